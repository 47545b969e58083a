"""What happens to gradients between their aggregation and the update."""

from collections.abc import Callable, Mapping, Sequence
import copy
from typing import Protocol

import tensorflow as tf

from hpm.errors import UsageError, number
from hpm.variable_mgr import sums

__all__ = ['Mean', 'Transform']

Tensors = Mapping[str, tf.Tensor]


class Transform(Protocol):
  """What happens to gradients between aggregation and update.

  In three parts, so that nothing but scalars moves for it: a statistic of each gradient where that
  gradient lies, the scalars from all of them on one device, and what is done to each gradient where
  its variable is updated. The scalars are computed once and copied: computed by each replica they
  would differ in the last bit, and the replicas would drift apart.
  """

  def statistic(self, gradient: tf.Tensor) -> tf.Tensor | None:
    """float32 scalar, to be summed over all gradients; None if none is needed."""

  def scalars(self, statistic: tf.Tensor | None, num_samples: tf.Tensor) -> dict[str, tf.Tensor]:
    """From the summed statistic and the int64 number of samples: float32 scalars for `apply`.

    A bool scalar called 'finite' decides whether there is an update at all.
    """

  def apply(
    self, name: str, gradient: tf.Tensor, value: Callable[[], tf.Tensor], scalars: Tensors
  ) -> tf.Tensor:
    """Elementwise; `value` reads the parameter before the update."""

  def unscaled(self) -> tuple[float | tf.Tensor, 'Transform']:
    """The constant factor on the towers' gradients, and the transform for gradients without it."""


class Mean:
  """From scaled sums to the mean over samples; then clipping; then weight decay.

  Args:
    scale: the constant factor that towers put on their losses; a scalar tensor if it is dynamic.
    clip_norm: bound on the norm of all gradients together (Pascanu et al. 2013, arXiv:1211.5063,
      algorithm 1).
    clip_value: bound on each element's magnitude.
    weight_decay: parameter name -> factor; factor * parameter, the gradient of an L2 penalty of
      factor / 2, is added after clipping.
    check_finite: whether an infinite or NaN gradient stops the update.
    reduction: 'mean' over all samples; or 'sum', which takes the sum over towers as it is: towers
      then put 1 / (their number of samples) on their losses.
  """

  def __init__(
    self,
    scale: float | tf.Tensor = 1.0,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    weight_decay: Mapping[str, float] | None = None,
    check_finite: bool = False,
    reduction: str = 'mean',
  ):
    if reduction not in ('mean', 'sum'):
      raise UsageError(f'gradient_reduction {reduction!r}: use mean or sum')
    for option, bound in (('clip_norm', clip_norm), ('clip_value', clip_value)):
      if bound is not None:
        number(option, bound, 'a number above 0', lambda x: x > 0)
    self._scale = scale
    self._clip_norm = clip_norm
    self._clip_value = clip_value
    self._weight_decay = weight_decay or {}
    self._check_finite = check_finite
    self._reduction = reduction

  def statistic(self, gradient: tf.Tensor) -> tf.Tensor | None:
    if self._clip_norm is None and not self._check_finite:
      return None
    return tf.nn.l2_loss(gradient)  # half the sum of squares; not finite if an element is not

  def scalars(self, statistic: tf.Tensor | None, num_samples: tf.Tensor) -> dict[str, tf.Tensor]:
    divisor = self._scale
    if self._reduction == 'mean':
      divisor *= tf.cast(tf.maximum(num_samples, 1), tf.float32)
    scalars = {'factor': tf.convert_to_tensor(1.0 / divisor, tf.float32)}
    if statistic is not None and self._clip_norm is not None:
      norm = tf.sqrt(2.0 * statistic) * scalars['factor']
      scalars['factor'] *= self._clip_norm / tf.maximum(norm, self._clip_norm)
    if statistic is not None and self._check_finite:
      scalars['finite'] = tf.math.is_finite(statistic)
    return scalars

  def apply(
    self, name: str, gradient: tf.Tensor, value: Callable[[], tf.Tensor], scalars: Tensors
  ) -> tf.Tensor:
    gradient = gradient * scalars['factor']
    if self._clip_value is not None:
      gradient = tf.clip_by_value(gradient, -self._clip_value, self._clip_value)
    if self._weight_decay.get(name):
      gradient += self._weight_decay[name] * value()
    return gradient

  def unscaled(self) -> tuple[float | tf.Tensor, 'Mean']:
    without = copy.copy(self)
    without._scale = 1.0
    return self._scale, without


def total(statistics: Sequence[tf.Tensor | None]) -> tf.Tensor | None:
  """The sum of what a transform's `statistic` gave; None if it gave none."""
  given = [statistic for statistic in statistics if statistic is not None]
  return sums.of_scalars(given) if given else None
