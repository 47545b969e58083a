"""Input pipelines: options in, batches of uint8 images and int32 labels out.

    from hpm import pipelines
    pipeline = pipelines.create('imagenet', data_dir='DIR', batch_size=64)
    for images, labels in pipeline.dataset():    # uint8 [64, 224, 224, 3], int32 [64]
      ...

A source of images is one new file and one line of `SOURCES`, a pipeline that makes batches of any
source is one of `PIPELINES`. Importing this package doesn't import TensorFlow; its attributes are
loaded when they are first used.
"""

from collections.abc import Sequence
import inspect
from typing import TYPE_CHECKING, Any

from hpm import errors, registry

if TYPE_CHECKING:
  from hpm.pipelines import sources
  from hpm.pipelines.base import Pipeline as Pipeline
  from hpm.pipelines.device_crop import crop_on_device as crop_on_device
  from hpm.pipelines.keras_layer import Normalize as Normalize
  from hpm.pipelines.normalization import normalize as normalize
  from hpm.pipelines.service_watch import ServiceWatch as ServiceWatch

__all__ = [
  'BUILT_IN',
  'PIPELINES',
  'SOURCES',
  'Normalize',
  'Pipeline',
  'ServiceWatch',
  'create',
  'crop_on_device',
  'normalize',
  'source',
]

# name -> 'module:function'; the function takes options and returns a `sources.Source`.
SOURCES = {
  'cifar10': 'hpm.pipelines.cifar:Cifar10Source',
  'cifar100': 'hpm.pipelines.cifar:Cifar100Source',
  'folder': 'hpm.pipelines.folder:FolderSource',
  'imagenet': 'hpm.pipelines.imagenet:ImageNetSource',
  'iterable': 'hpm.pipelines.iterable:IterableSource',
  'raw': 'hpm.pipelines.raw:RawSource',
  'tfds': 'hpm.pipelines.tfds:tfds_source',
}

# name -> 'module:function'; the function takes a source and options and returns a Pipeline.
PIPELINES = {
  'dali': 'hpm.pipelines.dali:DaliPipeline',
  'indexed': 'hpm.pipelines.indexed:IndexedPipeline',
  'raw': 'hpm.pipelines.raw:RawPipeline',
  'service': 'hpm.pipelines.service:ServicePipeline',
  'tfdata': 'hpm.pipelines.tfdata:TfDataPipeline',
}

# The same without a source.
SYNTHETIC = {'synthetic': 'hpm.pipelines.synthetic:SyntheticPipeline'}

# Pipelines that bring their data along.
BUILT_IN = {'digits': 'hpm.pipelines.digits:DigitsPipeline'}

_EXPORTS = {
  'Normalize': 'hpm.pipelines.keras_layer:Normalize',
  'Pipeline': 'hpm.pipelines.base:Pipeline',
  'ServiceWatch': 'hpm.pipelines.service_watch:ServiceWatch',
  'crop_on_device': 'hpm.pipelines.device_crop:crop_on_device',
  'normalize': 'hpm.pipelines.normalization:normalize',
}
__getattr__ = registry.lazy(__name__, _EXPORTS)


def create(name: str, *, pipeline: str = 'tfdata', **options: Any) -> 'Pipeline':
  """A pipeline of the data that `name` stands for.

  Args:
    name: of `SOURCES`, with what belongs to it after a colon ('tfds:mnist'); or of `BUILT_IN`, or
      'synthetic'.
    pipeline: of `PIPELINES`.
    **options: of the source and of the pipeline.

  Raises:
    UsageError: an unknown name, an option that there isn't, or one that is missing.
    DataError: from the source or pipeline, if its data is missing or damaged.
  """
  if name in SYNTHETIC or name in BUILT_IN:
    factory = registry.resolve('pipeline', {**SYNTHETIC, **BUILT_IN}, name)
    _check_options(name, [factory], options)
    return factory(**options)
  maker = registry.resolve('pipeline', PIPELINES, pipeline)
  origin, options = _source_factory(name, options)
  _check_options(name, [origin, maker], options)
  return maker(origin(**_known(origin, options)), **_known(maker, options))


def source(name: str, **options: Any) -> 'sources.Source':
  """The source alone: undecoded samples. Arguments and errors as for `create`."""
  factory, options = _source_factory(name, options)
  _check_options(name, [factory], options)
  return factory(**options)


def _source_factory(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """The function behind a source's name, and the options with what follows the colon."""
  kind, colon, detail = name.partition(':')
  if kind not in SOURCES:
    raise errors.unknown('data set', name, [*SOURCES, *BUILT_IN, *SYNTHETIC])
  factory = registry.resolve('data set', SOURCES, kind)
  takes_name = 'name' in inspect.signature(factory).parameters
  if colon and not takes_name:
    raise errors.UsageError(f'data set {name!r}: {kind!r} takes nothing after a colon')
  if takes_name:
    if not detail:
      raise errors.UsageError(f'data set {name!r}: say which one, as in {kind}:NAME')
    options = options | {'name': detail}
  return factory, options


def _known(factory: Any, options: dict[str, Any]) -> dict[str, Any]:
  parameters = inspect.signature(factory).parameters
  return {name: value for name, value in options.items() if name in parameters}


def _check_options(name: str, factories: Sequence[Any], options: dict[str, Any]) -> None:
  parameters: dict[str, inspect.Parameter] = {}
  for factory in factories:
    parameters |= inspect.signature(factory).parameters
  parameters.pop('source', None)
  strange = sorted(set(options) - set(parameters))
  if strange:
    raise errors.UsageError(
      f'pipeline {name!r} has no option {", ".join(map(repr, strange))}; '
      f'its options: {", ".join(parameters)}'
    )
  missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
  if missing:
    raise errors.UsageError(f'pipeline {name!r} needs {", ".join(map(repr, missing))}')
