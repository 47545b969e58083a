"""Checkpoints of a run: resumed from, written while it goes on, and when it is told to stop."""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Callable, Iterator, Sequence
import contextlib
import time
from typing import Any

from benchmarks.loop import Step, say
import hpm
from hpm.errors import UsageError

__all__ = ['Saving', 'Stopped', 'averaged', 'newest', 'restore', 'resume', 'seconds']


class Stopped(Exception):
  """The run was told to stop, and has: one line that says what became of it."""


class Saving:
  """When checkpoints are written, and what stops a run.

  Args:
    step: whose variables are saved.
    pipeline: whose position is saved with them.
    directory: None writes none.
    stop: not empty as soon as the run has to stop (see `process.terminations`).
    every_steps, every_s: distance of checkpoints, one of them or neither.
    keep: the newest so many stay; 0 keeps all.
    facts: what to keep of the training beside its values.
    record: gets the path of the last one.
    stage: tells others that a checkpoint is being written, while it lasts.
    keeper: the task that keeps checkpoints for all, if it is another one.
  """

  def __init__(
    self,
    step: hpm.TrainStep | hpm.EvalStep,
    pipeline: hpm.pipelines.Pipeline,
    directory: str | None,
    stop: list[int],
    *,
    every_steps: int | None = None,
    every_s: float | None = None,
    keep: int = 0,
    facts: Callable[[], dict[str, float]] = dict,
    record: dict[str, Any],
    stage: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    keeper: str | None = None,
  ):
    self._step, self._pipeline, self._stop, self._stage = step, pipeline, stop, stage
    self._every_steps, self._every_s = every_steps, every_s
    self._agrees = hasattr(step, 'stopped')
    self._facts, self._record, self._keeper = facts, record, keeper
    self._directory = directory
    self._writer = None if directory is None else hpm.checkpoint.Writer(directory, keep or None)
    self._path: str | None = None
    if self._writer is not None:
      pipeline.state(0)  # counts the records, if it has to, before anything is timed
    self._saved_at = time.monotonic()
    self._saved_step = self._done()

  def over(self, steps: Iterator[Step]) -> Iterator[Step]:
    """Passes steps on; after each, a checkpoint if one is due, and an end if one is asked for."""
    for step in steps:
      yield step
      if not step.settled:
        continue
      if self._stop and self._agrees:
        self._step.stop = True  # all workers stop, after the same step
      elif self._stop:
        self._end()
      if self._writer is not None and self._due(step):
        self._save()
    if self._agrees and self._step.stopped:
      self._end()

  def finish(self) -> None:
    """The checkpoint at the end of a run."""
    if self._writer is None:
      return
    if self._done() != self._saved_step:
      self._save()
    say(f'Saved {self._written()}')

  def last_good(self) -> str:
    """Where to go back to after a loss that isn't finite, in words."""
    if self._writer is None:
      return 'no checkpoints were kept, see --train_dir'
    self._written()
    path = hpm.checkpoint.last_finite(self._directory)
    return f'the last good checkpoint is {path}' if path else 'no checkpoint is good'

  def _end(self) -> None:
    if self._writer is None:
      kept = 'nothing is kept' if self._keeper is None else f'{self._keeper} says what is kept'
      raise Stopped(f'stopped by SIGTERM; {kept}')
    self._save()
    path = self._written()
    raise Stopped(
      f'stopped by SIGTERM after step {self._saved_step}: saved {path}; the same command goes on '
      'from there'
    )

  def _due(self, step: Step) -> bool:
    if self._every_steps is not None:
      return int(step.metrics.step) // self._every_steps > self._saved_step // self._every_steps
    return self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s

  def _save(self) -> None:
    self._written()
    consumed = getattr(self._step, 'consumed', None)  # by each worker; the first one saves
    position = consumed[0] if consumed else self._step.progress()[1]
    with self._stage('checkpoint'):
      self._path = self._writer.save(self._step, self._pipeline.state(position), self._facts())
    self._saved_at, self._saved_step = time.monotonic(), self._done()

  def _written(self) -> str | None:
    """Waits for what is being written; the last checkpoint, which stands then."""
    with self._stage('checkpoint'):
      self._writer.wait()
    if self._path is not None:
      self._record['checkpoint'] = self._path
    return self._path

  def _done(self) -> int:
    return self._step.progress()[0] if self._writer is not None else 0


def resume(
  directory: str | None,
  step: hpm.TrainStep,
  pipeline: hpm.pipelines.Pipeline,
  record: dict,
  worker: int = 0,
) -> tuple[int, int]:
  """Goes on from the newest checkpoint, if there is one.

  Of several workers the chief alone has a directory; the others get from it where they are.

  Returns:
    The steps behind it, and the images that this process has taken for them.
  """
  found = directory is not None and hpm.checkpoint.latest(directory) is not None
  facts: dict[str, Any] = {}
  path = directory
  if found:
    path = record['resumed_from'] = restore(directory, step, training=True)
    facts = hpm.checkpoint.facts(path)
  if hasattr(step, 'begin'):
    if found:
      step.consumed = _shares(step.progress()[1], len(step.consumed), facts.get('consumed', []))
    step.begin()
    done, position = step.progress()[0], step.consumed[worker]
  elif found:
    done, position = step.progress()
  if not found and not (worker and position):
    return 0, 0
  own = pipeline.state(position)
  state = facts.get('pipeline') or own
  before, now = (one.get('num_shards', 1) for one in (state, own))
  if before != now:
    raise UsageError(
      f'{path} is of a training by {_workers(before)}, each with a share of the data, and now '
      f'there would be {_workers(now)}: start as many as before, or begin in another --train_dir'
    )
  try:
    pipeline.restore(state)
  except UsageError as error:
    raise UsageError(f'{path} does not fit the data of this run: {error}') from None
  say(f'Going on after step {done}, {position} images')
  return done, position


def _workers(count: int) -> str:
  return '1 worker' if count == 1 else f'{count} workers'


def _shares(samples: int, num_workers: int, known: Sequence[int]) -> list[int]:
  """What each worker has taken of the samples.

  Args:
    samples: behind the checkpoint.
    num_workers: that go on from it.
    known: what the checkpoint says of it. Where the workers were asynchronous that is right for the
      chief alone, and the others have shared the rest.
  """
  if len(known) != num_workers:
    return [samples // num_workers] * num_workers
  if sum(known) == samples:
    return list(known)
  return [known[0]] + [(samples - known[0]) // max(1, num_workers - 1)] * (num_workers - 1)


def averaged(directory: str) -> bool:
  """Whether the newest checkpoint holds a moving average of the weights."""
  for path in reversed(hpm.checkpoint.paths(directory)):
    with contextlib.suppress(hpm.checkpoint.Damaged):
      return any(name.startswith('slots/average/') for name in hpm.checkpoint.names(path))
  return False


def seconds(path: str | None) -> float:
  """What the training up to a checkpoint took, as far as it is known."""
  if path is None:
    return 0.0
  return float(hpm.checkpoint.facts(path).get('training', {}).get('seconds', 0.0))


def newest(directory: str) -> str:
  """The newest checkpoint of a directory.

  Raises:
    UsageError: it has none.
  """
  path = hpm.checkpoint.latest(directory)
  if path is None:
    raise UsageError(
      f'--train_dir={directory} has no checkpoint (ckpt-*): train first, without --eval'
    )
  return path


def restore(directory: str, step: hpm.TrainStep, training: bool = False) -> str:
  """Restores from the newest whole checkpoint of `directory` and says so; returns its path.

  Args:
    directory, step: from where, and what.
    training: whether it goes on from there. Newer checkpoints that are damaged are renamed then,
      or they would push out the good ones that are to come.

  Raises:
    UsageError: there is none.
    hpm.checkpoint.Damaged: none can be read.
  """
  newest(directory)
  paths = hpm.checkpoint.paths(directory)
  for path in reversed(paths):
    try:
      notices = hpm.checkpoint.restore(path, step)
      break
    except hpm.checkpoint.Damaged as error:
      if path == paths[0]:
        raise
      what = f'renamed to {hpm.checkpoint.set_aside(path)}' if training else 'passed over'
      say(f'Notice: {path} is damaged ({error.reason}) and {what}: the one before it is taken')
  say(f'Successfully loaded model from {path}.')
  for notice in notices:
    say(f'Notice: {notice}')
  return path
