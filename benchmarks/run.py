"""Trains an image model on one or several devices and says how many images a second it gets.

  python benchmarks/run.py --variable_update=replicated
  python benchmarks/run.py --model=resnet50 --num_gpus=8 --batch_size=256 --use_fp16
  python benchmarks/run.py --device=cpu --num_gpus=2 --model=trivial --result_json=run.json

On real images, here a small set of photographs; with a checkpoint, and its accuracy:

  python -m hpm.pipelines sample --out=/tmp/sample
  python benchmarks/run.py --data_dir=/tmp/sample --train_dir=/tmp/train --num_batches=50
  python benchmarks/run.py --data_dir=/tmp/sample --train_dir=/tmp/train --eval

Exit code: 0 done; 1 the run failed (data, a loss that isn't finite); 2 flags that can't work;
130 interrupted.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Iterator, Sequence
import contextlib
import datetime
import itertools
import math
import os
from pathlib import Path
import shlex
import sys
import time
from typing import Any, NamedTuple

if __package__ in (None, ''):  # python benchmarks/run.py: find the checkout, not benchmarks/
  sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import flags, header, machine, progress, results, speed, startup
import hpm
from hpm.errors import DataError, UsageError

SEED = 0


class RunError(RuntimeError):
  """The run can't go on: the loss isn't finite, or memory is out. One line, as DataError."""


class Step(NamedTuple):
  """A finished step: its time, its images on all devices, their mean loss, what it reported."""

  seconds: float
  images: int
  loss: float
  metrics: Any


def main(arguments: Sequence[str]) -> int:
  """One run, from the command line to the exit code."""
  try:
    options = flags.parse(arguments)
    if options is None:
      say(f'{__doc__}\n{flags.help_text()}')
      return 0
    record = begin(arguments, options)
    with recorded(options, record):
      benchmark(options, record)
    say(closing(options, record))
  except (UsageError, DataError, RunError, OSError) as error:
    if isinstance(error, BrokenPipeError):  # nobody reads on, as in `run.py | head`
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f'error: {error}', file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return 0


def benchmark(options: flags.Options, record: dict[str, Any]) -> None:
  """Devices, parts, header, loop; what is learned on the way goes into `record`."""
  started = time.perf_counter()
  devices = startup.devices(options.device, options.num_gpus)
  flags.complete(options, devices)

  precision = hpm.precision.create('fp16' if options.use_fp16 else 'fp32')
  model = hpm.models.create(options.model, dtype=precision.compute_dtype)
  pipeline = hpm.pipelines.create(
    options.data_name,
    **flags.data.pipeline_options(options),
    batch_size=options.batch_size,
    image_size=model.image_size,
    num_classes=model.num_classes,
    seed=SEED,
  )
  manager = hpm.variable_mgr.create(
    options.variable_update, devices, **flags.variables.manager_options(options)
  )
  record['machine']['gpus'] = startup.gpu_names(devices)
  record |= {
    'model': model.name,
    'num_parameters': model.num_params,
    'devices': list(devices),
    'batch_size_per_device': options.batch_size,
    'batch_size_global': options.batch_size * len(devices),
  }
  if options.data_dir is None:
    epoch_size = flags.data.SYNTHETIC_EPOCH
  else:  # counted only where it is needed: of a large data set that takes a while
    epoch_size = pipeline.epoch_size if options.num_epochs is not None else None
  for line in header.lines(options, devices, model.data_format, epoch_size, record['machine']):
    say(line)
  say('=' * 10)

  if options.eval:
    restore(options.train_dir, hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', 0.0)))
    steps = watched(hpm.EvalStep(model, manager), pipeline, options.num_batches)
    evaluate(options, steps, record, started)
    return

  if options.forward_only:
    manager.create(*model.init(SEED))
    step = hpm.EvalStep(model, manager)
    position = 0
  else:
    optimizer = hpm.optimizers.create(options.optimizer, options.init_learning_rate)
    step = hpm.TrainStep(model, manager, optimizer, loss_scale=precision.loss_scale, seed=SEED)
    position = resume(options.train_dir, step, pipeline, record)

  num_steps = flags.steps.total(options, epoch_size, position)
  steps = watched(step, pipeline, num_steps, position)
  measure(options, steps, num_steps, record, started)

  if options.train_dir is not None:
    record['checkpoint'] = hpm.checkpoint.save(options.train_dir, step)
    say(f'Saved {record["checkpoint"]}')


def resume(
  directory: str | None, step: hpm.TrainStep, pipeline: hpm.pipelines.Pipeline, record: dict
) -> int:
  """Goes on from the newest checkpoint, if there is one; returns the samples behind it."""
  if directory is None or hpm.checkpoint.latest(directory) is None:
    return 0
  record['resumed_from'] = restore(directory, step)
  position = int(step.named_variables()['samples'])
  pipeline.restore(pipeline.state(position))
  say(f'Going on after step {int(step.named_variables()["step"])}, {position} images')
  return position


def restore(directory: str, step: hpm.TrainStep) -> str:
  """Restores from the newest checkpoint of `directory` and says so; returns its path."""
  path = hpm.checkpoint.latest(directory)
  if path is None:
    raise UsageError(
      f'--train_dir={directory} has no checkpoint (ckpt-*): train first, without --eval'
    )
  notices = hpm.checkpoint.restore(path, step)
  say(f'Successfully loaded model from {path}.')
  for notice in notices:
    say(f'Notice: {notice}')
  return path


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
  options: flags.Options,
  steps: Iterator[Step],
  num_steps: int,
  record: dict[str, Any],
  started: float,
) -> None:
  """Warm-up, then the timed steps, with their lines."""
  timed = speed.Speed()
  with progress.bar('steps', num_steps) as advance:
    if options.num_warmup_batches:
      say('Running warm up')
      for step in itertools.islice(steps, options.num_warmup_batches):
        note_first(record, step, started)
        advance()
      say('Done warm up')
    say(speed.TITLE)
    cpu_before, begun = time.process_time(), time.perf_counter()
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      timed.add(step.seconds, step.images)
      if number == 1 or number % options.display_every == 0:
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
  options: flags.Options, steps: Iterator[Step], record: dict[str, Any], started: float
) -> None:
  """One pass over the validation files, in which every image counts once."""
  timed = speed.Speed()
  totals = [0.0, 0, 0, 0]
  with progress.bar('steps', options.num_batches) as advance:
    for number, step in enumerate(steps, 1):
      note_first(record, step, started)
      totals = [total + value.numpy() for total, value in zip(totals, step.metrics, strict=True)]
      if number == 1:  # the one that traces and compiles
        cpu_before, begun = time.process_time(), time.perf_counter()
      else:
        timed.add(step.seconds, step.images)
      if timed.seconds and number % options.display_every == 0:
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


def begin(arguments: Sequence[str], options: flags.Options) -> dict[str, Any]:
  """What is known of a run before it starts."""
  return {
    'schema_version': results.SCHEMA_VERSION,
    'status': 'failed',  # until it has ended well
    'mode': flags.mode.title(options),
    'started_at': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': list(arguments),
    'flags_given': dict(options.given),
    'machine': machine.describe(),
  }


@contextlib.contextmanager
def recorded(options: flags.Options, record: dict[str, Any]) -> Iterator[None]:
  """Writes the result file, whichever way the run ends."""
  try:
    yield
    record['status'] = 'ok'
  except BaseException as error:
    for name in results.THROUGHPUT:
      record.pop(name, None)
    record['reason'] = f'{type(error).__name__}: {error}'.removesuffix(': ')
    raise
  finally:
    record['flags'] = options.values()
    record['peak_rss_mib'] = machine.peak_rss_mib()
    record['machine']['onednn'] = machine.onednn()
    if options.result_json:
      results.write(options.result_json, record)


def closing(options: flags.Options, record: dict[str, Any]) -> str:
  """The last line: the result file, and the next command to try."""
  file = f'Result: {options.result_json}. ' if options.result_json else ''
  command = shlex.join(['python', 'benchmarks/run.py', *flags.next_command(options)])
  return f'{file}Next: {command}'


def say(line: str) -> None:
  """One line for the user, at once even in a pipe."""
  print(line, flush=True)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
