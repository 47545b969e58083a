"""The performance-critical core of data-parallel image training on TensorFlow 2.

Nothing is imported until it is used, so that names and options can be checked without waiting for
TensorFlow.
"""

from typing import TYPE_CHECKING

from hpm import registry

if TYPE_CHECKING:
  from hpm import (
    checkpoint,
    cluster,
    devices,
    errors,
    losses,
    models,
    optimizers,
    pipelines,
    placement,
    precision,
    staging,
    variable_mgr,
  )
  from hpm.planning import plan
  from hpm.step import EvalStep, Metrics, TrainStep

__version__ = '0.1.0'
__all__ = [
  'EvalStep',
  'Metrics',
  'TrainStep',
  'checkpoint',
  'cluster',
  'devices',
  'errors',
  'losses',
  'models',
  'optimizers',
  'pipelines',
  'placement',
  'plan',
  'precision',
  'staging',
  'variable_mgr',
]

_ELSEWHERE = {
  'EvalStep': 'hpm.step',
  'Metrics': 'hpm.step',
  'TrainStep': 'hpm.step',
  'plan': 'hpm.planning',
}
__getattr__ = registry.lazy(
  __name__,
  {name: f'{_ELSEWHERE[name]}:{name}' if name in _ELSEWHERE else f'hpm.{name}' for name in __all__},
)
