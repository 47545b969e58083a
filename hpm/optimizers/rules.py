"""Update rules: one fused TensorFlow op a variable.

A rule names its slots (the state that it keeps beside each parameter), computes its scalars once a
step on one device, and applies itself wherever a manager has placed a parameter. It creates no
variable and knows no device. Updates lock their variables, for where several processes apply theirs
at the same time.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import ClassVar, Protocol

import tensorflow as tf

__all__ = ['SGD', 'Adam', 'Momentum', 'Optimizer', 'RMSProp', 'Schedule', 'nesterov']

Schedule = Callable[[tf.Tensor], tf.Tensor]
Scalars = Mapping[str, tf.Tensor]
Slots = Mapping[str, tf.Variable]


class Optimizer(Protocol):
  """What a variable manager needs of an update rule."""

  @property
  def slots(self) -> Mapping[str, float | None]:
    """Slot name -> the value that fills it at the start, None for the parameter's own.

    Each slot has its parameter's shape.
    """

  def scalars(self, step: tf.Tensor) -> dict[str, tf.Tensor]:
    """float32 scalars of this step, from the int64 number of finished steps."""

  def apply(
    self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars
  ) -> tf.Operation:
    """The op that updates one float32 variable and its slots; `scalars` lie on its device."""


def learning_rate_at(learning_rate: float | Schedule, step: tf.Tensor) -> tf.Tensor:
  if callable(learning_rate):
    return tf.cast(learning_rate(step), tf.float32)
  return tf.constant(learning_rate, tf.float32)


@dataclasses.dataclass(frozen=True)
class SGD:
  """Plain descent: w -= lr * g."""

  learning_rate: float | Schedule
  slots: ClassVar[Mapping[str, float]] = {}

  def scalars(self, step):
    return {'learning_rate': learning_rate_at(self.learning_rate, step)}

  def apply(self, variable, slots, gradient, scalars):
    return tf.raw_ops.ResourceApplyGradientDescent(
      var=variable.handle,
      alpha=scalars['learning_rate'],
      delta=gradient,
      use_locking=True,
    )


@dataclasses.dataclass(frozen=True)
class Momentum:
  """a = momentum * a + g; w -= lr * a, or with Nesterov: w -= lr * (g + momentum * a)

  The look-ahead form is that of Sutskever et al. 2013 (ICML), as TensorFlow rewrites it in terms of
  the parameters after the step.
  """

  learning_rate: float | Schedule
  momentum: float = 0.9
  nesterov: bool = False
  slots: ClassVar[Mapping[str, float]] = {'momentum': 0.0}

  def scalars(self, step):
    return {
      'learning_rate': learning_rate_at(self.learning_rate, step),
      'momentum': tf.constant(self.momentum, tf.float32),
    }

  def apply(self, variable, slots, gradient, scalars):
    return tf.raw_ops.ResourceApplyMomentum(
      var=variable.handle,
      accum=slots['momentum'].handle,
      lr=scalars['learning_rate'],
      grad=gradient,
      momentum=scalars['momentum'],
      use_nesterov=self.nesterov,
      use_locking=True,
    )


@dataclasses.dataclass(frozen=True)
class RMSProp:
  """r = decay * r + (1 - decay) * g^2; a = momentum * a + lr * g / sqrt(r + epsilon); w -= a.

  Defaults are tf_cnn_benchmarks' (decay 0.9, momentum 0.9, epsilon 1.0 under the root); r starts at
  one, as in TensorFlow 1.
  """

  learning_rate: float | Schedule
  decay: float = 0.9
  momentum: float = 0.9
  epsilon: float = 1.0
  slots: ClassVar[Mapping[str, float]] = {'rms': 1.0, 'momentum': 0.0}

  def scalars(self, step):
    return {
      'learning_rate': learning_rate_at(self.learning_rate, step),
      'decay': tf.constant(self.decay, tf.float32),
      'momentum': tf.constant(self.momentum, tf.float32),
      'epsilon': tf.constant(self.epsilon, tf.float32),
    }

  def apply(self, variable, slots, gradient, scalars):
    return tf.raw_ops.ResourceApplyRMSProp(
      var=variable.handle,
      ms=slots['rms'].handle,
      mom=slots['momentum'].handle,
      lr=scalars['learning_rate'],
      rho=scalars['decay'],
      momentum=scalars['momentum'],
      epsilon=scalars['epsilon'],
      grad=gradient,
      use_locking=True,
    )


@dataclasses.dataclass(frozen=True)
class Adam:
  """Kingma & Ba 2015 (arXiv:1412.6980), algorithm 1 in the form of the remark at its section 2."""

  learning_rate: float | Schedule
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  slots: ClassVar[Mapping[str, float]] = {'m': 0.0, 'v': 0.0}

  def scalars(self, step):
    number = tf.cast(step, tf.float32) + 1.0
    beta1 = tf.constant(self.beta1, tf.float32)
    beta2 = tf.constant(self.beta2, tf.float32)
    # The op would form 1 - beta ** number, which in float32 leaves five digits at the start: it
    # gets the rate corrected already, and powers of 0.
    correction1, correction2 = (-tf.math.expm1(number * tf.math.log(b)) for b in (beta1, beta2))
    rate = learning_rate_at(self.learning_rate, step)
    return {
      'learning_rate': rate * tf.sqrt(correction2) / correction1,
      'beta1': beta1,
      'beta2': beta2,
      'power': tf.constant(0.0),
      'epsilon': tf.constant(self.epsilon, tf.float32),
    }

  def apply(self, variable, slots, gradient, scalars):
    return tf.raw_ops.ResourceApplyAdam(
      var=variable.handle,
      m=slots['m'].handle,
      v=slots['v'].handle,
      beta1_power=scalars['power'],
      beta2_power=scalars['power'],
      lr=scalars['learning_rate'],
      beta1=scalars['beta1'],
      beta2=scalars['beta2'],
      epsilon=scalars['epsilon'],
      grad=gradient,
      use_locking=True,
    )


def nesterov(learning_rate: float | Schedule, momentum: float = 0.9) -> Momentum:
  """Momentum with Nesterov's look-ahead."""
  return Momentum(learning_rate, momentum, nesterov=True)
