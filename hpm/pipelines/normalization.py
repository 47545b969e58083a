"""uint8 images to a network's input: on the device, first thing in a tower.

Batches travel as uint8, a quarter of the bytes of float32, and the host is spared its most
expensive elementwise work.
"""

from collections.abc import Sequence
import typing

import numpy as np
import tensorflow as tf

from hpm.errors import UsageError

__all__ = ['normalize']


def normalize(
  images: tf.Tensor,
  dtype: 'str | tf.DType' = 'float32',
  data_format: str = 'NHWC',
  mean: float | Sequence[float] = 127.5,
  std: float | Sequence[float] = 127.5,
) -> tf.Tensor:
  """(images - mean) / std, in the type and layout of the network.

  Four ops at most, for tf.function and tf.Graph alike; they stand on whatever device the caller
  names. The transposition comes first, while an element is one byte. Differences from the
  default mean are exact in all three types, so that the only rounding is that of the result.

  Args:
    images: uint8 [B, H, W, C].
    dtype: 'float32', 'float16' or 'bfloat16'.
    data_format: 'NHWC' or 'NCHW', the layout of the result.
    mean: grey level (0-255) that becomes 0; one number or one a channel.
    std: grey levels that make 1; one number or one a channel. The defaults give -1 .. 1.

  Returns:
    `dtype` [B, H, W, C] or [B, C, H, W].

  Raises:
    UsageError: another data_format, or a type that isn't a floating-point one.
  """
  dtype = tf.as_dtype(dtype)
  if not dtype.is_floating:
    raise UsageError(f'dtype={dtype.name!r}: give float32, float16 or bfloat16')
  if data_format not in ('NHWC', 'NCHW'):
    raise UsageError(f'data_format={data_format!r}: give NHWC or NCHW')
  if data_format == 'NCHW':
    images = tf.transpose(images, [0, 3, 1, 2])

  def constant(value: float | Sequence[float] | np.ndarray) -> tf.Tensor:
    array = np.asarray(value, np.float64)
    if array.ndim and data_format == 'NCHW':
      array = array.reshape(-1, 1, 1)
    return tf.constant(array, dtype)

  centred = tf.cast(images, dtype) - constant(mean)
  return typing.cast(tf.Tensor, centred * constant(1.0 / np.asarray(std, np.float64)))
