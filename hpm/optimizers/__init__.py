"""Update rules by name; `hpm.optimizers.rules` holds them."""

from collections.abc import Callable
import inspect
import math
from typing import TYPE_CHECKING, Any

from hpm import errors, registry

if TYPE_CHECKING:
  from hpm.optimizers.averages import Averaged
  from hpm.optimizers.keras_adapter import from_keras
  from hpm.optimizers.rules import Optimizer, Schedule

__all__ = ['OPTIMIZERS', 'Averaged', 'Optimizer', 'Schedule', 'create', 'from_keras']

OPTIMIZERS = {
  'sgd': 'hpm.optimizers.rules:SGD',
  'momentum': 'hpm.optimizers.rules:Momentum',
  'nesterov': 'hpm.optimizers.rules:nesterov',
  'rmsprop': 'hpm.optimizers.rules:RMSProp',
  'adam': 'hpm.optimizers.rules:Adam',
  'lars': 'hpm.optimizers.lars:LARS',
}
_SHARES = {'momentum', 'decay', 'beta1', 'beta2'}  # of what was before; below 1, or it never ends

__getattr__ = registry.lazy(
  __name__,
  {
    'Averaged': 'hpm.optimizers.averages:Averaged',
    'Optimizer': 'hpm.optimizers.rules:Optimizer',
    'Schedule': 'hpm.optimizers.rules:Schedule',
    'from_keras': 'hpm.optimizers.keras_adapter:from_keras',
  },
)


def create(
  name: str,
  learning_rate: 'float | Callable[..., Any]',
  *,
  average_decay: float | None = None,
  **options: Any,
) -> 'Optimizer':
  """The rule called sgd, momentum, nesterov, rmsprop, adam or lars.

  Args:
    name: one of `OPTIMIZERS`.
    learning_rate: a number, or a function from the int64 number of finished steps to a float32
      scalar, built into the step's graph.
    average_decay: keeps a moving average of the weights beside them, see `Averaged`.
    **options: the rule's own fields, such as `momentum`.

  Raises:
    UsageError: another name or option, or a number that no rule can work with.
  """
  rule_of = registry.resolve('optimizer', OPTIMIZERS, name)
  valid = [field for field in inspect.signature(rule_of).parameters if field != 'learning_rate']
  for option, value in options.items():
    if option not in valid:
      raise errors.unknown(f'option of {name}', option, valid)
    _check(option, value)
  if not callable(learning_rate):
    _check('learning_rate', learning_rate)
  rule = rule_of(learning_rate, **options)
  if average_decay is None:
    return rule
  from hpm.optimizers import averages  # it imports TensorFlow

  return averages.Averaged(rule, average_decay)


def _check(option: str, value: Any) -> None:
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise errors.UsageError(f'{option} {value!r}: a number is needed') from None
  if not (math.isfinite(number) and number >= 0):
    raise errors.UsageError(f'{option} {value}: a finite number, 0 or more, is needed')
  if option in _SHARES and number >= 1:
    raise errors.UsageError(f'{option} {value}: must lie in [0, 1)')
