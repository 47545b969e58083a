"""`normalize` as a Keras layer, for `model.fit` on a pipeline of this package."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hpm.errors import UsageError
from hpm.pipelines.normalization import normalize

__all__ = ['Normalize']


@keras.saving.register_keras_serializable('hpm')
class Normalize(keras.layers.Layer):
  """uint8 [B, H, W, C] to the layer's compute type, in NHWC or NCHW; see `normalize`.

  Args:
    data_format: 'NHWC' or 'NCHW', of the result.
    mean: grey level (0-255) that becomes 0; one number or one a channel.
    std: grey levels that make 1; one number or one a channel.
    **kwargs: of `keras.layers.Layer`.

  Raises:
    UsageError: another data_format.
  """

  def __init__(
    self,
    data_format: str = 'NHWC',
    mean: float | Sequence[float] = 127.5,
    std: float | Sequence[float] = 127.5,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    if data_format not in ('NHWC', 'NCHW'):
      raise UsageError(f'data_format={data_format!r}: give NHWC or NCHW')
    self.data_format, self.mean, self.std = data_format, mean, std

  def call(self, images: tf.Tensor) -> tf.Tensor:
    return normalize(images, self.compute_dtype, self.data_format, self.mean, self.std)

  def compute_output_shape(self, input_shape: tuple) -> tuple:
    batch, height, width, channels = input_shape
    if self.data_format == 'NCHW':
      return (batch, channels, height, width)
    return (batch, height, width, channels)

  def compute_output_spec(self, images: Any) -> keras.KerasTensor:
    return keras.KerasTensor(self.compute_output_shape(images.shape), dtype=self.compute_dtype)

  def get_config(self) -> dict[str, Any]:
    return super().get_config() | {
      'data_format': self.data_format,
      'mean': self.mean,
      'std': self.std,
    }
