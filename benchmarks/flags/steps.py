"""How long: warm-up, timed steps, runs; and the seed that makes them repeatable."""

import math
from typing import NamedTuple

from absl import flags

from benchmarks.flags import cluster, profile
from hpm.errors import UsageError

TITLE = 'Steps'

# Where the flags are left out: on CPU devices so few that the run ends in minutes.
NUM_BATCHES = {'gpu': 100, 'cpu': 30}
NUM_WARMUP_BATCHES = {'gpu': 10, 'cpu': 2}
STALL_TIMEOUT_S = 600.0
SEED = 1234
LARGEST = 2**31 - 1  # of all whole numbers: TensorFlow's int32


class Plan(NamedTuple):
  """The steps of one run.

  Attributes:
    num_steps: all of them; none if an earlier run has reached the goal.
    num_warmup: how many of them are not timed.
  """

  num_steps: int
  num_warmup: int


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer(
    'num_batches',
    None,
    f'Timed steps. Default: {NUM_BATCHES["gpu"]} on GPUs, {NUM_BATCHES["cpu"]} on CPU devices; '
    'with --eval all of the validation files.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'num_epochs',
    None,
    'Instead of --num_batches: train until so many passes over the data are complete, warm-up '
    'and the steps of a resumed checkpoint included.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_warmup_batches',
    None,
    'Untimed steps before the timed ones; the first step traces and compiles. '
    f'Default: {NUM_WARMUP_BATCHES["gpu"]} on GPUs, {NUM_WARMUP_BATCHES["cpu"]} on CPU devices.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_runs',
    1,
    'Run so many times, each in a process of its own, and report the images over the mean step '
    'time of all timed steps, beside the rate of each run. Default: 1.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'stall_timeout_s',
    STALL_TIMEOUT_S,
    'A run in which nothing moves for so long ends with code 4, the stage that it is blocked in, '
    "and Python's stacks; longer than the slowest step, or call of several, and checkpoint. The "
    'first step and evaluations may take longer. 0: never. '
    f'Default: {STALL_TIMEOUT_S:g}.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'tf_random_seed',
    SEED,
    f'Of initial values, dropout, and the order and augmentation of the data. Default: {SEED}.',
    flag_values=values,
  )


def check(options) -> None:
  if options.num_batches is not None and options.num_epochs is not None:
    raise UsageError(
      f'--num_batches={options.num_batches} and --num_epochs={options.num_epochs:g} exclude each '
      'other: drop one'
    )
  if options.num_batches is not None and options.num_batches < 1:
    raise UsageError(
      f'--num_batches={options.num_batches}: at least 1 timed step is needed '
      '(0 meant 100 in tf_cnn_benchmarks; here, leave the flag out for the default)'
    )
  epochs = options.num_epochs
  if epochs is not None and not (math.isfinite(epochs) and epochs > 0):
    raise UsageError(f'--num_epochs={epochs}: a finite number above 0 is needed')
  if epochs is not None and epochs > LARGEST:
    raise UsageError(f'--num_epochs={epochs:g}: at most {LARGEST}, as far as TensorFlow counts')
  if options.num_warmup_batches is not None:
    _check_warmup(options)
  if options.num_runs < 1:
    raise UsageError(f'--num_runs={options.num_runs}: 1 or more is needed')
  if options.num_runs > 1:
    options.refuse_given(
      ['train_dir', 'curve_file', 'tensorboard_dir', *profile.FILES, 'profile_dir'],
      f'does not go with --num_runs={options.num_runs}, whose runs are independent: drop one',
    )
  if not 0 <= options.stall_timeout_s < math.inf:
    raise UsageError(
      f'--stall_timeout_s={options.stall_timeout_s:g}: seconds are needed, or 0 to wait for ever'
    )
  if options.tf_random_seed < 0:
    raise UsageError(f'--tf_random_seed={options.tf_random_seed}: must lie in 0 .. {LARGEST}')


def complete(options) -> None:
  if options.eval:
    return
  if options.num_warmup_batches is None:
    calls = options.steps_per_call
    wanted = max(NUM_WARMUP_BATCHES[options.device], _least_warmup(options))
    options.num_warmup_batches = math.ceil(wanted / calls) * calls
  if options.num_batches is None and options.num_epochs is None:
    options.num_batches = NUM_BATCHES[options.device]


def num_profiled(options) -> int:
  """Steps under the profiler, the last ones of the warm-up; whole calls."""
  if not profile.asked(options):
    return 0
  calls = options.steps_per_call
  return math.ceil(profile.NUM_STEPS / calls) * calls


def goal(options, epoch_size: int | None) -> int:
  """What the step counter has at the end of the whole training, warm-up included.

  Args:
    options: complete.
    epoch_size: images a pass over the data, of all workers; None unless --num_epochs is given.
  """
  if options.num_batches is not None:
    return (options.num_warmup_batches + options.num_batches) * cluster.num_apart(options)
  steps = options.num_epochs * epoch_size / _global_batch(options)
  if steps > LARGEST:
    raise UsageError(
      f'--num_epochs={options.num_epochs:g} is {steps:.3g} steps: at most {LARGEST}, as far as '
      'TensorFlow counts'
    )
  return math.ceil(steps)


def plan(options, epoch_size: int | None, done: int, position: int) -> Plan:
  """The steps that this run has to make.

  Args:
    options: complete.
    epoch_size: images a pass over the data; None unless --num_epochs is given. Of asynchronous
      workers each has a share of its own.
    done: steps of a resumed checkpoint, 0 without one.
    position: its images; of asynchronous workers this one's.

  Raises:
    UsageError: nothing would be measured.
  """
  warmup = options.num_warmup_batches
  if options.num_batches is not None:
    left = warmup + options.num_batches - done
  else:
    wanted = math.ceil(options.num_epochs * epoch_size)
    left = math.ceil((wanted - position) / _global_batch(options))
  if left <= 0:
    return Plan(0, 0)
  if left <= warmup and done:  # the end of a training that was interrupted
    return Plan(left, (left - 1) // options.steps_per_call * options.steps_per_call)
  if left <= warmup:
    raise UsageError(
      f'--num_epochs={options.num_epochs:g} is {left} steps, all of them warm-up '
      f'(--num_warmup_batches={warmup}): nothing would be measured; lower the warm-up'
    )
  return Plan(left, warmup)


def finished(options, done: int, position: int) -> str:
  """Why nothing is left to do."""
  if options.num_batches is not None:
    asked = f'--num_batches={options.num_batches} after {options.num_warmup_batches} of warm-up'
  else:
    asked = f'--num_epochs={options.num_epochs:g}'
  return (
    f'the checkpoint in --train_dir={options.train_dir} has {done} steps and {position} images, '
    f'all of {asked}; raise that to go on'
  )


def _global_batch(options) -> int:
  return options.batch_size * options.num_gpus * cluster.num_together(options)


def _least_warmup(options) -> int:
  """What profiling needs: the profiled steps, and before them the call that traces."""
  profiled = num_profiled(options)
  return profiled + options.steps_per_call if profiled else 0


def _check_warmup(options) -> None:
  warmup, calls = options.num_warmup_batches, options.steps_per_call
  if warmup < 0:
    raise UsageError(f'--num_warmup_batches={warmup}: 0 or more is needed')
  if calls > 0 and warmup % calls:
    raise UsageError(
      f'--num_warmup_batches={warmup} is no multiple of --steps_per_call={calls}, and only whole '
      f'calls can be timed: use {math.ceil(warmup / calls) * calls}'
    )
  if calls > 0 and warmup < _least_warmup(options):
    raise UsageError(
      f'--num_warmup_batches={warmup} leaves no room for the {num_profiled(options)} profiled '
      f'steps after the first call, which traces: use {_least_warmup(options)} or more'
    )
