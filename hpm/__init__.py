"""The performance-critical core of data-parallel image training on TensorFlow 2.

Nothing is imported until it is used, so that names and options can be checked without waiting for
TensorFlow.
"""

from typing import TYPE_CHECKING

from hpm import registry

if TYPE_CHECKING:
  from hpm import (
    checkpoint,
    devices,
    errors,
    losses,
    models,
    optimizers,
    pipelines,
    precision,
    staging,
    variable_mgr,
  )
  from hpm.step import EvalStep, Metrics, TrainStep

__version__ = '0.1.0'
__all__ = [
  'EvalStep',
  'Metrics',
  'TrainStep',
  'checkpoint',
  'devices',
  'errors',
  'losses',
  'models',
  'optimizers',
  'pipelines',
  'precision',
  'staging',
  'variable_mgr',
]

_CLASSES = {'EvalStep': 'hpm.step', 'Metrics': 'hpm.step', 'TrainStep': 'hpm.step'}
__getattr__ = registry.lazy(
  __name__,
  {name: f'{_CLASSES[name]}:{name}' if name in _CLASSES else f'hpm.{name}' for name in __all__},
)
