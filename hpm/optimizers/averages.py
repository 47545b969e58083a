"""A moving average of the weights, which evaluation reads, around any update rule."""

import dataclasses

import tensorflow as tf

from hpm.errors import number
from hpm.optimizers.rules import Optimizer

__all__ = ['SLOT', 'Averaged']

SLOT = 'average'


@dataclasses.dataclass(frozen=True)
class Averaged:
  """The rule's update, then average = d * average + (1 - d) * w (Polyak & Juditsky 1992).

  The average starts as the weights' first values. After t updates d is the smaller of `decay` and
  (1 + t) / (10 + t), so that the start is soon forgotten. It is one slot more beside each
  parameter: every manager keeps it, every checkpoint holds it, and `hpm.EvalStep(averaged=True)`
  evaluates it. Batch norm's moving statistics are those of the step, as ever.

  Attributes:
    rule: what updates the weights.
    decay: share of the average that a step keeps, in [0, 1).
  """

  rule: Optimizer
  decay: float

  def __post_init__(self):
    number('average_decay', self.decay, 'a number from 0 to below 1', lambda x: 0 <= x < 1)

  @property
  def slots(self):
    return {**self.rule.slots, SLOT: None}

  def scalars(self, step):
    done = tf.cast(step, tf.float32)
    decay = tf.minimum(tf.constant(self.decay, tf.float32), (1.0 + done) / (10.0 + done))
    return {**self.rule.scalars(step), 'average_share': 1.0 - decay}

  def apply(self, variable, slots, gradient, scalars):
    average = slots[SLOT]
    with tf.control_dependencies([self.rule.apply(variable, slots, gradient, scalars)]):
      value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
      before = tf.raw_ops.ReadVariableOp(resource=average.handle, dtype=average.dtype)
    return tf.raw_ops.AssignSubVariableOp(
      resource=average.handle, value=scalars['average_share'] * (before - value)
    )
