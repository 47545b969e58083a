"""The scaling model held to TensorFlow's Benchmarks page: constants, folds, and what was not seen.

Each platform has two constants that are fitted, to all its rows of 2 to 8 GPUs of one host on
synthetic data (least squares of the logarithms of their times), each from the rate of one GPU of
the same model and batch; and the network's rate, which is that of the instance type. In a fold all
rows of a model are left out, and predicted.

The rows of 16, 32 and 64 GPUs are predicted from that of 8 GPUs of the same model and batch, by
constants from the other models' rows of at most 8 GPUs; no row of several hosts is fitted to. The
baseline takes the rate of 8 GPUs times the hosts.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.console
import rich.table

from benchmarks import published, scaling
from benchmarks.scaling_model import BACKPROP, Load, Machine, Network, one_device, step
from hpm import errors

__all__ = [
  'DISTRIBUTED',
  'PLATFORMS',
  'Prediction',
  'distributed',
  'fit',
  'folds',
  'machine',
  'show',
]

DISTRIBUTED = 'ec2_k80_distributed'
# Platform -> those whose rows of one host tell of its hosts.
PLATFORMS = {
  'dgx1_p100': ('dgx1_p100',),
  'gce_k80': ('gce_k80',),
  'ec2_k80': ('ec2_k80', DISTRIBUTED),
}
_CROWDINGS = np.linspace(0, 0.2, 81)
_HOST_RATES = np.geomspace(1e9, 1e12, 121)
_MOVED = 0.2  # share by which constants are changed, to see what hangs on them


class Prediction(NamedTuple):
  """A row of the page, and what the model makes of it.

  Attributes:
    row: the published one.
    images_per_sec: predicted.
    linear: by the baseline.
  """

  row: published.Result
  images_per_sec: float
  linear: float

  @property
  def error(self) -> float:
    """Share by which the prediction is too high."""
    return self.images_per_sec / self.row.images_per_sec - 1

  @property
  def linear_error(self) -> float:
    return self.linear / self.row.images_per_sec - 1


class _Point(NamedTuple):
  """A row of one host."""

  row: published.Result
  one_s: float
  seconds: float
  load: Load


def machine(name: str, without: str | None = None) -> Machine:
  """The constants of a platform.

  Args:
    name: of `PLATFORMS`.
    without: a model whose rows are left out.
  """
  if name not in PLATFORMS:
    raise errors.unknown('--machine', name, PLATFORMS)
  crowding, rate = fit([point for point in _points(name) if point.row.model != without])
  network = published.platforms()[name].network_gbit_per_s
  return Machine(crowding, rate, network * 1e9 / 8 if network else float('inf'))


def fit(points: Sequence[_Point]) -> tuple[float, float]:
  """Crowding and bytes a second within the host that describe these rows best."""
  worst = np.zeros([len(_CROWDINGS), len(_HOST_RATES)])
  for point in points:
    shares, sizes = np.array(point.load.ready).T
    behind = np.cumsum(sizes[::-1])[::-1] / sizes.sum()
    half = point.load.host_bytes / 2 / _HOST_RATES
    for number, crowding in enumerate(_CROWDINGS):
      compute = point.one_s * (1 + crowding)
      ends = shares[:, None] * BACKPROP * compute + behind[:, None] * half
      late = np.maximum(0, ends.max(0) - BACKPROP * compute)
      worst[number] += np.log((compute + late + half) / point.seconds) ** 2
  crowding, rate = np.unravel_index(np.argmin(worst), worst.shape)
  return float(_CROWDINGS[crowding]), float(_HOST_RATES[rate])


def folds(name: str) -> Iterator[tuple[str, Machine, list[Prediction]]]:
  """Each model of a platform: the constants without it, and its rows of 2 to 8 GPUs."""
  points = _points(name)
  for model in dict.fromkeys(point.row.model for point in points):
    found = machine(name, model)
    yield model, found, [_predicted(point, found) for point in points if point.row.model == model]


def distributed(
  changed: str | None = None, factor: float = 1.0, push: bool = True
) -> list[Prediction]:
  """The rows of several hosts.

  Args:
    changed: an attribute of `Machine`, or 'backprop', that is multiplied by `factor`.
    push: whether gradients that leave while backprop runs cost nothing; False: all add their time.
  """
  backprop = BACKPROP * factor if changed == 'backprop' else BACKPROP
  if not push:
    backprop = 0.0
  return [
    _of_hosts(row, changed, factor, backprop) for row in _rows([DISTRIBUTED]) if row.hosts > 1
  ]


def _of_hosts(
  row: published.Result, changed: str | None, factor: float, backprop: float
) -> Prediction:
  host = machine('ec2_k80', row.model)
  if changed not in (None, 'backprop'):
    host = host.__class__(**{**vars(host), changed: getattr(host, changed) * factor})
  eight = published.cell(row.platform, row.model, 8, row.batch_size_per_gpu, row.data)
  load, devices = _load(eight), row.gpus_per_host
  one_s = one_device(_seconds(eight), load, host, devices, backprop)
  network = _network(row, load)
  found = step(one_s, load, host, devices, network, backprop)
  images = row.num_gpus * row.batch_size_per_gpu
  return Prediction(row, images / found.total, eight.images_per_sec * row.hosts)


def _predicted(point: _Point, host: Machine) -> Prediction:
  row = point.row
  found = step(point.one_s, point.load, host, row.num_gpus)
  images = row.num_gpus * row.batch_size_per_gpu
  return Prediction(row, images / found.total, images / point.one_s)


@functools.cache
def _points(name: str) -> tuple[_Point, ...]:
  found = []
  for row in _rows(PLATFORMS[name]):
    one = published.cell(row.platform, row.model, 1, row.batch_size_per_gpu, row.data)
    if row.hosts == 1 and row.num_gpus > 1:
      found.append(_Point(row, _seconds(one), _seconds(row), _load(row)))
  return tuple(found)


def _rows(platforms: Sequence[str]) -> list[published.Result]:
  """Real data is left out: where it is slower, that is the input's doing."""
  return [
    row
    for row in published.results()
    if row.platform in platforms and row.data == 'synthetic' and row.images_per_sec
  ]


def _seconds(row: published.Result) -> float:
  return row.num_gpus * row.batch_size_per_gpu / row.images_per_sec


def _arguments(row: published.Result) -> list[str]:
  """Flags of the driver, for what a row moves."""
  device = row.local_parameter_device
  return [
    *(f'--model={row.model}', f'--num_gpus={row.gpus_per_host}'),
    f'--variable_update={row.variable_update}',
    *([f'--local_parameter_device={device}'] if row.variable_update == 'parameter_server' else []),
  ]


@functools.cache
def _load(row: published.Result) -> Load:
  return scaling.load_of(_arguments(row), row.hosts, row.ps_tasks)


def _network(row: published.Result, load: Load) -> Network | None:
  return scaling.network_of(_arguments(row), load, row.hosts, row.ps_tasks)


def show(console: rich.console.Console, plot: str | None = None) -> None:
  """Prints all of it, and draws it into a file if one is given."""
  table = _table(
    "Constants: crowding and the rate within a host are fitted; the network is the instance type's",
    'machine',
    'without',
    'crowding',
    'host GB/s',
    'rows',
    'mean error',
    'worst',
    'linear',
  )
  for name in PLATFORMS:
    found = machine(name)
    rows = [_predicted(point, found) for point in _points(name)]
    table.add_row(*_fold(name, 'none', found, rows))
    for model, without, rows in folds(name):
      table.add_row(*_fold('', model, without, rows))
  console.print(table)
  table = _table(
    'Several hosts, from 8 GPUs of one; 10 Gbit/s',
    'model',
    'batch',
    'GPUs',
    'ps',
    'published',
    'predicted',
    'error',
    'linear',
  )
  found = distributed()
  for one in found:
    row = one.row
    table.add_row(
      row.model,
      str(row.batch_size_per_gpu),
      str(row.num_gpus),
      str(row.ps_tasks),
      f'{row.images_per_sec:g}',
      f'{one.images_per_sec:.0f}',
      f'{one.error:+.1%}',
      f'{one.linear_error:+.1%}',
    )
  console.print(table)
  mean, worst, base = summary(found)
  console.print(
    f'32 and 64 GPUs: mean error {mean:.1%}, worst {worst:.1%}; linear: mean {base:.1%}'
  )
  table = _table(
    'What hangs on each constant: 32 and 64 GPUs', 'constant', 'changed', 'mean error', 'worst'
  )
  for name in ('crowding', 'host_rate', 'network_rate', 'backprop'):
    for factor in (1 - _MOVED, 1 + _MOVED):
      mean, worst, _ = summary(distributed(name, factor))
      table.add_row(name, f'{factor - 1:+.0%}', f'{mean:.1%}', f'{worst:.1%}')
  mean, worst, _ = summary(distributed(push=False))
  table.add_row('nothing overlaps', '', f'{mean:.1%}', f'{worst:.1%}')
  console.print(table)
  if plot is not None:
    draw(plot)
    console.print(f'Drawn: {plot}')


def summary(found: Sequence[Prediction]) -> tuple[float, float, float]:
  """Of 32 and 64 GPUs: the mean error and the worst one, and the baseline's mean."""
  large = [one for one in found if one.row.num_gpus >= 32]
  sizes = [abs(one.error) for one in large]
  return (
    float(np.mean(sizes)),
    max(sizes),
    float(np.mean([abs(one.linear_error) for one in large])),
  )


def _fold(name: str, without: str, found: Machine, rows: Sequence[Prediction]) -> list[str]:
  sizes = [abs(one.error) for one in rows]
  linear = np.mean([abs(one.linear_error) for one in rows])
  return [
    name,
    without,
    f'{found.crowding:.3f}',
    f'{found.host_rate / 1e9:.1f}',
    str(len(rows)),
    f'{np.mean(sizes):.1%}',
    f'{max(sizes):.1%}',
    f'{linear:.1%}',
  ]


def _table(title: str, *columns: str) -> Any:
  table = rich.table.Table(title=title, title_justify='left', box=rich.box.SIMPLE, padding=0)
  for column in columns:
    table.add_column(column, justify='left' if column in columns[:1] else 'right')
  return table


def draw(file: str) -> None:
  """Published points over predicted curves: the rate over that of as many times one GPU."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 7.5), layout='constrained')
  panels = [*PLATFORMS, DISTRIBUTED]
  for axis, name in zip(figure.subplots(2, 2).flat, panels, strict=True):
    lines = _several() if name == DISTRIBUTED else _single(name)
    for number, (label, measured, predicted) in enumerate(lines):
      color = f'C{number}'
      axis.plot(*zip(*predicted, strict=True), color=color, label=label)
      axis.plot(*zip(*measured, strict=True), 'o', color=color)
    axis.set_xscale('log', base=2)
    ticks = sorted({count for _, measured, _ in lines for count, _ in measured})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(title=name, xlabel='GPUs', ylabel='of linear scaling, %')
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
  figure.suptitle('Published (points) and predicted without that model (lines), synthetic data')
  figure.savefig(file, dpi=120)


_Line = tuple[str, list[tuple[int, float]], list[tuple[int, float]]]


def _single(name: str) -> list[_Line]:
  """Label, published and predicted (GPUs, per cent of linear), of the page's main tables."""
  lines = []
  for model, _, rows in folds(name):
    batch = max(one.row.batch_size_per_gpu for one in rows)
    own = [o for o in rows if o.row.batch_size_per_gpu == batch and o.row.platform == name]
    if own:
      lines.append(_line(f'{model}, {batch}', own, 1))
  return lines


def _several() -> list[_Line]:
  kinds: dict[str, list[Prediction]] = {}
  for one in distributed():
    kinds.setdefault(f'{one.row.model}, {one.row.batch_size_per_gpu}', []).append(one)
  return [_line(label, rows, 8) for label, rows in kinds.items()]


def _line(label: str, rows: Sequence[Prediction], first: int) -> _Line:
  def share(one: Prediction, rate: float) -> tuple[int, float]:
    return one.row.num_gpus, 100 * rate / one.linear

  measured = [(first, 100.0), *(share(one, one.row.images_per_sec) for one in rows)]
  return label, measured, [(first, 100.0), *(share(one, one.images_per_sec) for one in rows)]
