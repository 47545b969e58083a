"""DenseNet (Huang et al. 2016, arXiv:1608.06993, table 1)."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import BatchNorm, Builder, Model

__all__ = ['VARIANTS', 'densenet121', 'keras_layer', 'torch_layer']

VARIANTS = {'': BatchNorm(), 'keras': BatchNorm(0.99, 1.001e-5, 'biased')}

_LAYERS = (6, 12, 24, 16)  # of each dense block


def norm_relu_conv(b: Builder, label: str, x: tf.Tensor, filters: int, size: int) -> tf.Tensor:
  x = tf.nn.relu(b.batch_norm(f'bn{label}', x))
  return b.conv(f'conv{label}', x, filters, size, 1, size // 2)


def dense_layer(b: Builder, x: tf.Tensor, growth: int) -> tf.Tensor:
  """A bottleneck whose result joins its input."""
  y = norm_relu_conv(b, '1', x, 4 * growth, 1)
  return b.concat([x, norm_relu_conv(b, '2', y, growth, 3)])


def densenet121(
  num_classes: int = 1000,
  image_size: int = 224,
  growth: int = 32,
  **options: Any,
) -> Model:
  """DenseNet-BC with 121 layers; 7,978,856 parameters.

  Args:
    num_classes: width of the logits.
    image_size: pixels.
    growth: channels that a layer adds.
    **options: see `hpm.models.create`; `variant` is '' (torchvision's constants of batch norm) or
      'keras' (those of keras.applications).
  """

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = b.conv('conv1', images, 2 * growth, 7, 2, 3)
    x = tf.nn.relu(b.batch_norm('bn1', x))
    x = b.max_pool(b.pad(x, 1), 3, 2)  # zeros are as good as any border after ReLU
    for i, layers in enumerate(_LAYERS, 1):
      for j in range(layers):
        x = b.block(f'block{i}/layer{j + 1}', dense_layer, x, growth)
      if i < len(_LAYERS):
        x = norm_relu_conv(b, str(i + 1), x, x.shape[b.channel_axis] // 2, 1)
        x = b.average_pool(x, 2, 2)
    x = tf.nn.relu(b.batch_norm('bn5', x))
    return b.dense('logits', b.global_average_pool(x), num_classes)

  return Model(
    network,
    name='densenet121',
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    variants=VARIANTS,
    **{'source': 'Huang et al., arXiv:1608.06993', **options},
  )


# Names elsewhere, see `hpm.models.pretrained`.


def keras_layer(model: str, layer: str) -> str:
  """'block2/layer3/conv1' -> 'conv3_block3_1_conv'."""
  if '/' in layer:
    block, index, part = layer.split('/')
    number = int(part[-1]) - (part[:-1] == 'bn')  # batch norms count from 0 there
    return f'conv{int(block[5:]) + 1}_block{index[5:]}_{number}_{part[:-1]}'
  names = {'logits': 'predictions', 'conv1': 'conv1_conv', 'bn1': 'conv1_bn', 'bn5': 'bn'}
  return names.get(layer, f'pool{layer[-1]}_{layer[:-1]}')


def torch_layer(model: str, layer: str) -> str:
  """'block2/layer3/conv1' -> 'features.denseblock2.denselayer3.conv1'."""
  layer = layer.replace('bn', 'norm')
  if '/' in layer:
    return 'features.dense' + layer.replace('/layer', '.denselayer').replace('/', '.')
  if layer == 'logits':
    return 'classifier'
  if layer[-1] in '234':
    return f'features.transition{int(layer[-1]) - 1}.{layer[:-1]}'
  return 'features.norm5' if layer == 'norm5' else f'features.{layer[:-1]}0'
