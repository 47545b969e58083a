"""How parameters are updated."""

import math

from absl import flags

from hpm import errors, optimizers
from hpm.errors import UsageError

TITLE = 'Optimizer'

# Rules whose rate follows the batch, 0.1 at 256 images (Goyal et al. 2017, arXiv:1706.02677,
# section 2.1); the others divide the gradient by its own size.
LINEAR = ('sgd', 'momentum', 'nesterov')


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'optimizer',
    'momentum',
    f'{", ".join(optimizers.OPTIMIZERS)}. Default: momentum.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'init_learning_rate',
    None,
    'The learning rate, constant. Default: 0.1 * global batch / 256 (independent: the batch of '
    f'one device) for {", ".join(LINEAR)}; 0.001 otherwise.',
    flag_values=values,
  )


def check(options) -> None:
  if options.optimizer not in optimizers.OPTIMIZERS:
    raise errors.unknown('--optimizer', options.optimizer, optimizers.OPTIMIZERS)
  rate = options.init_learning_rate
  if rate is not None and not (math.isfinite(rate) and rate > 0):
    raise UsageError(f'--init_learning_rate={rate}: a finite number above 0 is needed')


def complete(options) -> None:
  if options.init_learning_rate is None:
    linear = options.optimizer in LINEAR
    options.init_learning_rate = 0.1 * batch(options) / 256 if linear else 0.001


def batch(options) -> int:
  """Images behind one update: the global batch, or where nothing is shared that of one device."""
  alone = options.variable_update == 'independent'
  return options.batch_size * (1 if alone else options.num_gpus)
