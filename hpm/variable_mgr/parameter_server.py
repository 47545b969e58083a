"""parameter_server: one copy of each variable; gradients come to it, and it is updated once."""

from collections.abc import Mapping, Sequence
import math

import tensorflow as tf

from hpm.devices import CPU
from hpm.variable_mgr import sums
from hpm.variable_mgr.allreduce import check_place
from hpm.variable_mgr.base import Copy, Update, VariableManager
from hpm.variable_mgr.staged import StagedVariables

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
  """Variables on the CPU, on one compute device, or spread over all of them by size.

  Args:
    devices, batch_norm_statistics: as for `VariableManager`.
    local_parameter_device: 'cpu' keeps all variables on the host's CPU; 'spread' puts each on one
      of the compute devices; one of `devices` keeps all there.
    staged_vars: towers compute with the variables that the previous step fetched, so they needn't
      wait for copies; these are older by exactly one update. State isn't staged.
  """

  def __init__(
    self,
    devices: Sequence[str],
    local_parameter_device: str = 'cpu',
    staged_vars: bool = False,
    batch_norm_statistics: str | None = None,
  ):
    super().__init__(devices, batch_norm_statistics)
    place = local_parameter_device
    check_place('local_parameter_device', place, self.devices)
    self._spread = place == 'spread'
    self._place_of_all = {'cpu': CPU, 'spread': self.devices[0]}.get(place, place)
    self._staged = StagedVariables(self.devices) if staged_vars else None

  def create(self, params, state, optimizer=None):
    super().create(params, state, optimizer)
    if self._staged and optimizer:
      self._staged.create(params)

  def read(self, tower, training=True):
    params, state = super().read(tower)
    if self._staged and training:
      device = self.devices[tower]
      params = {n: self._read(v, device, device) for n, v in self._staged.of(tower).items()}
    return params, state

  def update(self, towers, transform, optimizer, step):
    (copy,) = self.copies
    gradients = {}
    for name in copy.params:
      with tf.device(copy.places[name]):
        gradients[name] = sums.in_order([tower.gradients[name] for tower in towers])
    places = copy.places.values()
    samples = self._num_samples(towers)
    scalars = self._scalars(gradients, copy, samples, transform, optimizer, step, places)
    home = self._place_of_all

    def reduce(packed):
      with tf.device(home):
        return [[sums.in_order(values) for values in zip(*packed, strict=True)]]

    (state,) = self._new_states(towers, [home], reduce)
    # What towers have read anyway, before the update; for the next step if variables are staged.
    fetched = self._fetched() if self._staged else []
    barriers = self._barriers()
    operations = self._apply(copy, gradients, state, transform, optimizer, scalars, barriers)
    if self._staged:
      operations += self._staged.store(fetched, barriers)
    return Update(operations, scalars.finite)

  def _fetched(self) -> list[dict[str, tf.Tensor]]:
    """The current parameters on each tower's device."""
    return [super(ParameterServer, self).read(tower)[0] for tower in range(len(self.devices))]

  def named_variables(self):
    return {**super().named_variables(), **(self._staged.named_variables() if self._staged else {})}

  def restore(self, values):
    operations = super().restore(values)
    return operations + (self._staged.restore(values) if self._staged else [])

  @property
  def variables(self):
    return super().variables + (self._staged.variables if self._staged else [])

  def _place(self, params, state):
    values = {**params, **state}
    if self._spread:
      sizes = {n: math.prod(v.shape) * v.dtype.size for n, v in values.items()}
      places = balance(sizes, self.devices)
    else:
      places = dict.fromkeys(values, self._place_of_all)
    return [Copy(params, state, places)]
