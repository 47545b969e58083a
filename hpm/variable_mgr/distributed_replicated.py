"""distributed_replicated: parameter servers hold the variables, every device a copy of them."""

import tensorflow as tf

from hpm.devices import CPU
from hpm.variable_mgr.base import Copy, Update
from hpm.variable_mgr.ps_tasks import ParameterServerTasks

__all__ = ['DistributedReplicated']


class DistributedReplicated(ParameterServerTasks):
  """Towers compute with copies on their own devices; the parameter servers update.

  As in `ParameterServerTasks` a worker gives the sum over its devices, and the chief updates once.
  When that is done each worker fetches every variable once, and puts it on all its devices. So a
  step begins without waiting for variables. Slots are on the parameter servers alone.

  Args: as for `ParameterServerTasks`, without `cross_replica_sync`: copies that are updated apart
  from one another would be different models.
  """

  def __init__(self, devices, **options):
    super().__init__(devices, **options)
    self._local: list[Copy] = []

  def create(self, params, state, optimizer=None):
    super().create(params, state, optimizer)
    names = [*params, *state]
    self._local = [
      Copy(params, state, dict.fromkeys(names, device), scope=f'local_{i}/')
      for i, device in enumerate(self.devices)
    ]

  def copy_of(self, tower):
    return self._local[tower]

  def update(self, towers, transform, optimizer, step):
    update = super().update(towers, transform, optimizer, step)
    pulled = self.pull(update.operations)
    return Update(pulled, update.finite, update.totals)

  def pull(self, after):
    (copy,) = self.copies
    waits = {}
    for place in dict.fromkeys(copy.places.values()):
      with tf.device(place), tf.control_dependencies(after):
        waits[place] = tf.no_op()
    operations = []
    for kind in ('params', 'state'):
      for name, variable in getattr(copy, kind).items():
        with tf.control_dependencies([waits[copy.places[name]]]):
          value = self._value(variable)
        with tf.device(CPU):
          value = tf.identity(value)
        operations += [self._assign(getattr(local, kind)[name], value) for local in self._local]
    return operations

  def restore(self, values):
    restored = super().restore(values)
    return [*restored, *self.pull(restored)]

  @property
  def variables(self):
    local = [variable for copy in self._local for _, variable in copy.items()]
    return [*super().variables, *local]
