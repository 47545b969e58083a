"""Input pipelines: options in, batches of uint8 images and int32 labels out.

    from hpm import pipelines
    pipeline = pipelines.create('imagenet', data_dir='DIR', batch_size=64)
    for images, labels in pipeline.dataset():    # uint8 [64, 224, 224, 3], int32 [64]
      ...

A new pipeline is one new file and one line of `PIPELINES`. Importing this package doesn't import
TensorFlow; its attributes are loaded when they are first used.
"""

import inspect
from typing import TYPE_CHECKING, Any

from hpm import errors, registry

if TYPE_CHECKING:
  from hpm.pipelines.base import Pipeline as Pipeline
  from hpm.pipelines.keras_layer import Normalize as Normalize
  from hpm.pipelines.normalization import normalize as normalize

__all__ = ['PIPELINES', 'Normalize', 'Pipeline', 'create', 'normalize']

# name -> 'module:function'; the function takes options and returns a Pipeline.
PIPELINES = {
  'imagenet': 'hpm.pipelines.imagenet:ImageNetPipeline',
  'synthetic': 'hpm.pipelines.synthetic:SyntheticPipeline',
}

_EXPORTS = {
  'Normalize': 'hpm.pipelines.keras_layer:Normalize',
  'Pipeline': 'hpm.pipelines.base:Pipeline',
  'normalize': 'hpm.pipelines.normalization:normalize',
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
