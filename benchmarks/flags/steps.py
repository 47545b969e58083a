"""How long: warm-up, timed steps, lines."""

import math

from absl import flags

from hpm.errors import UsageError

TITLE = 'Steps'

# Where the flags are left out: on CPU devices so few that the run ends in minutes.
NUM_BATCHES = {'gpu': 100, 'cpu': 30}
NUM_WARMUP_BATCHES = {'gpu': 10, 'cpu': 2}


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer(
    'num_batches',
    None,
    f'Timed steps. Default: {NUM_BATCHES["gpu"]} on GPUs, {NUM_BATCHES["cpu"]} on CPU devices; '
    'with --eval all of the\nvalidation files.',
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
    'display_every',
    10,
    'A line every so many steps, and at step 1. Default: 10.',
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
  if options.num_warmup_batches is not None and options.num_warmup_batches < 0:
    raise UsageError(f'--num_warmup_batches={options.num_warmup_batches}: 0 or more is needed')
  if options.display_every < 1:
    raise UsageError(f'--display_every={options.display_every}: 1 or more is needed')


def complete(options) -> None:
  if options.eval:
    return
  if options.num_warmup_batches is None:
    options.num_warmup_batches = NUM_WARMUP_BATCHES[options.device]
  if options.num_batches is None and options.num_epochs is None:
    options.num_batches = NUM_BATCHES[options.device]


def total(options, epoch_size: int, position: int) -> int:
  """Steps of this run, warm-up included; options complete, `position` in images."""
  if options.num_batches is not None:
    return options.num_warmup_batches + options.num_batches
  wanted = math.ceil(options.num_epochs * epoch_size)
  steps = math.ceil((wanted - position) / (options.batch_size * options.num_gpus))
  if steps <= 0:
    raise UsageError(
      f'--num_epochs={options.num_epochs:g} is {wanted} images, and the checkpoint has seen '
      f'{position} already: raise it to go on'
    )
  if steps <= options.num_warmup_batches:
    raise UsageError(
      f'--num_epochs={options.num_epochs:g} is {steps} steps, all of them warm-up '
      f'(--num_warmup_batches={options.num_warmup_batches}): nothing would be measured'
    )
  return steps
