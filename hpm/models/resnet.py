"""Residual networks, for ImageNet and for CIFAR-10.

v1 is He et al. 2015, arXiv:1512.03385 (tables 1 and 6), with the stride of a bottleneck on its
first 1x1 convolution. v1.5 has it on the 3x3 convolution (fb.resnet.torch, NVIDIA, torchvision);
ResNet-18 and -34 have no bottlenecks, hence no v1.5. v2 is He et al. 2016, arXiv:1603.05027: batch
norm and ReLU before each convolution and after the last block; its strides are where v1's are, as
in tf_cnn_benchmarks, which also normalises after the stem (we don't).
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import tensorflow as tf

from hpm.errors import UsageError
from hpm.models.builder import BatchNorm, Builder, Initializer, Model, Network, normal, ones, zeros

__all__ = ['VARIANTS', 'cifar_resnet', 'keras_layer', 'resnet', 'resnet_v2', 'torch_layer']

# 'keras' is the form of keras.applications. In v1 these constants are all the difference; v2 there
# has strides in the last block of a stage, further biases, and zeros around the stem's pool.
VARIANTS = {'': BatchNorm(), 'keras': BatchNorm(0.99, 1.001e-5, 'biased')}

Block = Callable[..., tf.Tensor]


def conv_norm(
  b: Builder,
  label: str,
  x: tf.Tensor,
  filters: int,
  size: int,
  strides: int,
  scale: Initializer = ones,
  beside: tf.Tensor | None = None,
) -> tf.Tensor:
  """Convolution `conv{label}` and batch norm `bn{label}`, plus `beside`."""
  conv, norm = f'conv{label}', f'bn{label}'
  if beside is not None:
    return b.conv_norm_add(conv, norm, x, beside, filters, size, strides, size // 2, scale)
  return b.batch_norm(norm, b.conv(conv, x, filters, size, strides, size // 2), scale)


def projection(b: Builder, x: tf.Tensor, filters: int, strides: int) -> tf.Tensor:
  """A shortcut for v1, a 1x1 convolution where the shape changes (the paper's option B)."""
  if strides == 1 and x.shape[b.channel_axis] == filters:
    return x
  return conv_norm(b, '0', x, filters, 1, strides)


def padded(b: Builder, x: tf.Tensor, filters: int, strides: int) -> tf.Tensor:
  """A shortcut without parameters: every other pixel, channels of zeros (option A)."""
  more = filters - x.shape[b.channel_axis]
  x = b.subsample(x, strides)
  return b.pad_channels(x, more // 2, more - more // 2) if more else x


def basic(
  b: Builder,
  x: tf.Tensor,
  filters: int,
  strides: int,
  scale: Initializer = ones,
  shortcut: Block = projection,
) -> tf.Tensor:
  """Two 3x3 convolutions; the last batch norm starts with `scale`."""
  beside = shortcut(b, x, filters, strides)
  x = tf.nn.relu(conv_norm(b, '1', x, filters, 3, strides))
  return tf.nn.relu(conv_norm(b, '2', x, filters, 3, 1, scale, beside))


def bottleneck(
  b: Builder,
  x: tf.Tensor,
  filters: int,
  strides: int,
  scale: Initializer = ones,
  stride_on_3x3: bool = False,
) -> tf.Tensor:
  """1x1, 3x3 and 1x1 convolutions, the last four times as wide."""
  first, second = (1, strides) if stride_on_3x3 else (strides, 1)
  beside = projection(b, x, 4 * filters, strides)
  x = tf.nn.relu(conv_norm(b, '1', x, filters, 1, first))
  x = tf.nn.relu(conv_norm(b, '2', x, filters, 3, second))
  return tf.nn.relu(conv_norm(b, '3', x, 4 * filters, 1, 1, scale, beside))


bottleneck_v1_5 = functools.partial(bottleneck, stride_on_3x3=True)


def norm_relu(b: Builder, label: str, x: tf.Tensor) -> tf.Tensor:
  return tf.nn.relu(b.batch_norm(f'bn{label}', x))


def shortcut_v2(
  b: Builder,
  x: tf.Tensor,
  active: tf.Tensor,
  filters: int,
  strides: int,
  keras: bool = False,
  project: bool = True,
) -> tf.Tensor:
  """A projection starts from the normalised input, everything else from the input itself."""
  if project and x.shape[b.channel_axis] != filters:
    return b.conv('conv0', active, filters, 1, strides, 0, use_bias=keras)
  return padded(b, x, filters, strides)


def basic_v2(
  b: Builder, x: tf.Tensor, filters: int, strides: int, keras: bool = False, project: bool = True
) -> tf.Tensor:
  """Batch norm, ReLU, 3x3 convolution, twice."""
  y = norm_relu(b, '1', x)
  beside = shortcut_v2(b, x, y, filters, strides, keras, project)
  y = b.conv('conv1', y, filters, 3, strides, 1)
  return beside + b.conv('conv2', norm_relu(b, '2', y), filters, 3, 1, 1)


def bottleneck_v2(
  b: Builder, x: tf.Tensor, filters: int, strides: int, keras: bool = False
) -> tf.Tensor:
  """Batch norm, ReLU and convolution, of 1x1, 3x3 and 1x1."""
  first, second = (1, strides) if keras else (strides, 1)
  y = norm_relu(b, '1', x)
  beside = shortcut_v2(b, x, y, 4 * filters, strides, keras)
  y = b.conv('conv1', y, filters, 1, first, 0)
  y = b.conv('conv2', norm_relu(b, '2', y), filters, 3, second, 1)
  return beside + b.conv('conv3', norm_relu(b, '3', y), 4 * filters, 1, 1, 0, use_bias=keras)


def stages(
  b: Builder,
  x: tf.Tensor,
  block: Block,
  filters: int,
  blocks: Sequence[int],
  late_strides: bool = False,
  **options: Any,
) -> tf.Tensor:
  """Stages of blocks, each twice as wide and half as high as the one before.

  With `late_strides` a stage halves the height in its last block, for the next one.
  """
  for stage, count in enumerate(blocks):
    for i in range(count):
      halves = (stage < len(blocks) - 1 and i == count - 1) if late_strides else (stage and not i)
      label, strides = f'stage{stage + 1}/block{i + 1}', 2 if halves else 1
      x = b.block(label, block, x, filters * 2**stage, strides, **options)
  return x


def resnet(
  name: str,
  block: Block,
  blocks: Sequence[int],
  num_classes: int = 1000,
  image_size: int = 224,
  zero_init: bool = False,
  variant: str = '',
  **options: Any,
) -> Model:
  """v1 and v1.5: a stem, four stages, global average pooling, one dense layer.

  Args:
    name: of the model.
    block: `basic` or `bottleneck`.
    blocks: of each stage.
    num_classes: width of the logits.
    image_size: pixels.
    zero_init: whether the last scale of each block starts at zero, so that the block starts as its
      shortcut (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
    variant: one of `VARIANTS`.
    **options: see `hpm.models.create`.
  """

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(conv_norm(b, '1', images, 64, 7, 2))
    x = b.max_pool(b.pad(x, 1), 3, 2)  # zeros are as good as any border after ReLU
    x = stages(b, x, block, 64, blocks, scale=zeros if zero_init else ones)
    return b.dense('logits', b.global_average_pool(x), num_classes, normal(0.01))

  return _model(network, name, num_classes, image_size, {'variant': variant, **options}, VARIANTS)


def resnet_v2(
  name: str,
  block: Block,
  blocks: Sequence[int],
  num_classes: int = 1000,
  image_size: int = 224,
  variant: str = '',
  **options: Any,
) -> Model:
  """v2; the arguments are those of `resnet`."""
  keras = variant == 'keras'

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = b.conv('conv1', images, 64, 7, 2, 3, use_bias=keras)
    x = b.max_pool(b.pad(x, 1), 3, 2) if keras else b.max_pool(x, 3, 2, 1)
    x = stages(b, x, block, 64, blocks, late_strides=keras, keras=keras)
    x = norm_relu(b, '', x)
    return b.dense('logits', b.global_average_pool(x), num_classes, normal(0.01))

  return _model(network, name, num_classes, image_size, {'variant': variant, **options}, VARIANTS)


def cifar_resnet(
  name: str,
  depth: int,
  v2: bool = False,
  num_classes: int = 10,
  image_size: int = 32,
  **options: Any,
) -> Model:
  """Section 4.2 of the paper: three stages of 16, 32 and 64 filters, shortcuts without parameters.

  Args:
    name: of the model.
    depth: number of weighted layers, 6 n + 2.
    v2: whether the blocks are v2's.
    num_classes: width of the logits.
    image_size: pixels.
    **options: see `hpm.models.create`.
  """
  blocks = [(depth - 2) // 6] * 3

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    if v2:
      x = b.conv('conv1', images, 16, 3, 1, 1)
      x = norm_relu(b, '', stages(b, x, basic_v2, 16, blocks, project=False))
    else:
      x = tf.nn.relu(conv_norm(b, '1', images, 16, 3, 1))
      x = stages(b, x, basic, 16, blocks, shortcut=padded)
    return b.dense('logits', b.global_average_pool(x), num_classes)

  return _model(network, name, num_classes, image_size, {'batch_size': 128, **options})


def _model(
  network: Network,
  name: str,
  num_classes: int,
  image_size: int,
  options: dict[str, Any],
  variants: Mapping[str, BatchNorm] | None = None,
) -> Model:
  paper = '1603.05027' if name.endswith('_v2') else '1512.03385'
  return Model(
    network,
    name=name,
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    variants=variants,
    **{'batch_size': 64, 'source': f'He et al., arXiv:{paper}', **options},
  )


resnet18 = functools.partial(resnet, 'resnet18', basic, (2, 2, 2, 2))
resnet34 = functools.partial(resnet, 'resnet34', basic, (3, 4, 6, 3))
resnet50 = functools.partial(resnet, 'resnet50', bottleneck, (3, 4, 6, 3))
resnet101 = functools.partial(resnet, 'resnet101', bottleneck, (3, 4, 23, 3))
resnet152 = functools.partial(resnet, 'resnet152', bottleneck, (3, 8, 36, 3))
resnet200 = functools.partial(resnet, 'resnet200', bottleneck, (3, 24, 36, 3))

resnet50_v1_5 = functools.partial(resnet, 'resnet50_v1.5', bottleneck_v1_5, (3, 4, 6, 3))
resnet101_v1_5 = functools.partial(resnet, 'resnet101_v1.5', bottleneck_v1_5, (3, 4, 23, 3))
resnet152_v1_5 = functools.partial(resnet, 'resnet152_v1.5', bottleneck_v1_5, (3, 8, 36, 3))
resnet200_v1_5 = functools.partial(resnet, 'resnet200_v1.5', bottleneck_v1_5, (3, 24, 36, 3))

resnet18_v2 = functools.partial(resnet_v2, 'resnet18_v2', basic_v2, (2, 2, 2, 2))
resnet34_v2 = functools.partial(resnet_v2, 'resnet34_v2', basic_v2, (3, 4, 6, 3))
resnet50_v2 = functools.partial(resnet_v2, 'resnet50_v2', bottleneck_v2, (3, 4, 6, 3))
resnet101_v2 = functools.partial(resnet_v2, 'resnet101_v2', bottleneck_v2, (3, 4, 23, 3))
resnet152_v2 = functools.partial(resnet_v2, 'resnet152_v2', bottleneck_v2, (3, 8, 36, 3))
resnet200_v2 = functools.partial(resnet_v2, 'resnet200_v2', bottleneck_v2, (3, 24, 36, 3))

resnet20 = functools.partial(cifar_resnet, 'resnet20', 20)
resnet32 = functools.partial(cifar_resnet, 'resnet32', 32)
resnet44 = functools.partial(cifar_resnet, 'resnet44', 44)
resnet56 = functools.partial(cifar_resnet, 'resnet56', 56)
resnet110 = functools.partial(cifar_resnet, 'resnet110', 110)

resnet20_v2 = functools.partial(cifar_resnet, 'resnet20_v2', 20, True)
resnet32_v2 = functools.partial(cifar_resnet, 'resnet32_v2', 32, True)
resnet44_v2 = functools.partial(cifar_resnet, 'resnet44_v2', 44, True)
resnet56_v2 = functools.partial(cifar_resnet, 'resnet56_v2', 56, True)
resnet110_v2 = functools.partial(cifar_resnet, 'resnet110_v2', 110, True)


# Names elsewhere, see `hpm.models.pretrained`.


def keras_layer(model: str, layer: str) -> str:
  """'stage2/block3/conv1' -> 'conv3_block3_1_conv'."""
  v2 = model.endswith('_v2')
  if layer == 'logits':
    return 'predictions'
  if '/' not in layer:
    return 'post_bn' if layer == 'bn' else f'conv1_{layer[:-1]}'
  stage, block, part = layer.split('/')
  kind, number = part[:-1], int(part[-1])
  prefix = f'conv{int(stage[5:]) + 1}_block{block[5:]}_'
  if v2 and kind == 'bn':  # counted there by the convolution before, here by the one after
    return prefix + (f'{number - 1}_bn' if number > 1 else 'preact_bn')
  return f'{prefix}{number}_{kind}'


def torch_layer(model: str, layer: str) -> str:
  """'stage2/block3/conv1' -> 'layer2.2.conv1', as in torchvision and timm.

  Raises:
    UsageError: torchvision has no such model.
  """
  if model.endswith('_v2'):
    raise UsageError(f'{model}: torchvision has no ResNet v2 to take weights from')
  if model in ('resnet50', 'resnet101', 'resnet152', 'resnet200'):
    raise UsageError(f'{model}: torch has its strides on the 3x3 convolutions, use {model}_v1.5')
  if '/' not in layer:
    return 'fc' if layer == 'logits' else layer
  stage, block, part = layer.split('/')
  part = {'conv0': 'downsample.0', 'bn0': 'downsample.1'}.get(part, part)
  return f'layer{stage[5:]}.{int(block[5:]) - 1}.{part}'
