"""replicated: one copy a device, kept equal by an all-reduce of the gradients."""

from collections.abc import Sequence

from hpm import variable_mgr
from hpm.errors import UsageError
from hpm.variable_mgr.allreduce import AllReduce, HalfTransfer
from hpm.variable_mgr.base import Update, VariableManager

__all__ = ['Replicated']


class Replicated(VariableManager):
  """Each device reads its own copy and applies the same update to it.

  Args:
    devices: one device string a tower.
    all_reduce_spec: name of an all-reduce, or one that is built already.
    local_parameter_device: where 'copy' sums: 'spread' over the devices, or on the 'cpu'.
    transfer_dtype: 'float16' or 'bfloat16' to halve what gradients move; None keeps float32.
  """

  def __init__(
    self,
    devices: Sequence[str],
    all_reduce_spec: str | AllReduce = 'copy',
    local_parameter_device: str = 'spread',
    transfer_dtype: str | None = None,
  ):
    super().__init__(devices)
    if local_parameter_device not in ('cpu', 'spread'):
      raise UsageError(f'local_parameter_device {local_parameter_device!r}: use cpu or spread')
    if isinstance(all_reduce_spec, str):
      options = {'sum_on': local_parameter_device} if all_reduce_spec == 'copy' else {}
      all_reduce_spec = variable_mgr.all_reduce(all_reduce_spec, devices, **options)
    self._reduce_state = all_reduce_spec
    self._reduce_gradients = all_reduce_spec
    if transfer_dtype is not None:
      self._reduce_gradients = HalfTransfer(all_reduce_spec, devices, transfer_dtype)

  @property
  def variables(self):
    return super().variables + self._reduce_gradients.variables

  def update(self, towers, transform, optimizer, step):
    # In the order in which backprop produces them, the last layer's first.
    names = list(reversed(towers[0].gradients))
    sums = self._reduce_gradients([[tower.gradients[n] for n in names] for tower in towers])
    gradients = [dict(zip(names, values, strict=True)) for values in sums]
    packed = self._reduce_state(self._pack_state(towers))
    first, samples = self.copies[0], self._num_samples(towers)
    scalars = self._scalars(gradients[0], first, samples, transform, optimizer, step, self.devices)
    barriers = self._barriers()
    operations = []
    for i, copy in enumerate(self.copies):
      state = self._mean_state(towers, packed[i], self.devices[i])
      operations += self._apply(copy, gradients[i], state, transform, optimizer, scalars, barriers)
    return Update(operations, scalars.finite)
