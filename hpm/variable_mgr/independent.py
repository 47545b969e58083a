"""independent: one copy a device, nothing shared; the upper bound that other modes are held to."""

from hpm.variable_mgr.base import VariableManager

__all__ = ['Independent']


class Independent(VariableManager):
  """Every device trains its own model on its own samples.

  A snapshot's canonical values are those of device 0; the other copies stand beside them as
  `replica/<i>/...`, which other modes drop.
  """

  def update(self, towers, transform, optimizer, step):
    barriers = self._barriers()
    updates = []
    for device, copy, tower in zip(self.devices, self.copies, towers, strict=True):
      scalars = self._scalars(
        tower.gradients, tower.num_samples, transform, optimizer, step, [device]
      )
      updates += self._apply(
        copy, tower.gradients, tower.state, transform, optimizer, scalars, barriers
      )
    return updates

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
