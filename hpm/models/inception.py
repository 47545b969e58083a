"""Inception v1, v3 and v4, each a table of branches whose results are concatenated.

v1 (GoogLeNet): Szegedy et al. 2014, arXiv:1409.4842; v3: Szegedy et al. 2015, arXiv:1512.00567;
v4: Szegedy et al. 2016, arXiv:1602.07261. Published code lets batch norm in v3 and v4 do without a
scale in front of ReLU; we keep the scale, as torchvision does, which is what the usual parameter
counts include.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from hpm.errors import UsageError
from hpm.models.builder import BatchNorm, Builder, Model, Network, Padding, Size, he_normal

__all__ = [
  'VARIANTS',
  'googlenet',
  'inception1',
  'inception3',
  'inception4',
  'keras_layer',
  'torch_layer',
]

_PAPER = {'': BatchNorm(epsilon=1e-3)}
# Of v3. 'torch' counts padding in average pools.
VARIANTS = {
  **_PAPER,
  'keras': BatchNorm(0.99, 1e-3, 'biased'),
  'torch': BatchNorm(epsilon=1e-3),
}


class Conv(NamedTuple):
  """A convolution with batch norm and ReLU."""

  filters: int
  size: Size = 1
  strides: int = 1
  padding: Padding = 'SAME'


class Pool(NamedTuple):
  """Pooling, 'max' or 'average'."""

  kind: str
  size: int = 3
  strides: int = 1
  padding: Padding = 'SAME'


# A chain of steps; a list among them stands for branches, each a chain.
Chain = Sequence[Any]
Unit = Callable[[Builder, int, tf.Tensor, Conv], tf.Tensor]

_AVERAGE = Pool('average')
_SHRINK = Pool('max', 3, 2, 'VALID')


def normalized(b: Builder, i: int, x: tf.Tensor, conv: Conv) -> tf.Tensor:
  return tf.nn.relu(b.batch_norm(f'bn{i}', b.conv(f'conv{i}', x, *conv)))


def biased(b: Builder, i: int, x: tf.Tensor, conv: Conv) -> tf.Tensor:
  return tf.nn.relu(b.conv(f'conv{i}', x, *conv, use_bias=True, initializer=he_normal('in')))


def chain(b: Builder, x: tf.Tensor, steps: Chain, unit: Unit = normalized) -> tf.Tensor:
  """Applies the steps; convolutions are counted from 1, branches too."""
  convolutions = 0
  for step in steps:
    if isinstance(step, Conv):
      convolutions += 1
      x = unit(b, convolutions, x, step)
    elif isinstance(step, Pool):
      pool = b.max_pool if step.kind == 'max' else b.average_pool
      x = pool(x, step.size, step.strides, step.padding)
    else:
      parts = []
      for i, branch in enumerate(step, 1):
        with b.scope(f'branch{i}'):
          parts.append(chain(b, x, branch, unit))
      x = b.concat(parts)
  return x


# v1, table 1 of the paper.

_STEM_1 = [Conv(64, 7, 2, 3), Pool('max', 3, 2), Conv(64), Conv(192, 3), Pool('max', 3, 2)]

# 1x1; 3x3 reduced, 3x3; 5x5 reduced, 5x5; after the pool.
_MIXED_1 = {
  '3a': (64, 96, 128, 16, 32, 32),
  '3b': (128, 128, 192, 32, 96, 64),
  '4a': (192, 96, 208, 16, 48, 64),
  '4b': (160, 112, 224, 24, 64, 64),
  '4c': (128, 128, 256, 24, 64, 64),
  '4d': (112, 144, 288, 32, 64, 64),
  '4e': (256, 160, 320, 32, 128, 128),
  '5a': (256, 160, 320, 32, 128, 128),
  '5b': (384, 192, 384, 48, 128, 128),
}


def _mixed_1(
  one: int, reduced3: int, three: int, reduced5: int, five: int, pooled: int, large: int
) -> Chain:
  return [
    [
      [Conv(one)],
      [Conv(reduced3), Conv(three, 3)],
      [Conv(reduced5), Conv(five, large)],
      [Pool('max'), Conv(pooled)],
    ]
  ]


def _inception1(
  name: str,
  unit: Unit,
  large: int,
  last_pool: int,
  num_classes: int,
  image_size: int,
  dropout: float,
  auxiliary: bool,
  options: dict[str, Any],
) -> Model:
  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = chain(b, images, _STEM_1, unit)
    for label, filters in _MIXED_1.items():
      if label == '4a':
        x = b.max_pool(x, 3, 2, 'SAME')
      if label == '5a':
        x = b.max_pool(x, last_pool, 2, 'SAME')
      x = b.block(f'mixed{label}', chain, x, _mixed_1(*filters, large), unit)
      if auxiliary and label in ('4a', '4d'):
        head(b, 'auxiliary1' if label == '4a' else 'auxiliary2', x)
    x = b.dropout('dropout', b.global_average_pool(x), dropout)
    return b.dense('logits', x, num_classes)

  def head(b: Builder, scope: str, x: tf.Tensor) -> None:
    if b.training:
      with b.scope(scope):
        x = b.flatten(chain(b, x, [Pool('average', 5, 3, 'VALID'), Conv(128)], unit))
        x = b.dropout('dropout', tf.nn.relu(b.dense('fc1', x, 1024)), 0.7)
        b.auxiliary_head(b.dense('logits', x, num_classes), 0.3)

  return _model(network, name, num_classes, image_size, '1409.4842', options)


def googlenet(
  num_classes: int = 1000,
  image_size: int = 224,
  dropout: float = 0.2,
  auxiliary: bool = False,
  **options: Any,
) -> Model:
  """Inception v1 as torchvision has it; 6,624,904 parameters without auxiliary heads.

  It differs from the paper (see `inception1`) by batch norm in place of biases, by 3x3 convolutions
  where the paper has 5x5, and by a last max pool of 2x2.

  Args:
    num_classes: width of the logits.
    image_size: pixels.
    dropout: rate before the dense layer.
    auxiliary: whether training has the paper's two further heads, their losses weighted 0.3; they
      need images of 193 pixels at least.
    **options: see `hpm.models.create`.
  """
  return _inception1(
    'googlenet', normalized, 3, 2, num_classes, image_size, dropout, auxiliary, options
  )


def inception1(
  num_classes: int = 1000,
  image_size: int = 224,
  dropout: float = 0.4,
  auxiliary: bool = False,
  **options: Any,
) -> Model:
  """Inception v1 as in the paper and tf_cnn_benchmarks' googlenet, without batch norm.

  The paper's local response normalisation is left out, as there. 6,998,552 parameters; the
  arguments are those of `googlenet`.
  """
  return _inception1(
    'inception1', biased, 5, 3, num_classes, image_size, dropout, auxiliary, options
  )


# v3, table 1 and figures 5 to 7 and 10 of the paper, with the widths of the published code.

_STEM_3 = [
  Conv(32, 3, 2, 'VALID'),
  Conv(32, 3, 1, 'VALID'),
  Conv(64, 3),
  _SHRINK,
  Conv(80, 1, 1, 'VALID'),
  Conv(192, 3, 1, 'VALID'),
  _SHRINK,
]


def _mixed_35(pooled: int) -> Chain:
  return [
    [
      [Conv(64)],
      [Conv(48), Conv(64, 5)],
      [Conv(64), Conv(96, 3), Conv(96, 3)],
      [_AVERAGE, Conv(pooled)],
    ]
  ]


def _mixed_17(c: int) -> Chain:
  return [
    [
      [Conv(192)],
      [Conv(c), Conv(c, (1, 7)), Conv(192, (7, 1))],
      [Conv(c), Conv(c, (7, 1)), Conv(c, (1, 7)), Conv(c, (7, 1)), Conv(192, (1, 7))],
      [_AVERAGE, Conv(192)],
    ]
  ]


_MIXED_8 = [
  [
    [Conv(320)],
    [Conv(384), [[Conv(384, (1, 3))], [Conv(384, (3, 1))]]],
    [Conv(448), Conv(384, 3), [[Conv(384, (1, 3))], [Conv(384, (3, 1))]]],
    [_AVERAGE, Conv(192)],
  ]
]

_MIXED_3 = [
  _mixed_35(32),
  _mixed_35(64),
  _mixed_35(64),
  [[[Conv(384, 3, 2, 'VALID')], [Conv(64), Conv(96, 3), Conv(96, 3, 2, 'VALID')], [_SHRINK]]],
  _mixed_17(128),
  _mixed_17(160),
  _mixed_17(160),
  _mixed_17(192),
  [
    [
      [Conv(192), Conv(320, 3, 2, 'VALID')],
      [Conv(192), Conv(192, (1, 7)), Conv(192, (7, 1)), Conv(192, 3, 2, 'VALID')],
      [_SHRINK],
    ]
  ],
  _MIXED_8,
  _MIXED_8,
]
_AUXILIARY_AFTER = 7


def inception3(
  num_classes: int = 1000,
  image_size: int = 299,
  dropout: float = 0.2,
  auxiliary: bool = True,
  variant: str = '',
  **options: Any,
) -> Model:
  """Inception v3; 27,161,264 parameters, 23,834,568 of them without the auxiliary head.

  Args:
    num_classes: width of the logits.
    image_size: pixels; 75 at least, with the auxiliary head 299 (or more).
    dropout: rate before the dense layer.
    auxiliary: whether training has a further head, its loss weighted 0.4.
    variant: one of `VARIANTS`.
    **options: see `hpm.models.create`.
  """
  mixed = _MIXED_3
  if variant == 'torch':
    mixed = [_replace(block, _AVERAGE, Pool('average', padding=1)) for block in mixed]

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = chain(b, images, _STEM_3)
    for i, block in enumerate(mixed):
      x = b.block(f'mixed{i}', chain, x, block)
      if auxiliary and i == _AUXILIARY_AFTER:
        head(b, x)
    x = b.dropout('dropout', b.global_average_pool(x), dropout)
    return b.dense('logits', x, num_classes)

  def head(b: Builder, x: tf.Tensor) -> None:
    if b.training:
      with b.scope('auxiliary'):
        x = chain(b, x, [Pool('average', 5, 3, 'VALID'), Conv(128), Conv(768, 5, 1, 'VALID')])
        b.auxiliary_head(b.dense('logits', b.global_average_pool(x), num_classes), 0.4)

  options = {'variant': variant, **options}
  return _model(network, 'inception3', num_classes, image_size, '1512.00567', options, VARIANTS)


# v4, figures 3 to 9 of the paper.

_STEM_4 = [Conv(32, 3, 2, 'VALID'), Conv(32, 3, 1, 'VALID'), Conv(64, 3)]
_SPLITS_4 = [
  [[[_SHRINK], [Conv(96, 3, 2, 'VALID')]]],
  [
    [
      [Conv(64), Conv(96, 3, 1, 'VALID')],
      [Conv(64), Conv(64, (1, 7)), Conv(64, (7, 1)), Conv(96, 3, 1, 'VALID')],
    ]
  ],
  [[[Conv(192, 3, 2, 'VALID')], [_SHRINK]]],
]
_A_4 = [
  [
    [Conv(96)],
    [Conv(64), Conv(96, 3)],
    [Conv(64), Conv(96, 3), Conv(96, 3)],
    [_AVERAGE, Conv(96)],
  ]
]
_B_4 = [
  [
    [Conv(384)],
    [Conv(192), Conv(224, (1, 7)), Conv(256, (7, 1))],
    [Conv(192), Conv(192, (7, 1)), Conv(224, (1, 7)), Conv(224, (7, 1)), Conv(256, (1, 7))],
    [_AVERAGE, Conv(128)],
  ]
]
_C_4 = [
  [
    [Conv(256)],
    [Conv(384), [[Conv(256, (1, 3))], [Conv(256, (3, 1))]]],
    [
      Conv(384),
      Conv(448, (3, 1)),
      Conv(512, (1, 3)),
      [[Conv(256, (1, 3))], [Conv(256, (3, 1))]],
    ],
    [_AVERAGE, Conv(256)],
  ]
]
_REDUCTION_A_4 = [
  [[Conv(384, 3, 2, 'VALID')], [Conv(192), Conv(224, 3), Conv(256, 3, 2, 'VALID')], [_SHRINK]]
]
_REDUCTION_B_4 = [
  [
    [Conv(192), Conv(192, 3, 2, 'VALID')],
    [Conv(256), Conv(256, (1, 7)), Conv(320, (7, 1)), Conv(320, 3, 2, 'VALID')],
    [_SHRINK],
  ]
]
_MIXED_4 = [
  *_SPLITS_4,
  *[_A_4] * 4,
  _REDUCTION_A_4,
  *[_B_4] * 7,
  _REDUCTION_B_4,
  *[_C_4] * 3,
]


def inception4(
  num_classes: int = 1000,
  image_size: int = 299,
  dropout: float = 0.2,
  **options: Any,
) -> Model:
  """Inception v4; 42,679,816 parameters.

  Args:
    num_classes: width of the logits.
    image_size: pixels; 75 at least.
    dropout: rate before the dense layer.
    **options: see `hpm.models.create`.
  """

  def network(b: Builder, images: tf.Tensor) -> tf.Tensor:
    x = chain(b, images, _STEM_4)
    for i, block in enumerate(_MIXED_4):
      x = b.block(f'mixed{i}', chain, x, block)
    x = b.dropout('dropout', b.global_average_pool(x), dropout)
    return b.dense('logits', x, num_classes)

  return _model(network, 'inception4', num_classes, image_size, '1602.07261', options)


def _model(
  network: Network,
  name: str,
  num_classes: int,
  image_size: int,
  paper: str,
  options: dict[str, Any],
  variants: Mapping[str, BatchNorm] = _PAPER,
) -> Model:
  return Model(
    network,
    name=name,
    image_shape=(image_size, image_size, 3),
    num_classes=num_classes,
    variants=variants,
    **{'source': f'Szegedy et al., arXiv:{paper}', **options},
  )


def _replace(steps: Chain, old: Pool, new: Pool) -> Chain:
  return [
    [_replace(branch, old, new) for branch in step]
    if isinstance(step, list)
    else new
    if step == old
    else step
    for step in steps
  ]


# Names elsewhere, see `hpm.models.pretrained`.

# keras.applications names the layers of Inception v3 by counting, so only their order is known.
KERAS_BY_POSITION = ('inception3',)

FLATTENED = {'auxiliary1/fc1': 128, 'auxiliary2/fc1': 128}

_TORCH_STEM_3 = (
  'Conv2d_1a_3x3',
  'Conv2d_2a_3x3',
  'Conv2d_2b_3x3',
  'Conv2d_3b_1x1',
  'Conv2d_4a_3x3',
)
_TORCH_MIXED_3 = ('5b', '5c', '5d', '6a', '6b', '6c', '6d', '6e', '7a', '7b', '7c')
_TORCH_BRANCHES_3 = {
  '5': ('branch1x1', 'branch5x5_{}', 'branch3x3dbl_{}', 'branch_pool'),
  '6a': ('branch3x3', 'branch3x3dbl_{}'),
  '6': ('branch1x1', 'branch7x7_{}', 'branch7x7dbl_{}', 'branch_pool'),
  '7a': ('branch3x3_{}', 'branch7x7x3_{}'),
  '7': ('branch1x1', 'branch3x3_{}', 'branch3x3dbl_{}', 'branch_pool'),
}


def keras_layer(model: str, layer: str) -> str:
  """'mixed2/branch3/conv2' -> 'conv2d_17', for Inception v3 without its auxiliary head.

  Raises:
    UsageError: of any other model of this family.
  """
  if model != 'inception3':
    raise UsageError(f'{model}: keras.applications has Inception v3 alone of this family')
  if layer == 'logits':
    return 'dense'
  if layer.startswith('auxiliary'):
    raise UsageError(
      'inception3: keras.applications has no auxiliary head, create the model with auxiliary=False'
    )
  scope, _, part = layer.rpartition('/')
  kind = 'conv2d' if part.startswith('conv') else 'batch_normalization'
  position = _keras_order().index((scope, int(part[-1])))
  return f'{kind}_{position}' if position else kind


@functools.cache
def _keras_order() -> list[tuple[str, int]]:
  """Scope and number of each convolution in the order of Keras's layers.

  Keras sorts layers by their distance from the output, and those of one distance by branch.
  """
  found: list[tuple[int, str, int]] = []

  def walk(steps: Chain, scope: str, distance: int) -> int:
    """Goes from the last step to the first; returns the distance of what comes before."""
    number = sum(isinstance(step, Conv) for step in steps)
    for step in reversed(steps):
      if isinstance(step, Conv):
        distance += 3  # with its batch norm and ReLU
        found.append((distance, scope, number))
        number -= 1
      elif isinstance(step, Pool):
        distance += 1
      else:
        inner = f'{scope}/branch' if scope else 'branch'
        ends = [walk(branch, f'{inner}{i}', distance + 1) for i, branch in enumerate(step, 1)]
        distance = max(ends)
    return distance

  distance = 0
  for i, block in reversed(list(enumerate(_MIXED_3))):
    distance = walk(block, f'mixed{i}', distance)
  walk(_STEM_3, '', distance)
  return [(scope, number) for _, scope, number in sorted(found, key=lambda entry: -entry[0])]


def torch_layer(model: str, layer: str) -> str:
  """'mixed3a/branch2/conv1' -> 'inception3a.branch2.0.conv', as in torchvision.

  Raises:
    UsageError: torchvision has no such model.
  """
  if model not in ('googlenet', 'inception3'):
    raise UsageError(f'{model}: torchvision has googlenet and inception3 of this family')
  if layer == 'logits':
    return 'fc'
  scope, _, part = layer.rpartition('/')
  kind = 'conv' if part.startswith('conv') else 'bn'
  name = _torch_googlenet if model == 'googlenet' else _torch_inception3
  return name(scope, part, kind)


def _torch_googlenet(scope: str, part: str, kind: str) -> str:
  if not scope:
    return f'conv{part[-1]}.{kind}'
  if scope.startswith('auxiliary'):
    return f'aux{scope[-1]}.' + {'fc1': 'fc1', 'logits': 'fc2'}.get(part, f'conv.{kind}')
  block, branch = scope.split('/')
  index = {'branch1': '', 'branch4': '1.'}.get(branch, f'{int(part[-1]) - 1}.')
  return f'inception{block[5:]}.{branch}.{index}{kind}'


def _torch_inception3(scope: str, part: str, kind: str) -> str:
  if not scope:
    return f'{_TORCH_STEM_3[int(part[-1]) - 1]}.{kind}'
  if scope == 'auxiliary':
    return 'AuxLogits.fc' if part == 'logits' else f'AuxLogits.conv{int(part[-1]) - 1}.{kind}'
  block, *branches = scope.split('/')
  label = _TORCH_MIXED_3[int(block[5:])]
  names = _TORCH_BRANCHES_3.get(label) or _TORCH_BRANCHES_3[label[0]]
  number = part[-1]
  if len(branches) == 2:  # a branch that splits at its end
    number = ('2' if branches[0] == 'branch2' else '3') + ' ab'[int(branches[1][-1])]
  return f'Mixed_{label}.{names[int(branches[0][-1]) - 1].format(number)}.{kind}'
