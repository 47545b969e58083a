"""LeNet-5's descendant with ReLU and max pooling, as tf_cnn_benchmarks builds it."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import Builder, Model

__all__ = ['lenet']


def lenet(
  num_classes: int = 1000, image_size: int = 28, channels: int = 3, **options: Any
) -> Model:
  """Two 5x5 convolutions with pooling, two dense layers (after LeCun et al. 1998)."""

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = images
    for name, filters in (('conv1', 32), ('conv2', 64)):
      x = tf.nn.relu(b.conv(name, x, filters, 5, use_bias=True))
      x = b.max_pool(x, 2, 2)
    x = tf.nn.relu(b.dense('fc1', b.flatten(x), 512))
    return b.dense('logits', x, num_classes)

  return Model(
    network,
    name='lenet',
    image_shape=(image_size, image_size, channels),
    num_classes=num_classes,
    **{'source': 'after LeCun et al. 1998', **options},
  )
