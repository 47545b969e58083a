"""LARS: a learning rate for each layer, from the norms of its weights and its gradient."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

import tensorflow as tf

from hpm.optimizers.rules import Schedule, learning_rate_at

__all__ = ['LARS']


@dataclasses.dataclass(frozen=True)
class LARS:
  """a = momentum * a + lr * trust * |w| / (|g| + decay * |w|) * (g + decay * w); w -= a.

  You, Gitman & Ginsburg 2017 (arXiv:1708.03888), algorithm 1. Parameters of one axis (biases, batch
  norm) decay not at all and take the rate as it is, as do those whose norm or gradient is nought.

  Norms are summed in float64, and only their ratio is rounded: the order in which a device adds up
  does not reach the weights, and replicas stay equal.

  Attributes:
    learning_rate: a number, or a schedule.
    momentum: share of the step before that a step keeps.
    trust: the coefficient, what a layer may move in one step as a share of its weights' norm.
    weight_decay: the rule's own, since the ratio needs the gradient without it: leave that of the
      step at 0.
    epsilon: added to the denominator.
  """

  learning_rate: float | Schedule
  momentum: float = 0.9
  trust: float = 0.001
  weight_decay: float = 0.0
  epsilon: float = 0.0
  slots: ClassVar[Mapping[str, float]] = {'momentum': 0.0}

  def scalars(self, step):
    return {
      'learning_rate': learning_rate_at(self.learning_rate, step),
      'momentum': tf.constant(self.momentum, tf.float32),
    }

  def apply(self, variable, slots, gradient, scalars):
    rate = scalars['learning_rate']
    if variable.shape.rank > 1:
      value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
      weights, slope = _norm(value), _norm(gradient)
      ratio = self.trust * weights / (slope + self.weight_decay * weights + self.epsilon)
      moves = tf.logical_and(weights > 0, slope > 0)
      rate *= tf.cast(tf.where(moves, ratio, tf.ones_like(ratio)), tf.float32)
      if self.weight_decay:
        gradient += self.weight_decay * value
    # The step's rate belongs inside the velocity, so that a rate that changes acts on new gradients
    # alone; the op multiplies by `lr` what comes out.
    return tf.raw_ops.ResourceApplyMomentum(
      var=variable.handle,
      accum=slots['momentum'].handle,
      lr=tf.constant(1.0),
      grad=rate * gradient,
      momentum=scalars['momentum'],
      use_locking=True,
    )


def _norm(values: tf.Tensor) -> tf.Tensor:
  return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(values, tf.float64))))
