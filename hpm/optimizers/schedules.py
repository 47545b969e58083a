"""Learning-rate schedules: functions from the number of finished steps to a rate, in the graph.

Each factory here returns a function (int64 scalar) -> float32 scalar for `hpm.optimizers.create`.
All lengths are steps. `epochs` turns epochs into steps, by the global batch.
"""

from collections.abc import Sequence
import itertools
import math

import tensorflow as tf

from hpm.errors import UsageError, number, whole
from hpm.optimizers.rules import Schedule, learning_rate_at

__all__ = ['constant', 'cosine', 'epochs', 'exponential', 'piecewise', 'polynomial', 'warmup']


def epochs(number: float, epoch_size: int, global_batch: int) -> int:
  """`number` epochs as steps, rounded down; `epoch_size` samples, `global_batch` samples a step."""
  return int(number * epoch_size / global_batch)


def constant(rate: float) -> Schedule:
  """The same rate in every step."""
  return lambda step: tf.constant(rate, tf.float32)


def piecewise(boundaries: Sequence[int], rates: Sequence[float]) -> Schedule:
  """`rates[i]` until step `boundaries[i]`, the last rate from the last boundary on.

  Args:
    boundaries: steps, increasing; step b already has the next rate.
    rates: one more than boundaries.

  Raises:
    UsageError: another number of rates, boundaries that do not rise, or what is no number.
  """
  if len(rates) != len(boundaries) + 1:
    raise UsageError(
      f'{len(boundaries)} boundaries need {len(boundaries) + 1} rates, not {len(rates)}'
    )
  boundaries = [whole('boundary', one, 0) for one in boundaries]
  rates = [number('rate', one) for one in rates]
  if any(a >= b for a, b in itertools.pairwise(boundaries)):
    raise UsageError(f'boundaries {list(boundaries)}: each must be larger than the one before')

  def rate(step: tf.Tensor) -> tf.Tensor:
    if not boundaries:
      return tf.constant(rates[0], tf.float32)
    passed = tf.reduce_sum(tf.cast(step >= tf.constant(boundaries, tf.int64), tf.int32))
    return tf.gather(tf.constant(rates, tf.float32), passed)

  return rate


def exponential(
  rate: float, decay_steps: int, factor: float, staircase: bool = True, minimum: float = 0.0
) -> Schedule:
  """`rate * factor ** (step / decay_steps)`, never below `minimum`.

  With `staircase` the exponent is rounded down, so the rate falls at once every `decay_steps`.
  """
  decay_steps = whole('decay_steps', decay_steps)
  factor = number('factor', factor, 'a finite number above 0', lambda x: 0 < x < math.inf)

  def at(step: tf.Tensor) -> tf.Tensor:
    exponent = step // decay_steps if staircase else step / decay_steps
    return tf.maximum(rate * tf.pow(factor, tf.cast(exponent, tf.float32)), minimum)

  return at


def polynomial(rate: float, num_steps: int, end_rate: float = 0.0, power: float = 2.0) -> Schedule:
  """From `rate` to `end_rate` in `num_steps`, by `(1 - step / num_steps) ** power`."""
  num_steps = whole('num_steps', num_steps)

  def at(step: tf.Tensor) -> tf.Tensor:
    return end_rate + (rate - end_rate) * tf.pow(1.0 - _share(step, num_steps), power)

  return at


def cosine(rate: float, num_steps: int, end_rate: float = 0.0) -> Schedule:
  """Half a cosine from `rate` to `end_rate` (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5)."""
  num_steps = whole('num_steps', num_steps)

  def at(step: tf.Tensor) -> tf.Tensor:
    return end_rate + (rate - end_rate) * 0.5 * (1.0 + tf.cos(math.pi * _share(step, num_steps)))

  return at


def warmup(schedule: float | Schedule, num_steps: int) -> Schedule:
  """A linear ramp from nought in front (Goyal et al. 2017, arXiv:1706.02677, section 2.2).

  The rate of step s < num_steps is (s + 1) / (num_steps + 1) of what the schedule gives at step
  `num_steps`; from there on the schedule itself.
  """
  num_steps = whole('num_steps', num_steps, 0)

  def at(step: tf.Tensor) -> tf.Tensor:
    step = tf.cast(step, tf.int64)  # of a number of Python's the sum would make int32
    target = learning_rate_at(schedule, tf.maximum(step, num_steps))
    return target * tf.minimum(1.0, tf.cast(step + 1, tf.float32) / (num_steps + 1))

  return at


def _share(step: tf.Tensor, num_steps: int) -> tf.Tensor:
  return tf.minimum(tf.cast(step, tf.float32) / num_steps, 1.0)
