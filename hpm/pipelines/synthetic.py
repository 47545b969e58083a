"""Random batches that cost nothing: what a model can do when input is no limit."""

from collections.abc import Mapping

import tensorflow as tf

from hpm.errors import UsageError
from hpm.pipelines import base, order

__all__ = ['SyntheticPipeline']


class SyntheticPipeline(base.Pipeline):
  """An endless pipeline that repeats one random batch.

  Random, because constant images would let kernels and compression look too good.

  Args:
    batch_size: samples per device.
    image_size: height and width, pixels.
    num_classes: labels are drawn from 0 .. num_classes - 1.
    seed: the same seed gives the same batch.
    with_ids: adds ids 0 .. batch_size - 1, the same in every batch.

  Raises:
    UsageError: a number out of range.
  """

  def __init__(
    self,
    *,
    batch_size: int,
    image_size: int = 224,
    num_classes: int = 1000,
    seed: int = 0,
    with_ids: bool = False,
  ):
    super().__init__(batch_size=batch_size, image_size=image_size, num_classes=num_classes)
    self._seed = base.integer('seed', seed, 'give any integer')
    self._with_ids = with_ids

  @property
  def epoch_size(self) -> None:
    return None

  def dataset(self) -> tf.data.Dataset:
    """(uint8 [B, H, W, 3], int32 [B]) without end, int64 [B] ids as third if asked for."""
    # Drawn by ops, not in Python, so that a tf.Graph holds two integers and not the batch.
    shape = [self.batch_size, self.image_size, self.image_size, 3]
    with tf.device('/CPU:0'):
      images = tf.random.stateless_uniform(
        shape, [order.subseed(self._seed, 'images'), 0], 0, 256, tf.int32, alg='philox'
      )
      labels = tf.random.stateless_uniform(
        shape[:1],
        [order.subseed(self._seed, 'labels'), 0],
        0,
        self.num_classes,
        tf.int32,
        alg='philox',
      )
      batch: tuple[tf.Tensor, ...] = (tf.cast(images, tf.uint8), labels)
      if self._with_ids:
        batch += (tf.range(self.batch_size, dtype=tf.int64),)
      # The thread that tunes sleeps ever longer, and the end of an iterator waits for it: after a
      # run of minutes, for half a minute.
      options = tf.data.Options()
      options.autotune.enabled = False
      return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)

  def state(self, num_samples: int) -> dict[str, int]:
    samples = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed')
    return {'seed': self._seed, 'samples': samples}

  def restore(self, state: Mapping[str, int]) -> None:
    if 'epoch_size' in state:
      raise UsageError(
        'this position belongs to a pipeline of records, not to synthetic data: '
        'restore with the same pipeline'
      )
    if state.get('seed') != self._seed:
      raise UsageError(
        f'seed={self._seed}, but the position was saved with seed={state.get("seed")}: '
        f'pass seed={state.get("seed")}'
      )
