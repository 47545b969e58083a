"""Handwritten digits that come with scikit-learn: real training data on any machine, in memory.

1,797 images of 8 x 8 (Alpaydin & Kaynak 1998, the test part of the UCI set); 1,437 of them, drawn
once for all, are for training, 360 for validation.
"""

from collections.abc import Mapping
import functools

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import UsageError
from hpm.pipelines import base, order

__all__ = ['DigitsPipeline']

_SIDE = 8
_NUM_TRAIN = 1437
_ALONE = {'num_shards': 1, 'shard_index': 0}  # in a position that says nothing of shards


class DigitsPipeline(base.Pipeline):
  """Batches of digits; order and shifts follow from the seed and the position in the stream.

  Training: a new order every epoch, each image moved by up to `max_shift` pixels each way.
  Evaluation: one pass in a fixed order.

  Args:
    batch_size: samples per device.
    image_size: pixels; the only size is 8.
    num_classes: outputs of the model, at least 10.
    split: 'train' or 'validation'.
    num_epochs: passes over the data; None: training never ends, evaluation takes one pass.
    seed: of order and shifts.
    max_shift: pixels of the 8.
    num_shards, shard_index: how many workers share the images, and which of them this is.

  Raises:
    UsageError: an option out of range, or scikit-learn is not installed.
  """

  def __init__(
    self,
    *,
    batch_size: int,
    image_size: int = _SIDE,
    num_classes: int = 10,
    split: str = 'train',
    num_epochs: int | None = None,
    seed: int = 0,
    max_shift: int = 1,
    num_shards: int = 1,
    shard_index: int = 0,
  ):
    super().__init__(batch_size=batch_size, image_size=image_size, num_classes=num_classes)
    if image_size != _SIDE:
      raise UsageError(
        f'image_size={image_size}: digits have {_SIDE} x {_SIDE} pixels and are not resized: '
        f'ask for image_size={_SIDE}'
      )
    if num_classes < 10:
      raise UsageError(f'num_classes={num_classes}: there are 10 digits')
    if split not in ('train', 'validation'):
      raise errors.unknown('split', split, ('train', 'validation'))
    self._training = split == 'train'
    if num_epochs is not None:
      num_epochs = base.positive('num_epochs', num_epochs, 'give passes over the data, or None')
    self._num_epochs = num_epochs if self._training else num_epochs or 1
    self._seed = base.integer('seed', seed, 'give any integer')
    self._max_shift = base.at_least(0, 'max_shift', max_shift, 'give pixels')
    self._num_shards = base.positive('num_shards', num_shards, 'give the number of workers')
    self._shard_index = base.at_least(0, 'shard_index', shard_index, 'give the number of this one')
    if self._shard_index >= self._num_shards:
      raise UsageError(f'shard_index={shard_index} must lie below num_shards={num_shards}')
    images, labels = _load()
    part = slice(_NUM_TRAIN) if self._training else slice(_NUM_TRAIN, None)
    self._images, self._labels = images[part], labels[part]
    self._first_sample = 0

  @property
  def epoch_size(self) -> int:
    return len(range(self._shard_index, len(self._labels), self._num_shards))

  @property
  def epoch_size_of_all(self) -> int:
    return len(self._labels)

  def dataset(self) -> tf.data.Dataset:
    """(uint8 [B, 8, 8, 3], int32 [B]) from the position on."""
    with tf.device('/CPU:0'):
      images, labels = tf.constant(self._images), tf.constant(self._labels)
      size, share = self.epoch_size_of_all, self.epoch_size
      total = None if self._num_epochs is None else self._num_epochs * share
      first_epoch, skipped = divmod(self._first_sample, share)

      def sample(position: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.gather(images, index)
        if self._training and self._max_shift:
          image = self._shifted(image, position)
        return tf.repeat(image[..., tf.newaxis], 3, 2), tf.gather(labels, index)

      def epoch(number: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(size)
        if self._training:
          seed = tf.stack([tf.constant(order.subseed(self._seed, 'order'), tf.int64), number])
          indices = tf.random.experimental.stateless_shuffle(indices, seed)
        positions = number * size + tf.range(size, dtype=tf.int64)
        # One order for all workers, who take turns: so each image comes once, as without them.
        own = slice(self._shard_index, None, self._num_shards)
        return tf.data.Dataset.from_tensor_slices((positions[own], indices[own]))

      samples = tf.data.Dataset.counter(first_epoch).flat_map(epoch).skip(skipped)
      if total is not None:
        samples = samples.take(max(0, total - self._first_sample))
      batches = samples.map(sample, num_parallel_calls=1, deterministic=True)
      batches = batches.batch(self.batch_size, drop_remainder=total is None)
      if total is None:
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        batches = batches.apply(endless)
      options = tf.data.Options()
      options.autotune.enabled = False
      return batches.prefetch(4).with_options(options)

  def state(self, num_samples: int) -> dict[str, int]:
    samples = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed')
    shards = {'num_shards': self._num_shards, 'shard_index': self._shard_index}
    return {
      'seed': self._seed,
      **(shards if self._num_shards > 1 else {}),
      'samples': samples,
      'epoch_size': self.epoch_size,
    }

  def restore(self, state: Mapping[str, int]) -> None:
    saved = _ALONE | dict(state)
    if 'samples' not in saved:
      raise UsageError("the position has no 'samples': it is not that of a pipeline")
    for name, value in (_ALONE | self.state(0)).items():
      if name != 'samples' and saved.get(name) != value:
        raise UsageError(
          f'{name}={value}, but the position was saved with {name}={saved.get(name)}: go on with '
          'the same data and seed'
        )
    self._first_sample = int(state['samples'])

  def _shifted(self, image: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    """The image, uint8 [8, 8], moved as the seed says for a position in the stream."""
    most = self._max_shift
    seed = tf.stack([tf.constant(order.subseed(self._seed, 'shift'), tf.int64), position])
    offset = tf.random.stateless_uniform([2], seed, 0, 2 * most + 1, tf.int32, alg='philox')
    return tf.slice(tf.pad(image, [[most, most]] * 2), offset, [_SIDE, _SIDE])


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
  """uint8 [1797, 8, 8] and int32 [1797], in an order of their own."""
  try:
    from sklearn import datasets
  except ImportError as error:
    raise UsageError("digits come with scikit-learn: pip install 'hpm[sample]'") from error
  digits = datasets.load_digits()
  chosen = np.random.default_rng(0).permutation(len(digits.target))
  images = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)
  return images, digits.target[chosen].astype(np.int32)
