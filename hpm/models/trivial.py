"""The smallest model that takes ImageNet's images: what is left is input and overhead."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import Builder, Model

__all__ = ['trivial']


def trivial(num_classes: int = 1000, image_size: int = 224, **options: Any) -> Model:
  """Two dense layers of 1 and 4096 units, as tf_cnn_benchmarks' model of this name."""

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(b.dense('fc1', b.flatten(images), 1))
    x = tf.nn.relu(b.dense('fc2', x, 4096))
    return b.dense('logits', x, num_classes)

  return Model(
    network,
    name='trivial',
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    **{'source': 'tf_cnn_benchmarks', **options},
  )
