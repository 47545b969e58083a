"""Relaxed consistency: the gradients of one step are combined and applied during the next."""

import dataclasses

import tensorflow as tf

from hpm.errors import UsageError
from hpm.variable_mgr import sums
from hpm.variable_mgr.base import TowerResult, VariableManager

__all__ = ['Relaxed']

_PREFIX = 'carry/gradients/'
_SAMPLES = 'carry/num_samples'


class Relaxed(VariableManager):
  """Wraps a synchronous manager so that it updates by the gradients of the step before.

  Combining gradients then overlaps with the towers of the next step, which compute with variables
  that lack the newest gradient. Every device keeps its tower's own gradients, unscaled, so that a
  loss scale may change in between. At the start they are zeros, and the first step applies those.

  What is found out about gradients, such as that they overflowed, is found out a step late. State
  (batch norm's averages) is not delayed.

  In a checkpoint the gradients in flight are `carry/gradients/<name>`, summed over the towers, and
  `carry/num_samples`, how many samples they are of. They are restored on any number of devices; a
  checkpoint without them starts from zeros again.

  Args:
    inner: the manager.
  """

  def __init__(self, inner: VariableManager):
    if not inner.synchronous:
      raise UsageError(
        "variable_consistency 'relaxed': independent devices combine no gradients, so there is "
        'nothing to hide: leave it out'
      )
    super().__init__(inner.devices)
    self._inner = inner
    self.home = inner.home
    self.cross_replica = inner.cross_replica
    self._gradients: list[dict[str, tf.Variable]] = []
    self._num_samples_of: list[tf.Variable] = []

  @property
  def name(self):
    return f'{self._inner.name}, relaxed'

  def create(self, params, state, optimizer=None):
    self._inner.create(params, state, optimizer)
    self.copies = self._inner.copies
    if optimizer is None:
      return
    for i, device in enumerate(self.devices):
      with tf.device(self.home):
        zeros = {name: tf.zeros(value.shape) for name, value in params.items()}
        self._num_samples_of.append(tf.Variable(tf.zeros([], tf.int64), name='carry/num_samples'))
      with tf.device(device):
        self._gradients.append(
          {n: tf.Variable(zero, name=f'carry/gradients_{i}/{n}') for n, zero in zeros.items()}
        )

  def read(self, tower, training=True):
    return self._inner.read(tower, training)

  def update(self, towers, transform, optimizer, step):
    scale, transform = transform.unscaled()
    delayed: list[TowerResult] = []
    operations: list[tf.Operation] = []
    for i, (device, tower) in enumerate(zip(self.devices, towers, strict=True)):
      with tf.device(self.home):
        num_samples = self._swapped(self._num_samples_of[i], tower.num_samples, operations)
      gradients = {}
      with tf.device(device):
        unscale = None if isinstance(scale, float) and scale == 1.0 else tf.constant(1.0) / scale
        for name, variable in self._gradients[i].items():
          value = tower.gradients[name]
          value = value if unscale is None else value * unscale
          gradients[name] = self._swapped(variable, value, operations)
      delayed.append(dataclasses.replace(tower, gradients=gradients, num_samples=num_samples))
    update = self._inner.update(delayed, transform, optimizer, step)
    return update._replace(operations=[*update.operations, *operations])

  def copy_of(self, tower):
    return self._inner.copy_of(tower)

  def named_variables(self):
    named = self._inner.named_variables()
    if self._gradients:
      named |= {_PREFIX + name: v for name, v in self._gradients[0].items()}
      named[_SAMPLES] = self._num_samples_of[0]
    return named

  def snapshot(self):
    values = self._inner.snapshot()
    if self._gradients:
      for name in self._gradients[0]:
        parts = [self._value(gradients[name]) for gradients in self._gradients]
        with tf.device(self.home):
          values[_PREFIX + name] = sums.in_order(parts)
      parts = [self._value(variable) for variable in self._num_samples_of]
      with tf.device(self.home):
        values[_SAMPLES] = tf.add_n(parts)
    return values

  def restore(self, values):
    operations = list(self._inner.restore(values))
    for i, gradients in enumerate(self._gradients):  # the sum to one tower, nought to all others
      named = {_PREFIX + name: variable for name, variable in gradients.items()}
      named[_SAMPLES] = self._num_samples_of[i]
      for name, variable in named.items():
        with tf.device(self.home):
          value = (
            values[name] if name in values and i == 0 else tf.zeros(variable.shape, variable.dtype)
          )
        operations.append(self._assign(variable, value))
    return operations

  @property
  def variables(self):
    own = [v for gradients in self._gradients for v in gradients.values()]
    return [*self._inner.variables, *own, *self._num_samples_of]

  def _swapped(
    self, variable: tf.Variable, value: tf.Tensor, operations: list[tf.Operation]
  ) -> tf.Tensor:
    """What the variable held; `value` takes its place."""
    before = self._value(variable)
    with tf.control_dependencies([before]):
      operations.append(self._assign(variable, value))
    return before
