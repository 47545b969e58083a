"""parameter_server: one copy of each variable; gradients come to it, and it is updated once."""

from collections.abc import Mapping, Sequence
import math

import tensorflow as tf

from hpm.devices import CPU
from hpm.errors import UsageError
from hpm.variable_mgr.base import Copy, Update, VariableManager

__all__ = ['ParameterServer', 'balance']


def balance(sizes: Mapping[str, int], devices: Sequence[str]) -> dict[str, str]:
  """Name -> device: largest first, each to the device that holds least so far.

  Ties go to the earlier device and the earlier name, so that every process finds the same answer.
  """
  load = dict.fromkeys(devices, 0)
  places = {}
  for name in sorted(sizes, key=lambda name: -sizes[name]):
    place = min(devices, key=load.__getitem__)
    places[name] = place
    load[place] += sizes[name]
  return places


class ParameterServer(VariableManager):
  """Variables on the CPU, or spread over the compute devices by size.

  Args:
    devices: one device string a tower.
    local_parameter_device: 'cpu' keeps all variables on the host's CPU; 'spread' puts each on one
      of the compute devices.
  """

  def __init__(self, devices: Sequence[str], local_parameter_device: str = 'cpu'):
    super().__init__(devices)
    if local_parameter_device not in ('cpu', 'spread'):
      raise UsageError(f'local_parameter_device {local_parameter_device!r}: use cpu or spread')
    self._spread = local_parameter_device == 'spread'

  def _place(self, params, state):
    values = {**params, **state}
    if self._spread:
      sizes = {n: math.prod(v.shape) * v.dtype.size for n, v in values.items()}
      places = balance(sizes, self.devices)
    else:
      places = dict.fromkeys(values, CPU)
    return [Copy(params, state, places)]

  def update(self, towers, transform, optimizer, step):
    (copy,) = self.copies
    gradients = {}
    for name in copy.params:
      with tf.device(copy.places[name]):
        gradients[name] = tf.add_n([tower.gradients[name] for tower in towers])
    places = copy.places.values()
    samples = self._num_samples(towers)
    scalars = self._scalars(gradients, copy, samples, transform, optimizer, step, places)
    home = self.devices[0] if self._spread else CPU
    with tf.device(home):
      sums = [tf.add_n(values) for values in zip(*self._pack_state(towers), strict=True)]
    state = self._mean_state(towers, sums, home)
    barriers = self._barriers()
    operations = self._apply(copy, gradients, state, transform, optimizer, scalars, barriers)
    return Update(operations, scalars.finite)
