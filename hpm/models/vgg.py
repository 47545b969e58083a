"""VGG: stacks of 3x3 convolutions (Simonyan & Zisserman 2014, arXiv:1409.1556, table 1)."""

import functools
from typing import Any

import tensorflow as tf

from hpm.models.builder import Builder, Model, normal

__all__ = ['keras_layer', 'timm_layer', 'torch_layer', 'vgg']

_FILTERS = (64, 128, 256, 512, 512)
_CONVOLUTIONS = {  # of each stage; configurations A, B, D and E
  'vgg11': (1, 1, 2, 2, 2),
  'vgg13': (2, 2, 2, 2, 2),
  'vgg16': (2, 2, 3, 3, 3),
  'vgg19': (2, 2, 4, 4, 4),
}


def vgg(
  name: str,
  num_classes: int = 1000,
  image_size: int = 224,
  dropout: float = 0.5,
  **options: Any,
) -> Model:
  """Five stages, each with a max pool of stride 2, and three dense layers.

  Args:
    name: 'vgg11', 'vgg13', 'vgg16' or 'vgg19', with '_bn' for a batch norm after each convolution
      (torchvision's; it keeps the biases).
    num_classes: width of the logits.
    image_size: pixels; the smallest is 32.
    dropout: rate after each of the two hidden dense layers; keras.applications has none.
    **options: see `hpm.models.create`.
  """

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = images
    for stage, count in enumerate(_CONVOLUTIONS[name.removesuffix('_bn')]):
      x = b.block(f'stage{stage + 1}', convolutions, x, count, _FILTERS[stage])
    x = b.flatten(x)
    for i in (1, 2):
      x = tf.nn.relu(b.dense(f'fc{i}', x, 4096, normal(0.01)))
      x = b.dropout(f'dropout{i}', x, dropout)
    return b.dense('logits', x, num_classes, normal(0.01))

  def convolutions(b: Builder, x: tf.Tensor, count: int, filters: int) -> tf.Tensor:
    for i in range(1, count + 1):
      x = b.conv(f'conv{i}', x, filters, 3, padding=1, use_bias=True)
      x = tf.nn.relu(b.batch_norm(f'bn{i}', x) if name.endswith('_bn') else x)
    return b.max_pool(x, 2, 2)

  return Model(
    network,
    name=name,
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    **{'batch_size': 64, 'source': 'Simonyan & Zisserman, arXiv:1409.1556', **options},
  )


vgg11 = functools.partial(vgg, 'vgg11')
vgg13 = functools.partial(vgg, 'vgg13')
vgg16 = functools.partial(vgg, 'vgg16')
vgg19 = functools.partial(vgg, 'vgg19')

vgg11_bn = functools.partial(vgg, 'vgg11_bn')
vgg13_bn = functools.partial(vgg, 'vgg13_bn')
vgg16_bn = functools.partial(vgg, 'vgg16_bn')
vgg19_bn = functools.partial(vgg, 'vgg19_bn')


# Names elsewhere, see `hpm.models.pretrained`.

FLATTENED = {'fc1': 512}


def keras_layer(model: str, layer: str) -> str:
  """'stage2/conv1' -> 'block2_conv1'."""
  if '/' in layer:
    return layer.replace('stage', 'block').replace('/', '_')
  return 'predictions' if layer == 'logits' else layer


def torch_layer(model: str, layer: str) -> str:
  """'stage2/conv1' -> 'features.3' of vgg11: layers counted with their ReLUs and pools."""
  if '/' not in layer:
    return {'fc1': 'classifier.0', 'fc2': 'classifier.3', 'logits': 'classifier.6'}[layer]
  stage, part = layer.split('/')
  stages, batch_norm = _CONVOLUTIONS[model.removesuffix('_bn')], model.endswith('_bn')
  before, i = int(stage[5:]) - 1, int(part[-1]) - 1
  a_unit = 3 if batch_norm else 2
  index = a_unit * (sum(stages[:before]) + i) + before
  return f'features.{index + part.startswith("bn")}'


def timm_layer(model: str, layer: str) -> str:
  """'fc1' -> 'pre_logits.fc1', a convolution there; the others as in torchvision."""
  names = {'fc1': 'pre_logits.fc1', 'fc2': 'pre_logits.fc2', 'logits': 'head.fc'}
  return names.get(layer) or torch_layer(model, layer)
