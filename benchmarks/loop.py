"""The loops: steps waited for, timed, watched and reported."""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Callable, Iterator
import itertools
import math
import re
import statistics
import time
from typing import Any, NamedTuple

from benchmarks import flags, machine, progress, speed
import hpm
from hpm.errors import DataError

__all__ = ['NotFinite', 'RunError', 'Step', 'evaluate', 'measure', 'report', 'say', 'watched']

_DRIFT = 0.05  # share of the step time from which a drift is worth a warning
_OTHER_LOAD = 0.1  # share of the cores


class RunError(RuntimeError):
  """The run can't go on: the loss isn't finite, or memory is out. One line, as DataError."""


class NotFinite(RunError):
  """The loss is NaN or infinite."""


class Step(NamedTuple):
  """A finished step.

  Attributes:
    seconds: its time; of several steps in one call, the mean of theirs.
    images: on all devices of this process.
    loss: mean over them.
    metrics: what the step reported.
    settled: whether the variables are those after this step: not within a call of several.
  """

  seconds: float
  images: int
  loss: float
  metrics: Any
  settled: bool = True


def _alone(images: int, seconds: float, ago: float = 0.0) -> tuple[float, str]:
  total = images / seconds
  return total, speed.summary(total)


def watched(
  step: hpm.TrainStep | hpm.EvalStep,
  pipeline: hpm.pipelines.Pipeline,
  num_steps: int | None,
  position: int = 0,
  *,
  steps_per_call: int = 1,
  private_threads: int | None = None,
) -> Iterator[Step]:
  """Runs, waits for and times each step; says in one line what the data or the loss do wrong.

  Args:
    step: what to run.
    pipeline: where its batches come from.
    num_steps: None runs to the end of the data.
    position: samples that earlier runs have consumed.
    steps_per_call: see `hpm.TrainStep.run`.
    private_threads: that the pipeline's dataset gets for itself.
  """
  import tensorflow as tf

  from hpm.pipelines.synthetic import SyntheticPipeline

  inference = isinstance(step, hpm.EvalStep)
  dataset = pipeline.dataset()
  if private_threads is not None:
    threads = tf.data.Options()
    threads.threading.private_threadpool_size = private_threads
    dataset = dataset.with_options(threads)
  running = step.run(dataset, num_steps, steps_per_call)
  number = 1
  while True:
    begun = time.perf_counter()
    try:
      results = list(itertools.islice(running, steps_per_call))
      values = [(_own_samples(metrics), float(metrics.loss)) for metrics in results]
    except tf.errors.ResourceExhaustedError as error:
      raise RunError(f'out of memory in step {number}: lower --batch_size') from error
    # A message that quotes a damaged record may be no UTF-8, and then can't be raised as it is.
    except (tf.errors.OpError, UnicodeDecodeError) as error:
      if 'tf2xla' in str(error):
        raise RunError(
          f'XLA can not compile the tower, drop --xla: {_xla_reason(error)}'
        ) from error
      if isinstance(pipeline, SyntheticPipeline):  # the fault can't be the data's
        raise
      raise pipeline.explain(error, position) from error
    if not results:
      return
    seconds = (time.perf_counter() - begun) / len(results)
    for metrics, (images, loss) in zip(results, values, strict=True):
      if inference:  # it reports sums
        loss /= max(images, 1)
      if not math.isfinite(loss):
        if inference:
          raise RunError(f'the loss is {loss} in step {number}: the weights have overflowed')
        raise NotFinite(
          f'the loss is {loss} in step {int(metrics.step)}: lower --init_learning_rate'
        )
      position += images
      number += 1
      yield Step(seconds, images, loss, metrics, metrics is results[-1])


def measure(
  steps: Iterator[Step],
  num_warmup: int,
  num_timed: int,
  lines: flags.lines.Lines,
  record: dict[str, Any],
  started: float,
  rate: Callable[[int, float, float], tuple[float, str]] = _alone,
) -> None:
  """Warm-up, then the timed steps, with their lines.

  Args:
    steps: from `watched`; they may end early.
    num_warmup: how many of them aren't timed.
    num_timed: how many follow, for the progress bar.
    lines: what is printed.
    record: gets the throughput and what belongs to it.
    started: when the run did, by `time.perf_counter`.
    rate: from this process's timed images, their seconds and how long ago those ended to the total
      a second, and its line.

  Raises:
    DataError: nothing was left to be timed.
  """
  timed, losses, skipped = speed.Speed(lines.ewma), [], 0
  record['num_warmup_steps'] = num_warmup
  with progress.bar('steps', num_warmup + num_timed) as advance:
    if num_warmup:
      say('Running warm up')
      for step in itertools.islice(steps, num_warmup):
        note_first(record, step, started)
        advance()
      say('Done warm up')
    say(speed.title(lines.loss, lines.accuracies))
    clock = _Clock()
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      timed.add(step.seconds, step.images)
      losses.append(step.loss)
      skipped += not getattr(step.metrics, 'finite', True)
      if number == 1 or number % lines.every == 0:
        say(timed.line(number, step.loss, _accuracies(step) if lines.accuracies else ()))
      advance()
      clock.stop()
  if not timed.seconds:
    raise DataError(
      'the data ended before the first timed step, so nothing was measured: '
      'lower --num_warmup_batches or --batch_size'
    )
  report(record, timed, clock, rate)
  record |= {'losses': losses, 'last_loss': losses[-1]}
  if hasattr(step.metrics, 'loss_scale'):
    record |= {'loss_scale': float(step.metrics.loss_scale), 'skipped_steps': int(skipped)}


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
    display_every: a line every so many steps.
    record, started: as for `measure`.
  """
  timed = speed.Speed()
  totals = [0.0, 0, 0, 0]
  with progress.bar('steps', num_steps) as advance:
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      totals = [total + value.numpy() for total, value in zip(totals, step.metrics, strict=True)]
      if number == 1:  # the one that traces and compiles
        clock = _Clock()
      else:
        timed.add(step.seconds, step.images)
      if timed.seconds and number % display_every == 0:
        say(f'{number}\t{timed.mean:.1f} examples/sec')
      advance()
      clock.stop()
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
    report(record, timed, clock)
  else:
    say('One step, which traced and compiled: no throughput')


def note_first(record: dict[str, Any], step: Step, started: float) -> None:
  """Keeps when the first step of the run ended, and its loss."""
  record.setdefault('time_to_first_step_s', time.perf_counter() - started)
  record.setdefault('first_loss', step.loss)


def report(
  record: dict[str, Any],
  timed: speed.Speed,
  clock: _Clock,
  rate: Callable[[int, float, float], tuple[float, str]] = _alone,
) -> None:
  """Prints and keeps the throughput, and what makes it doubtful."""
  total, summary = rate(sum(timed.images), clock.wall, clock.ago)
  say(summary)
  record |= throughput(timed)
  record |= {
    'images_per_second_total': total,
    'loop_wall_s': clock.wall,
    'cpu_s': clock.cpu,
  }
  warnings = record.setdefault('warnings', [])
  if clock.other is not None:
    record['other_load_cores'] = clock.other
    cores = record['machine']['cores']
    if clock.other > _OTHER_LOAD * cores:
      warnings.append(
        f'other processes kept {clock.other:.1f} of {cores} cores busy: measure on a quiet machine'
      )
  drift = speed.drift(timed.seconds)
  if drift is not None and abs(drift) > _DRIFT:
    change = 'longer' if drift > 0 else 'less time'
    warnings.append(
      f'the last third of the timed steps took {abs(drift):.0%} {change} than the first: '
      'measure longer, after a longer warm-up'
    )
  if record.get('num_warmup_steps') == 0 and record['mode'] != 'evaluation':
    warnings.append('no warm-up: the first timed step traced and compiled')
  for warning in warnings:
    say(f'Warning: {warning}')


def throughput(timed: speed.Speed) -> dict[str, Any]:
  """What step times alone say."""
  return {
    'images_per_second': timed.mean,
    'images_per_second_median': timed.median,
    'images_per_second_interval': speed.interval(speed.blocks(timed.seconds, timed.images), 1.0),
    'standard_error': timed.standard_error,
    'jitter': timed.jitter,
    'step_seconds': timed.seconds,
    'step_images': timed.images,
    'step_seconds_mean': statistics.fmean(timed.seconds),
    'step_seconds_median': statistics.median(timed.seconds),
    'step_seconds_percentiles': speed.percentiles(timed.seconds),
  }


def say(line: str) -> None:
  """One line for the user, at once even in a pipe."""
  print(line, flush=True)


class _Clock:
  """Time of a loop: of the wall, of this process on the CPU, of other processes.

  Attributes:
    wall, cpu: seconds from the start to the last `stop`.
    other: cores that others kept busy; None where the system doesn't say.
  """

  def __init__(self) -> None:
    self._load = machine.load()
    self._cpu, self._wall = time.process_time(), time.perf_counter()
    self.wall = self.cpu = 0.0

  def stop(self) -> None:
    self.wall = time.perf_counter() - self._wall
    self.cpu = time.process_time() - self._cpu

  @property
  def ago(self) -> float:
    """Seconds since the last `stop`."""
    return time.perf_counter() - self._wall - self.wall

  @property
  def other(self) -> float | None:
    elapsed = time.perf_counter() - self._wall
    return machine.other_load(self._load, machine.load(), elapsed)


def _xla_reason(error: Exception) -> str:
  """The line of the compiler's report that says what it can't do."""
  first = re.search(r'\(0\) \w+:\s*(.*)', str(error))  # of several errors, one a device
  return (first[1] if first else str(error).splitlines()[0]).strip()[:300]


def _own_samples(metrics: Any) -> int:
  return int(getattr(metrics, 'own_samples', metrics.num_samples))


def _accuracies(step: Step) -> tuple[float, float]:
  images = max(int(step.metrics.num_samples), 1)
  return int(step.metrics.top_1) / images, int(step.metrics.top_5) / images
