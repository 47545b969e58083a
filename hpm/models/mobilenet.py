"""MobileNet v2: inverted residuals (Sandler et al. 2018, arXiv:1801.04381, table 2)."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import BatchNorm, Builder, Model

__all__ = ['VARIANTS', 'keras_layer', 'mobilenet_v2', 'timm_layer', 'torch_layer']

# The paper's own implementation pads as 'SAME' does, torchvision by one pixel on every side.
VARIANTS = {
  '': BatchNorm(0.997, 1e-3),
  'keras': BatchNorm(0.999, 1e-3, 'biased'),
  'torch': BatchNorm(),
}

# Expansion, filters, blocks, strides of the first of them.
_STAGES = (
  (1, 16, 1, 1),
  (6, 24, 2, 2),
  (6, 32, 3, 2),
  (6, 64, 4, 2),
  (6, 96, 3, 1),
  (6, 160, 3, 2),
  (6, 320, 1, 1),
)


def mobilenet_v2(
  num_classes: int = 1000,
  image_size: int = 224,
  dropout: float = 0.2,
  variant: str = '',
  **options: Any,
) -> Model:
  """Width 1.0; 3,504,872 parameters.

  Args:
    num_classes: width of the logits.
    image_size: pixels.
    dropout: rate before the dense layer; keras.applications has none.
    variant: one of `VARIANTS`.
    **options: see `hpm.models.create`.
  """
  padding = 1 if variant == 'torch' else 'SAME'

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu6(b.batch_norm('bn1', b.conv('conv1', images, 32, 3, 2, padding)))
    i = 0
    for expansion, filters, blocks, first_strides in _STAGES:
      for block in range(blocks):
        i += 1
        strides = 1 if block else first_strides
        x = b.block(f'block{i}', inverted_residual, x, expansion, filters, strides)
    x = tf.nn.relu6(b.batch_norm('bn2', b.conv('conv2', x, 1280, 1)))
    x = b.dropout('dropout', b.global_average_pool(x), dropout)
    return b.dense('logits', x, num_classes)

  def inverted_residual(
    b: Builder, x: tf.Tensor, expansion: int, filters: int, strides: int
  ) -> tf.Tensor:
    """Widens, filters each channel by itself, narrows without a nonlinearity."""
    channels = x.shape[b.channel_axis]
    y = x
    if expansion > 1:
      y = tf.nn.relu6(b.batch_norm('bn0', b.conv('expand', y, expansion * channels, 1)))
    y = tf.nn.relu6(b.batch_norm('bn1', b.depthwise_conv('depthwise', y, 3, strides, padding)))
    if strides == 1 and channels == filters:
      return b.conv_norm_add('project', 'bn2', y, x, filters, 1)
    return b.batch_norm('bn2', b.conv('project', y, filters, 1))

  return Model(
    network,
    name='mobilenet_v2',
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    variant=variant,
    variants=VARIANTS,
    **{'source': 'Sandler et al., arXiv:1801.04381', **options},
  )


# Names elsewhere, see `hpm.models.pretrained`.

_KERAS = {'bn0': 'expand_BN', 'bn1': 'depthwise_BN', 'bn2': 'project_BN'}


def keras_layer(model: str, layer: str) -> str:
  """'block3/expand' -> 'block_2_expand'; the first block has a name of its own."""
  if '/' in layer:
    block, part = layer.split('/')
    index = int(block[5:]) - 1
    prefix = f'block_{index}' if index else 'expanded_conv'
    return f'{prefix}_{_KERAS.get(part, part)}'
  names = {'conv1': 'Conv1', 'bn1': 'bn_Conv1', 'conv2': 'Conv_1', 'bn2': 'Conv_1_bn'}
  return names.get(layer, 'predictions')


def torch_layer(model: str, layer: str) -> str:
  """'block3/expand' -> 'features.3.conv.0.0', as in torchvision."""
  if '/' not in layer:
    names = {'conv1': '0.0', 'bn1': '0.1', 'conv2': '18.0', 'bn2': '18.1'}
    return f'features.{names[layer]}' if layer in names else 'classifier.1'
  block, part = layer.split('/')
  index = int(block[5:])
  shift = 0 if index == 1 else 1  # the first block expands nothing
  names = {
    'expand': '0.0',
    'bn0': '0.1',
    'depthwise': f'{shift}.0',
    'bn1': f'{shift}.1',
    'project': f'{shift + 1}',
    'bn2': f'{shift + 2}',
  }
  return f'features.{index}.conv.{names[part]}'


def timm_layer(model: str, layer: str) -> str:
  """'block3/expand' -> 'blocks.1.1.conv_pw', counted by stages."""
  if '/' not in layer:
    names = {'conv1': 'conv_stem', 'conv2': 'conv_head', 'logits': 'classifier'}
    return names.get(layer, layer)
  block, part = layer.split('/')
  stage, index = 0, int(block[5:]) - 1
  while index >= _STAGES[stage][2]:
    index -= _STAGES[stage][2]
    stage += 1
  if stage:
    names = {'expand': 'conv_pw', 'depthwise': 'conv_dw', 'project': 'conv_pwl'}
    name = names.get(part) or f'bn{int(part[-1]) + 1}'
  else:  # the first block expands nothing
    name = {'depthwise': 'conv_dw', 'project': 'conv_pw'}.get(part, part)
  return f'blocks.{stage}.{index}.{name}'
