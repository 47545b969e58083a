"""One page of result files: tables and charts in one file of HTML, which loads nothing.

  python -m benchmarks.report results/*.json --out=report/

Files are those of --result_json, of runs, evaluations and --diagnose, failed ones too: they stand
on the page with their reason. Written is report/report.html. --charts=false needs no matplotlib.

Exit code: 0 the page is written; 1 a file that is no result; 2 flags that can't work.
"""

from collections.abc import Mapping, Sequence
import os
import sys
from typing import Any, NamedTuple

from absl import flags

from benchmarks import command, files, presets, results
from benchmarks.loop import say
from benchmarks.page import blocks, charts
from benchmarks.page.blocks import Block, Figure, Heading, Panel, Table, Text
from hpm.errors import UsageError

__all__ = ['main', 'page']

_EMPTY = '–'
_GROUPED = ('model', 'batch_size_per_device')  # what runs have in common that scale


class Run(NamedTuple):
  """A result and what it is called on the page."""

  name: str
  result: Mapping[str, Any]

  @property
  def rate(self) -> float | None:
    return self.result.get('images_per_second')

  @property
  def num_devices(self) -> int:
    return len(self.result.get('devices', [])) or 1


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Writes the page; see the module's docstring for the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_string('out', 'report', 'Directory of the page.', flag_values=values)
  flags.DEFINE_boolean('charts', True, 'Draw charts.', flag_values=values)
  paths = command.parse(values, arguments, positional=True)
  if not paths:
    raise UsageError('nothing to report: name result files (--result_json)')
  if values.charts:
    charts.require()
  runs = [Run(name, results.read(path)) for name, path in zip(_names(paths), paths, strict=True)]
  draw = charts.panel_svg if values.charts else lambda panel, width: None
  target = os.path.join(values.out, 'report.html')
  files.write(target, blocks.html(page(runs), draw))
  say(f'Written: {target}')
  return 0


def page(runs: Sequence[Run]) -> list[Block]:
  """All that stands on it."""
  parts: list[Block] = [Heading(1, 'Report'), _overview(runs)]
  measured = [run for run in runs if run.rate is not None]
  if measured:
    parts.append(_throughput(measured))
  parts += _scaling(measured)
  for run in runs:
    parts += _of_run(run)
  return [*parts, Heading(2, 'Environment'), *_environment(runs)]


def _names(paths: Sequence[str]) -> list[str]:
  """What tells the files apart: their names, or as much of their paths as differs."""
  names = [os.path.basename(path).removesuffix('.json') for path in paths]
  if len(set(names)) < len(names):
    return [os.path.normpath(path).removesuffix('.json') for path in paths]
  return names


def _overview(runs: Sequence[Run]) -> Table:
  columns = (
    'run',
    'status',
    'model',
    'mode',
    'devices',
    'batch',
    'precision',
    'images/s',
    '95 % interval',
    'ms a step',
    'MB/s a device',
  )
  rows = []
  for run in runs:
    r = run.result
    demand = r.get('input_demand', {})
    encoded = demand.get('encoded_mb_per_second')
    mb = encoded if encoded is not None else demand.get('pixels_mb_per_second')
    kind = '' if mb is None else ' encoded' if encoded is not None else ' pixels'
    rows.append(
      [
        run.name,
        r['status'],
        r.get('model', _EMPTY),
        _mode(r),
        str(run.num_devices),
        str(r.get('batch_size_per_device', _EMPTY)),
        str(r['flags'].get('precision', _EMPTY)),
        _EMPTY if run.rate is None else presets.rate(run.rate),
        _interval(r),
        _number(r.get('step_seconds_median'), 1e3),
        _number(mb) + kind,
      ]
    )
  return Table('All runs', columns, rows)


def _mode(result: Mapping[str, Any]) -> str:
  if result['mode'] != 'training':
    return result['mode']
  return str(result['flags'].get('variable_update', 'training'))


def _interval(result: Mapping[str, Any]) -> str:
  found = result.get('images_per_second_interval')
  return _EMPTY if not found else ' to '.join(presets.rate(value) for value in found)


def _number(value: float | None, factor: float = 1.0) -> str:
  return (
    _EMPTY
    if value is None
    else f'{value * factor:,.3g}'
    if value * factor < 100
    else (f'{value * factor:,.0f}')
  )


def _throughput(runs: Sequence[Run]) -> Figure:
  def draw(axes: Any) -> None:
    for place, run in enumerate(runs):
      low, high = run.result.get('images_per_second_interval') or (run.rate, run.rate)
      axes.barh(place, run.rate, color=charts.COLOURS[0], height=0.6)
      axes.errorbar(
        run.rate, place, xerr=[[run.rate - low], [high - run.rate]], color='0.1', capsize=3
      )
    axes.set_yticks(range(len(runs)), [_cut(run.name) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel('images/s, with the 95 % interval')

  return Figure('throughput', 'Images a second on all devices.', [Panel('Throughput', draw)], 6.0)


def _cut(name: str) -> str:
  return name if len(name) <= 28 else f'...{name[-25:]}'


def _scaling(runs: Sequence[Run]) -> list[Block]:
  """Where a model was run on several numbers of devices."""
  groups: dict[tuple[str, ...], dict[int, list[float]]] = {}
  for run in runs:
    if run.result['mode'] == 'training' and 'model' in run.result:
      key = (*(str(run.result.get(name)) for name in _GROUPED), _mode(run.result))
      groups.setdefault(key, {}).setdefault(run.num_devices, []).append(run.rate)
  groups = {key: rates for key, rates in groups.items() if len(rates) > 1}
  if not groups:
    return []

  def draw(axes: Any) -> None:
    for number, (key, rates) in enumerate(groups.items()):
      points = [(count, sum(own) / len(own)) for count, own in sorted(rates.items())]
      first, rate = points[0]
      axes.plot(
        *zip(*points, strict=True), label=f'{key[0]}, {key[1]}, {key[2]}', **charts.line(number)
      )
      ideal = [(count, rate * count / first) for count, _ in points]
      axes.plot(*zip(*ideal, strict=True), color='0.7', linewidth=1, zorder=1)
    axes.set_xlabel('devices')
    axes.set_ylabel('images/s')
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({count for rates in groups.values() for count in rates}))
    axes.legend(fontsize=7.5, frameon=False)

  caption = 'Images a second over the number of devices; grey: the fewest, times devices.'
  return [Heading(2, 'Scaling'), Figure('scaling', caption, [Panel('Scaling', draw)], 4.5)]


def _of_run(run: Run) -> list[Block]:
  r = run.result
  parts: list[Block] = [Heading(2, run.name)]
  if r['status'] != 'ok':
    parts.append(Text(f'{r["status"].capitalize()}: {r["reason"]}'))
  if 'diagnosis' in r:
    parts += _verdict(r['diagnosis'])
  facts = [(name, text) for name, text in _facts(r) if text]
  parts.append(Table('', ('', ''), [list(fact) for fact in facts], left=True))
  if run.rate is not None and len(r['step_seconds']) > 1:
    caption = 'How often a step took so long, and each step in its turn; the line is the median.'
    parts.append(Figure(f'{run.name}_steps', caption, _steps(r), 4.4))
  parts += [Text(f'Warning: {warning}') for warning in r.get('warnings', [])]
  return parts


def _verdict(found: Mapping[str, Any]) -> list[Block]:
  rows = []
  for name, seconds in found['parts'].items():
    gain = found['gains'].get(name)
    rate = presets.rate(found['images'] / seconds) if seconds > 1e-6 else _EMPTY
    shown = (
      'nearly all'
      if gain is None and name in found['gains']
      else (_EMPTY if gain is None else f'{gain:.0%}' if gain < 10 else f'{gain:,.0f} times')
    )
    rows.append([name, f'{seconds * 1e3:.2f}', rate, shown])
  for label, key in (('a step, predicted', 'predicted_s'), ('a step, measured', 'measured_s')):
    rows.append([label, f'{found[key] * 1e3:.2f}', presets.rate(found['images'] / found[key]), ''])
  columns = ('part', 'ms a step', 'images/s', 'gain without it')
  return [Text(found['sentence']), Table('What each part takes alone', columns, rows)]


def _facts(r: Mapping[str, Any]) -> list[tuple[str, str]]:
  published, cost, accuracy = (r.get(name, {}) for name in ('published', 'cost', 'accuracy'))
  demand, gpus = r.get('input_demand', {}), r.get('peak_gpu_mib')
  percentiles = r.get('step_seconds_percentiles', {})
  return [
    ('command', ' '.join(['run.py', *r['command']])),
    ('started', r['started_at']),
    ('steps', '' if 'step_seconds' not in r else str(len(r['step_seconds']))),
    ('ms a step', ', '.join(f'{n} {v * 1e3:.1f}' for n, v in percentiles.items())),
    ('runs', ', '.join(presets.rate(one['images_per_second']) for one in r.get('runs', []))),
    ('host memory', _unit(r.get('peak_rss_mib'), 'MiB at most')),
    ('GPU memory', '' if not gpus else ', '.join(f'{size:,.0f}' for size in gpus) + ' MiB at most'),
    ('first step after', _unit(r.get('time_to_first_step_s'), 's')),
    ('CPU time', _unit(r.get('cpu_s'), 's in the timed loop')),
    ('other load', _unit(r.get('other_load_cores'), 'cores')),
    ('input of a device', _demand(demand)),
    ('accuracy', ', '.join(f'{n} {v:.4g}' for n, v in accuracy.items())),
    ('cost', ', '.join(f'{n} {v:.4g}' for n, v in cost.items())),
    (
      'published',
      ''
      if not published
      else (
        f'{published["name"]}: {presets.rate(published["images_per_second"])} images/s on '
        f'{published["num_devices"]} of {published["hardware"]}; this run, a device, '
        f'{published["ratio_per_device"]:.3g} times that; differs: '
        + (', '.join(published['differs']) or 'nothing that was published')
      ),
    ),
  ]


def _unit(value: float | None, unit: str) -> str:
  return '' if value is None else f'{_number(round(value, 3))} {unit}'


def _demand(found: Mapping[str, Any]) -> str:
  if not found:
    return ''
  texts = [f'{presets.rate(found["images_per_second"])} images/s']
  for name in ('pixels', 'encoded'):
    if (value := found.get(f'{name}_mb_per_second')) is not None:
      texts.append(f'{_number(value)} MB/s {name}')
  return ', '.join(texts)


def _steps(r: Mapping[str, Any]) -> list[Panel]:
  times = [seconds * 1e3 for seconds in r['step_seconds']]
  median = r['step_seconds_median'] * 1e3

  def histogram(axes: Any) -> None:
    axes.hist(times, bins=min(40, max(5, len(times) // 3)), color=charts.COLOURS[0])
    axes.axvline(median, color='0.1', linewidth=1)
    axes.set_xlabel('ms a step')
    axes.set_ylabel('steps')

  def timeline(axes: Any) -> None:
    axes.plot(range(1, len(times) + 1), times, '.', markersize=3, color=charts.COLOURS[0])
    axes.axhline(median, color='0.1', linewidth=1)
    axes.set_xlabel('timed step')
    axes.set_ylabel('ms')
    axes.set_ylim(bottom=0)

  return [Panel('Step times', histogram), Panel('In their turn', timeline)]


def _environment(runs: Sequence[Run]) -> list[Block]:
  """A column for each machine; runs on the same one share it."""
  machines: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
  for run in runs:
    machines.setdefault(repr(run.result['machine']), (run.result['machine'], []))[1].append(
      run.name
    )
  found: list[Block] = []
  for machine, names in machines.values():
    rows = [[name.replace('_', ' '), _shown(value)] for name, value in machine.items()]
    caption = f'Of {", ".join(names)}' if len(machines) > 1 else ''
    found.append(Table(caption, ('', ''), rows, left=True))
  return found


def _shown(value: Any) -> str:
  if isinstance(value, Mapping):
    return ', '.join(f'{name}={one}' for name, one in value.items()) or 'none'
  if isinstance(value, list):
    return ', '.join(map(str, value)) or 'none'
  return str(value)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
