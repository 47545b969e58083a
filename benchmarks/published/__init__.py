"""Published results as data: what others measured, on what, and why a cell is empty.

  row = published.results()[0]
  row.images_per_sec, row.per_device
  published.reason(row, 'ps_tasks')

Three tables, read from the CSV files beside this one, without TensorFlow:

  results.csv       TensorFlow's Benchmarks page of May 2017: 207 figures in images a second, and
                    two cells that the page leaves out, with its reason in `note`
  platforms.csv     what each of its four platforms was
  accelerators.csv  ResNet-50 on TPUs and newer GPUs: rate, price, accuracy. Batch sizes are global

An empty cell is None here and stays empty wherever it is shown. Nothing is interpolated.
"""

import csv
import functools
from pathlib import Path
import types
import typing
from typing import Any, NamedTuple

from hpm.errors import DataError

__all__ = [
  'Accelerator',
  'MODELS',
  'PAGE',
  'Platform',
  'Result',
  'accelerators',
  'cell',
  'headline_batch',
  'platforms',
  'reason',
  'results',
  'scaling',
]

PAGE = 'TensorFlow Benchmarks page, May 2017'
# In the page's order.
MODELS = {
  'inception3': 'Inception v3',
  'resnet50': 'ResNet-50',
  'resnet152': 'ResNet-152',
  'alexnet': 'AlexNet',
  'vgg16': 'VGG16',
}


class Result(NamedTuple):
  """A cell of the page: training in float32.

  Attributes:
    platform: a name of `platforms`.
    model: a name of `hpm.models`.
    num_gpus: on all hosts.
    hosts, gpus_per_host: machines, and GPUs of each.
    ps_tasks: parameter-server tasks, on the worker's hosts; None without.
    batch_size_per_gpu: images.
    data: 'synthetic' or 'imagenet'.
    optimizer, variable_update, local_parameter_device: as the driver's flags.
    nccl: whether replicated used NCCL; None for other managers.
    cross_replica_sync: whether workers wait for each other; None on one host.
    images_per_sec: on all GPUs; None where the page leaves it out.
    note: why, then.
  """

  platform: str
  model: str
  num_gpus: int
  hosts: int
  gpus_per_host: int
  ps_tasks: int | None
  batch_size_per_gpu: int
  data: str
  optimizer: str
  variable_update: str
  local_parameter_device: str | None
  nccl: bool | None
  cross_replica_sync: bool | None
  images_per_sec: float | None
  note: str

  @property
  def per_device(self) -> float | None:
    """Images a second on each GPU."""
    return None if self.images_per_sec is None else self.images_per_sec / self.num_gpus


class Platform(NamedTuple):
  """The environment of the results of one platform; texts as published.

  Attributes:
    disk_mb_per_s: megabytes a second that the volume sustains.
    network_gbit_per_s: of the instance type.
    date: year and month.
  """

  platform: str
  instance: str
  gpus: str
  hosts: int
  os: str
  cuda: str
  cudnn: str
  tensorflow_commit: str
  benchmark_commit: str
  build: str
  disk: str
  disk_mb_per_s: float | None
  network_gbit_per_s: float | None
  dataset: str
  date: str
  source: str

  @property
  def gpu(self) -> str:
    """What a GPU is called."""
    return self.gpus.removesuffix(' a host').partition('x ')[2]


class Accelerator(NamedTuple):
  """A row of the comparison of accelerators, TPU v2 against V100 and what came after.

  Attributes:
    chips: how many computed.
    precision: 'float16', 'bfloat16' or 'float16+XLA'.
    global_batch: images a step on all chips; None where it isn't published.
    images_per_sec: on all chips.
    usd_per_hour: of the whole system.
    top1: validation accuracy, per cent.
    epochs: to that accuracy.
    usd_to_top1: as published; it is epochs * 1281167 / images_per_sec / 3600 * usd_per_hour.
  """

  system: str
  chips: int
  model: str
  precision: str
  framework: str
  global_batch: int | None
  data: str
  images_per_sec: float
  usd_per_hour: float | None
  top1: float | None
  epochs: float | None
  usd_to_top1: float | None
  source: str

  @property
  def per_device(self) -> float:
    """Images a second on each chip."""
    return self.images_per_sec / self.chips

  @property
  def batch_size_per_device(self) -> int | None:
    """Images a step on each chip."""
    return None if self.global_batch is None else self.global_batch // self.chips


# Column -> why it is empty, where a row doesn't say so itself.
_REASONS = {
  'ps_tasks': 'one process, without parameter-server tasks',
  'local_parameter_device': 'NCCL sums on all GPUs; distributed_replicated keeps a copy on each',
  'nccl': 'only replicated is with or without NCCL',
  'cross_replica_sync': 'one worker, which waits for nobody',
  'disk_mb_per_s': 'not published',
  'network_gbit_per_s': 'one host, which sends nothing',
  'global_batch': 'not published',
  'usd_per_hour': 'not published',
  'top1': 'speed alone was measured',
  'epochs': 'not published',
  'usd_to_top1': 'not published',
}


@functools.cache
def results() -> tuple[Result, ...]:
  """All cells of the page, in its order: platform, batch, data, GPUs, model."""
  return tuple(_read('results.csv', Result))


@functools.cache
def platforms() -> dict[str, Platform]:
  """Name -> platform, in the page's order."""
  return {platform.platform: platform for platform in _read('platforms.csv', Platform)}


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
  """The comparison of accelerators."""
  return tuple(_read('accelerators.csv', Accelerator))


def reason(row: NamedTuple, column: str) -> str | None:
  """Why a cell is empty; None where it isn't."""
  if getattr(row, column) not in (None, ''):
    return None
  return getattr(row, 'note', '') if column == 'images_per_sec' else _REASONS.get(column)


def headline_batch(platform: str, model: str) -> int:
  """Images a GPU of the page's main tables: the larger of the two batch sizes."""
  return max(
    row.batch_size_per_gpu for row in results() if (row.platform, row.model) == (platform, model)
  )


def cell(
  platform: str, model: str, num_gpus: int, batch_size_per_gpu: int, data: str
) -> Result | None:
  """The one cell of these, if the page has it."""
  wanted = (platform, model, num_gpus, batch_size_per_gpu, data)
  for row in results():
    if (row.platform, row.model, row.num_gpus, row.batch_size_per_gpu, row.data) == wanted:
      return row
  return None


def scaling(row: Result) -> float | None:
  """The rate over that of so many times one GPU; None where the page lacks one of the two."""
  one = cell(row.platform, row.model, 1, row.batch_size_per_gpu, row.data)
  if row.images_per_sec is None or one is None or one.images_per_sec is None:
    return None
  return row.images_per_sec / (row.num_gpus * one.images_per_sec)


def _read(name: str, kind: type) -> list[Any]:
  """The rows of a CSV file, each cell as the type of its column asks.

  Raises:
    DataError: other columns, or a cell that doesn't parse.
  """
  path = Path(__file__).with_name(name)
  columns = typing.get_type_hints(kind)
  with path.open(newline='', encoding='utf-8') as file:
    reader = csv.DictReader(file)
    if reader.fieldnames != list(columns):
      raise DataError(f'{path}: columns {reader.fieldnames}, needed: {list(columns)}')
    try:
      return [
        kind(**{column: _value(row[column], columns[column]) for column in columns})
        for row in reader
      ]
    except ValueError as error:
      raise DataError(f'{path}, line {reader.line_num}: {error}') from error


def _value(text: str, wanted: Any) -> Any:
  kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
  if not text and types.NoneType in kinds:
    return None
  if kinds[0] is bool:
    if text not in ('true', 'false'):
      raise ValueError(f'{text!r} is neither true nor false')
    return text == 'true'
  return kinds[0](text)
