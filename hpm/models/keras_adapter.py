"""Keras models as hpm models, so that every variable manager and precision trains them.

  model = hpm.models.from_keras(keras_model)               # the very values it holds now
  model = hpm.models.from_keras(build, dtype='bfloat16')   # what a function of the user builds

The Keras model is called in a `keras.StatelessScope`, as its own `stateless_call` does, but through
`__call__`, so that its autocast and activity regularisers hold and a `call` without `training`
works.

What becomes of the parts of a Keras model:

- trainable variables: parameters; their initial values are those that the Keras model holds when it
  is adapted (loaded, or initialised by Keras), whatever the seed.
- batch-norm averages, frozen variables, whatever else is not trainable: state. Values that a step
  leaves as they are, frozen ones above all, are neither averaged over towers nor written.
- floating tensors that layers keep as attributes (`Normalization`'s statistics): state too, because
  TensorFlow can't take eager tensors into the graph of a session.
- states of seed generators: nothing that lasts. Each application sets them from `rng`, so that
  every step and tower draws anew and a resumed run draws what an unbroken one would.
- `add_loss`, weight and activity regularisers: `Forward.penalty`.

Precision and layout are those that the model was built with: pass a function instead of a model to
have it built under a policy. Keras's batch norm moves its variance by the biased batch variance.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import functools
import random
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpm.errors import UsageError
from hpm.models import flops
from hpm.models.builder import CrossReplica, Forward, Model, Spec

__all__ = ['KerasModel', 'building', 'from_keras', 'seed_states']

_POLICIES = {'float32': 'float32', 'float16': 'mixed_float16', 'bfloat16': 'mixed_bfloat16'}
_LAYOUTS = {'NHWC': 'channels_last', 'NCHW': 'channels_first'}


def from_keras(
  model: keras.Model | Callable[[], keras.Model],
  *,
  name: str | None = None,
  image_shape: tuple[int, int, int] | None = None,
  num_classes: int | None = None,
  dtype: str | None = None,
  data_format: str | None = None,
  input_range: tuple[float, float] = (-1.0, 1.0),
) -> 'KerasModel':
  """A Keras model with one input, images, and one output, logits [b, num_classes].

  Args:
    model: the model, or a function without arguments that builds it; the function is called under
      `dtype`'s policy and `data_format`'s layout, and with Python's random numbers fixed, from
      which Keras draws its initialisers' seeds.
    name: what checkpoints call it; the Keras model's name, less Keras's own count.
    image_shape: (height, width, channels); needed where the model does not fix it.
    num_classes, dtype, data_format: checked against the model; None takes what it has.
    input_range: the values that the model expects for black and white. The step hands it images of
      -1 to 1; (0, 255) suits a model that begins with its own `Rescaling(1 / 255)`.

  Raises:
    UsageError: the model has several inputs or outputs, another shape, precision or layout than
      asked for, ends in a softmax, has nothing to train, or has synchronised batch norm.
  """
  if keras.backend.backend() != 'tensorflow':
    raise UsageError(
      f'Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow before importing it'
    )
  if not tf.executing_eagerly():
    raise UsageError('from_keras inside a graph: build the Keras model eagerly, before the graph')
  if not isinstance(model, keras.Model):
    with building(dtype or 'float32', data_format or 'NHWC'):
      built = model() if callable(model) else model
      if not isinstance(built, keras.Model):
        raise UsageError(f'from_keras needs a Keras model, not {type(built).__name__}')
      return from_keras(
        built,
        name=name,
        image_shape=image_shape,
        num_classes=num_classes,
        dtype=dtype,
        data_format=data_format,
        input_range=input_range,
      )
  name = name or _own_name(model)
  built_in = _layout(model, name, data_format or 'NHWC')
  if data_format is not None and data_format != built_in:
    raise UsageError(
      f'model {name} was built in {built_in}, not {data_format}: call '
      f'keras.config.set_image_data_format({_LAYOUTS.get(data_format)!r}) before building it'
    )
  shape, outputs = _shapes(model, name, image_shape, built_in)
  if not isinstance(outputs, tuple) or len(outputs) != 2 or outputs[1] is None:
    raise UsageError(f'model {name} returns {outputs}: one output [b, num_classes] is needed')
  if num_classes not in (None, outputs[1]):
    raise UsageError(f'model {name} has {outputs[1]} classes, not {num_classes}')
  computes_in = _compute_dtype(model, name)
  if dtype is not None and dtype != computes_in:
    raise UsageError(
      f'model {name} was built to compute in {computes_in}, not {dtype}: build it after '
      f'keras.config.set_dtype_policy({_POLICIES.get(dtype, dtype)!r}), or pass the function that '
      'builds it'
    )
  _refuse_what_cannot_train(model, name)
  return KerasModel(
    model,
    name=name,
    image_shape=shape,
    num_classes=outputs[1],
    dtype=computes_in,
    data_format=built_in,
    input_range=input_range,
  )


class KerasModel(Model):
  """See the module's docstring; made by `from_keras`."""

  def __init__(
    self,
    model: keras.Model,
    *,
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    dtype: str,
    data_format: str,
    input_range: tuple[float, float] = (-1.0, 1.0),
  ):
    super().__init__(
      self._no_network,
      name=name,
      image_shape=image_shape,
      num_classes=num_classes,
      dtype=dtype,
      data_format=data_format,
    )
    low, high = input_range
    if not low < high:
      raise UsageError(f'input_range {input_range}: (value for black, value for white) is needed')
    self._input_range = input_range
    self._keras = model
    weights = {id(variable) for variable in model.weights}
    trainable = {id(variable) for variable in model.trainable_variables}
    paths = list(_walk(model))
    variables = _variable_names(paths)
    self._seeds = [v for v in variables.values() if id(v) not in weights]
    variables = {n: v for n, v in variables.items() if id(v) in weights}
    self._params = {n: v for n, v in variables.items() if id(v) in trainable}
    self._state = {n: v for n, v in variables.items() if id(v) not in trainable}
    # name -> (layer, attribute)
    self._constants = _constants(paths, taken=variables)
    # As NumPy arrays, because a graph that is built later can't read eager variables.
    self._values = {n: _as_stored(v.numpy()) for n, v in variables.items()}
    for constant, (layer, attribute) in self._constants.items():
      value = vars(layer)[attribute]
      if not hasattr(value, 'numpy'):
        raise UsageError(
          f'model {name}: layer {layer.name} keeps {attribute!r} from the graph in which Keras '
          "traced the model's call to build it: build the layer in the model's build() instead"
        )
      self._values[constant] = _as_stored(value.numpy())

  @property
  def param_specs(self) -> Mapping[str, Spec]:
    """Parameter name -> shape and the value's constant, in Keras's order."""
    return {name: self._spec(name) for name in self._params}

  @property
  def state_specs(self) -> Mapping[str, Spec]:
    """State name -> shape and the value's constant; float32, int64 or bool."""
    return {name: self._spec(name) for name in (*self._state, *self._constants)}

  @functools.cached_property
  def num_macs(self) -> int:
    """As `Model.num_macs`; products of attention (Einsum) are not counted."""

    def logits(params, state, images):
      return self.forward(params, state, images, training=False).logits

    height, width, channels = self.image_shape
    nhwc = self.data_format == 'NHWC'
    shape = (height, width, channels) if nhwc else (channels, height, width)
    values = [
      {n: tf.TensorSpec(spec.shape, self._values[n].dtype) for n, spec in specs.items()}
      for specs in (self.param_specs, self.state_specs)
    ]
    traced = tf.function(logits, autograph=False).get_concrete_function(
      *values, tf.TensorSpec((None, *shape), self.dtype)
    )
    return flops.count_macs(traced.structured_outputs)

  def forward(
    self,
    params: Mapping[str, tf.Tensor],
    state: Mapping[str, tf.Tensor],
    images: tf.Tensor,
    training: bool,
    rng: tf.Tensor | None = None,
    cross_replica: CrossReplica | None = None,
  ) -> Forward:
    """As `Model.forward`; in `new_state`, what has not changed is the very tensor of `state`.

    Raises:
      UsageError: with `cross_replica`, which Keras's layers can't take; without `rng`, in training
        of a model that draws random numbers; if a layer reads or assigns what isn't the model's
        own, or assigns a parameter.
    """
    if cross_replica is not None:
      raise UsageError(
        f'model {self.name}: the batch norm of Keras has no statistics over all replicas here: '
        'train it without cross_replica'
      )
    mapping = [(v, tf.cast(params[n], v.dtype)) for n, v in self._params.items()]
    mapping += [(v, tf.cast(state[n], v.dtype)) for n, v in self._state.items()]
    own = {id(variable) for variable, _ in mapping}
    if self._seeds:
      if training and rng is None:
        raise UsageError(
          f'model {self.name} draws random numbers in training: apply() needs rng, int32 [2]'
        )
      seeds = seed_states(tf.zeros([2], tf.int32) if rng is None else rng, len(self._seeds))
      mapping += zip(self._seeds, seeds)
    given = [images, *params.values(), *state.values()]
    with self._foreign_reads_refused(given), self._substituted(state):
      scope = keras.StatelessScope(mapping, collect_losses=True)
      before = {key: scope.state_mapping[key] for key in own}
      with scope:
        logits = self._keras(self._to_input_range(images), training=training)
      if scope.state_mapping.keys() - own - {id(variable) for variable in self._seeds}:
        raise UsageError(
          f'model {self.name} changes a variable that is not its own, as keras.random does without '
          'a seed: give the layer a keras.random.SeedGenerator, and add_weight for what it keeps'
        )
    new_state = dict(state)
    for name, variable in {**self._params, **self._state}.items():
      value = scope.state_mapping[id(variable)]
      if value is before[id(variable)]:
        continue
      if name in self._params:
        raise UsageError(
          f'model {self.name} assigns its parameter {name} in call: only the optimizer may'
        )
      new_state[name] = tf.cast(value, state[name].dtype)
    losses = [*scope.losses, *self._weight_penalties(params)]
    penalty = tf.add_n([tf.reduce_sum(tf.cast(x, tf.float32)) for x in losses]) if losses else None
    return Forward(tf.cast(logits, tf.float32), new_state, penalty=penalty)

  def _weight_penalties(self, params: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
    # Not from `model.losses`: it tells layers' losses apart by the ids of tensors, some long gone.
    return [
      variable.regularizer(params[name])
      for name, variable in self._params.items()
      if variable.regularizer is not None
    ]

  def _to_input_range(self, images: tf.Tensor) -> tf.Tensor:
    low, high = self._input_range
    if (low, high) == (-1.0, 1.0):
      return images
    half = tf.constant((high - low) / 2, images.dtype)
    return images * half + tf.constant((high + low) / 2, images.dtype)

  @contextlib.contextmanager
  def _substituted(self, state: Mapping[str, tf.Tensor]) -> Iterator[None]:
    """Puts state in the place of the tensors that layers keep as attributes."""
    kept = {name: vars(layer)[attr] for name, (layer, attr) in self._constants.items()}
    try:
      for name, (layer, attribute) in self._constants.items():
        vars(layer)[attribute] = tf.cast(state[name], kept[name].dtype)
      yield
    finally:
      for name, (layer, attribute) in self._constants.items():
        vars(layer)[attribute] = kept[name]

  @contextlib.contextmanager
  def _foreign_reads_refused(self, given: Iterable[tf.Tensor]) -> Iterator[None]:
    """Refuses eager values that the enclosing function captures, other than those it was given.

    They would stay on the device where they are, and a session can't have them. (TensorFlow makes
    constants of the smallest ones, which is as well.)
    """
    graph = tf.compat.v1.get_default_graph()
    known = {id(tensor) for tensor in given}
    known |= {id(tensor) for tensor, _ in getattr(graph, 'captures', ())}
    yield
    for tensor, _ in getattr(graph, 'captures', ()):
      if id(tensor) not in known and hasattr(tensor, 'numpy'):
        what = 'a variable' if tensor.dtype == tf.resource else f'a tensor {list(tensor.shape)}'
        raise UsageError(
          f'model {self.name} reads {what} that is neither a weight nor an attribute of one of its '
          'layers: keep it in the layer that uses it, by add_weight'
        )

  def _spec(self, name: str) -> Spec:
    value = self._values[name]
    return Spec(value.shape, lambda shape, seed: tf.constant(value))

  def _no_network(self, *_: Any) -> tf.Tensor:
    raise AssertionError('forward is overridden')


def seed_states(rng: tf.Tensor, count: int) -> list[tf.Tensor]:
  """The states, int64 [2], that `count` seed generators begin a step with.

  Full random numbers rather than sums with a count: a generator adds one for each draw, and must
  not meet what another tower or step begins with.
  """
  states = tf.random.stateless_uniform([count, 2], rng, None, None, tf.int64)
  return tf.unstack(states)


def _as_stored(value: np.ndarray) -> np.ndarray:
  """What state holds: TensorFlow has no int32 variable on GPUs; floating state is float32."""
  if np.issubdtype(value.dtype, np.integer):
    return value.astype(np.int64)
  return value if value.dtype == np.bool_ else value.astype(np.float32)


@contextlib.contextmanager
def building(dtype: str, data_format: str, seed: int = 0) -> Iterator[None]:
  """Keras's global settings for what is built inside; variables come to lie on the CPU.

  Raises:
    UsageError: a dtype or layout that Keras has not.
  """
  for kind, value, valid in (
    ('dtype', dtype, _POLICIES),
    ('data_format', data_format, _LAYOUTS),
  ):
    if value not in valid:
      raise UsageError(f'{kind} {value!r}: use {", ".join(valid)}')
  policy, layout = keras.config.dtype_policy(), keras.config.image_data_format()
  draws = random.getstate()
  keras.config.set_dtype_policy(_POLICIES[dtype])
  keras.config.set_image_data_format(_LAYOUTS[data_format])
  random.seed(seed)
  try:
    with tf.device('/CPU:0'):
      yield
  finally:
    random.setstate(draws)
    keras.config.set_image_data_format(layout)
    keras.config.set_dtype_policy(policy)


def _walk(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
  """All layers, each once, inner before outer, with their paths, '' for the model itself.

  Keras numbers the layers of the process; here each parent numbers its own, so that another build
  of the model has the same paths. What the user has named keeps its name.
  """
  seen: set[int] = set()

  def walk(layer: keras.Layer, path: str) -> Iterator[tuple[str, keras.Layer]]:
    if id(layer) in seen:
      return
    seen.add(id(layer))
    used: set[str] = set()
    # What `Model.layers` returns; layers that aren't models have no public list.
    for child in layer._flatten_layers(include_self=False, recursive=False):
      yield from walk(child, f'{path}{_unique(_own_name(child), used)}/')
    yield path, layer

  yield from walk(model, '')


def _own_name(layer: keras.Layer) -> str:
  """The layer's name, less the number that Keras gave it if the user named it not."""
  base = re.sub(r'_\d+$', '', layer.name)
  automatic = base.replace('_', '') == type(layer).__name__.replace('_', '').lower()
  return base if automatic else layer.name


def _unique(name: str, used: set[str]) -> str:
  candidate, count = name, 0
  while candidate in used:
    count += 1
    candidate = f'{name}_{count}'
  used.add(candidate)
  return candidate


def _variable_names(paths: list[tuple[str, keras.Layer]]) -> dict[str, keras.Variable]:
  """Name -> variable, each once, in the order of the outermost layer's list."""
  names: dict[int, str] = {}
  used: set[str] = set()
  for path, layer in paths:
    for variable in layer.variables:
      if id(variable) not in names:
        own = re.sub(r'^variable_\d+$', 'variable', variable.name)
        names[id(variable)] = _unique(path + own, used)
  return {names[id(variable)]: variable for variable in paths[-1][1].variables}


def _constants(
  paths: list[tuple[str, keras.Layer]], taken: Mapping[str, Any]
) -> dict[str, tuple[keras.Layer, str]]:
  """Name -> (layer, attribute) of the floating tensors that layers keep; others may be shapes."""
  used = set(taken)
  return {
    _unique(f'{path}{attribute}_constant', used): (layer, attribute)
    for path, layer in paths
    for attribute, value in vars(layer).items()
    if isinstance(value, tf.Tensor) and value.dtype.is_floating
  }


def _layers(model: keras.Model) -> list[keras.Layer]:
  return [layer for _, layer in _walk(model)]


def _layout(model: keras.Model, name: str, default: str) -> str:
  """NHWC or NCHW: what the layers that know a layout say."""
  names: dict[Any, str] = {value: key for key, value in _LAYOUTS.items()}
  formats = {getattr(layer, 'data_format', None) for layer in _layers(model)} & names.keys()
  if len(formats) > 1:
    raise UsageError(f'model {name} mixes channels_first and channels_last: build it in one')
  return names[formats.pop()] if formats else default


def _compute_dtype(model: keras.Model, name: str) -> str:
  """The lowest precision that a layer with weights computes in."""
  found = set()
  for layer in _layers(model):
    for variable in layer.weights:
      dtype = tf.as_dtype(variable.dtype)
      if dtype.is_floating and dtype != tf.float32:
        raise UsageError(
          f'model {name} keeps {variable.path} in {variable.dtype}: weights must be float32; the '
          'policies for half precision are mixed_float16 and mixed_bfloat16'
        )
    if layer.weights:
      found.add(layer.compute_dtype)
  half = found - {'float32'}
  if len(half) > 1 or half - _POLICIES.keys():
    raise UsageError(f'model {name} computes in {", ".join(sorted(found))}: use one of them')
  return half.pop() if half else 'float32'


def _shapes(
  model: keras.Model, name: str, image_shape: tuple[int, int, int] | None, data_format: str
) -> tuple[tuple[int, int, int], Any]:
  """(height, width, channels), and the outputs' shape; builds the model if it isn't built."""
  first = data_format == 'NCHW'
  functional = bool(getattr(model, 'inputs', None))
  fixed: tuple[int | None, ...] = (None, None, None)
  if functional:
    if not isinstance(model.input_shape, tuple) or len(model.input_shape) != 4:
      raise UsageError(
        f'model {name} takes {model.input_shape}: one input, images of rank 4, is needed'
      )
    _, *sides = model.input_shape
    fixed = (*sides[1:], sides[0]) if first else tuple(sides)
  height, width, channels = image_shape or fixed
  if height is None or width is None or channels is None:
    raise UsageError(
      f'model {name} does not say for which images it is: give image_shape=(height, width, 3), '
      'or image_size'
    )
  if any(have not in (None, want) for have, want in zip(fixed, (height, width, channels))):
    raise UsageError(f'model {name} takes images of {fixed}, not {image_shape}')
  if functional:
    return (height, width, channels), model.output_shape
  shape = (None, channels, height, width) if first else (None, height, width, channels)
  try:
    with tf.device('/CPU:0'):
      outputs = model(keras.KerasTensor(shape, model.compute_dtype))
  except Exception as error:
    raise UsageError(
      f'model {name} does not build for images of {image_shape}: {first_line(error)}'
    ) from error
  return (height, width, channels), getattr(outputs, 'shape', outputs)


def _refuse_what_cannot_train(model: keras.Model, name: str) -> None:
  if not model.trainable_variables:
    raise UsageError(f'model {name} has nothing to train: all of its variables are frozen')
  for layer in _layers(model):
    if getattr(layer, 'synchronized', False):
      raise UsageError(
        f'model {name}: layer {layer.name} is synchronised over tf.distribute replicas, of which '
        'there are none here: build it with synchronized=False'
      )
  last = _last_operation(model)
  squashing = (keras.activations.softmax, keras.activations.sigmoid)
  if type(last).__name__ in ('Softmax', 'Sigmoid') or getattr(last, 'activation', 0) in squashing:
    raise UsageError(
      f'model {name} ends in {last.name}, which turns logits into probabilities: the losses here '
      'take logits, so leave its activation out (classifier_activation=None in keras.applications)'
    )


def _last_operation(model: keras.Model) -> Any:
  """What gives the output of a functional or sequential model; of others nobody can tell."""
  last: Any = model
  while isinstance(last, keras.Model):
    if not getattr(last, 'outputs', None):
      return last
    last = last.layers[-1] if isinstance(last, keras.Sequential) else last.operations[-1]
  return last


def first_line(error: Exception) -> str:
  """What an error says, in one line."""
  return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
