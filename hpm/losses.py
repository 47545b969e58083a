"""Losses: functions of (labels, logits) to one float32 value a sample.

They are summed, not averaged: the step divides the aggregate by the number of samples of all
devices, which keeps partial batches exact.
"""

from collections.abc import Callable

import tensorflow as tf

from hpm.errors import number

__all__ = ['Loss', 'softmax_cross_entropy']

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def softmax_cross_entropy(label_smoothing: float = 0.0) -> Loss:
  """Cross entropy against integer labels.

  Args:
    label_smoothing: share of the target spread evenly over all classes, in [0, 1) (Szegedy et al.
      2016, arXiv:1512.00567, section 7).

  Returns:
    labels int [b], logits float [b, classes] -> float32 [b].
  """
  label_smoothing = number(
    'label_smoothing', label_smoothing, 'a number from 0 to below 1', lambda x: 0 <= x < 1
  )

  def loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(logits, tf.float32)
    if not label_smoothing:
      return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    num_classes = logits.shape[-1]
    spread = label_smoothing / num_classes
    targets = tf.one_hot(labels, num_classes, 1.0 - label_smoothing + spread, spread)
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)

  return loss
