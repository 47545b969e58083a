"""How parameters are updated: the rule, its constants, clipping and decay."""

import math
from typing import Any

from absl import flags

from hpm import errors, optimizers
from hpm.errors import UsageError

TITLE = 'Optimizer'

# Flag -> field of the update rule, for each rule that has constants.
RULES: dict[str, dict[str, str]] = {
  'sgd': {},
  'momentum': {'momentum': 'momentum'},
  'nesterov': {'momentum': 'momentum'},
  'rmsprop': {
    'rmsprop_decay': 'decay',
    'rmsprop_momentum': 'momentum',
    'rmsprop_epsilon': 'epsilon',
  },
  'adam': {'adam_beta1': 'beta1', 'adam_beta2': 'beta2', 'adam_epsilon': 'epsilon'},
  'lars': {'momentum': 'momentum', 'lars_trust': 'trust', 'lars_epsilon': 'epsilon'},
}
CONSTANTS = {
  'momentum': (0.9, 'Of momentum, nesterov and lars.'),
  'rmsprop_decay': (0.9, 'Of rmsprop: share of the mean square that a step keeps.'),
  'rmsprop_momentum': (0.9, 'Of rmsprop.'),
  'rmsprop_epsilon': (1.0, 'Of rmsprop: added under the root.'),
  'adam_beta1': (0.9, 'Of adam: share of the first moment that a step keeps.'),
  'adam_beta2': (0.999, 'Of adam: share of the second moment that a step keeps.'),
  'adam_epsilon': (1e-8, 'Of adam: added to the root.'),
  'lars_trust': (0.001, "Of lars: a layer's step as a share of its weights' norm, at a rate of 1."),
  'lars_epsilon': (0.0, 'Of lars: added to the denominator.'),
}
WEIGHT_DECAY = 4e-5
DECAYED = ('kernels', 'all')
UPDATES = (
  *('optimizer', *CONSTANTS, 'gradient_clip', 'gradient_clip_norm', 'weight_decay'),
  *('weight_decay_on', 'label_smoothing', 'weight_average_decay'),
)


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'optimizer',
    'momentum',
    f'{", ".join(optimizers.OPTIMIZERS)}. Default: momentum.',
    flag_values=values,
  )
  for name, (default, text) in CONSTANTS.items():
    flags.DEFINE_float(name, default, f'{text} Default: {default:g}.', flag_values=values)
  flags.DEFINE_float(
    'gradient_clip',
    None,
    'Bound on the magnitude of each element of the mean gradient. Default: none.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'gradient_clip_norm',
    None,
    'Bound on the norm of all mean gradients together. Default: none.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'weight_decay',
    WEIGHT_DECAY,
    'Factor w of the penalty w / 2 * sum of squares on the kernels of convolutions and dense '
    f'layers; biases and batch norm are left out. Default: {WEIGHT_DECAY:g}.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'weight_decay_on',
    'kernels',
    'What --weight_decay is on: kernels; or all, biases and batch norm too, as in '
    'tf_cnn_benchmarks. Default: kernels.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'label_smoothing',
    0.0,
    'Share of the target that is spread over all classes, in training. Default: 0.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'weight_average_decay',
    None,
    'Keep a moving average of the weights, of which a step keeps this share, such as 0.9999; '
    'evaluation takes it. Default: none.',
    flag_values=values,
  )


def check(options) -> None:
  rule = options.optimizer
  if rule not in optimizers.OPTIMIZERS:
    raise errors.unknown('--optimizer', rule, optimizers.OPTIMIZERS)
  for name in CONSTANTS:
    if name not in RULES.get(rule, {}):
      owners = [other for other, constants in RULES.items() if name in constants]
      options.refuse_given(
        [name],
        f'has no effect with --optimizer={rule}: drop it, or use --optimizer={" or ".join(owners)}',
      )
    value = getattr(options, name)
    if name == 'lars_epsilon':
      _bounded(options, name, value >= 0, 'a finite number, 0 or more')
    elif name.endswith(('epsilon', 'trust')):
      _bounded(options, name, value > 0, 'a finite number above 0 is needed')
    else:
      _bounded(options, name, 0 <= value < 1, 'a number from 0 to below 1 is needed')
  for name in ('gradient_clip', 'gradient_clip_norm'):
    value = getattr(options, name)
    if value is not None:
      _bounded(options, name, value > 0, 'a finite number above 0 is needed')
  _bounded(options, 'weight_decay', options.weight_decay >= 0, 'a finite number, 0 or more')
  if options.weight_decay_on not in DECAYED:
    raise errors.unknown('--weight_decay_on', options.weight_decay_on, DECAYED)
  if options.weight_decay_on == 'all' and rule == 'lars':
    raise UsageError(
      '--weight_decay_on=all: --optimizer=lars leaves out biases and batch norm: drop it'
    )
  share = 'a number from 0 to below 1 is needed'
  _bounded(options, 'label_smoothing', 0 <= options.label_smoothing < 1, share)
  average = options.weight_average_decay
  if average is not None:
    _bounded(options, 'weight_average_decay', 0 <= average < 1, share)
  if options.cross_replica_sync is False:  # each worker updates by its own gradient
    for name in ('gradient_clip_norm', 'weight_average_decay'):
      if getattr(options, name) is not None:
        raise UsageError(
          f'{options.spelled(name)} needs the workers in step with one another, and '
          '--cross_replica_sync=false leaves them alone: drop one'
        )


def complete(options) -> None:
  del options  # every default here is the same on all machines


def rule_options(options) -> dict[str, Any]:
  """What `hpm.optimizers.create` takes beside the rule's name and the learning rate."""
  constants = RULES.get(options.optimizer, {})
  found = {field: getattr(options, name) for name, field in constants.items()}
  if options.optimizer == 'lars':
    found['weight_decay'] = options.weight_decay
  if options.weight_average_decay is not None:
    found['average_decay'] = options.weight_average_decay
  return found


def step_options(options) -> dict[str, Any]:
  """What `hpm.TrainStep` takes of these."""
  found: dict[str, Any] = {
    'clip_value': options.gradient_clip,
    'clip_norm': options.gradient_clip_norm,
    'weight_decay': 0.0 if options.optimizer == 'lars' else options.weight_decay,
  }
  if options.label_smoothing:
    from hpm import losses

    found['loss'] = losses.softmax_cross_entropy(options.label_smoothing)
  if options.weight_decay_on == 'all':
    found['decayed'] = lambda name: True
  return found


def title(options) -> str:
  """The rule as the header says it: with the constants that matter."""
  constants = RULES.get(options.optimizer, {})
  words = [f'{name} {getattr(options, name):g}' for name in constants]
  if options.gradient_clip is not None:
    words.append(f'elements clipped at {options.gradient_clip:g}')
  if options.gradient_clip_norm is not None:
    words.append(f'norm clipped at {options.gradient_clip_norm:g}')
  decay = f'weight decay {options.weight_decay:g} on {options.weight_decay_on}'
  words.append(decay if options.weight_decay else 'no weight decay')
  if options.label_smoothing:
    words.append(f'labels smoothed by {options.label_smoothing:g}')
  if options.weight_average_decay is not None:
    words.append(f'weights averaged by {options.weight_average_decay:g}')
  return f'{options.optimizer} ({", ".join(words)})'


def _bounded(options, name: str, holds: bool, needed: str) -> None:
  if not (holds and math.isfinite(getattr(options, name))):
    raise UsageError(f'{options.spelled(name)}: {needed}')
