"""Update rules by name; `hpm.optimizers.rules` holds them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpm import registry

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
  """
  rule = registry.resolve('optimizer', OPTIMIZERS, name)(learning_rate, **options)
  if average_decay is None:
    return rule
  from hpm.optimizers import averages  # it imports TensorFlow

  return averages.Averaged(rule, average_decay)
