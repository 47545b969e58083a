"""The learning rate: its start, its way down, its warm-up."""

from __future__ import annotations  # a schedule in a signature would import TensorFlow

import math
from typing import TYPE_CHECKING

from absl import flags

from benchmarks.flags import cluster
from hpm import errors
from hpm.errors import UsageError

if TYPE_CHECKING:
  from hpm.optimizers import Schedule

TITLE = 'Learning rate'

# Rules whose rate follows the batch, 0.1 at 256 images (Goyal et al. 2017, arXiv:1706.02677,
# section 2.1); the others divide the gradient by its own size.
LINEAR = ('sgd', 'momentum', 'nesterov', 'lars')
SCHEDULES = ('constant', 'polynomial', 'cosine', 'resnet')
# The rule that tf_cnn_benchmarks trains its ResNets by: epochs at which the rate is divided by 10,
# epochs of warm-up, and the rate at 256 images.
RESNET_EPOCHS = (30, 60, 80, 90)
RESNET_WARMUP = 5
RESNET_RATE = 0.128
UPDATES = (
  'init_learning_rate',
  'learning_rate_schedule',
  'polynomial_power',
  'piecewise_learning_rate_schedule',
  'num_epochs_per_decay',
  'learning_rate_decay_factor',
  'minimum_learning_rate',
  'num_learning_rate_warmup_epochs',
  'resnet_base_lr',
  'learning_rate_base_batch',
)


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_float(
    'init_learning_rate',
    None,
    'The learning rate at the start, after any warm-up. Default: 0.1 * global batch / 256 '
    f'(independent: the batch of one device) for {", ".join(LINEAR)}; 0.001 otherwise.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'learning_rate_schedule',
    None,
    f'{", ".join(SCHEDULES)}. polynomial and cosine fall to --minimum_learning_rate at the end of '
    f'training; resnet divides by 10 at epochs {", ".join(map(str, RESNET_EPOCHS))}, after '
    f'{RESNET_WARMUP} epochs of warm-up. Default: constant.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'polynomial_power',
    2.0,
    'Of --learning_rate_schedule=polynomial. Default: 2.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'piecewise_learning_rate_schedule',
    None,
    'LR0;E1;LR1;...;En;LRn: rate LR0 until epoch E1, LR1 until E2, and so on.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'num_epochs_per_decay',
    None,
    'Multiply the rate by --learning_rate_decay_factor, at once, every so many epochs.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'learning_rate_decay_factor', None, 'See --num_epochs_per_decay.', flag_values=values
  )
  flags.DEFINE_float(
    'minimum_learning_rate',
    0.0,
    'Where the rate stops falling (--num_epochs_per_decay, polynomial, cosine). Default: 0.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'num_learning_rate_warmup_epochs',
    0.0,
    'Epochs of a linear ramp from 0 in front of any schedule. Default: 0.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'resnet_base_lr',
    None,
    'The rate at a global batch of 256 of --learning_rate_schedule=resnet, which this asks for. '
    f'Default: {RESNET_RATE:g}.',
    flag_values=values,
  )

  flags.DEFINE_integer(
    'learning_rate_base_batch',
    None,
    'All rates given are those at a global batch of so many images, and follow the batch of this '
    'run in proportion (Goyal et al. 2017). Default: they hold as they are.',
    flag_values=values,
  )


def check(options) -> None:
  for name in ('init_learning_rate', 'resnet_base_lr', 'num_epochs_per_decay', 'polynomial_power'):
    _positive(options, name)
  for name in ('minimum_learning_rate', 'num_learning_rate_warmup_epochs'):
    value = getattr(options, name)
    if not (math.isfinite(value) and value >= 0):
      raise UsageError(f'{options.spelled(name)}: a finite number, 0 or more')
  factor = options.learning_rate_decay_factor
  if factor is not None and not 0 < factor <= 1:
    raise UsageError(f'--learning_rate_decay_factor={factor:g}: a number above 0, at most 1')
  if (factor is None) != (options.num_epochs_per_decay is None):
    given, lacking = 'num_epochs_per_decay', 'learning_rate_decay_factor'
    if factor is not None:
      given, lacking = lacking, given
    raise UsageError(f'{options.spelled(given)} needs --{lacking} beside it')
  _check_base(options)
  _check_kind(options)
  if options.piecewise_learning_rate_schedule is not None:
    piecewise(options.piecewise_learning_rate_schedule)
  rate = options.init_learning_rate
  if rate is not None and options.minimum_learning_rate > rate:
    raise UsageError(
      f'{options.spelled("minimum_learning_rate")} lies above --init_learning_rate={rate:g}'
    )


def complete(options) -> None:
  kind = _kind(options)
  if kind in SCHEDULES:
    options.learning_rate_schedule = kind
  if kind == 'resnet' and options.resnet_base_lr is None:
    options.resnet_base_lr = RESNET_RATE
  if options.init_learning_rate is None:
    options.init_learning_rate = _first_rate(options, kind)


def batch(options) -> int:
  """Images behind one update: the global batch, or where nothing is shared that of one device."""
  alone = options.variable_update == 'independent'
  together = 1 if alone else options.num_gpus * cluster.num_together(options)
  return options.batch_size * together


def needs_epochs(options) -> bool:
  """Whether the rate depends on how many images an epoch has."""
  return _kind(options) in ('resnet', 'piecewise', 'decay') or bool(
    options.num_learning_rate_warmup_epochs
  )


def create(options, epoch_size: int | None, num_steps: int) -> float | Schedule:
  """The rate for `hpm.optimizers.create`; options complete.

  Args:
    options: complete.
    epoch_size: images a pass over the data, of all workers; None unless `needs_epochs`.
    num_steps: of the whole training, see `steps.goal`.
  """
  from hpm.optimizers import schedules

  def steps(epochs: float) -> int:
    return _steps(options, epochs, epoch_size)

  kind, scale = _kind(options), factor(options)
  rate = options.init_learning_rate * scale
  lowest, warmup = options.minimum_learning_rate * scale, warmup_steps(options, epoch_size)
  if kind == 'piecewise':
    rates, ends = piecewise(options.piecewise_learning_rate_schedule)
    rates = [one * scale for one in rates]
    schedule = schedules.piecewise([steps(end) for end in ends], rates)
  elif kind == 'decay':
    decay_steps = max(1, steps(options.num_epochs_per_decay))
    times = options.learning_rate_decay_factor
    schedule = schedules.exponential(rate, decay_steps, times, minimum=lowest)
  elif kind == 'resnet':
    rates = [rate / 10**i for i in range(len(RESNET_EPOCHS) + 1)]
    schedule = schedules.piecewise([steps(end) for end in RESNET_EPOCHS], rates)
  elif warmup >= num_steps:  # it ends on its way up: what would come down has no length
    schedule = rate
  elif kind == 'polynomial':
    schedule = schedules.polynomial(rate, num_steps, lowest, options.polynomial_power)
  elif kind == 'cosine':
    schedule = schedules.cosine(rate, num_steps, lowest)
  else:
    schedule = rate
  return schedules.warmup(schedule, warmup) if warmup else schedule


def warmup_steps(options, epoch_size: int | None) -> int:
  """Steps of the ramp in front of the schedule; arguments as for `create`."""
  epochs = options.num_learning_rate_warmup_epochs
  if _kind(options) == 'resnet':
    epochs = RESNET_WARMUP
  return _steps(options, epochs, epoch_size) if epochs else 0


def warnings(options, epoch_size: int | None, num_steps: int) -> list[str]:
  """Doubts about the rate; arguments as for `create`."""
  warmup = warmup_steps(options, epoch_size)
  if num_steps > warmup:
    return []
  rate = options.init_learning_rate * factor(options)
  return [
    f'the learning rate was still warming up at the end: {num_steps} of {warmup} steps, to '
    f'{rate * num_steps / (warmup + 1):.2g} of {rate:.2g}; train for longer, or give '
    '--num_learning_rate_warmup_epochs'
  ]


def factor(options) -> float:
  """What all rates are multiplied by; options complete."""
  base = options.learning_rate_base_batch
  return 1.0 if base is None else batch(options) / base


def title(options) -> str:
  """The rate and its way, as the header says it."""
  kind, scale = _kind(options), factor(options)
  words = [f'{options.init_learning_rate * scale:g}{_source(options, kind)}']
  if kind == 'piecewise':
    rates, ends = piecewise(options.piecewise_learning_rate_schedule)
    words += [f'{rate * scale:g} from epoch {end:g}' for rate, end in zip(rates[1:], ends)]
  elif kind == 'decay':
    words.append(
      f'times {options.learning_rate_decay_factor:g} every {options.num_epochs_per_decay:g} epochs'
    )
  elif kind == 'resnet':
    words.append(f'a tenth from epochs {", ".join(map(str, RESNET_EPOCHS))} each')
    words.append(f'{RESNET_WARMUP} epochs of warm-up')
  elif kind != 'constant':
    words.append(f'{kind}')
  if options.minimum_learning_rate:
    words.append(f'down to {options.minimum_learning_rate * scale:g}')
  if options.num_learning_rate_warmup_epochs:
    words.append(f'{options.num_learning_rate_warmup_epochs:g} epochs of warm-up')
  return ', '.join(words)


def piecewise(text: str) -> tuple[list[float], list[float]]:
  """Rates and the epochs between them, one fewer, from 'LR0;E1;LR1;...'.

  Raises:
    UsageError: not of that form, a rate below 0, or epochs that don't increase.
  """
  flag = f'--piecewise_learning_rate_schedule={text}'
  words = text.split(';')
  try:
    numbers = [float(word) for word in words]
  except ValueError:
    numbers = []
  if len(numbers) % 2 == 0 or not all(map(math.isfinite, numbers)):
    raise UsageError(f"{flag}: numbers of the form 'LR0;E1;LR1;...' are needed, rates at both ends")
  rates, ends = numbers[::2], numbers[1::2]
  if min(rates) < 0:
    raise UsageError(f'{flag}: the rate {min(rates):g} is below 0')
  for before, after in zip([0.0, *ends], ends):
    if after <= before:
      raise UsageError(f'{flag}: epoch {after:g} does not come after {before:g}')
  return rates, ends


def _kind(options) -> str:
  """Which of the schedules the flags ask for: one of SCHEDULES, 'piecewise' or 'decay'."""
  if options.piecewise_learning_rate_schedule is not None:
    return 'piecewise'
  if options.num_epochs_per_decay is not None:
    return 'decay'
  if options.resnet_base_lr is not None:
    return 'resnet'
  return options.learning_rate_schedule or 'constant'


def _check_base(options) -> None:
  base = options.learning_rate_base_batch
  if base is None:
    return
  if base < 1:
    raise UsageError(f'{options.spelled("learning_rate_base_batch")}: 1 or more is needed')
  if options.init_learning_rate is None and options.piecewise_learning_rate_schedule is None:
    raise UsageError(
      f'{options.spelled("learning_rate_base_batch")} needs a rate to follow it: give '
      '--init_learning_rate, or leave it out, and the default follows the batch'
    )


def _check_kind(options) -> None:
  """One schedule is asked for, and nothing that it does not take."""
  asked = options.learning_rate_schedule
  if asked is not None and asked not in SCHEDULES:
    raise errors.unknown('--learning_rate_schedule', asked, SCHEDULES)
  kind = _kind(options)
  naming = {
    'piecewise': 'piecewise_learning_rate_schedule',
    'decay': 'num_epochs_per_decay',
    'resnet': 'resnet_base_lr' if options.resnet_base_lr is not None else 'learning_rate_schedule',
  }.get(kind, 'learning_rate_schedule')
  takes = {
    'piecewise': {
      'piecewise_learning_rate_schedule',
      'num_learning_rate_warmup_epochs',
      'learning_rate_base_batch',
    },
    'resnet': {'learning_rate_schedule', 'resnet_base_lr'},
    'decay': {
      'learning_rate_base_batch',
      'init_learning_rate',
      'num_epochs_per_decay',
      'learning_rate_decay_factor',
      'minimum_learning_rate',
      'num_learning_rate_warmup_epochs',
    },
    'polynomial': {
      'learning_rate_base_batch',
      'init_learning_rate',
      'learning_rate_schedule',
      'polynomial_power',
      'minimum_learning_rate',
      'num_learning_rate_warmup_epochs',
    },
    'cosine': {
      'learning_rate_base_batch',
      'init_learning_rate',
      'learning_rate_schedule',
      'minimum_learning_rate',
      'num_learning_rate_warmup_epochs',
    },
    'constant': {
      'learning_rate_base_batch',
      'init_learning_rate',
      'learning_rate_schedule',
      'num_learning_rate_warmup_epochs',
    },
  }[kind]
  chosen = options.spelled(naming) if naming in options.given else 'a constant learning rate'
  options.refuse_given(
    [name for name in UPDATES if name not in takes], f'does not go with {chosen}: drop one'
  )
  if kind == 'resnet' and asked not in (None, 'resnet'):
    raise UsageError(
      f'{options.spelled("learning_rate_schedule")} does not go with '
      f'{options.spelled("resnet_base_lr")}: drop one'
    )


def _first_rate(options, kind: str) -> float:
  if kind == 'piecewise':
    return piecewise(options.piecewise_learning_rate_schedule)[0][0]
  if kind == 'resnet':
    return options.resnet_base_lr * batch(options) / 256
  return 0.1 * batch(options) / 256 if options.optimizer in LINEAR else 0.001


def _steps(options, epochs: float, epoch_size: int | None) -> int:
  from hpm.optimizers import schedules

  together = options.num_gpus * cluster.num_together(options)
  return schedules.epochs(epochs, epoch_size, options.batch_size * together)


def _source(options, kind: str) -> str:
  """How the first rate was chosen, if it was."""
  if kind == 'resnet':
    return f' ({options.resnet_base_lr:g} * {batch(options)} / 256)'
  base = options.learning_rate_base_batch
  if base is not None:
    return f' ({options.init_learning_rate:g} * {batch(options)} / {base})'
  if 'init_learning_rate' not in options.open or kind == 'piecewise':
    return ''
  return f' (0.1 * {batch(options)} / 256)' if options.optimizer in LINEAR else ''


def _positive(options, name: str) -> None:
  value = getattr(options, name)
  if value is not None and not (math.isfinite(value) and value > 0):
    raise UsageError(f'--{name}={value}: a finite number above 0 is needed')
