"""Many small tensors as one flat one, for fewer transfers."""

from collections.abc import Sequence

import tensorflow as tf

__all__ = ['pack', 'unpack']


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """Tensors of one dtype -> their values in one vector, in the given order."""
  flat = [t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors]
  return tf.concat(flat, 0) if len(flat) > 1 else flat[0]


def unpack(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
  """The inverse of `pack`; all shapes are static."""
  parts = tf.split(flat, [shape.num_elements() for shape in shapes]) if len(shapes) > 1 else [flat]
  return [
    part if shape.rank == 1 else tf.reshape(part, shape)
    for part, shape in zip(parts, shapes, strict=True)
  ]
