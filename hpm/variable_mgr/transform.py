"""What happens to gradients between their aggregation and the update."""

from collections.abc import Mapping
from typing import Protocol

import tensorflow as tf

__all__ = ['Mean', 'Transform']

Tensors = Mapping[str, tf.Tensor]


class Transform(Protocol):
  """What happens to gradients between aggregation and update.

  The scalars are computed once, on one device, and copied: computed by each replica they would
  differ in the last bit, and the replicas would drift apart.
  """

  def scalars(self, gradients: Tensors, num_samples: tf.Tensor) -> dict[str, tf.Tensor]:
    """float32 scalars from the aggregated gradients and the int64 number of samples in them."""

  def apply(self, gradient: tf.Tensor, scalars: Tensors) -> tf.Tensor:
    """Elementwise, at each place where the variable is updated."""


class Mean:
  """The transform that every synchronous mode needs: from scaled sums to the mean over samples.

  Args:
    scale: the constant factor that towers put on their losses.
  """

  def __init__(self, scale: float = 1.0):
    self._scale = scale

  def scalars(self, gradients: Tensors, num_samples: tf.Tensor) -> dict[str, tf.Tensor]:
    samples = tf.cast(tf.maximum(num_samples, 1), tf.float32)
    return {'factor': 1.0 / (self._scale * samples)}

  def apply(self, gradient: tf.Tensor, scalars: Tensors) -> tf.Tensor:
    return gradient * scalars['factor']
