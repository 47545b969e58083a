"""Evaluations while a training goes on: when they are due, what they find, what is kept of it."""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Callable, Iterator
import os
from typing import Any

from benchmarks.curves import Curve
from benchmarks.loop import Step, say
import hpm

__all__ = ['BEST', 'Evaluating', 'accuracy', 'best_of']

BEST = 'best'  # directory in --train_dir of the best checkpoint


def accuracy(
  step: hpm.EvalStep, pipeline: hpm.pipelines.Pipeline, num_steps: int | None = None
) -> Callable[[], dict[str, Any]]:
  """Makes a pass over the validation images, each of them counted once, whenever it is called.

  All passes are over one data set: making it anew would trace its functions again.

  Args:
    step: what evaluates.
    pipeline: of one pass.
    num_steps: stops after so many.

  Returns:
    What gives the same as `hpm.EvalStep.evaluate`; it raises DataError where there are no images,
    or one can't be used.
  """
  import tensorflow as tf

  dataset = pipeline.dataset()
  if num_steps is not None:
    dataset = dataset.take(num_steps * len(step.manager.devices))

  def evaluate() -> dict[str, Any]:
    try:
      return step.evaluate(dataset)
    except (tf.errors.OpError, UnicodeDecodeError) as error:
      raise pipeline.explain(error, 0) from error

  return evaluate


class Evaluating:
  """Evaluates a training at some of its steps, and ends it where that is asked for.

  Args:
    step: what is trained.
    evaluate: gives the accuracy of its current variables.
    due: ((steps before, steps now), (images before, images now)) -> whether to evaluate now.
    curve: knows the time, and is told what is found.
    stop_at: top-1 accuracy that ends the training; None never does.
    directory: of the checkpoints; None keeps no best one.
    record: gets all evaluations, the best one, and what the accuracy took.
  """

  def __init__(
    self,
    step: hpm.TrainStep,
    evaluate: Callable[[], dict[str, Any]],
    due: Callable[[tuple[int, int], tuple[int, int]], bool],
    curve: Curve,
    *,
    stop_at: float | None,
    directory: str | None,
    record: dict[str, Any],
  ):
    self._step, self._evaluate, self._due = step, evaluate, due
    self._curve, self._stop_at, self._record = curve, stop_at, record
    self._directory = None if directory is None else os.path.join(directory, BEST)
    self._best = None if self._directory is None else best_of(self._directory)
    self._done = self._progress()
    self._evaluated = -1
    record['evaluations'] = []

  def over(self, steps: Iterator[Step]) -> Iterator[Step]:
    """Passes steps on; evaluates where it is due, and ends at the accuracy that was asked for."""
    for step in steps:
      yield step
      if not step.settled:
        continue
      before, now = self._done, self._progress()
      self._done = now
      if self._due((before[0], now[0]), (before[1], now[1])) and self._reached(now):
        if not hasattr(self._step, 'reached'):
          return
        self._step.reached = True  # other workers are in the next step already: all end after it

  def finish(self) -> None:
    """An evaluation at the end, unless that has just been made."""
    self._done = self._progress()
    if self._evaluated != self._done[0]:
      self._reached(self._done)

  def _progress(self) -> tuple[int, int]:
    return self._step.progress()

  def _reached(self, done: tuple[int, int]) -> bool:
    """Evaluates; whether the training is to end with it."""
    number, images = self._evaluated, _ = done
    found = self._evaluate()
    point = {'step': number, 'images': images, **self._curve.time(), **found}
    self._record['evaluations'].append(point)
    self._record['accuracy'] = found
    self._curve.evaluated(point)
    say(f'Evaluation after step {number}, {images} images, {point["seconds"]:.1f} s:')
    say(
      f'Accuracy @ 1 = {found["top_1"]:.4f} Accuracy @ 5 = {found["top_5"]:.4f} '
      f'[{found["num_samples"]} examples]'
    )
    if self._best is None or found['top_1'] > self._best:
      self._best = found['top_1']
      self._keep(point)
    if self._stop_at is None or found['top_1'] < self._stop_at:
      return False
    if 'to_accuracy' in self._record:
      return True
    self._record['to_accuracy'] = {'asked': self._stop_at, **point}
    say(
      f'Reached {found["top_1"]:.4f} of --stop_at_top_1_accuracy={self._stop_at:g} in '
      f'{point["seconds"]:.1f} s and {images} images'
    )
    return True

  def _keep(self, point: dict[str, Any]) -> None:
    self._record['best'] = {name: point[name] for name in ('step', 'images', 'top_1', 'top_5')}
    if self._directory is None:
      return
    writer = hpm.checkpoint.Writer(self._directory, keep=1)
    path = writer.save(self._step, facts={**self._curve.time(), 'top_1': point['top_1']})
    writer.wait()
    self._record['best']['checkpoint'] = path


def best_of(directory: str) -> float | None:
  """Top-1 accuracy of the best checkpoint that an earlier run has kept there."""
  path = hpm.checkpoint.latest(directory)
  return None if path is None else hpm.checkpoint.facts(path).get('training', {}).get('top_1')
