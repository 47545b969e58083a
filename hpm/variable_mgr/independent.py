"""independent: one copy a device, nothing shared; the upper bound that other modes are held to."""

from collections.abc import Sequence

import tensorflow as tf

from hpm.errors import UsageError
from hpm.variable_mgr.base import Update, VariableManager

__all__ = ['Independent']


class Independent(VariableManager):
  """Every device trains its own model on its own samples.

  A snapshot's canonical values are those of device 0; the other copies stand beside them as
  `replica/<i>/...`, which other modes drop.
  """

  synchronous = False

  def __init__(self, devices: Sequence[str], batch_norm_statistics: str | None = None):
    super().__init__(devices)
    if batch_norm_statistics is not None:
      raise UsageError(
        f'batch_norm_statistics {batch_norm_statistics!r}: independent devices keep their own '
        'statistics: leave it out, or use another manager'
      )

  def read(self, tower, training=True):
    del training
    return self._read_own(tower)

  def update(self, towers, transform, optimizer, step):
    barriers = self._barriers()
    gradients = [tower.gradients for tower in towers]
    states = [tower.state for tower in towers]
    scalars = [
      self._scalars(tower.gradients, copy, tower.num_samples, transform, optimizer, step, [device])
      for device, copy, tower in zip(self.devices, self.copies, towers, strict=True)
    ]
    operations = self._apply_to_each(gradients, states, transform, optimizer, scalars, barriers)
    finite = [of_copy.finite for of_copy in scalars]
    if finite[0] is None:
      return Update(operations, None)
    with tf.device(self.home):
      return Update(operations, tf.reduce_all(finite))

  def named_variables(self):
    named = super().named_variables()
    for i, copy in enumerate(self.copies[1:], 1):
      named |= {f'replica/{i}/{name}': variable for name, variable in copy.items()}
    return named

  def restore(self, values):
    return [
      self._assign(variable, values.get(f'replica/{i}/{name}', values[name]))
      for i, copy in enumerate(self.copies)
      for name, variable in copy.items()
    ]
