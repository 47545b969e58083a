"""Every input pipeline and format beside the usual recipe, the decoder's limit and other loaders.

  python -m benchmarks.input --corpus                       # builds the corpus first; some minutes
  python -m benchmarks.input --data_dir=DIR --json=input.json --plot=input.png
  python -m benchmarks.input --corpus --other_python=PYTHON # one that has torch or grain

DIR holds ImageNet's TFRecords, train-*-of-*; they are brought into the other formats below
--work_dir once. All rows read the same images. The C loop (benchmarks/native/jpeg_loop.c) and the
rows of the compiled reader need a C compiler and libjpeg-turbo's headers; a row whose package isn't
there is left out, and said to be.

Each row lives in a process of its own, pinned to one core and then to two, and waits while another
runs. A round measures every row once, the order turns, and medians over rounds are shown with the
lowest and highest. Warm-up, and batches that were made while others ran, are left out. CPU
milliseconds an image count all threads and child processes: they are what a loaded machine
disturbs least. `load` says how many cores others kept busy.

Groups of rows: training (8 to 100 % of the area, 224 pixels, flip), evaluation, and stages: a
pipeline up to reading, parsing, decoding, resizing, batching and the copy to the first GPU (without
one, to where it is).
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import functools
import json
import os
from pathlib import Path
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import command, files, input_worker, machine
from hpm.errors import DataError, UsageError
from hpm.pipelines import jpeg_native

__all__ = ['Contender', 'main', 'measure', 'native', 'summary', 'table']

ROOT = Path(__file__).resolve().parent.parent
C_LOOP, RECIPE = 'C loop', 'recipe'
_AT_ONCE = 8  # processes, of up to 1 GB each
GROUPS = ('training', 'evaluation', 'stages')
# The C loop's row is nobody's worker.
ROWS = {C_LOOP: 'libjpeg-turbo in C: crop, resize, flip'} | {
  name: row.text for name, row in input_worker.ROWS.items()
}


class Contender:
  """A worker that waits for its turns.

  Args:
    config: of `input_worker`.
    python: the interpreter that runs it.

  Raises:
    DataError: it fails to start.
  """

  def __init__(self, config: dict[str, Any], python: str = sys.executable):
    self._process = _start(config, python)
    self._ask(None)

  def measure(self, seconds: float) -> dict[str, float]:
    """Images, wall and CPU seconds."""
    return self._ask(f'{seconds}\n')

  def end(self) -> float | None:
    """Ends the worker; the most memory that it took, MiB; None if it has ended before."""
    assert self._process.stdin
    try:
      self._process.stdin.close()
      return self._answer()['peak_mib']
    except (OSError, DataError):
      return None
    finally:
      self.kill()

  def kill(self) -> None:
    """Ends it at once."""
    self._process.kill()
    self._process.wait()

  def _ask(self, text: str | None) -> dict[str, Any]:
    if text is not None:
      assert self._process.stdin
      try:
        self._process.stdin.write(text)
        self._process.stdin.flush()
      except OSError:
        raise DataError('the process has ended') from None
    return self._answer()

  def _answer(self) -> dict[str, Any]:
    assert self._process.stdout
    line = self._process.stdout.readline()
    answer = json.loads(line) if line else {'error': 'the process has ended'}
    if 'error' in answer:
      self.kill()
      raise DataError(answer['error'])
    return answer


def _start(config: dict[str, Any], python: str) -> subprocess.Popen:
  environment = os.environ | {'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3'}
  return subprocess.Popen(
    [python, '-m', 'benchmarks.input_worker', json.dumps(config)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    cwd=ROOT,
    env=environment,
  )


def native(work_dir: Path) -> Path:
  """The C loop, compiled.

  Raises:
    DataError: no compiler, no headers, or it doesn't compile.
  """
  compiler = shutil.which('cc') or shutil.which('gcc') or shutil.which('clang')
  if not compiler:
    raise DataError('no C compiler: apt install gcc libjpeg62-turbo-dev')
  work_dir.mkdir(parents=True, exist_ok=True)
  program, source = work_dir / 'jpeg_loop', ROOT / 'benchmarks' / 'native' / 'jpeg_loop.c'
  command = [compiler, '-O3', '-march=native', str(source), '-o', str(program), '-ljpeg', '-lm']
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    why = next((line for line in done.stderr.splitlines() if 'error' in line), 'it fails')
    raise DataError(f'{why.strip()}: apt install libjpeg62-turbo-dev')
  return program


def _c_loop(command: Sequence[str], cores: Sequence[int]) -> dict[str, float]:
  """Runs the C loop once on each core, together."""
  running = [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      text=True,
      preexec_fn=functools.partial(os.sched_setaffinity, 0, [core]),
    )
    for core in cores
  ]
  parts = [process.communicate()[0].split() for process in running]
  if any(process.returncode for process in running):
    raise DataError('the C loop failed')
  # Rates add up; a measurement has one time.
  wall = max(float(part[1]) for part in parts)
  rate = sum(int(part[0]) / float(part[1]) for part in parts)
  images = sum(int(part[0]) for part in parts)
  cpu = sum(float(part[2]) for part in parts)
  return {'images': rate * wall, 'wall_s': wall, 'cpu_s': cpu * rate * wall / images}


def measure(
  prepared: dict[str, Any],
  names: Sequence[str],
  *,
  cores: Sequence[int],
  work_dir: Path,
  batch_size: int = 64,
  image_size: int = 224,
  seconds: float = 4.0,
  num_rounds: int = 5,
  other_pythons: Sequence[str] = (),
  progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
  """Measures rows by turns on some cores.

  Args:
    prepared: what `input_worker.prepare` gave.
    names: of rows, keys of `ROWS`.
    cores: numbers of the cores.
    work_dir: where the C loop is compiled.
    batch_size: images.
    image_size: pixels.
    seconds: of each measurement.
    num_rounds: how often each row is measured.
    other_pythons: run the rows whose packages this one doesn't have.
    progress: is told what is done.

  Returns:
    For each row `name`, `text`, `cores` (their number), and `rounds` (images, wall_s, cpu_s) and
    `peak_mib`; or `left_out`, why it wasn't measured.
  """
  results = {
    name: {'name': name, 'text': ROWS[name], 'cores': len(cores), 'rounds': []} for name in names
  }
  config = {
    'cores': list(cores),
    'batch_size': batch_size,
    'image_size': image_size,
    'data': prepared['data'],
  }

  def turn_of(name: str, stack: contextlib.ExitStack) -> Callable[[], dict[str, float]]:
    if name == C_LOOP:
      command = [str(native(work_dir)), prepared['list'], str(seconds), str(image_size)]
      return functools.partial(_c_loop, command, cores)
    if name.endswith('native'):
      jpeg_native.build()
    contender = Contender(config | {'row': name}, _python(name, other_pythons))
    stack.callback(lambda: results[name].update(peak_mib=contender.end()))
    return functools.partial(contender.measure, seconds)

  for chunk in _chunks(names):
    with contextlib.ExitStack() as stack:
      turns: dict[str, Callable[[], dict[str, float]]] = {}
      for name in chunk:
        progress(f'starting {name}')
        try:
          turns[name] = turn_of(name, stack)
        except DataError as error:
          results[name]['left_out'] = str(error)
      for number in range(num_rounds):
        order = list(turns)
        shift = number * len(order) // num_rounds
        for name in order[shift:] + order[:shift]:
          progress(f'round {number + 1} of {num_rounds}: {name}')
          try:
            results[name]['rounds'].append(turns[name]())
          except DataError as error:
            results[name]['left_out'] = str(error)
            del turns[name]
  return list(results.values())


def _chunks(names: Sequence[str]) -> list[list[str]]:
  """Rows that are measured by turns: not more processes at once than fit into memory.

  The usual recipe and the C loop, if they are wanted, are measured with all of them.
  """
  anchors = [name for name in names if name in (C_LOOP, RECIPE)]
  others = [name for name in names if name not in anchors]
  size = _AT_ONCE - len(anchors)
  return [anchors + others[start : start + size] for start in range(0, max(len(others), 1), size)]


def _python(name: str, others: Sequence[str]) -> str:
  """The interpreter for a row; DataError if none has its package."""
  package = input_worker.ROWS[name].package
  for python in (sys.executable, *others):
    if package is None or _has(python, package):
      return python
  raise DataError(f'{package} is not installed')


def _has(python: str, package: str) -> bool:
  code = f'import importlib.util, sys; sys.exit(not importlib.util.find_spec({package!r}))'
  try:
    return subprocess.run([python, '-c', code], capture_output=True).returncode == 0
  except OSError as error:
    raise UsageError(f'--other_python={python}: {error.strerror}') from None


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The rows with `images_per_s` and `cpu_ms` (median, lowest, highest) and what they are times.

  `times_recipe` and `times_c_loop` compare CPU time an image, of medians on as many cores: above 1
  is faster than the usual recipe, or than the C loop.
  """
  rows = []
  for row in results:
    row = dict(row)
    if row['rounds']:
      speeds = [r['images'] / r['wall_s'] for r in row['rounds']]
      cpu = [r['cpu_s'] / r['images'] * 1e3 for r in row['rounds']]
      row['images_per_s'] = (statistics.median(speeds), min(speeds), max(speeds))
      row['cpu_ms'] = (statistics.median(cpu), min(cpu), max(cpu))
    rows.append(row)
  for row in rows:
    for other, key in ((RECIPE, 'times_recipe'), (C_LOOP, 'times_c_loop')):
      found = [r for r in rows if r['name'] == other and r['cores'] == row['cores']]
      if found and 'cpu_ms' in found[0] and 'cpu_ms' in row:
        row[key] = found[0]['cpu_ms'][0] / row['cpu_ms'][0]
  return rows


def table(rows: Sequence[dict[str, Any]], num_cores: int) -> Any:
  """The rows of one number of cores, for `rich`."""
  import rich.table

  made = rich.table.Table(title=f'{num_cores} core{"s" if num_cores > 1 else ""}', box=None)
  for name, justify in (
    ('', 'left'),
    ('images/s', 'right'),
    ('lowest – highest', 'right'),
    ('CPU ms', 'right'),
    ('× recipe', 'right'),
    ('× C loop', 'right'),
    ('MiB', 'right'),
    ('', 'left'),
  ):
    made.add_column(name, justify=justify, no_wrap=justify == 'right')  # type: ignore[arg-type]
  for row in rows:
    if row['cores'] != num_cores:
      continue
    if 'cpu_ms' not in row:
      made.add_row(row['name'], *[''] * 6, f'left out: {row.get("left_out", "not measured")}')
      continue
    middle, low, high = row['images_per_s']
    made.add_row(
      row['name'],
      f'{middle:.0f}',
      f'{low:.0f} – {high:.0f}',
      f'{row["cpu_ms"][0]:.3f}',
      *(f'{row[key]:.2f}' if key in row else '' for key in ('times_recipe', 'times_c_loop')),
      f'{row["peak_mib"]:.0f}' if row.get('peak_mib') else '',
      row['text'],
    )
  return made


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
  """Images per second with their spread, a panel a number of cores."""
  from matplotlib import ticker
  from matplotlib.figure import Figure

  measured = [row for row in rows if 'cpu_ms' in row and ':' not in row['name']]
  counts = sorted({row['cores'] for row in measured})
  shown = {count: [row for row in measured if row['cores'] == count][::-1] for count in counts}
  height = 1.2 + 0.28 * max(map(len, shown.values()))
  figure = Figure(figsize=(6 * len(counts), height), layout='constrained')
  panels = figure.subplots(1, len(counts), squeeze=False, sharex=True)[0]
  for axes, count in zip(panels, counts, strict=True):
    names = [row['name'] for row in shown[count]]
    speeds = [row['images_per_s'] for row in shown[count]]
    spread = [
      [middle - low for middle, low, _ in speeds],
      [high - middle for middle, _, high in speeds],
    ]
    # Points: the length of a bar says nothing on a logarithmic axis.
    axes.errorbar([middle for middle, *_ in speeds], names, xerr=spread, fmt='o', capsize=3)
    for name, (middle, _, high) in zip(names, speeds, strict=True):
      axes.annotate(
        f'{middle:.0f}', (high, name), (6, 0), textcoords='offset points', va='center', fontsize=8
      )
    axes.set_xscale('log')
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter('{x:.0f}')
    axes.xaxis.set_minor_formatter('')
    axes.margins(x=0.18)
    axes.set_xlabel('images per second: median, lowest, highest')
    axes.set_title(f'{count} core{"s" if count > 1 else ""}')
    axes.grid(axis='x', alpha=0.3)
  figure.savefig(path, dpi=120)


def _arguments() -> argparse.ArgumentParser:
  parser = command.Parser(prog='python -m benchmarks.input', description=__doc__)
  parser.add_argument('--data_dir', metavar='DIR', help='the directory of train-*-of-*')
  parser.add_argument(
    '--corpus', action='store_true', help='build (or take) the corpus below --work_dir'
  )
  parser.add_argument('--work_dir', default='.data/input', metavar='DIR', help='%(default)s')
  parser.add_argument(
    '--rows', metavar='NAME;NAME', help=f'default: all; {"; ".join(GROUPS)}; {"; ".join(ROWS)}'
  )
  parser.add_argument('--cores', default='1,2', help='numbers of cores, default: %(default)s')
  parser.add_argument('--batch_size', type=int, default=64, help='%(default)s')
  parser.add_argument('--image_size', type=int, default=224, help='%(default)s')
  parser.add_argument('--seconds', type=float, default=4.0, help='a measurement, %(default)s')
  parser.add_argument('--num_rounds', type=int, default=5, help='%(default)s')
  parser.add_argument(
    '--other_python',
    metavar='PYTHON',
    action='append',
    default=[],
    help='has torchvision or grain; may be given several times',
  )
  parser.add_argument('--json', metavar='FILE', help='where all numbers go')
  parser.add_argument('--plot', metavar='FILE', help='a picture (pip install matplotlib)')
  return parser


def _names(text: str | None) -> list[str]:
  """The rows that are asked for by name or group, in the table's order."""
  if not text:
    return list(ROWS)
  wanted = [part.strip() for part in text.split(';') if part.strip()]
  strange = [part for part in wanted if part not in ROWS and part not in GROUPS]
  if strange:
    raise UsageError(
      f'--rows: no row or group {strange[0]!r}; there are {"; ".join((*GROUPS, *ROWS))}'
    )
  group = {name: row.group for name, row in input_worker.ROWS.items()} | {C_LOOP: 'training'}
  return [name for name in ROWS if name in wanted or group[name] in wanted]


def _prepare(data_dir: str, work_dir: Path, image_size: int) -> dict[str, Any]:
  options = {'data_dir': data_dir, 'work_dir': str(work_dir), 'image_size': image_size}
  with _start({'prepare': options}, sys.executable) as process:
    assert process.stdout
    answer = json.loads(process.stdout.readline() or '{"error": "preparing the data failed"}')
  if 'error' in answer:
    raise DataError(answer['error'])
  return answer


def _run(options: argparse.Namespace, console: Any) -> dict[str, Any]:
  if bool(options.data_dir) == options.corpus:
    raise UsageError('give --data_dir=DIR, or --corpus')
  names = _names(options.rows)
  try:
    counts = [int(part) for part in options.cores.split(',')]
  except ValueError:
    raise UsageError(f'--cores={options.cores}: give numbers such as 1,2') from None
  available = sorted(os.sched_getaffinity(0), reverse=True)  # the first serves interrupts, too
  if min(counts) < 1 or max(counts) > len(available):
    raise UsageError(f'--cores={options.cores}: this process may use {len(available)}')
  if options.plot:
    try:
      import matplotlib  # noqa: F401
    except ImportError:
      raise UsageError('--plot needs matplotlib: pip install matplotlib') from None
  work_dir = Path(options.work_dir).resolve()
  with console.status('preparing the data') as status:
    if options.corpus:
      from benchmarks.corpus import build

      status.update('building the corpus')
      options.data_dir = build.build(str(work_dir / 'corpus'))
    status.update('bringing the data into all formats')
    data_dir = os.path.abspath(options.data_dir)
    prepared = _prepare(data_dir, work_dir / 'formats', options.image_size)
    before, begin, results = machine.load(), time.perf_counter(), []
    for count in counts:
      results += measure(
        prepared,
        names,
        cores=available[:count],
        work_dir=work_dir,
        batch_size=options.batch_size,
        image_size=options.image_size,
        seconds=options.seconds,
        num_rounds=options.num_rounds,
        other_pythons=options.other_python,
        progress=lambda text, count=count: status.update(f'{count} cores, {text}'),
      )
    load = _load(before, results, time.perf_counter() - begin)
  return {
    'machine': machine.describe(),
    'load': load,
    'num_images': prepared['num_images'],
    'bytes': prepared['bytes'],
    'batch_size': options.batch_size,
    'image_size': options.image_size,
    'seconds': options.seconds,
    'rows': summary(results),
  }


def _load(before: Any, results: Sequence[dict[str, Any]], wall_s: float) -> float | None:
  """Cores that neither this process nor its rows kept busy, on average."""
  after = machine.load()
  if before is None or after is None:
    return None
  ours = sum(r['cpu_s'] for row in results for r in row['rounds'])
  return max(0.0, (after.machine - before.machine - ours) / wall_s)


@command.line()
def main(arguments: Sequence[str]) -> int:
  """Measures, prints the tables, writes the results; the exit code."""
  import rich.console

  options = _arguments().parse_args(arguments)
  errors = rich.console.Console(stderr=True)
  result = _run(options, errors)
  console = rich.console.Console(width=None if sys.stdout.isatty() else 140)
  for count in sorted({row['cores'] for row in result['rows']}):
    console.print(table(result['rows'], count))
  sizes = ', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in result['bytes'].items())
  console.print(f'{result["num_images"]} images: {sizes}', highlight=False)
  if result['load'] is not None:
    console.print(
      f'others, and the starting of rows, kept {result["load"]:.1f} cores busy', highlight=False
    )
  if options.json:
    files.write(options.json, json.dumps(result, indent=1))
  if options.plot:
    plot(result['rows'], options.plot)
  return 0 if any('cpu_ms' in row for row in result['rows']) else 1


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
