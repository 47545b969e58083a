"""Throughput over a grid of flags, batch sizes above all: a table, a chart, what others had.

  python -m benchmarks.sweep --model=resnet50 --num_gpus=4 --global_batch_size=256,512,1024,2048
  python -m benchmarks.sweep --model=resnet50,vgg16 --batch_size=1,2,4 --device=cpu --num_gpus=1
  python -m benchmarks.sweep --variable_update=replicated,parameter_server --num_gpus=2,4

All flags of benchmarks/run.py; one with several values, between commas, is an axis of the grid.
--global_batch_size is --batch_size times --num_gpus. Each run is a process of its own; rounds go
over all cells by turns. The same command goes on where it was stopped; a cell that takes longer
than --cell_timeout_s, or whose memory runs out, stays empty with that reason.

  --sweep_runs=3         runs of each cell
  --cell_timeout_s=3600  for one of them
  --max_minutes=N        no round starts that would not end before
  --out=results/sweep    gets sweep.json, sweep.png (with matplotlib) and each run's result

In the chart lines join what was measured here; published points of the same model and batch stand
by themselves, and nothing is interpolated. Exit code: 0; 1 not a single cell was measured; 2 flags
that can't work; 130 interrupted, 143 stopped by SIGTERM: the same command goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import importlib.util
import itertools
import json
import os
import sys
from typing import Any, NamedTuple

from benchmarks import cells, command, files, flags, process, published, runs
from benchmarks.loop import say
from hpm import errors, json_file
from hpm.errors import DataError, UsageError

__all__ = ['Cell', 'Point', 'grid', 'main', 'points', 'table']

OWN = {'sweep_runs': '3', 'cell_timeout_s': '3600', 'max_minutes': '', 'out': 'results/sweep'}
_GLOBAL = 'global_batch_size'
# Set by the sweep itself, or about one run alone.
_REFUSED = ('result_json', 'num_runs', 'train_dir', 'curve_file', 'dry_run', 'eval')


class Cell(NamedTuple):
  """One combination of the grid.

  Attributes:
    name: of its directory: the values of the axes.
    axes: flag -> value, of those that have several.
    command: arguments of benchmarks/run.py.
  """

  name: str
  axes: dict[str, str]
  command: list[str]


class Point(NamedTuple):
  """A published figure.

  Attributes:
    label: system, framework and precision.
    global_batch: images.
    images_per_sec: on all its devices.
    num_devices: how many.
  """

  label: str
  global_batch: int
  images_per_sec: float
  num_devices: int


@command.line(__doc__, 'interrupted; the same command goes on')
def main(arguments: Sequence[str]) -> int:
  """Measures, prints the table, draws the chart; see the module's docstring for the exit code."""
  own, given = _split(arguments)
  wanted = grid(given)
  num_runs = int(_number(own, 'sweep_runs'))
  limit_s = 60 * _number(own, 'max_minutes') if own['max_minutes'] else None
  _prepare(own['out'], wanted)
  commands = {cell.name: cell.command for cell in wanted}
  timeout_s = _number(own, 'cell_timeout_s')
  with process.terminations() as stop:
    failures = cells.measure(own['out'], commands, num_runs, limit_s, timeout_s, stop)
    if stop:
      print('stopped by SIGTERM; the same command goes on', file=sys.stderr)
      return 143
  rows = [_row(cell, cells.collect(own['out'], cell.name, num_runs), failures) for cell in wanted]
  if not any('images_per_second' in row for row in rows):
    raise DataError(f'no cell was measured: {next(iter(failures.values()), "time was up")}')
  for line in table(rows):
    say(line)
  files.write(os.path.join(own['out'], 'sweep.json'), json.dumps(rows, indent=2) + '\n')
  if importlib.util.find_spec('matplotlib') is None:
    say("No chart: pip install 'hpm[report]'")
  else:
    _draw(os.path.join(own['out'], 'sweep.png'), rows)
  say(f'Written: {own["out"]}')
  return 0


def grid(given: Mapping[str, str]) -> list[Cell]:
  """All combinations of the values, the last flag's changing fastest.

  Args:
    given: flag -> value, or values between commas.

  Raises:
    UsageError: nothing varies, or a combination can't work, with its reason.
  """
  values = {name: text.split(',') for name, text in given.items()}
  axes = [name for name, some in values.items() if len(some) > 1]
  if not axes:
    raise UsageError('nothing varies: give a flag several values, as in --batch_size=16,32,64')
  for name in _REFUSED:
    if name in given:
      raise UsageError(f'--{name} does not go with a sweep: drop it')
  if _GLOBAL in given and 'batch_size' in given:
    raise UsageError(f'--{_GLOBAL} and --batch_size say the same thing: drop one')
  if _GLOBAL in given and 'num_gpus' not in given:
    raise UsageError(f'--{_GLOBAL} is shared by the devices: add --num_gpus')
  found = []
  for chosen in itertools.product(*values.values()):
    cell = dict(zip(values, chosen, strict=True))
    command = [f'--{name}={value}' for name, value in _per_device(cell).items()]
    flags.parse(command)  # refuses what can't work before anything is run
    name = '-'.join(f'{axis}={cell[axis]}'.replace('/', '_') for axis in axes)
    found.append(Cell(name, {axis: cell[axis] for axis in axes}, command))
  return found


def points(model: str) -> list[Point]:
  """What was published of a model, with synthetic data."""
  found = [
    Point(
      f'{row.system}, {row.framework}, {row.precision}',
      row.global_batch,
      row.images_per_sec,
      row.chips,
    )
    for row in published.accelerators()
    if row.model == model and row.data == 'synthetic' and row.global_batch is not None
  ]
  found += [
    Point(
      f'{row.platform}, {row.variable_update}, float32',
      row.num_gpus * row.batch_size_per_gpu,
      row.images_per_sec,
      row.num_gpus,
    )
    for row in published.results()
    if row.model == model
    and row.data == 'synthetic'
    and row.images_per_sec is not None
    and row.hosts == 1
  ]
  return found


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """A line a cell, and below it what was published at its global batch."""
  width = max(len(row['cell']) for row in rows)
  lines = [f'{"cell":<{width}} {"global":>7} {"images/s":>9} {"lowest":>8} {"highest":>8} runs']
  batches = {(row.get('model'), row.get('global_batch')) for row in rows}
  for row in rows:
    if 'images_per_second' not in row:
      lines.append(f'{row["cell"]:<{width}} {"":>7} {"":>9} {"":>8} {"":>8} {row["note"]}')
      continue
    lines.append(
      f'{row["cell"]:<{width}} {row["global_batch"]:>7} {row["images_per_second"]:>9.2f} '
      f'{row["lowest"]:>8.2f} {row["highest"]:>8.2f} {row["num_runs"]:>4}'
    )
  for model, batch in sorted(b for b in batches if b[0] is not None):
    for point in points(model):
      if point.global_batch == batch:
        lines.append(
          f'published: {model} at {batch}: {point.images_per_sec:.0f} images/s on '
          f'{point.num_devices} devices ({point.label})'
        )
  return lines


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
  """The sweep's own options, and the driver's flags, each flag -> value."""
  own, given = dict(OWN), {}
  for argument in arguments:
    name, equals, value = argument.partition('=')
    if not name.startswith('--') or name == '--':
      raise UsageError(f'unexpected {argument!r}: flags are written --name=value')
    name = name[2:]
    if name in own and not (equals and value):
      raise UsageError(f'--{name} has no value: write --{name}=...')
    (own if name in own else given)[name] = value if equals else 'true'
  known = {*OWN, _GLOBAL, *flags.parse([]).values()}
  for name in given:
    if name not in known and name.removeprefix('no') not in known:
      raise errors.unknown('flag', f'--{name}', [f'--{one}' for one in known])
  return own, given


def _number(own: Mapping[str, str], name: str) -> float:
  try:
    number = float(own[name])
  except ValueError:
    number = 0.0
  whole = number.is_integer() if name == 'sweep_runs' else True
  if not (0 < number < float('inf') and whole):
    raise UsageError(f'--{name}={own[name]}: a number above 0 is needed')
  return number


def _per_device(cell: Mapping[str, str]) -> dict[str, str]:
  """The flags of a cell as the driver has them."""
  flat = {name: value for name, value in cell.items() if name != _GLOBAL}
  if _GLOBAL in cell:
    try:
      size, rest = divmod(int(cell[_GLOBAL]), int(cell['num_gpus']))
    except (ValueError, ZeroDivisionError):
      size, rest = 0, 1
    if rest or size < 1:
      raise UsageError(
        f'--{_GLOBAL}={cell[_GLOBAL]} can not be shared by --num_gpus={cell["num_gpus"]} devices: '
        'choose a multiple'
      )
    flat['batch_size'] = str(size)
  return flat


def _prepare(out: str, wanted: Sequence[Cell]) -> None:
  """Makes the directory of a sweep, or checks that what it holds was measured by these commands.

  Raises:
    UsageError: a cell of the same name had another command.
  """
  path = os.path.join(out, 'commands.json')
  try:
    there = dict(json_file.read(path))
  except (OSError, ValueError, TypeError):
    there = {}
  for cell in wanted:
    if there.get(cell.name, cell.command) != cell.command:
      raise UsageError(
        f'--out={out} holds {cell.name} of another sweep ({" ".join(there[cell.name])}): give '
        'another directory, or remove it'
      )
  known = {**there, **{cell.name: cell.command for cell in wanted}}
  files.write(path, json.dumps(known, indent=2) + '\n')


def _row(
  cell: Cell, done: Sequence[Mapping[str, Any]], failures: Mapping[str, str]
) -> dict[str, Any]:
  """What table, chart and file say of a cell; without a rate if nothing was measured."""
  row: dict[str, Any] = {'cell': cell.name, 'axes': cell.axes, 'command': cell.command}
  if cell.name in failures:
    row['note'] = failures[cell.name]
  if not done:
    return {'note': 'not measured: time was up', **row}
  together = runs.combined(done)
  return row | {
    'model': together['model'],
    'num_devices': len(together['devices']),
    'global_batch': together['batch_size_global'],
    'images_per_second': together['images_per_second'],
    'lowest': together['runs_spread']['lowest'],
    'highest': together['runs_spread']['highest'],
    'num_runs': len(done),
  }


def _draw(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
  """Images a second against the global batch; a line for each combination of the other axes."""
  from matplotlib import figure

  chart = figure.Figure(figsize=(8, 5), layout='constrained')
  ax = chart.subplots()
  lines: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    if 'images_per_second' in row:
      others = {n: v for n, v in row['axes'].items() if n not in ('batch_size', _GLOBAL)}
      label = ', '.join(f'{n}={v}' for n, v in others.items()) or f'{row["model"]}, measured here'
      lines.setdefault(label, []).append(row)
  for label, some in lines.items():
    some = sorted(some, key=lambda row: row['global_batch'])
    middle = [row['images_per_second'] for row in some]
    spread = [
      [row['images_per_second'] - row['lowest'] for row in some],
      [row['highest'] - row['images_per_second'] for row in some],
    ]
    spread = [[max(0.0, one) for one in side] for side in spread]
    batches = [row['global_batch'] for row in some]
    ax.errorbar(batches, middle, spread, marker='o', capsize=2, label=label)
  by_label: dict[str, list[Point]] = {}
  for model in sorted({row['model'] for row in rows if 'model' in row}):
    for point in points(model):
      by_label.setdefault(f'{model}: {point.label}', []).append(point)
  for label, some in by_label.items():
    ax.scatter(
      [point.global_batch for point in some],
      [point.images_per_sec for point in some],
      marker='x',
      label=f'published: {label}',
    )
  ax.set_xscale('log', base=2)
  ax.set_yscale('log')
  ax.set_xlabel('global batch, images')
  ax.set_ylabel('images a second')
  ax.legend(fontsize=7)
  chart.savefig(path, format='png', dpi=120)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
