"""How networks are written: a function of a builder, run once to collect and again to apply.

  def network(b, images):                       # images [b, H, W, C] in the compute dtype
    x = b.conv('conv1', images, 64, 7, strides=2)
    x = tf.nn.relu(b.batch_norm('bn1', x))
    return b.dense('fc', b.global_average_pool(x), 10)

  model = Model(network, name='mine', image_shape=(32, 32, 3), num_classes=10)
  params, state = model.init(seed=0)
  logits, new_state = model.apply(params, state, images, training=True, rng=rng)

The builder binds precision, layout and training once, so the network mentions none of them. A model
creates no variable and knows no device and no variable manager.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import NamedTuple
import zlib

import tensorflow as tf

from hpm.errors import UsageError

__all__ = ['Builder', 'Forward', 'Model', 'Spec']

Initializer = Callable[[Sequence[int], tf.Tensor], tf.Tensor]
CrossReplica = Callable[[tf.Tensor], tf.Tensor]
Padding = str | int


def zeros(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
  del seed
  return tf.zeros(shape)


def ones(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
  del seed
  return tf.ones(shape)


def normal(stddev: float) -> Initializer:
  return lambda shape, seed: stddev * tf.random.stateless_normal(shape, seed)


def he_normal(fan: str) -> Initializer:
  """Normal with variance 2 / fan, fan 'in' or 'out' (He et al. 2015, arXiv:1502.01852, eq. 10, 14).

  For kernels of shape [..., in, out]; the receptive field counts towards the fan.
  """

  def initializer(shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    channels = shape[-2] if fan == 'in' else shape[-1]
    return normal(math.sqrt(2.0 / (math.prod(shape[:-2]) * channels)))(shape, seed)

  return initializer


@dataclasses.dataclass(frozen=True)
class Spec:
  """A parameter or a piece of state before it has a value (float32)."""

  shape: tuple[int, ...]
  initializer: Initializer


class Forward(NamedTuple):
  """What a model computes.

  Attributes:
    logits: float32 [b, num_classes].
    new_state: a dictionary with the keys of the state.
    auxiliary: further heads that only training has: (float32 [b, num_classes], weight of its loss).
    penalty: float32 scalar that is added to the mean loss (regularisers, a Keras model's
      `add_loss`), or None.
  """

  logits: tf.Tensor
  new_state: dict[str, tf.Tensor]
  auxiliary: tuple[tuple[tf.Tensor, float], ...] = ()
  penalty: tf.Tensor | None = None


class Builder:
  """What a network builds with.

  Attributes:
    training: whether dropout drops and batch norm uses the batch's statistics.
    dtype: compute dtype; parameters are float32 and cast once each.
    data_format: 'NHWC' or 'NCHW', of images and all activations of rank 4.
    new_state: the state after this application, name -> value.
    auxiliary: further heads, see `auxiliary_head`.
  """

  def __init__(
    self,
    param: Callable[[str, Spec], tf.Tensor],
    state: Callable[[str, Spec], tf.Tensor],
    *,
    training: bool,
    dtype: tf.DType,
    data_format: str,
    rng: tf.Tensor | None = None,
    cross_replica: CrossReplica | None = None,
  ):
    self.training = training
    self.dtype = dtype
    self.data_format = data_format
    self.new_state: dict[str, tf.Tensor] = {}
    self.auxiliary: list[tuple[tf.Tensor, float]] = []
    self._param = param
    self._state = state
    self._rng = rng
    self._cross_replica = cross_replica
    self._scope: list[str] = []

  @contextlib.contextmanager
  def scope(self, name: str) -> Iterator[None]:
    """Prefixes the names of what is built inside with `name/`."""
    self._scope.append(name)
    try:
      yield
    finally:
      self._scope.pop()

  @property
  def channel_axis(self) -> int:
    return 3 if self.data_format == 'NHWC' else 1

  def param(self, name: str, shape: Sequence[int], initializer: Initializer) -> tf.Tensor:
    """A trainable float32 parameter."""
    return self._param(self._name(name), Spec(tuple(shape), initializer))

  def state(self, name: str, shape: Sequence[int], initializer: Initializer) -> tf.Tensor:
    """A value that a training step replaces by `set_state` and no gradient reaches."""
    return self._state(self._name(name), Spec(tuple(shape), initializer))

  def set_state(self, name: str, value: tf.Tensor) -> None:
    self.new_state[self._name(name)] = value

  def conv(
    self,
    name: str,
    x: tf.Tensor,
    filters: int,
    size: int,
    strides: int = 1,
    padding: Padding = 'SAME',
    use_bias: bool = False,
    initializer: Initializer | None = None,
  ) -> tf.Tensor:
    """Square 2-D convolution. `padding`: 'SAME', 'VALID', or pixels on every side."""
    with self.scope(name):
      shape = (size, size, x.shape[self.channel_axis], filters)
      kernel = self._cast(self.param('kernel', shape, initializer or he_normal('out')))
      x = tf.nn.conv2d(x, kernel, strides, self._explicit(padding), data_format=self.data_format)
      if use_bias:
        bias = self._cast(self.param('bias', (filters,), zeros))
        x = tf.nn.bias_add(x, bias, data_format=self.data_format)
    return x

  def dense(
    self, name: str, x: tf.Tensor, units: int, initializer: Initializer | None = None
  ) -> tf.Tensor:
    """[b, n] -> [b, units] with bias."""
    with self.scope(name):
      kernel = self.param('kernel', (x.shape[-1], units), initializer or he_normal('in'))
      bias = self.param('bias', (units,), zeros)
      return tf.nn.bias_add(tf.matmul(x, self._cast(kernel)), self._cast(bias))

  def batch_norm(
    self,
    name: str,
    x: tf.Tensor,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    scale_initializer: Initializer = ones,
  ) -> tf.Tensor:
    """Batch normalisation over all axes but channels (Ioffe & Szegedy 2015, arXiv:1502.03167).

    The moving variance follows the unbiased batch variance, as in FusedBatchNorm and torch.
    Statistics and scale stay float32 whatever the compute dtype.
    """
    with self.scope(name):
      shape = (x.shape[self.channel_axis],)
      scale = self.param('scale', shape, scale_initializer)
      offset = self.param('offset', shape, zeros)
      mean = self.state('moving_mean', shape, zeros)
      variance = self.state('moving_variance', shape, ones)
      if self.training and self._cross_replica is not None:
        y, mean, variance = _cross_replica_batch_norm(
          x,
          scale,
          offset,
          mean,
          variance,
          momentum,
          epsilon,
          self._cross_replica,
          self.channel_axis,
        )
      else:
        # With a factor below one the op itself moves the averages: no further op a layer.
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
          x=x,
          scale=scale,
          offset=offset,
          mean=mean,
          variance=variance,
          epsilon=epsilon,
          exponential_avg_factor=1.0 - momentum,
          data_format=self.data_format,
          is_training=self.training,
        )
      if self.training:
        self.set_state('moving_mean', mean)
        self.set_state('moving_variance', variance)
    return y

  def max_pool(
    self, x: tf.Tensor, size: int, strides: int, padding: Padding = 'VALID'
  ) -> tf.Tensor:
    """Square maximum pooling. `padding`: 'SAME', 'VALID', or pixels on every side."""
    return tf.nn.max_pool2d(x, size, strides, self._explicit(padding), data_format=self.data_format)

  def global_average_pool(self, x: tf.Tensor) -> tf.Tensor:
    """Rank 4 -> [b, channels]."""
    return tf.reduce_mean(x, [1, 2] if self.data_format == 'NHWC' else [2, 3])

  def flatten(self, x: tf.Tensor) -> tf.Tensor:
    """Rank 4 -> [b, n], in the order height, width, channels whatever the layout."""
    if self.data_format == 'NCHW':
      x = tf.transpose(x, [0, 2, 3, 1])
    return tf.reshape(x, [-1, math.prod(x.shape[1:])])

  def dropout(self, name: str, x: tf.Tensor, rate: float) -> tf.Tensor:
    """Drops with probability `rate` in training; the mask follows from `rng` and the name."""
    if not self.training or not rate:
      return x
    if self._rng is None:
      raise UsageError('this model drops out in training: apply() needs rng, int32 [2]')
    salt = zlib.crc32(self._name(name).encode()) & 0x7FFFFFFF
    # Added, not xor-ed: on a GPU int32 sums stay in host memory, where the seed is wanted.
    return tf.nn.experimental.stateless_dropout(x, rate, self._rng + tf.constant([salt, 0]))

  def auxiliary_head(self, logits: tf.Tensor, weight: float) -> None:
    """Adds `weight` times the loss of these logits [b, num_classes] to the training loss."""
    self.auxiliary.append((logits, weight))

  def _cast(self, value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, self.dtype)

  def _explicit(self, padding: Padding) -> str | list[list[int]]:
    if isinstance(padding, str):
      return padding
    if not padding:
      return 'VALID'
    pads = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    return pads if self.data_format == 'NHWC' else [pads[0], pads[3], pads[1], pads[2]]

  def _name(self, name: str) -> str:
    return '/'.join([*self._scope, name])


def _cross_replica_batch_norm(
  x: tf.Tensor,
  scale: tf.Tensor,
  offset: tf.Tensor,
  mean: tf.Tensor,
  variance: tf.Tensor,
  momentum: float,
  epsilon: float,
  cross_replica: CrossReplica,
  channel_axis: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Batch norm by the statistics of all replicas' samples, which cross as one [3, C] tensor."""

  def per_channel(vector: tf.Tensor) -> tf.Tensor:
    return vector if channel_axis == 3 else tf.reshape(vector, [-1, 1, 1])

  axes = [axis for axis in range(4) if axis != channel_axis]
  x32 = tf.cast(x, tf.float32)
  count = tf.cast(tf.size(x) // x.shape[channel_axis], tf.float32)
  counts = tf.fill([x.shape[channel_axis]], count)
  sums = tf.stack([tf.reduce_sum(x32, axes), tf.reduce_sum(tf.square(x32), axes), counts])
  total, total_square, total_count = tf.unstack(cross_replica(sums))
  batch_mean = total / total_count
  batch_variance = total_square / total_count - tf.square(batch_mean)
  y = tf.nn.batch_normalization(
    x32,
    per_channel(batch_mean),
    per_channel(batch_variance),
    per_channel(offset),
    per_channel(scale),
    epsilon,
  )
  unbiased = batch_variance * total_count / tf.maximum(total_count - 1.0, 1.0)
  move = 1.0 - momentum
  return (
    tf.cast(y, x.dtype),
    mean + move * (tf.stop_gradient(batch_mean) - mean),
    variance + move * (tf.stop_gradient(unbiased) - variance),
  )


Network = Callable[[Builder, tf.Tensor], tf.Tensor]


class Model:
  """A network with its shapes, precision and layout bound: two pure functions.

  Attributes:
    name: as in the registry.
    image_shape: (height, width, channels) of the images, whatever the layout.
    num_classes: width of the logits.
    dtype: name of the compute dtype.
    data_format: 'NHWC' or 'NCHW', of the images that `apply` takes.
  """

  def __init__(
    self,
    network: Network,
    *,
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    dtype: str = 'float32',
    data_format: str = 'NHWC',
  ):
    if dtype not in ('float32', 'float16', 'bfloat16'):
      raise UsageError(f'dtype {dtype!r}: use float32, float16 or bfloat16')
    if data_format not in ('NHWC', 'NCHW'):
      raise UsageError(f'data_format {data_format!r}: use NHWC or NCHW')
    if min(image_shape) < 1:
      raise UsageError(f'image shape {image_shape}: sizes must be positive')
    if num_classes < 1:
      raise UsageError(f'num_classes {num_classes}: at least 1 is needed')
    self.name = name
    self.image_shape = tuple(image_shape)
    self.num_classes = num_classes
    self.dtype = dtype
    self.data_format = data_format
    self._network = network

  @property
  def image_size(self) -> int:
    """Height of the images in pixels."""
    return self.image_shape[0]

  @property
  def num_params(self) -> int:
    """Number of trainable values."""
    return sum(math.prod(spec.shape) for spec in self.param_specs.values())

  @property
  def param_specs(self) -> Mapping[str, Spec]:
    """Parameter name -> shape and initialiser, in the order in which the network uses them."""
    return self._specs[0]

  @property
  def state_specs(self) -> Mapping[str, Spec]:
    """State name -> shape and initialiser."""
    return self._specs[1]

  def init(self, seed: int = 0) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Initial parameters and state, float32, computed on the CPU from (seed, hash of the name)."""

    def values(specs: Mapping[str, Spec]) -> dict[str, tf.Tensor]:
      return {
        name: spec.initializer(spec.shape, [seed, zlib.crc32(name.encode()) & 0x7FFFFFFF])
        for name, spec in specs.items()
      }

    with tf.device('/CPU:0'):
      return values(self.param_specs), values(self.state_specs)

  def apply(
    self,
    params: Mapping[str, tf.Tensor],
    state: Mapping[str, tf.Tensor],
    images: tf.Tensor,
    training: bool,
    rng: tf.Tensor | None = None,
    cross_replica: CrossReplica | None = None,
  ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Logits, float32 [b, num_classes], and the new state; the arguments are `forward`'s."""
    forward = self.forward(params, state, images, training, rng, cross_replica)
    return forward.logits, forward.new_state

  def forward(
    self,
    params: Mapping[str, tf.Tensor],
    state: Mapping[str, tf.Tensor],
    images: tf.Tensor,
    training: bool,
    rng: tf.Tensor | None = None,
    cross_replica: CrossReplica | None = None,
  ) -> Forward:
    """Everything that a training step needs.

    Args:
      params: name -> float32 tensor, as from `init`.
      state: name -> tensor, as from `init`.
      images: [b, H, W, C] ('NHWC') or [b, C, H, W] ('NCHW') in the compute dtype.
      training: see `Builder`.
      rng: int32 [2], the seed of dropout; different for every step and tower.
      cross_replica: sums a tensor over all replicas, with a gradient; with it batch norm uses the
        statistics of the global batch.
    """
    builder = Builder(
      lambda name, spec: params[name],
      lambda name, spec: state[name],
      training=training,
      dtype=tf.as_dtype(self.dtype),
      data_format=self.data_format,
      rng=rng,
      cross_replica=cross_replica,
    )
    logits = self._network(builder, images)
    return Forward(
      tf.cast(logits, tf.float32),
      {**state, **builder.new_state},
      tuple((tf.cast(logits, tf.float32), weight) for logits, weight in builder.auxiliary),
    )

  @functools.cached_property
  def _specs(self) -> tuple[dict[str, Spec], dict[str, Spec]]:
    params: dict[str, Spec] = {}
    state: dict[str, Spec] = {}

    def collect(specs: dict[str, Spec]) -> Callable[[str, Spec], tf.Tensor]:
      def placeholder(name: str, spec: Spec) -> tf.Tensor:
        if name in params or name in state:
          raise ValueError(f'model {self.name}: two values are called {name!r}')
        specs[name] = spec
        return tf.zeros(spec.shape)

      return placeholder

    height, width, channels = self.image_shape
    nhwc = self.data_format == 'NHWC'
    shape = (height, width, channels) if nhwc else (channels, height, width)
    dtype = tf.as_dtype(self.dtype)
    with tf.Graph().as_default():  # thrown away: only the names and shapes are wanted
      builder = Builder(
        collect(params),
        collect(state),
        training=True,
        dtype=dtype,
        data_format=self.data_format,
        rng=tf.zeros([2], tf.int32),
      )
      try:
        self._network(builder, tf.compat.v1.placeholder(dtype, (None, *shape)))
      except ValueError as error:
        if 'two values' in str(error):
          raise
        raise UsageError(
          f'model {self.name} does not fit images of {height} x {width} x {channels}: '
          f'{str(error).splitlines()[0]}'
        ) from error
    return params, state
