"""Images that a Python program has at hand: pairs of (encoded bytes, label)."""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from hpm.errors import DataError, UsageError
from hpm.pipelines import base, order, sources

__all__ = ['IterableSource']


class IterableSource(sources.RandomAccess):
  """Pairs of (bytes of a JPEG, PNG, GIF or BMP, label from 0 on).

  A sequence (with `len` and indices) is asked for a pair when it is needed, from several threads at
  once. Any other iterable is read to its end first and kept in memory, because epochs, shuffling
  and resuming need every pair again.

  Args:
    samples: the pairs.
    split: 'train' trains, every other name evaluates (unless `training` says otherwise).

  Raises:
    UsageError: what is given can't be iterated over, or holds nothing.
  """

  remedy = 'replace this pair or leave it out'

  def __init__(self, samples: Iterable[tuple[bytes, int]], split: str = 'train'):
    if not isinstance(samples, Iterable) and not hasattr(samples, '__getitem__'):
      raise UsageError(f'samples={samples!r}: give an iterable of (bytes, label)')
    random = hasattr(samples, '__len__') and hasattr(samples, '__getitem__')
    self._samples: Sequence[tuple[bytes, int]] = samples if random else list(samples)  # type: ignore[assignment]
    if not len(self._samples):
      raise UsageError('samples holds nothing: give (bytes, label) pairs')
    self.origin, self.split = type(samples).__name__, split

  @property
  def files(self) -> Sequence[str]:
    return [self.origin]

  def count(self, strict: bool) -> list[int]:
    return [len(self._samples)]

  def describe(self, file: int, record: int) -> str:
    return f'{self.origin}: sample {record}'

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    def pair(record: np.int64) -> tuple[bytes, np.int64]:
      found = self.contents(0, int(record))
      return found.encoded, np.int64(found.label)

    encoded, label = tf.numpy_function(pair, [order.split_id(ident)[1]], [tf.string, tf.int64])
    return sources.Sample(tf.ensure_shape(encoded, []), tf.ensure_shape(label, []))

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    try:
      encoded, label = self._samples[record]
    except (TypeError, ValueError):
      raise DataError(
        f'{type(self._samples[record]).__name__} in place of a pair (bytes, label)'
      ) from None
    if not isinstance(encoded, bytes):
      raise DataError(f'{type(encoded).__name__} in place of the bytes of an encoded image')
    try:
      label = base.integer('label', label, 'give the class as a number from 0 on')
    except UsageError as error:
      raise DataError(str(error)) from None
    return sources.Contents(encoded, label)
