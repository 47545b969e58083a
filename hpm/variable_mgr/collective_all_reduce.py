"""collective_all_reduce: a copy on every device of every process, kept equal by collectives."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from hpm.errors import UsageError
from hpm.variable_mgr import sums
from hpm.variable_mgr.allreduce import Lists, half
from hpm.variable_mgr.base import TowerResult
from hpm.variable_mgr.collective import Group, next_key, tokens_of
from hpm.variable_mgr.replicated import Replicated

__all__ = ['AcrossWorkers', 'CollectiveAllReduce']

Tensors = Mapping[str, tf.Tensor]


class AcrossWorkers:
  """Sums over the devices of all workers: first over a worker's own, then over workers.

  Each tensor is summed on one of the worker's devices, in turn. That device gives the sum to one
  collective with the same device of all other workers, and the result is copied to the rest. So
  each tensor crosses the network once, however many devices there are.

  Args:
    devices: this worker's.
    num_workers: how many there are, with as many devices each.
    transfer_dtype: 'float16' or 'bfloat16', in which float32 values cross between workers, and are
      summed on the way; None for their own.
    hint: TensorFlow's communication hint.
  """

  # So that the first is on its way while backprop goes on, and none is too small for a network.
  buckets = 8

  def __init__(
    self,
    devices: Sequence[str],
    num_workers: int,
    transfer_dtype: str | None = None,
    hint: str = 'auto',
  ):
    self._devices = tuple(devices)
    self._wire = None if transfer_dtype is None else half(transfer_dtype)
    self._groups = [Group(num_workers, hint) for _ in devices]
    self.num_workers = num_workers
    self.variables: list[tf.Variable] = []

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    results: list[list[tf.Tensor]] = [[] for _ in self._devices]
    for index, values in enumerate(zip(*tensors, strict=True)):
      number = index % len(self._devices)
      with tf.device(self._devices[number]):
        value = self._everywhere(sums.in_order(values), number)
      for result, device in zip(results, self._devices, strict=True):
        if device == self._devices[number]:
          result.append(value)
        else:
          with tf.device(device):
            result.append(tf.identity(value))
    return results

  def one(self, value: tf.Tensor) -> tf.Tensor:
    """The sum of a value of each worker, on the first device; exact for integers."""
    with tf.device(self._devices[0]):
      return self._across(tf.identity(value), 0)

  def _everywhere(self, value: tf.Tensor, number: int) -> tf.Tensor:
    if self._wire is None or value.dtype != tf.float32:
      return self._across(value, number)
    return tf.cast(self._across(tf.cast(value, self._wire), number), tf.float32)

  def _across(self, value: tf.Tensor, number: int) -> tf.Tensor:
    if self.num_workers == 1:
      return value
    if not self.variables:
      self.variables = tokens_of(self._devices)
    device, token = self._devices[number], self.variables[number]
    return self._groups[number].reduce(value, next_key(), token.handle, device)


class CollectiveAllReduce(Replicated):
  """`Replicated` over processes: every device of every worker applies the same update.

  Args:
    devices, batch_norm_statistics: as for `VariableManager`; 'mean' alone.
    worker, num_workers: which of how many workers this is.
    transfer_dtype: as for `AcrossWorkers`, for gradients.
    gradient_repacking, agg_small_grads_max_bytes, agg_small_grads_max_group: as for `Replicated`;
      by default whole gradients go together up to an eighth of all bytes.
    hint: TensorFlow's communication hint.
  """

  def __init__(
    self,
    devices: Sequence[str],
    *,
    worker: int,
    num_workers: int,
    transfer_dtype: str | None = None,
    gradient_repacking: int | None = None,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
    batch_norm_statistics: str | None = None,
    hint: str = 'auto',
  ):
    if batch_norm_statistics not in (None, 'mean'):
      raise UsageError(
        f'batch_norm_statistics {batch_norm_statistics!r} is for the devices of one process: '
        "use 'mean', which is that over all workers"
      )
    super().__init__(
      devices,
      all_reduce_spec=AcrossWorkers(devices, num_workers, transfer_dtype, hint),
      gradient_repacking=gradient_repacking,
      agg_small_grads_max_bytes=agg_small_grads_max_bytes,
      agg_small_grads_max_group=agg_small_grads_max_group,
      batch_norm_statistics=batch_norm_statistics,
    )
    self.worker, self.num_workers = worker, num_workers
    # State and scalars cross as they are.
    self._across = self._reduce_state = AcrossWorkers(devices, num_workers, hint=hint)
    self._totals: Tensors = {}

  @property
  def variables(self):
    return [*super().variables, *self._across.variables]

  def update(self, towers, transform, optimizer, step):
    update = super().update(towers, transform, optimizer, step)
    return update._replace(totals=self._totals)

  def broadcast(self, variables: Sequence[tf.Variable]) -> list[tf.Operation]:
    """Gives these variables the chief's values in all workers; graph-building."""
    operations = []
    for variable in variables:
      value = self._value(variable)
      if self.worker:  # the sum is then the chief's
        value = tf.zeros_like(value)
      operations.append(self._assign(variable, self._across.one(value)))
    return operations

  def _num_samples(self, towers: Sequence[TowerResult]) -> tf.Tensor:
    """Of all workers; what else is reported crosses with it, behind all gradients."""
    with tf.device(self.home):
      scalars = {'gradients_of': tf.cast(super()._num_samples(towers), tf.float64)}
      for tower in towers:
        for name, value in tower.sums.items():
          value = tf.cast(value, tf.float64)
          scalars[name] = scalars[name] + value if name in scalars else value
      vector = tf.stack(list(scalars.values()))
    total = self._across.one(vector)
    with tf.device(self.home):
      self._totals = dict(zip(scalars, tf.unstack(tf.identity(total)), strict=True))
      return tf.cast(self._totals['gradients_of'], tf.int64)

  def _new_states(self, towers, places, reduce):
    def mean_over_workers(packed):
      results = []
      for place, values in zip(places, reduce(packed), strict=True):
        with tf.device(place):
          results.append([value * (1.0 / self.num_workers) for value in values])
      return results

    return super()._new_states(towers, places, mean_over_workers)
