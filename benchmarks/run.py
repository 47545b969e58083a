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
import os
from pathlib import Path
import shlex
import sys
import time
from typing import Any

if __package__ in (None, ''):  # python benchmarks/run.py: find the checkout, not benchmarks/
  sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import flags, header, loop, machine, results, startup
from benchmarks.loop import say
import hpm
from hpm.errors import DataError, UsageError

SEED = 0


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
  except BrokenPipeError:  # nobody reads on, as in `run.py | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except (UsageError, DataError, loop.RunError, OSError) as error:
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
    trained = hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', 0.0))
    record['resumed_from'] = restore(options.train_dir, trained)
    steps = loop.watched(hpm.EvalStep(model, manager), pipeline, options.num_batches)
    loop.evaluate(steps, options.num_batches, options.display_every, record, started)
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
  steps = loop.watched(step, pipeline, num_steps, position)
  num_timed = num_steps - options.num_warmup_batches
  loop.measure(steps, options.num_warmup_batches, num_timed, options.display_every, record, started)

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


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
