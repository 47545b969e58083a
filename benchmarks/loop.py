"""The loops: steps waited for, timed, watched and reported."""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Iterator
import itertools
import math
import time
from typing import Any, NamedTuple

from benchmarks import progress, speed
import hpm
from hpm.errors import DataError

__all__ = ['RunError', 'Step', 'evaluate', 'measure', 'say', 'watched']


class RunError(RuntimeError):
  """The run can't go on: the loss isn't finite, or memory is out. One line, as DataError."""


class Step(NamedTuple):
  """A finished step: its time, its images on all devices, their mean loss, what it reported."""

  seconds: float
  images: int
  loss: float
  metrics: Any


def watched(
  step: hpm.TrainStep | hpm.EvalStep,
  pipeline: hpm.pipelines.Pipeline,
  num_steps: int | None,
  position: int = 0,
) -> Iterator[Step]:
  """Runs, waits for and times each step; says in one line what the data or the loss do wrong.

  Args:
    step: what to run.
    pipeline: where its batches come from.
    num_steps: None runs to the end of the data.
    position: samples that earlier runs have consumed.
  """
  import tensorflow as tf

  from hpm.pipelines.synthetic import SyntheticPipeline

  inference = isinstance(step, hpm.EvalStep)
  running = step.run(pipeline.dataset(), num_steps)
  for number in itertools.count(1):
    begun = time.perf_counter()
    try:
      metrics = next(running, None)
      if metrics is None:
        return
      images, loss = int(metrics.num_samples), float(metrics.loss)
    except tf.errors.ResourceExhaustedError as error:
      raise RunError(f'out of memory in step {number}: lower --batch_size') from error
    except tf.errors.OpError as error:
      if isinstance(pipeline, SyntheticPipeline):  # the fault can't be the data's
        raise
      raise pipeline.explain(error, position) from error
    seconds = time.perf_counter() - begun
    if inference:  # it reports sums
      loss /= max(images, 1)
    if not math.isfinite(loss):
      cause = 'the weights have overflowed' if inference else 'lower --init_learning_rate'
      raise RunError(f'the loss is {loss} in step {number} of this run (warm-up included): {cause}')
    position += images
    yield Step(seconds, images, loss, metrics)


def measure(
  steps: Iterator[Step],
  num_warmup: int,
  num_timed: int,
  display_every: int,
  record: dict[str, Any],
  started: float,
) -> None:
  """Warm-up, then the timed steps, with their lines.

  Args:
    steps: from `watched`; they may end early.
    num_warmup: how many of them aren't timed.
    num_timed: how many follow, for the progress bar.
    display_every: a line every so many timed steps.
    record: gets the throughput and what belongs to it.
    started: when the run did, by `time.perf_counter`.

  Raises:
    DataError: nothing was left to be timed.
  """
  timed = speed.Speed()
  with progress.bar('steps', num_warmup + num_timed) as advance:
    if num_warmup:
      say('Running warm up')
      for step in itertools.islice(steps, num_warmup):
        note_first(record, step, started)
        advance()
      say('Done warm up')
    say(speed.TITLE)
    cpu_before, begun = time.process_time(), time.perf_counter()
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      timed.add(step.seconds, step.images)
      if number == 1 or number % display_every == 0:
        say(timed.line(number, step.loss))
      advance()
      wall, cpu = time.perf_counter() - begun, time.process_time() - cpu_before
  if not timed.seconds:
    raise DataError(
      'the data ended before the first timed step, so nothing was measured: '
      'lower --num_warmup_batches or --batch_size'
    )
  report(record, timed, wall, cpu)
  record['last_loss'] = step.loss


def evaluate(
  steps: Iterator[Step],
  num_steps: int | None,
  display_every: int,
  record: dict[str, Any],
  started: float,
) -> None:
  """Accuracy over all samples of the steps, each counted once; the first step isn't timed.

  Args:
    steps: from `watched`, of an `EvalStep`.
    num_steps: how many they are, for the progress bar; None if it isn't known.
    display_every, record, started: as for `measure`.
  """
  timed = speed.Speed()
  totals = [0.0, 0, 0, 0]
  with progress.bar('steps', num_steps) as advance:
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      totals = [total + value.numpy() for total, value in zip(totals, step.metrics, strict=True)]
      if number == 1:  # the one that traces and compiles
        cpu_before, begun = time.process_time(), time.perf_counter()
      else:
        timed.add(step.seconds, step.images)
      if timed.seconds and number % display_every == 0:
        say(f'{number}\t{timed.mean:.1f} examples/sec')
      advance()
      wall, cpu = time.perf_counter() - begun, time.process_time() - cpu_before
  loss, top_1, top_5, images = totals
  record['accuracy'] = {
    'top_1': float(top_1 / images),
    'top_5': float(top_5 / images),
    'loss': float(loss / images),
    'num_samples': int(images),
  }
  say(
    f'Accuracy @ 1 = {top_1 / images:.4f} Accuracy @ 5 = {top_5 / images:.4f} [{images} examples]'
  )
  if timed.seconds:
    report(record, timed, wall, cpu)
  else:
    say('One step, which traced and compiled: no throughput')


def note_first(record: dict[str, Any], step: Step, started: float) -> None:
  """Keeps when the first step of the run ended, and its loss."""
  record.setdefault('time_to_first_step_s', time.perf_counter() - started)
  record.setdefault('first_loss', step.loss)


def report(record: dict[str, Any], timed: speed.Speed, wall: float, cpu: float) -> None:
  """Prints and keeps the throughput. `wall`, `cpu`: seconds of the timed loop."""
  total = sum(timed.images) / wall
  say(speed.summary(total))
  record |= {
    'images_per_second': timed.mean,
    'images_per_second_total': total,
    'images_per_second_median': timed.median,
    'standard_error': timed.standard_error,
    'jitter': timed.jitter,
    'step_seconds': timed.seconds,
    'step_images': timed.images,
    'loop_wall_s': wall,
    'cpu_s': cpu,
  }


def say(line: str) -> None:
  """One line for the user, at once even in a pipe."""
  print(line, flush=True)
