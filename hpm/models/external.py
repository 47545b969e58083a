"""Models that aren't ours, by name: `keras.applications`, and what a user's function returns.

model = hpm.models.create('keras:EfficientNetV2B0', num_classes=10, image_size=64)
model = hpm.models.create('my.module:function')
"""

from collections.abc import Callable, Mapping
import importlib
import inspect
from typing import Any

import keras

from hpm import errors
from hpm.errors import UsageError
from hpm.models.builder import Model
from hpm.models.keras_adapter import KerasModel, building, first_line, from_keras

__all__ = ['application', 'create', 'from_function']

# What of an application is decided here. Pretrained weights want the preprocessing that they were
# trained with, which is for the user to know: see `from_keras` and its `input_range`.
_DECIDED = frozenset(
  [
    'weights',
    'include_top',
    'classes',
    'classifier_activation',
    'input_shape',
    'input_tensor',
    'pooling',
    'name',
  ]
)


def create(name: str, **options: Any) -> Model:
  """The model 'keras:NAME' or 'package.module:function'."""
  source, _, rest = name.partition(':')
  return application(rest, **options) if source == 'keras' else from_function(name, **options)


def application(
  name: str,
  num_classes: int = 1000,
  image_size: int | None = None,
  dtype: str = 'float32',
  data_format: str = 'NHWC',
  **options: Any,
) -> KerasModel:
  """A model of `keras.applications`, randomly initialised, without its softmax.

  Its own preprocessing is left out where it has the option, and the network gets -1 to 1, as all
  models here do; where it is part of the network (EfficientNetB0 to B7) the images are brought back
  to 0 to 255 first, which costs bfloat16 up to a quarter of a grey level.

  Args:
    name: as in `keras.applications`, such as 'ResNet50'.
    num_classes, dtype, data_format: as for every model.
    image_size: in pixels; by default the application's own, or 224 where it takes any.
    **options: what else the application's function takes, such as `alpha`.

  Raises:
    UsageError: there is no such model or option, or the option is decided here.
  """
  functions = {
    key: value
    for key, value in vars(keras.applications).items()
    if key[0].isupper() and inspect.isfunction(value)
  }
  if name not in functions:
    raise errors.unknown('model of keras.applications', name, functions)
  parameters = inspect.signature(functions[name]).parameters
  free = parameters.keys() - _DECIDED
  for option in options:
    if option in _DECIDED:
      raise UsageError(
        f'keras:{name}: {option} is decided here: for another one build the Keras model yourself '
        'and give it to hpm.models.from_keras'
      )
    if option not in free:
      raise errors.unknown(f'option of keras:{name}', option, free)
  arguments = {'weights': None, 'classifier_activation': None, 'classes': num_classes, **options}
  if image_size is not None:
    shape = (image_size, image_size, 3)
    arguments['input_shape'] = shape if data_format == 'NHWC' else (3, image_size, image_size)
  if 'include_preprocessing' in parameters:
    arguments.setdefault('include_preprocessing', False)
  with building(dtype, data_format):
    try:
      model = functions[name](**arguments)
    except ValueError as error:
      raise UsageError(f'keras:{name}: {first_line(error)}') from error
  any_size = None in model.input_shape[1:]
  own_scale = arguments.get('include_preprocessing') or any(
    isinstance(layer, keras.layers.Rescaling) for layer in model.layers
  )
  return from_keras(
    model,
    name=f'keras:{name}',
    image_shape=(224, 224, 3) if any_size else None,
    dtype=dtype,
    data_format=data_format,
    input_range=(0.0, 255.0) if own_scale else (-1.0, 1.0),
  )


def from_function(name: str, **options: Any) -> Model:
  """What a user's function returns: a model of ours, or a Keras model, which is adapted.

  Args:
    name: 'package.module:function'. It is called as `from_keras` calls one, with those options that
      it takes; the others must be what its model has anyway, else they are refused.
    **options: as for `hpm.models.create`, and for a Keras model those of `from_keras`.

  Raises:
    UsageError: the module or function is not there, or needs what no option gives.
  """
  function = _imported(name)
  parameters = inspect.signature(function).parameters
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  taken = {key: value for key, value in options.items() if takes_all or key in parameters}
  for key, p in parameters.items():
    is_one = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    if is_one and key not in taken and p.default is p.empty:
      raise UsageError(f'{name} needs {key}, which no option gives: let it have a default')
  with building(options.get('dtype') or 'float32', options.get('data_format') or 'NHWC'):
    model = function(**taken)
    if isinstance(model, keras.Model):
      return _adapted(model, name, options, taken)
  if not isinstance(model, Model):
    raise UsageError(
      f'{name} returned an object of type {type(model).__name__}: a Keras model or an '
      'hpm.models.Model is needed'
    )
  for key, value in options.items():
    if key not in taken and value not in (None, getattr(model, key, None)):
      raise UsageError(
        f'{name} takes no {key}, and its model has {getattr(model, key, "none")}, not {value!r}: '
        'let the function take it'
      )
  return model


def _adapted(
  model: keras.Model, name: str, options: Mapping[str, Any], taken: Mapping[str, Any]
) -> KerasModel:
  """`from_keras` with those of the options that it takes, which checks them."""
  options = {'name': name, **options}
  size = options.pop('image_size', None)
  if size is not None:
    options.setdefault('image_shape', (size, size, 3))
  parameters = inspect.signature(from_keras).parameters
  for key in options.keys() - taken.keys():
    if key not in parameters:
      raise errors.unknown(f'option of {name}', key, {*parameters, 'image_size'} - {'model'})
  return from_keras(model, **{key: value for key, value in options.items() if key in parameters})


def _imported(name: str) -> Callable[..., Any]:
  module_name, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{module_name}.'.startswith(f'{error.name}.'):
      raise  # the module is there, and lacks something itself
    raise UsageError(
      f'model {name!r}: there is no module {error.name}: is its directory on PYTHONPATH?'
    ) from error
  functions = {key: value for key, value in vars(module).items() if callable(value)}
  if attribute not in functions:
    raise errors.unknown(f'function of {module_name}', attribute, functions)
  return functions[attribute]
