"""The same convolutions, computed in other ways: equal up to rounding, with the same parameters.

`pointwise` and `subsample` pay on CPUs and stand in every network; what the first convolution may
be turned into is a model's `stem_rewrite`.
"""

from collections.abc import Callable

import tensorflow as tf

from hpm.errors import UsageError

__all__ = ['pad_channels', 'pointwise', 'space_to_depth', 'subsample']


def pointwise(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
  """1x1 convolution of stride 1, whose kernel's gradient is one matrix product.

  oneDNN's product takes a third less CPU time than its convolution's gradient, over the shapes of
  ResNet-50; forward and for the gradient of `x` its convolutions are the faster ones.

  Args:
    x: [b, h, w, in].
    kernel: [1, 1, in, out].

  Returns:
    [b, h, w, out].
  """

  @tf.custom_gradient
  def run(x: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      with tf.name_scope('gradient_tape/pointwise'):  # as the tape's own, for `hpm.planning`
        by_x = tf.nn.conv2d_transpose(dy, kernel, tf.shape(x), 1, 'SAME')
        rows = [tf.reshape(t, [-1, t.shape[-1]]) for t in (x, dy)]
        by_kernel = tf.matmul(*rows, transpose_a=True)
        return by_x, tf.reshape(by_kernel, kernel.shape)

    return tf.nn.conv2d(x, kernel, 1, 'SAME'), gradient

  return run(x, kernel)


def subsample(x: tf.Tensor, strides: int) -> tf.Tensor:
  """The first pixel of every square of `strides` x `strides`, of [b, h, w, c].

  As `x[:, ::strides, ::strides]`, whose kernels take ten times as long.
  """
  _, height, width, channels = x.shape
  rows, columns = -(-height // strides), -(-width // strides)
  missing = [[0, 0], [0, rows * strides - height], [0, columns * strides - width], [0, 0]]
  if any(after for _, after in missing):
    x = tf.pad(x, missing)
  x = tf.reshape(x, [-1, strides, columns, strides * channels])
  x = tf.slice(x, [0, 0, 0, 0], [-1, 1, columns, channels])
  return tf.reshape(x, [-1, rows, columns, channels])


def pad_channels(
  images: tf.Tensor, kernel: tf.Tensor, strides: int, padding: int, data_format: str
) -> tf.Tensor:
  """A convolution over 4 channels in place of 3, the last one and its weights zeros.

  Some kernels want channels in fours. The arguments are those of `space_to_depth`.
  """
  axis = 3 if data_format == 'NHWC' else 1
  height, width = (1, 2) if data_format == 'NHWC' else (2, 3)
  sides = [[0, 0]] * 4
  sides[height] = sides[width] = [padding, padding]
  # Channels come by `tf.concat`: TensorFlow takes a `tf.pad` of channels, or of kernels, for one of
  # pixels when it fuses that with the convolution.
  images = _with_zeros(tf.pad(images, sides), axis)
  return tf.nn.conv2d(images, _with_zeros(kernel, 2), strides, 'VALID', data_format)


def _with_zeros(x: tf.Tensor, axis: int) -> tf.Tensor:
  """4 channels along an axis that has fewer."""
  channels = tf.split(x, x.shape[axis], axis)
  return tf.concat([*channels, *[tf.zeros_like(channels[0])] * (4 - len(channels))], axis)


def space_to_depth(
  images: tf.Tensor, kernel: tf.Tensor, strides: int, padding: int, data_format: str
) -> tf.Tensor:
  """A strided convolution as one of stride 1 over squares of pixels laid into channels.

  7x7 of stride 2 on 224 x 224 x 3 becomes 4x4 on 112 x 112 x 12, with zeros in front of the kernel
  (MLPerf's ResNet on TPUs, Ying et al. 2018, arXiv:1811.06992).

  Args:
    images: [b, h, w, c], or [b, c, h, w] for 'NCHW'; h and w are multiples of `strides`.
    kernel: [k, k, c, out].
    strides: 2 or more.
    padding: pixels on every side.
    data_format: 'NHWC' or 'NCHW'.

  Raises:
    UsageError: h or w is no multiple of `strides`.
  """
  height, width = (1, 2) if data_format == 'NHWC' else (2, 3)
  size, _, channels, filters = kernel.shape
  in_front = -padding % strides  # zeros, so that padding is whole squares
  before = (padding + in_front) // strides
  blocks = -(-(size + in_front) // strides)
  behind = blocks * strides - size - in_front
  sides = [[0, 0]] * 4
  for axis in (height, width):
    pixels = images.shape[axis]
    if pixels % strides:
      raise UsageError(
        f"stem_rewrite 'space_to_depth' needs images of a multiple of {strides} pixels, not "
        f'{pixels}: choose another image size, or leave stem_rewrite out'
      )
    out = (pixels + 2 * padding - size) // strides + 1
    sides[axis] = [before, out - 1 + blocks - pixels // strides - before]
  kernel = tf.pad(kernel, [[in_front, behind], [in_front, behind], [0, 0], [0, 0]])
  kernel = tf.reshape(kernel, [blocks, strides, blocks, strides, channels, filters])
  kernel = tf.transpose(kernel, [0, 2, 1, 3, 4, 5])
  kernel = tf.reshape(kernel, [blocks, blocks, strides**2 * channels, filters])
  squares = tf.pad(tf.nn.space_to_depth(images, strides, data_format), sides)
  return tf.nn.conv2d(squares, kernel, 1, 'VALID', data_format)
