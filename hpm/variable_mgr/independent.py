"""independent: one copy a device, nothing shared; the upper bound that other modes are held to."""

import tensorflow as tf

from hpm.variable_mgr.base import Update, VariableManager

__all__ = ['Independent']


class Independent(VariableManager):
  """Every device trains its own model on its own samples.

  A snapshot's canonical values are those of device 0; the other copies stand beside them as
  `replica/<i>/...`, which other modes drop.
  """

  def update(self, towers, transform, optimizer, step):
    barriers = self._barriers()
    operations, finite = [], []
    for device, copy, tower in zip(self.devices, self.copies, towers, strict=True):
      scalars = self._scalars(
        tower.gradients, copy, tower.num_samples, transform, optimizer, step, [device]
      )
      finite.append(scalars.finite)
      operations += self._apply(
        copy, tower.gradients, tower.state, transform, optimizer, scalars, barriers
      )
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
