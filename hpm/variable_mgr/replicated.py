"""replicated: one copy a device, kept equal by an all-reduce of the gradients."""

from collections.abc import Sequence
from typing import Any

from hpm import variable_mgr
from hpm.variable_mgr.allreduce import AllReduce, HalfTransfer, check_place
from hpm.variable_mgr.base import Update, VariableManager
from hpm.variable_mgr.packing import Aggregated, Buckets, Repacked
from hpm.variable_mgr.topology import Links

__all__ = ['Replicated']


class Replicated(VariableManager):
  """Each device reads its own copy and applies the same update to it.

  Args:
    devices, batch_norm_statistics: as for `VariableManager`.
    all_reduce_spec: see `hpm.variable_mgr.spec`; or an all-reduce that is built already.
    local_parameter_device: where 'copy' sums: 'spread' over the devices, on the 'cpu', or on one of
      the devices.
    network_topology: of 'hierarchical_copy': a name or a link matrix, see
      `hpm.variable_mgr.topology`.
    transfer_dtype: 'float16' or 'bfloat16' to halve what gradients move; None keeps float32. Sums
      are float32 in all all-reduces that are built of copies and sums.
    gradient_repacking: reduces the gradients as so many buckets of equal size; 0 leaves them. None
      also leaves them, but where the all-reduce asks for `buckets` (see `AllReduce`), as
      'collective' and 'nccl' do, whole ones go together up to an eighth of all bytes, unless small
      ones are packed.
    agg_small_grads_max_bytes: reduces runs of gradients up to this size as one; 0 leaves them.
    agg_small_grads_max_group: the most gradients in such a run.
  """

  def __init__(
    self,
    devices: Sequence[str],
    all_reduce_spec: str | AllReduce = 'copy',
    local_parameter_device: str = 'spread',
    network_topology: str | Links | None = None,
    transfer_dtype: str | None = None,
    gradient_repacking: int | None = None,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
    batch_norm_statistics: str | None = None,
  ):
    super().__init__(devices, batch_norm_statistics)
    place = local_parameter_device
    check_place('local_parameter_device', place, self.devices)
    gradients: AllReduce
    state: AllReduce
    if isinstance(all_reduce_spec, str):
      options: dict[str, Any] = {}
      if place != 'spread':
        options['sum_on'] = place
      if network_topology is not None:
        options['network_topology'] = network_topology
      gradients = state = variable_mgr.all_reduce(all_reduce_spec, devices, **options)
      if transfer_dtype is not None:
        options['transfer_dtype'] = transfer_dtype
        gradients = variable_mgr.all_reduce(all_reduce_spec, devices, **options)
    else:
      gradients = state = all_reduce_spec
      if transfer_dtype is not None:
        gradients = HalfTransfer(all_reduce_spec, devices, transfer_dtype)
    buckets: int = getattr(gradients, 'buckets', 0)
    if agg_small_grads_max_bytes:
      gradients = Aggregated(
        gradients, devices, agg_small_grads_max_bytes, agg_small_grads_max_group
      )
    elif gradient_repacking is None and buckets:
      gradients = Buckets(gradients, devices, buckets)
    if gradient_repacking:
      gradients = Repacked(gradients, devices, gradient_repacking)
    self._reduce_gradients = gradients
    self._reduce_state = state

  @property
  def variables(self):
    tokens = {v.ref(): v for r in (self._reduce_gradients, self._reduce_state) for v in r.variables}
    return [*super().variables, *tokens.values()]

  def read(self, tower, training=True):
    del training
    return self._read_own(tower)

  def update(self, towers, transform, optimizer, step):
    # In the order in which backprop produces them, the last layer's first.
    names = list(reversed(towers[0].gradients))
    sums = self._reduce_gradients([[tower.gradients[n] for n in names] for tower in towers])
    gradients = [dict(zip(names, values, strict=True)) for values in sums]
    first, samples = self.copies[0], self._num_samples(towers)
    scalars = self._scalars(gradients[0], first, samples, transform, optimizer, step, self.devices)
    states = self._new_states(towers, self.devices, self._reduce_state)
    barriers = self._barriers()
    of_each = [scalars] * len(self.copies)
    operations = self._apply_to_each(gradients, states, transform, optimizer, of_each, barriers)
    return Update(operations, scalars.finite)
