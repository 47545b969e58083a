"""The matrix of the benchmark page: its cells, their commands, and the rounds that run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from benchmarks import files, presets, progress, published, results, runs
from benchmarks.loop import say
from benchmarks.page import rates
from hpm.errors import DataError, UsageError

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
    there = json.loads(Path(path).read_text())
  except (OSError, ValueError):
    files.write(path, json.dumps(asked, indent=2) + '\n')
    return
  for name, value in asked.items():
    if there.get(name) != value:
      raise UsageError(
        f'--out={out} holds another matrix ({name} {there.get(name)}, asked for {value}): give '
        'another directory, or remove it'
      )


def command(cell: Cell, wanted: Matrix, path: str) -> list[str]:
  """Arguments of `benchmarks/run.py` for one run of a cell.

  Args:
    cell: which.
    wanted: how.
    path: of the result file.
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
    'result_json': path,
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
  cells = wanted.cells()
  begun = time.monotonic()
  failures: dict[Cell, str] = {}
  total = len(cells) * wanted.num_runs
  with progress.bar('runs', total) as advance:
    for number in range(1, wanted.num_runs + 1):
      round_begun, measured = time.monotonic(), 0
      for place, cell in enumerate(cells, 1):
        advance()
        path = _path(out, cell, number)
        if cell in failures or _done(path):
          continue
        elapsed = time.monotonic() - begun
        if stop or (limit_s is not None and elapsed > limit_s):
          return failures
        started = time.monotonic()
        reason = _run(command(cell, wanted, path), path, timeout_s)
        measured += 1
        if stop:
          return failures
        if reason is not None:
          failures[cell] = reason
        said = reason or f'{results.read(path)["images_per_second"]:.2f} images/sec'
        took = time.monotonic() - started
        say(f'Run {number}, {place} of {len(cells)}: {cell.name}: {said} ({took:.0f} s)')
      # Rounds are alike: the next one would take as long as this.
      took = time.monotonic() - round_begun
      left = None if limit_s is None else limit_s - (time.monotonic() - begun)
      if measured and left is not None and number < wanted.num_runs and took > left:
        say(f'Round {number} took {took:.0f} s, and {left:.0f} s are left: no further round')
        return failures
  return failures


def collect(out: str, wanted: Matrix) -> dict[Cell, list[dict[str, Any]]]:
  """The results of each cell that has any."""
  found = {}
  for cell in wanted.cells():
    paths = [_path(out, cell, number) for number in range(1, wanted.num_runs + 1)]
    done = [results.read(path) for path in paths if _done(path)]
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


def _path(out: str, cell: Cell, number: int) -> str:
  return os.path.join(out, 'cells', cell.name, f'run{number}.json')


def _done(path: str) -> bool:
  try:
    return results.read(path)['status'] == 'ok'
  except DataError:
    return False


def _run(arguments: Sequence[str], path: str, timeout_s: float) -> str | None:
  """One run in a process group of its own; the reason if it failed."""
  program = str(Path(__file__).with_name('run.py'))
  log = f'{path.removesuffix(".json")}.log'
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with contextlib.suppress(FileNotFoundError):
    os.remove(path)
  with open(log, 'w') as lines:
    child = subprocess.Popen(
      [sys.executable, program, *arguments],
      stdout=lines,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    with _ended(child):
      try:
        child.wait(timeout_s)
      except subprocess.TimeoutExpired:
        return f'took longer than {timeout_s:.0f} s'
  if _done(path):
    return None
  try:
    return results.read(path)['reason'].partition(': ')[2]
  except DataError:
    return f'ended with code {child.returncode}, see {log}'


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
  """No process of the child's group outlives the context; a SIGTERM reaches it at once."""
  before = signal.getsignal(signal.SIGTERM)

  def terminate(number: int, frame: Any) -> None:
    child.terminate()
    if callable(before):
      before(number, frame)

  signal.signal(signal.SIGTERM, terminate)
  try:
    yield
  finally:
    if child.poll() is None:
      os.killpg(child.pid, signal.SIGKILL)
      child.wait()
    signal.signal(signal.SIGTERM, before)


def count_gpus() -> int:
  """Seen by TensorFlow, in a process of its own, which leaves their memory to the runs."""
  code = 'import tensorflow as tf; print(len(tf.config.list_physical_devices("GPU")))'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  return int(done.stdout.split()[-1]) if done.returncode == 0 else 0
