"""What every pipeline offers, and the checks of the options that they share."""

import abc
from collections.abc import Mapping
import operator
import os
import re
from typing import TYPE_CHECKING

import numpy as np

from hpm.errors import DataError, UsageError

if TYPE_CHECKING:
  import tensorflow as tf

  from hpm.pipelines import skips

__all__ = ['Pipeline']


class Pipeline(abc.ABC):
  """A source of batches with a position that can be saved and restored.

  A position is a number of samples from the very start of the stream, and it is counted by the
  consumer: what was prefetched but never trained on doesn't count.

  Attributes:
    batch_size: samples a batch, that is, per device.
    image_size: height and width of the images, pixels.
    num_classes: labels lie in 0 .. num_classes - 1.
  """

  def __init__(self, *, batch_size: int, image_size: int, num_classes: int):
    self.batch_size = positive(
      'batch_size',
      batch_size,
      'give the samples per device (0 meant the default of the model in tf_cnn_benchmarks)',
    )
    self.image_size = positive('image_size', image_size, 'give height and width in pixels')
    self.num_classes = positive(
      'num_classes', num_classes, 'give the number of outputs of the model'
    )

  @property
  @abc.abstractmethod
  def epoch_size(self) -> int | None:
    """Samples an epoch; None if the pipeline has no epochs."""

  @property
  def epoch_size_of_all(self) -> int | None:
    """The same of all workers that share the data."""
    return self.epoch_size

  @abc.abstractmethod
  def dataset(self) -> 'tf.data.Dataset':
    """Batches from the restored position on (the start, if nothing was restored).

    Elements are (uint8 [B, H, W, 3], int32 [B]), with int64 [B] ids as a third component if the
    pipeline was made with `with_ids=True`.
    """

  @abc.abstractmethod
  def state(self, num_samples: int) -> dict[str, int]:
    """The position after `num_samples` samples of the stream, as integers for a checkpoint.

    Args:
      num_samples: samples that finished steps consumed since the start of the training: after a
        `restore` this count goes on from the restored one.
    """

  @abc.abstractmethod
  def restore(self, state: Mapping[str, int]) -> None:
    """Lets the next `dataset()` start exactly where `state` says.

    Raises:
      UsageError: the state is of another order (seed, shuffle buffer).
      DataError: the state is of other data (number of records).
    """

  def skipped(self) -> 'list[skips.Skipped]':
    """The bad records that were left out so far, if this pipeline was told to; see there."""
    return []

  def explain(self, error: Exception, num_samples: int = 0) -> DataError:
    """Says which file and record made the iterator raise `error`; for step loops to raise.

    Args:
      error: what the iterator of `dataset()` raised.
      num_samples: samples consumed by then, counted as in `state`; the search starts there.
    """
    return DataError(f'failed after {num_samples} samples: {first_line(error)}')


def num_cores() -> int:
  """Cores that this process may use."""
  try:
    return len(os.sched_getaffinity(0))
  except AttributeError:  # not on macOS
    return os.cpu_count() or 1


def positive(name: str, value: object, fix: str) -> int:
  """`value` as an int of at least 1, or a UsageError that quotes it."""
  return at_least(1, name, value, fix)


def at_least(minimum: int, name: str, value: object, fix: str) -> int:
  """`value` as an int of at least `minimum`, or a UsageError that quotes it."""
  number = integer(name, value, fix)
  if number < minimum:
    raise UsageError(f'{name}={number} must be at least {minimum}: {fix}')
  return number


def integer(name: str, value: object, fix: str) -> int:
  """`value` as an int (any integer type, bool excepted), or a UsageError that quotes it."""
  try:
    if isinstance(value, bool):
      raise TypeError
    return operator.index(value)  # type: ignore[arg-type]
  except TypeError:
    raise UsageError(f'{name}={value!r} is not an integer: {fix}') from None


def flag(name: str, value: object) -> bool:
  """`value`, True or False, or a UsageError that quotes it."""
  if not isinstance(value, (bool, np.bool_)):
    raise UsageError(f'{name}={value!r}: give True or False')
  return bool(value)


def first_line(error: BaseException) -> str:
  """What went wrong, in one line, without TensorFlow's nodes and stack around it."""
  text = getattr(error, 'message', None) or str(error)
  # "Graph execution error: ... {{function_node X}} the line that is wanted [Op:Y] name: [[node]]"
  line = (text.split('\n\t [[')[0].strip().splitlines() or [''])[-1]
  line = re.sub(r'\s*\[Op:\w+\].*', '', line.rsplit('}}', 1)[-1]).strip()
  return line or type(error).__name__
