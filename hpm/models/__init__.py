"""Image models as pure functions of (parameters, state, images).

A new model is one function of a builder in one new file, and one line in `MODELS`. Models from
elsewhere go by 'keras:NAME' or 'module:function'.
"""

from collections.abc import Callable
import inspect
import re
from typing import TYPE_CHECKING, Any

from hpm import errors, registry
from hpm.errors import UsageError

if TYPE_CHECKING:
  from hpm.models.builder import BatchNorm, Builder, Model
  from hpm.models.keras_adapter import from_keras
  from hpm.models.module import Module
  from hpm.models.summary import Description, describe, table

__all__ = [
  'MODELS',
  'STEM_REWRITES',
  'BatchNorm',
  'Builder',
  'Description',
  'Model',
  'Module',
  'check_name',
  'check_recompute',
  'check_stem_rewrite',
  'create',
  'describe',
  'from_keras',
  'pretrained',
  'table',
]

MODELS = {
  'trivial': 'hpm.models.trivial:trivial',
  'lenet': 'hpm.models.lenet:lenet',
  'alexnet': 'hpm.models.alexnet:alexnet',
  'googlenet': 'hpm.models.inception:googlenet',
  'inception1': 'hpm.models.inception:inception1',
  'inception3': 'hpm.models.inception:inception3',
  'inception4': 'hpm.models.inception:inception4',
  'vgg11': 'hpm.models.vgg:vgg11',
  'vgg13': 'hpm.models.vgg:vgg13',
  'vgg16': 'hpm.models.vgg:vgg16',
  'vgg19': 'hpm.models.vgg:vgg19',
  'vgg11_bn': 'hpm.models.vgg:vgg11_bn',
  'vgg13_bn': 'hpm.models.vgg:vgg13_bn',
  'vgg16_bn': 'hpm.models.vgg:vgg16_bn',
  'vgg19_bn': 'hpm.models.vgg:vgg19_bn',
  'resnet18': 'hpm.models.resnet:resnet18',
  'resnet34': 'hpm.models.resnet:resnet34',
  'resnet50': 'hpm.models.resnet:resnet50',
  'resnet101': 'hpm.models.resnet:resnet101',
  'resnet152': 'hpm.models.resnet:resnet152',
  'resnet200': 'hpm.models.resnet:resnet200',
  'resnet50_v1.5': 'hpm.models.resnet:resnet50_v1_5',
  'resnet101_v1.5': 'hpm.models.resnet:resnet101_v1_5',
  'resnet152_v1.5': 'hpm.models.resnet:resnet152_v1_5',
  'resnet200_v1.5': 'hpm.models.resnet:resnet200_v1_5',
  'resnet18_v2': 'hpm.models.resnet:resnet18_v2',
  'resnet34_v2': 'hpm.models.resnet:resnet34_v2',
  'resnet50_v2': 'hpm.models.resnet:resnet50_v2',
  'resnet101_v2': 'hpm.models.resnet:resnet101_v2',
  'resnet152_v2': 'hpm.models.resnet:resnet152_v2',
  'resnet200_v2': 'hpm.models.resnet:resnet200_v2',
  'resnet20': 'hpm.models.resnet:resnet20',
  'resnet32': 'hpm.models.resnet:resnet32',
  'resnet44': 'hpm.models.resnet:resnet44',
  'resnet56': 'hpm.models.resnet:resnet56',
  'resnet110': 'hpm.models.resnet:resnet110',
  'resnet20_v2': 'hpm.models.resnet:resnet20_v2',
  'resnet32_v2': 'hpm.models.resnet:resnet32_v2',
  'resnet44_v2': 'hpm.models.resnet:resnet44_v2',
  'resnet56_v2': 'hpm.models.resnet:resnet56_v2',
  'resnet110_v2': 'hpm.models.resnet:resnet110_v2',
  'densenet121': 'hpm.models.densenet:densenet121',
  'mobilenet_v2': 'hpm.models.mobilenet:mobilenet_v2',
}

# What a strided first convolution may be turned into, with the same parameters and results.
STEM_REWRITES = {
  'pad_channels': 'hpm.models.rewrites:pad_channels',
  'space_to_depth': 'hpm.models.rewrites:space_to_depth',
}
# Models that begin with one, padded by pixels: the residual ones for ImageNet and some others.
WITH_STRIDED_STEM = frozenset(
  name
  for name in MODELS
  if name in ('alexnet', 'googlenet', 'inception1', 'densenet121')
  or re.match(r'resnet(18|34|50|101|152|200)', name)
)
# Models that are not made of blocks, whose activations could be computed again.
WITHOUT_BLOCKS = frozenset(['trivial', 'lenet', 'alexnet'])

__getattr__ = registry.lazy(
  __name__,
  {
    'BatchNorm': 'hpm.models.builder:BatchNorm',
    'Builder': 'hpm.models.builder:Builder',
    'Description': 'hpm.models.summary:Description',
    'Model': 'hpm.models.builder:Model',
    'Module': 'hpm.models.module:Module',
    'describe': 'hpm.models.summary:describe',
    'from_keras': 'hpm.models.keras_adapter:from_keras',
    'pretrained': 'hpm.models.pretrained',
    'table': 'hpm.models.summary:table',
  },
)


def create(name: str, **options: Any) -> 'Model':
  """The model called `name`.

  Args:
    name: one of `MODELS`; 'keras:NAME' for one of keras.applications; 'package.module:function' for
      what a function of the user's returns, a Keras model or an hpm one.
    **options: `num_classes` (1000, CIFAR's ResNets 10; labels count from 0, and with 1001 classes
      it is for the data to call ImageNet's 1 to 1000 and keep 0 for the background), `image_size`
      in pixels (the model's own default), `dtype` of the computation ('float32', 'float16',
      'bfloat16'), `data_format` ('NHWC', 'NCHW'), `batch_norm` (a `BatchNorm`, in place of the
      family's constants), `recompute` (True: the backward pass computes the activations of blocks
      again, for less memory and more time; not under XLA, which merges the two), `stem_rewrite`
      (one of `STEM_REWRITES`: another way to compute a strided first convolution, with the same
      parameters and results), and what the model's own function takes.

  Raises:
    UsageError: there is no such model or option, or the model can't have the option; said here, or
      when the model is built.
  """
  check_name(name)
  if options.get('recompute'):
    check_recompute(name)
  if options.get('stem_rewrite'):
    check_stem_rewrite(name, options['stem_rewrite'])
  if name in MODELS:
    function = registry.resolve('model', MODELS, name)
    _check_options(name, function, options)
    return function(**options)
  from hpm.models import external  # it imports TensorFlow

  return external.create(name, **options)


def check_name(name: str, kind: str = 'model') -> None:
  """UsageError with the nearest names, unless `name` has a form that `create` takes.

  The error calls it `kind`. Whether keras.applications or the user's module holds it is left to
  `create`: that takes imports.
  """
  word = r'[^\W\d]\w*'
  if name not in MODELS and not re.fullmatch(rf'{word}(\.{word})*:{word}', name):
    raise errors.unknown(kind, name, [*MODELS, 'keras:NAME', 'module:function'])


def check_stem_rewrite(name: str, rewrite: str) -> None:
  """UsageError unless there is such a rewrite and the model `name` begins with what it rewrites.

  Of functions of the user's that is found out when their model is built.
  """
  if rewrite not in STEM_REWRITES:
    raise errors.unknown('stem_rewrite', rewrite, STEM_REWRITES)
  if name.startswith('keras:') or (name in MODELS and name not in WITH_STRIDED_STEM):
    raise UsageError(
      f'stem_rewrite {rewrite!r}: model {name} does not begin with a strided convolution that is '
      f'padded by pixels: leave it out, or use one of {", ".join(sorted(WITH_STRIDED_STEM))}'
    )


def check_recompute(name: str) -> None:
  """UsageError unless the model `name` is made of blocks whose activations can be computed again.

  Of functions of the user's that is found out when their model is built.
  """
  if name.startswith('keras:'):
    raise UsageError(f'recompute: {name} is built by Keras, which decides that: leave it out')
  if name in WITHOUT_BLOCKS:
    raise UsageError(
      f'recompute: model {name} has no blocks that could be computed again: leave it out'
    )


def _check_options(name: str, function: Callable[..., 'Model'], options: dict[str, Any]) -> None:
  from hpm.models.builder import Model

  bound = {'network', 'name', 'image_shape', 'variants'}  # by the model's own function
  valid = {*inspect.signature(Model).parameters, *inspect.signature(function).parameters} - bound
  for option in options:
    if option not in valid:
      raise errors.unknown(f'option of {name}', option, valid - {'options'})
