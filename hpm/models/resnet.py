"""Residual networks with bottleneck blocks (He et al. 2015, arXiv:1512.03385, table 1)."""

from typing import Any

import tensorflow as tf

from hpm.models.builder import Builder, Model, normal

__all__ = ['resnet50', 'resnet50_v1_5']


def bottleneck(
  b: Builder, name: str, x: tf.Tensor, filters: int, strides: int, stride_on_3x3: bool
) -> tf.Tensor:
  """1x1, 3x3, 1x1 convolutions beside a shortcut, projected where the shape changes."""
  with b.scope(name):
    shortcut = x
    if strides > 1 or x.shape[b.channel_axis] != 4 * filters:
      shortcut = b.batch_norm('bn0', b.conv('conv0', x, 4 * filters, 1, strides, 0))
    first, second = (1, strides) if stride_on_3x3 else (strides, 1)
    x = tf.nn.relu(b.batch_norm('bn1', b.conv('conv1', x, filters, 1, first, 0)))
    x = tf.nn.relu(b.batch_norm('bn2', b.conv('conv2', x, filters, 3, second, 1)))
    x = b.batch_norm('bn3', b.conv('conv3', x, 4 * filters, 1, 1, 0))
    return tf.nn.relu(x + shortcut)


def resnet(
  name: str,
  blocks: tuple[int, int, int, int],
  stride_on_3x3: bool,
  num_classes: int = 1000,
  image_size: int = 224,
  **options: Any,
) -> Model:
  """A stem, four stages of bottleneck blocks, global average pooling, one dense layer."""

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(b.batch_norm('bn1', b.conv('conv1', images, 64, 7, 2, 3)))
    x = b.max_pool(x, 3, 2, 1)
    for stage, num_blocks in enumerate(blocks):
      for block in range(num_blocks):
        strides = 2 if stage and not block else 1
        label = f'stage{stage + 1}/block{block + 1}'
        x = bottleneck(b, label, x, 64 * 2**stage, strides, stride_on_3x3)
    return b.dense('logits', b.global_average_pool(x), num_classes, normal(0.01))

  return Model(
    network,
    name=name,
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    **options,
  )


def resnet50(**options: Any) -> Model:
  """ResNet-50 with the stride on a block's first 1x1 convolution; 25,557,032 parameters."""
  return resnet('resnet50', (3, 4, 6, 3), stride_on_3x3=False, **options)


def resnet50_v1_5(**options: Any) -> Model:
  """ResNet-50 with the stride on the 3x3 convolution (fb.resnet.torch, NVIDIA's v1.5)."""
  return resnet('resnet50_v1.5', (3, 4, 6, 3), stride_on_3x3=True, **options)
