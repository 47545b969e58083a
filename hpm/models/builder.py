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
from typing import Any, NamedTuple
import zlib

import numpy as np
import tensorflow as tf

from hpm import errors, registry
from hpm.errors import UsageError, whole
from hpm.models import STEM_REWRITES, flops, rewrites

__all__ = ['BatchNorm', 'Builder', 'Forward', 'Model', 'Spec']

Initializer = Callable[[Sequence[int], tf.Tensor], tf.Tensor]
CrossReplica = Callable[[tf.Tensor], tf.Tensor]
Padding = str | int
Size = int | tuple[int, int]


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
class BatchNorm:
  """The constants of batch normalisation, part of what a family of networks is.

  Attributes:
    momentum: share of the moving averages that a step keeps.
    epsilon: added to the variance.
    variance: what the moving variance follows: the 'unbiased' batch variance, as in FusedBatchNorm
      and torch, or the 'biased' one that the batch itself is normalised with, as in Keras.
  """

  momentum: float = 0.9
  epsilon: float = 1e-5
  variance: str = 'unbiased'

  def __post_init__(self):
    if not 0.0 <= self.momentum < 1.0:
      raise UsageError(f'batch norm momentum {self.momentum}: must lie in [0, 1)')
    if self.epsilon <= 0.0:
      raise UsageError(f'batch norm epsilon {self.epsilon}: must be positive')
    if self.variance not in ('unbiased', 'biased'):
      raise errors.unknown('batch norm variance', self.variance, ('unbiased', 'biased'))


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
    norm: the constants of batch normalisation.
    stem_rewrite: one of `STEM_REWRITES` until the stem has been built by it, or ''.
    new_state: the state after this application, name -> value.
    auxiliary: further heads, see `auxiliary_head`.
    num_blocks: calls of `block`.
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
    norm: BatchNorm | None = None,
    recompute: Mapping[str, tf.Tensor] | None = None,
    stem_rewrite: str = '',
  ):
    self.training = training
    self.dtype = dtype
    self.data_format = data_format
    self.norm = norm or BatchNorm()
    self.stem_rewrite = stem_rewrite
    self.new_state: dict[str, tf.Tensor] = {}
    self.auxiliary: list[tuple[tf.Tensor, float]] = []
    self.num_blocks = 0
    self._param = param
    self._state = state
    self._rng = rng
    self._cross_replica = cross_replica
    self._recompute = recompute  # all parameters by name, or None: keep activations
    self._scope: list[str] = []
    self._subsampled: dict[tuple[Any, int], tf.Tensor] = {}

  @contextlib.contextmanager
  def scope(self, name: str) -> Iterator[None]:
    """Prefixes the names of what is built inside with `name/`."""
    self._scope.append(name)
    try:
      yield
    finally:
      self._scope.pop()

  def block(
    self, name: str, function: Callable[..., tf.Tensor], x: tf.Tensor, *args: Any, **kwargs: Any
  ) -> tf.Tensor:
    """`function(b, x, *args, **kwargs)` under `name/`: the unit of recomputation.

    With a model's `recompute` a block keeps only its input for the backward pass, which computes
    its activations again (Chen et al. 2016, arXiv:1604.06174).
    """
    self.num_blocks += 1
    with self.scope(name):
      if self._recompute is None or not self.training:
        return function(self, x, *args, **kwargs)
      if self._cross_replica is not None:
        raise UsageError(
          'recompute=True would run the collectives of synchronised batch norm twice: '
          'leave one of the two out'
        )
      return self._recomputed(self._recompute, lambda b, x: function(b, x, *args, **kwargs), x)

  def _recomputed(
    self,
    params: Mapping[str, tf.Tensor],
    function: Callable[['Builder', tf.Tensor], tf.Tensor],
    x: tf.Tensor,
  ) -> tf.Tensor:
    # Gradients reach only what is an argument, so the block's parameters are made arguments.
    prefix, scope = self._name(''), list(self._scope)
    names = [name for name in params if name.startswith(prefix)]
    state_names: list[str] = []

    def forward(x: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
      own = dict(zip(names, values))
      b = Builder(
        lambda name, spec: own[name],
        self._state,
        training=True,
        dtype=self.dtype,
        data_format=self.data_format,
        rng=self._rng,
        norm=self.norm,
      )
      b._scope = list(scope)
      y = function(b, x)
      if b.auxiliary:
        raise ValueError(f'{prefix}: an auxiliary head inside a block would be lost')
      state_names[:] = b.new_state
      return [y, *b.new_state.values()]

    @tf.custom_gradient
    def run(x: tf.Tensor, *values: tf.Tensor) -> Any:
      def gradient(dy: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
        # Not before the gradient arrives, and not the same ops: those would be merged with the
        # forward pass, and the activations kept after all.
        with tf.control_dependencies([dy]):
          again = [tf.identity(value) for value in (x, *values)]
        with tf.GradientTape() as tape:
          tape.watch(again)
          y = forward(again[0], again[1:])[0]
        return tape.gradient(y, again, dy, unconnected_gradients='zero')

      return forward(x, values), gradient

    y, *states = run(x, *(params[name] for name in names))
    self.new_state.update(zip(state_names, states))
    return y

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
    size: Size,
    strides: int = 1,
    padding: Padding = 'SAME',
    use_bias: bool = False,
    initializer: Initializer | None = None,
  ) -> tf.Tensor:
    """2-D convolution.

    Args:
      name: of its parameters `name/kernel` and `name/bias`.
      x: rank 4.
      filters: channels of the result.
      size: of the kernel, or (height, width).
      strides: in both directions.
      padding: 'SAME', 'VALID', or pixels on every side.
      use_bias: whether a bias is added.
      initializer: of the kernel; `he_normal('out')` if left out.
    """
    with self.scope(name):
      x = self._convolve(x, self._kernel(x, filters, size, initializer), strides, padding)
      if use_bias:
        bias = self._cast(self.param('bias', (filters,), zeros))
        x = tf.nn.bias_add(x, bias, data_format=self.data_format)
    return x

  def conv_norm_add(
    self,
    conv: str,
    norm: str,
    x: tf.Tensor,
    beside: tf.Tensor,
    filters: int,
    size: Size,
    strides: int = 1,
    padding: Padding = 'SAME',
    scale_initializer: Initializer = ones,
  ) -> tf.Tensor:
    """`beside` plus `conv` followed by `batch_norm`, under those names: a residual block's end.

    In inference batch norm goes into kernel and bias, because oneDNN adds, and applies a ReLU that
    follows, within convolutions that have a bias, and not within those that have batch norm.
    """
    if self.training or not self._plain:
      x = self.conv(conv, x, filters, size, strides, padding)
      return self.batch_norm(norm, x, scale_initializer) + beside
    with self.scope(conv):
      kernel = self._kernel(x, filters, size)
    with self.scope(norm):
      scale, offset, mean, variance = self._norm_values(filters, scale_initializer)
    factor = scale * tf.math.rsqrt(variance + self.norm.epsilon)
    # Not before `x` is there, or all kernels' products would lie in memory at once. (The edge comes
    # from a copy, since TensorFlow fuses nothing with an op that has edges of this kind itself.)
    with tf.control_dependencies([tf.identity(x)]):
      kernel = kernel * factor
    x = self._convolve(x, kernel, strides, padding)
    # A plain sum would not be put into the convolution.
    return tf.add_n([tf.nn.bias_add(x, offset - mean * factor), beside])

  def _kernel(
    self, x: tf.Tensor, filters: int, size: Size, initializer: Initializer | None = None
  ) -> tf.Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    shape = (height, width, x.shape[self.channel_axis], filters)
    return self._cast(self.param('kernel', shape, initializer or he_normal('out')))

  def _convolve(self, x: tf.Tensor, kernel: tf.Tensor, strides: int, padding: Padding) -> tf.Tensor:
    height, width, channels, _ = kernel.shape
    if height == width and strides > 1 and not isinstance(padding, str) and channels <= 4:
      return self._stem(x, kernel, strides, padding)
    if height == width == 1 and padding in ('SAME', 'VALID', 0) and self._plain:
      x = self.subsample(x, strides)
      return rewrites.pointwise(x, kernel) if self.training else tf.nn.conv2d(x, kernel, 1, 'SAME')
    if strides > 1 and not isinstance(padding, str) and self._plain:
      # oneDNN's gradients of padded input cost a fifth to a half less than those with padding.
      x, padding = self.pad(x, padding), 'VALID'
    pads = self._explicit(padding, (height, width), strides)
    return tf.nn.conv2d(x, kernel, strides, pads, data_format=self.data_format)

  def _stem(self, x: tf.Tensor, kernel: tf.Tensor, strides: int, padding: int) -> tf.Tensor:
    if self.stem_rewrite:
      rewrite = registry.resolve('stem_rewrite', STEM_REWRITES, self.stem_rewrite)
      self.stem_rewrite = ''
      return rewrite(x, kernel, strides, padding, self.data_format)
    # Images get no gradient, so to pad them costs little, and oneDNN then has a kernel for the
    # filters' gradient (a 7x7 stem: a third of the CPU time).
    return tf.nn.conv2d(self.pad(x, padding), kernel, strides, 'VALID', self.data_format)

  def subsample(self, x: tf.Tensor, strides: int) -> tf.Tensor:
    """Every `strides`-th pixel, from the first on: what 1x1 convolutions of that stride see.

    Those of one tensor share the result.
    """
    if strides == 1:
      return x
    if not self._plain:
      return self.max_pool(x, 1, strides)
    key = (x.ref(), strides)
    if key not in self._subsampled:
      self._subsampled[key] = rewrites.subsample(x, strides)
    return self._subsampled[key]

  def depthwise_conv(
    self, name: str, x: tf.Tensor, size: int, strides: int = 1, padding: Padding = 'SAME'
  ) -> tf.Tensor:
    """Square convolution of each channel by itself; see `conv`."""
    with self.scope(name):
      shape = (size, size, x.shape[self.channel_axis], 1)
      kernel = self._cast(self.param('depthwise_kernel', shape, he_normal('out')))
      steps = [1, strides, strides, 1] if self.data_format == 'NHWC' else [1, 1, strides, strides]
      pads = self._explicit(padding, (size, size), strides)
      return tf.nn.depthwise_conv2d(x, kernel, steps, pads, data_format=self.data_format)

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
    scale_initializer: Initializer = ones,
    norm: BatchNorm | None = None,
  ) -> tf.Tensor:
    """Batch normalisation over all axes but channels (Ioffe & Szegedy 2015, arXiv:1502.03167).

    Statistics and scale stay float32 whatever the compute dtype. `norm` replaces the model's
    constants.
    """
    norm = norm or self.norm
    with self.scope(name):
      channels = x.shape[self.channel_axis]
      scale, offset, mean, variance = self._norm_values(channels, scale_initializer)
      if self.training and self._cross_replica is not None:
        y, mean, variance = _cross_replica_batch_norm(
          x,
          scale,
          offset,
          mean,
          variance,
          norm,
          self._cross_replica,
          self.channel_axis,
        )
      else:
        old = variance
        # With a factor below one the op itself moves the averages: no further op a layer.
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
          x=x,
          scale=scale,
          offset=offset,
          mean=mean,
          variance=variance,
          epsilon=norm.epsilon,
          exponential_avg_factor=1.0 - norm.momentum,
          data_format=self.data_format,
          is_training=self.training,
        )
        if self.training and norm.variance == 'biased':
          # The op has moved towards the unbiased variance, n / (n - 1) times this one.
          kept = norm.momentum * old
          variance = kept + (variance - kept) * _bias(_count_per_channel(x, self.channel_axis))
      if self.training:
        self.set_state('moving_mean', mean)
        self.set_state('moving_variance', variance)
    return y

  def _norm_values(self, channels: int, scale_initializer: Initializer) -> tuple[tf.Tensor, ...]:
    """Scale, offset, moving mean and moving variance, under the scope of a batch norm."""
    shape = (channels,)
    return (
      self.param('scale', shape, scale_initializer),
      self.param('offset', shape, zeros),
      self.state('moving_mean', shape, zeros),
      self.state('moving_variance', shape, ones),
    )

  def max_pool(
    self, x: tf.Tensor, size: int, strides: int, padding: Padding = 'VALID'
  ) -> tf.Tensor:
    """Square maximum pooling. `padding`: 'SAME', 'VALID', or pixels on every side."""
    if padding and not isinstance(padding, str):
      # Pooling's own explicit padding is unknown to XLA, and on the CPU takes the slow kernel (a
      # 3x3 pool of 112 x 112 x 64: 3.5 times the CPU time of padding first). `tf.pad` takes any
      # value but nought from host memory, for which a GPU would have to wait: so it is added.
      height, width = (1, 2) if self.data_format == 'NHWC' else (2, 3)
      shape = [1, 1, 1, 1]
      shape[height], shape[width] = x.shape[height], x.shape[width]
      sides = [[0, 0]] * 4
      sides[height] = sides[width] = [padding, padding]
      border = np.pad(np.zeros(shape), sides, constant_values=x.dtype.min)
      x, padding = self.pad(x, padding) + tf.constant(border, x.dtype), 'VALID'
    return tf.nn.max_pool2d(x, size, strides, padding or 'VALID', data_format=self.data_format)

  def average_pool(
    self, x: tf.Tensor, size: int, strides: int, padding: Padding = 'VALID'
  ) -> tf.Tensor:
    """Square average pooling.

    `padding`: 'SAME' (only pixels inside the image count), 'VALID', or pixels of zeros on every
    side, which count.
    """
    if padding and not isinstance(padding, str):
      x = self.pad(x, padding)
    padding = padding if isinstance(padding, str) else 'VALID'
    return tf.nn.avg_pool2d(x, size, strides, padding, data_format=self.data_format)

  def pad(self, x: tf.Tensor, pixels: int) -> tf.Tensor:
    """Zeros on every side of the images."""
    sides = [[0, 0], [pixels, pixels], [pixels, pixels]]
    sides.insert(self.channel_axis, [0, 0])
    return tf.pad(x, sides)

  def pad_channels(self, x: tf.Tensor, before: int, after: int) -> tf.Tensor:
    """Channels of zeros before and after those of `x`."""
    sides = [[0, 0]] * 3
    sides.insert(self.channel_axis, [before, after])
    return tf.pad(x, sides)

  def concat(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Rank 4, one after the other along the channels."""
    return tf.concat(parts, self.channel_axis)

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
    if not 0.0 <= rate < 1.0:
      raise UsageError(f'dropout {rate}: must lie in [0, 1)')
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

  @property
  def _plain(self) -> bool:
    """Whether rewrites that were measured on CPUs apply; nothing is known of other cases."""
    return self.dtype == tf.float32 and self.data_format == 'NHWC'

  def _explicit(
    self, padding: Padding, size: tuple[int, int], strides: int
  ) -> str | list[list[int]]:
    if isinstance(padding, str):
      return padding
    if not padding:
      return 'VALID'
    if strides == 1 and size == (2 * padding + 1, 2 * padding + 1):
      return 'SAME'  # the same pixels, for which oneDNN's kernels take a third less CPU time
    pads = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    return pads if self.data_format == 'NHWC' else [pads[0], pads[3], pads[1], pads[2]]

  def _name(self, name: str) -> str:
    return '/'.join([*self._scope, name])


def _count_per_channel(x: tf.Tensor, channel_axis: int) -> tf.Tensor:
  """Values of `x` that share a channel, float32; a constant where the shape is static."""
  channels = x.shape[channel_axis]
  if x.shape.is_fully_defined():
    return tf.constant(math.prod(x.shape) // channels, tf.float32)
  return tf.cast(tf.size(x) // channels, tf.float32)


def _bias(count: tf.Tensor) -> tf.Tensor:
  """Biased over unbiased variance of `count` values; 1 for a single one, as FusedBatchNorm."""
  return tf.maximum(count - 1.0, 1.0) / count


def _cross_replica_batch_norm(
  x: tf.Tensor,
  scale: tf.Tensor,
  offset: tf.Tensor,
  mean: tf.Tensor,
  variance: tf.Tensor,
  norm: BatchNorm,
  cross_replica: CrossReplica,
  channel_axis: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Batch norm by the statistics of all replicas' samples, which cross as one [3, C] tensor."""

  def per_channel(vector: tf.Tensor) -> tf.Tensor:
    return vector if channel_axis == 3 else tf.reshape(vector, [-1, 1, 1])

  axes = [axis for axis in range(4) if axis != channel_axis]
  x32 = tf.cast(x, tf.float32)
  counts = tf.fill([x.shape[channel_axis]], _count_per_channel(x, channel_axis))
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
    norm.epsilon,
  )
  moved = batch_variance
  if norm.variance == 'unbiased':
    moved /= _bias(total_count)
  move = 1.0 - norm.momentum
  return (
    tf.cast(y, x.dtype),
    mean + move * (tf.stop_gradient(batch_mean) - mean),
    variance + move * (tf.stop_gradient(moved) - variance),
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
    batch_norm: the constants of its batch normalisation.
    recompute: whether the backward pass computes the activations of blocks again.
    stem_rewrite: how the strided first convolution is computed: '' as written, 'pad_channels' or
      'space_to_depth' (`hpm.models.STEM_REWRITES`); parameters are the same in all three.
    variant: which library's form of the network this is; '' is the paper's.
    variants: the forms that there are -> their constants of batch normalisation.
    batch_size: a usual number of samples a device.
    source: where the network comes from.
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
    batch_norm: BatchNorm | None = None,
    recompute: bool = False,
    stem_rewrite: str = '',
    variant: str = '',
    variants: Mapping[str, BatchNorm] | None = None,
    batch_size: int = 32,
    source: str = '',
  ):
    if dtype not in ('float32', 'float16', 'bfloat16'):
      raise UsageError(f'dtype {dtype!r}: use float32, float16 or bfloat16')
    if data_format not in ('NHWC', 'NCHW'):
      raise UsageError(f'data_format {data_format!r}: use NHWC or NCHW')
    for side in image_shape:
      whole('image shape', side)
    num_classes = whole('num_classes', num_classes)
    self.name = name
    self.image_shape = tuple(image_shape)
    self.num_classes = num_classes
    self.dtype = dtype
    self.data_format = data_format
    self.variants = dict(variants or {'': BatchNorm()})
    if variant not in self.variants:
      valid = [form or "''" for form in self.variants]
      raise errors.unknown(f'variant of {name}', variant, valid)
    self.variant = variant
    self.batch_norm = batch_norm or self.variants[variant]
    self.recompute = recompute
    if stem_rewrite and stem_rewrite not in STEM_REWRITES:
      raise errors.unknown('stem_rewrite', stem_rewrite, STEM_REWRITES)
    self.stem_rewrite = stem_rewrite
    self.batch_size = batch_size
    self.source = source
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
  def num_macs(self) -> int:
    """Multiply-adds of one image's forward pass, see `hpm.models.flops`."""
    return self._collected[2]

  @property
  def param_specs(self) -> Mapping[str, Spec]:
    """Parameter name -> shape and initialiser, in the order in which the network uses them."""
    return self._collected[0]

  @property
  def state_specs(self) -> Mapping[str, Spec]:
    """State name -> shape and initialiser."""
    return self._collected[1]

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
      norm=self.batch_norm,
      recompute=params if self.recompute else None,
      stem_rewrite=self.stem_rewrite,
    )
    logits = self._network(builder, images)
    return Forward(
      tf.cast(logits, tf.float32),
      {**state, **builder.new_state},
      tuple((tf.cast(logits, tf.float32), weight) for logits, weight in builder.auxiliary),
    )

  @functools.cached_property
  def _collected(self) -> tuple[dict[str, Spec], dict[str, Spec], int]:
    """Parameters, state and multiply-adds, from one run of the network in a graph."""
    params: dict[str, Spec] = {}
    state: dict[str, Spec] = {}

    def collect(specs: dict[str, Spec]) -> Callable[[str, Spec], tf.Tensor]:
      def placeholder(name: str, spec: Spec) -> tf.Tensor:
        if name in params or name in state:
          raise UsageError(f'model {self.name}: two values are called {name!r}: rename one')
        specs[name] = spec
        return tf.compat.v1.placeholder(tf.float32, spec.shape)

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
        stem_rewrite=self.stem_rewrite,
      )
      try:
        logits = self._network(builder, tf.compat.v1.placeholder(dtype, (None, *shape)))
      except UsageError:
        raise
      except ValueError as error:
        reason = str(error).splitlines()[0].partition(" for '{{node")[0]
        raise UsageError(
          f'model {self.name} does not fit images of {height} x {width} x {channels}: {reason}'
        ) from error
      if builder.stem_rewrite:
        raise UsageError(
          f'stem_rewrite {self.stem_rewrite!r}: model {self.name} has no strided first convolution '
          'with padding by pixels that it could rewrite: leave it out'
        )
      if self.recompute and not builder.num_blocks:
        raise UsageError(
          f'recompute: model {self.name} has no blocks that could be computed again: leave it out, '
          'or build the network with Builder.block'
        )
      return params, state, flops.count_macs(logits)
