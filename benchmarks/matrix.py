"""The matrix of the benchmark page: its cells, their commands, and the rounds that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks import cells, files, presets, published, runs
from benchmarks.page import rates
from hpm import json_file
from hpm.errors import UsageError

__all__ = [
  'Cell',
  'Matrix',
  'batches',
  'collect',
  'command',
  'configuration',
  'count_gpus',
  'like',
  'measure',
  'prepare',
  'rates_of',
]

SYNTHETIC = rates.SYNTHETIC
# The machine of the page whose configuration of each model is taken: one with fast links.
LIKE = 'dgx1_p100'
# Small enough for a small machine; the other batch where the page has one on its K80s.
QUICK_BATCHES = {'inception3': (4, 2), 'resnet50': (4, 2), 'alexnet': (16,)}
QUICK_BATCH = (4,)


class Cell(NamedTuple):
  """What is run: images a device, and data 'synthetic' or a name of `Matrix.data`."""

  model: str
  num_devices: int
  batch_size: int
  data: str

  @property
  def name(self) -> str:
    return f'{self.model}-{self.num_devices}x{self.batch_size}-{self.data}'


@dataclasses.dataclass(frozen=True)
class Matrix:
  """All cells and how each is measured.

  Attributes:
    device: 'cpu' or 'gpu'.
    counts: numbers of devices.
    batches: model -> images a device, the headline first.
    data: name of real data -> its directory.
    num_runs, num_warmup_batches, num_batches: of each cell.
    quick: whether batches and steps are those of --quick.
  """

  device: str
  counts: tuple[int, ...]
  batches: Mapping[str, tuple[int, ...]]
  data: Mapping[str, str]
  num_runs: int = presets.METHOD['num_runs']
  num_warmup_batches: int = presets.METHOD['num_warmup_batches']
  num_batches: int = presets.METHOD['num_batches']
  quick: bool = False

  def cells(self) -> list[Cell]:
    """In the page's order: synthetic, real, then the other batches."""
    found = []
    for rank in range(max(map(len, self.batches.values()))):
      # The other batch is measured with synthetic data and one set of real data, as on the page.
      real = list(self.data)[:1] if rank else list(self.data)
      for data in (SYNTHETIC, *real):
        for count in self.counts:
          for model, sizes in self.batches.items():
            if rank < len(sizes):
              found.append(Cell(model, count, sizes[rank], data))
    return found


def prepare(out: str, wanted: Matrix) -> None:
  """Makes the directory of a new matrix, or checks that it holds this one.

  Raises:
    UsageError: it holds another.
  """
  path = os.path.join(out, 'matrix.json')
  asked = json.loads(json.dumps(dataclasses.asdict(wanted)))
  try:
    there = dict(json_file.read(path))
  except (OSError, ValueError, TypeError):
    files.write(path, json.dumps(asked, indent=2) + '\n')
    return
  for name, value in asked.items():
    if there.get(name) != value:
      raise UsageError(
        f'--out={out} holds another matrix ({name} {there.get(name)}, asked for {value}): give '
        'another directory, or remove it'
      )


def command(cell: Cell, wanted: Matrix) -> list[str]:
  """Arguments of `benchmarks/run.py` for one run of a cell.

  Args:
    cell: which.
    wanted: how.
  """
  update = like(cell.model)
  given = {
    'device': wanted.device,
    'num_gpus': cell.num_devices,
    'model': cell.model,
    'batch_size': cell.batch_size,
    'precision': 'fp32',
    'variable_update': update.variable_update,
    'local_parameter_device': update.local_parameter_device,
    'use_nccl': None if update.nccl is None else str(wanted.device == 'gpu').lower(),
    'optimizer': update.optimizer,
    'init_learning_rate': presets.LEARNING_RATE,
    'num_warmup_batches': wanted.num_warmup_batches,
    'num_batches': wanted.num_batches,
    'data_dir': wanted.data.get(cell.data),
  }
  return [f'--{name}={value}' for name, value in given.items() if value is not None]


def configuration(wanted: Matrix) -> dict[str, tuple[str, str]]:
  """Model -> variable_update and local_parameter_device, as the page's table has them."""
  found = {}
  for model in wanted.batches:
    update = like(model)
    words = update.variable_update
    if update.nccl is not None:
      words += ' (with NCCL)' if wanted.device == 'gpu' else ' (without NCCL)'
    found[model] = (words, update.local_parameter_device or '–')
  return found


def measure(
  out: str, wanted: Matrix, limit_s: float | None, timeout_s: float, stop: Sequence[int] = ()
) -> dict[Cell, str]:
  """Runs what is missing, round by round; returns the cells that failed, with the reason.

  Args:
    out: directory of the results.
    wanted: the matrix.
    limit_s: no run starts after so many seconds, and no round that would not end before.
    timeout_s: of one process.
    stop: not empty as soon as nothing more may start.
  """
  names = {cell.name: cell for cell in wanted.cells()}
  commands = {name: command(cell, wanted) for name, cell in names.items()}
  failures = cells.measure(out, commands, wanted.num_runs, limit_s, timeout_s, stop)
  return {names[name]: reason for name, reason in failures.items()}


def collect(out: str, wanted: Matrix) -> dict[Cell, list[dict[str, Any]]]:
  """The results of each cell that has any."""
  found = {}
  for cell in wanted.cells():
    done = cells.collect(out, cell.name, wanted.num_runs)
    if done:
      found[cell] = done
  return found


def rates_of(
  wanted: Matrix, done: Mapping[Cell, Sequence[Mapping[str, Any]]], failures: Mapping[Cell, str]
) -> list[rates.Rate]:
  """A rate a cell: of several runs all images over all seconds of their timed steps."""
  found = []
  for cell in wanted.cells():
    if cell not in done:
      note = failures.get(cell, 'not measured: time was up')
      found.append(rates.Rate(*cell, None, num_runs=0, note=note))
      continue
    together = runs.combined(done[cell])
    spread = together['runs_spread']
    few = len(done[cell]) < max(map(len, done.values()))
    note = f'{len(done[cell])} {"run" if len(done[cell]) == 1 else "runs"}' if few else ''
    found.append(
      rates.Rate(
        *cell,
        together['images_per_second'],
        spread['lowest'],
        spread['highest'],
        len(done[cell]),
        note,
        sum(together['step_images']) / together['cpu_s'] if wanted.device == 'cpu' else None,
      )
    )
  return found


def batches(model: str, quick: bool) -> tuple[int, ...]:
  """The two batch sizes of the page, the headline first; one where it has one."""
  if quick:
    return QUICK_BATCHES.get(model, QUICK_BATCH)
  found = {
    row.batch_size_per_gpu
    for row in published.results()
    if (row.platform, row.model) == (LIKE, model)
  }
  return tuple(sorted(found or {64, 32}, reverse=True))


def like(model: str) -> published.Result:
  """The published row whose configuration the model gets; ResNet-50's for one that has none."""
  rows = [row for row in published.results() if row.platform == LIKE]
  return next((row for row in rows if row.model == model), rows[1])


def count_gpus() -> int:
  """Seen by TensorFlow, in a process of its own, which leaves their memory to the runs."""
  code = 'import tensorflow as tf; print(len(tf.config.list_physical_devices("GPU")))'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  return int(done.stdout.split()[-1]) if done.returncode == 0 else 0
