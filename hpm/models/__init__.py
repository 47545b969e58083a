"""Image models as pure functions of (parameters, state, images).

A new model is one function of a builder in one new file, and one line in `MODELS`.
"""

from typing import TYPE_CHECKING, Any

from hpm import registry

if TYPE_CHECKING:
  from hpm.models.builder import Builder, Model

__all__ = ['MODELS', 'Builder', 'Model', 'create']

MODELS = {
  'trivial': 'hpm.models.trivial:trivial',
  'lenet': 'hpm.models.lenet:lenet',
  'alexnet': 'hpm.models.alexnet:alexnet',
  'resnet50': 'hpm.models.resnet:resnet50',
  'resnet50_v1.5': 'hpm.models.resnet:resnet50_v1_5',
}

__getattr__ = registry.lazy(
  __name__,
  {'Builder': 'hpm.models.builder:Builder', 'Model': 'hpm.models.builder:Model'},
)


def create(name: str, **options: Any) -> 'Model':
  """The model called `name`.

  Args:
    name: one of `MODELS`.
    **options: `num_classes` (1000), `image_size` in pixels (the model's own default), `dtype` of
      the computation ('float32', 'float16', 'bfloat16'), `data_format` ('NHWC', 'NCHW'), and what
      the model's own function takes.
  """
  return registry.resolve('model', MODELS, name)(**options)
