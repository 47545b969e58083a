"""Input pipelines: options in, batches of uint8 images and int32 labels out.

    from hpm import pipelines
    pipeline = pipelines.imagenet('DIR', batch_size=64)
    for images, labels in pipeline.dataset():    # uint8 [64, 224, 224, 3], int32 [64]
      ...

A new pipeline is one new file and one line of `PIPELINES`. Importing this package doesn't import
TensorFlow; its attributes are loaded when they are first used.
"""

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from hpm import errors, registry

if TYPE_CHECKING:
  from hpm.pipelines.base import Pipeline as Pipeline
  from hpm.pipelines.imagenet import imagenet as imagenet
  from hpm.pipelines.keras_normalize import Normalize as Normalize
  from hpm.pipelines.normalize import normalize as normalize
  from hpm.pipelines.synthetic import synthetic as synthetic

__all__ = ['PIPELINES', 'Normalize', 'Pipeline', 'create', 'imagenet', 'normalize', 'synthetic']

# name -> 'module:function'; the function takes options and returns a Pipeline.
PIPELINES = {
  'imagenet': 'hpm.pipelines.imagenet:imagenet',
  'synthetic': 'hpm.pipelines.synthetic:synthetic',
}

_EXPORTS = {
  'Normalize': 'hpm.pipelines.keras_normalize:Normalize',
  'Pipeline': 'hpm.pipelines.base:Pipeline',
  'imagenet': 'hpm.pipelines.imagenet:imagenet',
  'normalize': 'hpm.pipelines.normalize:normalize',
  'synthetic': 'hpm.pipelines.synthetic:synthetic',
}
__getattr__ = registry.lazy(__name__, _EXPORTS)


def create(name: str, **options: Any) -> 'Pipeline':
  """The pipeline that `PIPELINES` lists under `name`, made with `options`.

  Raises:
    UsageError: an unknown name, an option that this pipeline doesn't have, or one that is missing.
    DataError: from the pipeline, if its data is missing or damaged.
  """
  factory = registry.resolve('pipeline', PIPELINES, name)
  parameters = inspect.signature(factory).parameters
  strange = sorted(set(options) - set(parameters))
  if strange:
    raise errors.UsageError(
      f'pipeline {name!r} has no option {", ".join(map(repr, strange))}; '
      f'its options: {", ".join(parameters)}'
    )
  missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
  if missing:
    raise errors.UsageError(f'pipeline {name!r} needs {", ".join(map(repr, missing))}')
  return factory(**options)


class _Package(types.ModuleType):
  """Keeps `pipelines.imagenet` the function, whichever import comes first.

  Importing the submodule of that name makes Python bind the *module* here.
  """

  def __setattr__(self, name: str, value: Any) -> None:
    if name in _EXPORTS and isinstance(value, types.ModuleType):
      value = getattr(value, name)
    super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
