"""AlexNet in its one-tower form."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import Builder, Model, he_normal

__all__ = ['alexnet', 'torch_layer']

# filters, kernel, strides, padding, whether a 3x3 max pool of stride 2 follows
_CONVOLUTIONS = (
  (64, 11, 4, 2, True),
  (192, 5, 1, 2, True),
  (384, 3, 1, 1, False),
  (256, 3, 1, 1, False),
  (256, 3, 1, 1, True),
)


def alexnet(
  num_classes: int = 1000, image_size: int = 224, dropout: float = 0.5, **options: Any
) -> Model:
  """Five convolutions, three dense layers (Krizhevsky 2014, arXiv:1404.5997); 61,100,840 values.

  Args:
    num_classes: width of the logits.
    image_size: pixels; the smallest is 63.
    dropout: rate before each of the two hidden dense layers.
    **options: see `hpm.models.create`.
  """

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = images
    for i, (filters, size, strides, padding, pool) in enumerate(_CONVOLUTIONS, 1):
      x = b.conv(f'conv{i}', x, filters, size, strides, padding, True, he_normal('in'))
      x = tf.nn.relu(x)
      if pool:
        x = b.max_pool(x, 3, 2)
    x = b.flatten(x)
    for i in (1, 2):
      x = tf.nn.relu(b.dense(f'fc{i}', b.dropout(f'dropout{i}', x, dropout), 4096))
    return b.dense('logits', x, num_classes)

  return Model(
    network,
    name='alexnet',
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    **{'batch_size': 512, 'source': 'Krizhevsky, arXiv:1404.5997', **options},
  )


# Names elsewhere, see `hpm.models.pretrained`.

FLATTENED = {'fc1': 256}

_TORCH = {
  **{f'conv{i}': f'features.{index}' for i, index in enumerate((0, 3, 6, 8, 10), 1)},
  **{'fc1': 'classifier.1', 'fc2': 'classifier.4', 'logits': 'classifier.6'},
}


def torch_layer(model: str, layer: str) -> str:
  """'conv2' -> 'features.3', as in torchvision."""
  return _TORCH[layer]
