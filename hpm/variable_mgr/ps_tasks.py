"""parameter_server over processes: the variables lie on tasks of their own, workers compute.

For the session runtime (`hpm.cluster`): each worker builds a graph of its own, in which variables,
accumulators and queues on parameter servers are shared with the others by their names.
"""

from collections.abc import Mapping, Sequence
import functools
import math
import weakref

import tensorflow as tf

from hpm.devices import CPU
from hpm.errors import UsageError
from hpm.optimizers.rules import Optimizer
from hpm.variable_mgr import sums
from hpm.variable_mgr.allreduce import half
from hpm.variable_mgr.base import Copy, TowerResult, Update, VariableManager
from hpm.variable_mgr.parameter_server import balance
from hpm.variable_mgr.rendezvous import Accumulator, Rendezvous
from hpm.variable_mgr.transform import Transform

__all__ = ['ParameterServerTasks']

Tensors = Mapping[str, tf.Tensor]

_STATE = ''  # no parameter's name; one device holds all state, which travels as one tensor


class ParameterServerTasks(VariableManager):
  """One copy of each variable, on the parameter servers; the optimizer runs there.

  A worker reads each variable once a step, for all its devices, and gives each gradient once,
  summed over its devices. Synchronous workers give to accumulators. The chief takes the sums when
  all have given, updates once, and then tells all to go on. What is divided are sums over samples,
  so workers with few samples or none are exact.

  Asynchronous workers each apply the mean over their own samples, when they have it, and wait for
  nobody.

  Args:
    devices, batch_norm_statistics: as for `VariableManager`; 'mean' and 'first' alone.
    ps_devices: the CPU of each parameter server.
    worker, num_workers: which of how many workers this is; 0 is the chief.
    cross_replica_sync: whether workers update together.
    transfer_dtype: 'float16' or 'bfloat16', in which gradients travel; sums are float32.
  """

  def __init__(
    self,
    devices: Sequence[str],
    *,
    ps_devices: Sequence[str],
    worker: int,
    num_workers: int,
    cross_replica_sync: bool = True,
    transfer_dtype: str | None = None,
    batch_norm_statistics: str | None = None,
  ):
    if batch_norm_statistics == 'cross_replica':
      raise UsageError(
        "batch_norm_statistics 'cross_replica' needs collectives, which parameter servers don't "
        "have: use 'mean' or 'first', or another manager"
      )
    super().__init__(devices, batch_norm_statistics)
    self.worker, self.num_workers = worker, num_workers
    self.synchronous = cross_replica_sync
    if not cross_replica_sync:
      self.home = ps_devices[0]  # whoever ends a step counts it there
    self._ps_devices = tuple(ps_devices)
    self._wire = None if transfer_dtype is None else half(transfer_dtype)
    self._state_place = ''
    # Graph -> name of what was read on a parameter server -> this worker's copy.
    self._cached: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    self._rendezvous = Rendezvous('step', ps_devices[0], worker, num_workers)

  def create(self, params, state, optimizer=None):
    if not self.synchronous and not getattr(optimizer, 'atomic', True):
      raise UsageError(
        f"{optimizer}: its updates read and write in several ops, and would lose other workers' "
        'without cross_replica_sync: use a rule of hpm.optimizers.create'
      )
    super().create(params, state, optimizer)

  def update(self, towers, transform, optimizer, step):
    barriers = self._barriers()
    given = self._given(towers, barriers)
    if not self.synchronous:
      return self._update_alone(given, towers, transform, optimizer, step, barriers)
    return self._update_together(given, towers, transform, optimizer, step, barriers)

  def pull(self, after: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Brings what this worker keeps of the variables up to date, when these have run."""
    del after
    return []  # nothing is kept here

  def _update_alone(
    self,
    given: Tensors,
    towers: Sequence[TowerResult],
    transform: Transform,
    optimizer: Optimizer,
    step: tf.Tensor,
    barriers: Mapping[str, tf.Operation],
  ) -> Update:
    (copy, *_), samples = self.copies, self._num_samples(towers)
    scalars = self._scalars(given, copy, samples, transform, optimizer, step, self._ps_devices)
    if scalars.finite is not None:
      raise UsageError(
        'a dynamic loss scale: asynchronous workers have no common gradient to decide on: '
        'use a constant one, or cross_replica_sync'
      )
    (state,) = self._new_states(towers, [self._state_place], self._summed_here)
    return Update(self._apply(copy, given, state, transform, optimizer, scalars, barriers), None)

  def _update_together(
    self,
    given: Tensors,
    towers: Sequence[TowerResult],
    transform: Transform,
    optimizer: Optimizer,
    step: tf.Tensor,
    barriers: Mapping[str, tf.Operation],
  ) -> Update:
    chief, (copy, *_) = self.worker == 0, self.copies
    operations = list(barriers.values())
    taken = {}
    for name, value in given.items():
      accumulator = self._accumulator(f'gradient/{name}', copy.places[name], value)
      operations.append(accumulator.give(value))
      if chief:
        taken[name] = accumulator.take()
    with tf.device(self.home):
      scalars = _totals(towers)
      scalars['gradients_of'] = self._num_samples(towers)  # relaxed gradients are of older samples
      said, totals = self._rendezvous.sums(scalars)
    operations.append(said)
    shared = functools.partial(self._summed_everywhere, operations)
    (state,) = self._new_states(towers, [self._state_place], shared)
    if chief:
      with tf.device(self.home):
        samples = tf.cast(totals['gradients_of'], tf.int64)
      of_step = self._scalars(taken, copy, samples, transform, optimizer, step, self._ps_devices)
      updates = self._apply(copy, taken, state, transform, optimizer, of_step, barriers)
      with tf.device(self._ps_devices[0]), tf.control_dependencies([tf.group(*updates)]):
        finite = tf.constant(True) if of_step.finite is None else tf.identity(of_step.finite)
        operations += self._rendezvous.tell({**totals, 'finite': finite})
    with tf.device(self.home), tf.control_dependencies([tf.group(*operations)]):
      told = dict(self._rendezvous.told([*scalars, 'finite']))
      finite = tf.cast(told['finite'], tf.bool)
    return Update([finite.op], finite, told)

  def _given(
    self, towers: Sequence[TowerResult], barriers: dict[str, tf.Operation]
  ) -> dict[str, tf.Tensor]:
    """Each gradient, summed over this worker's devices, on its parameter server.

    Nothing is given before everything has been read: what is given may be used for an update.
    """
    for place in self._ps_devices:
      if place not in barriers:
        with tf.device(place):
          barriers[place] = tf.no_op()
    given = {}
    for name, place in self._gradient_places():
      with tf.device(CPU):
        value = sums.in_order([tower.gradients[name] for tower in towers])
        if self._wire is not None:
          value = tf.cast(value, self._wire)
      with tf.device(place), tf.control_dependencies([barriers[place]]):
        given[name] = tf.identity(value) if self._wire is None else tf.cast(value, tf.float32)
    return given

  def _gradient_places(self) -> list[tuple[str, str]]:
    """Parameters and where they are updated, in the order in which backprop comes to them."""
    copy = self.copies[0]
    return [(name, copy.places[name]) for name in reversed(copy.params)]

  def _accumulator(self, name: str, place: str, value: tf.Tensor) -> Accumulator:
    return Accumulator(name, place, value.dtype, value.shape, self.num_workers)

  def _summed_here(self, packed: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
    with tf.device(CPU):
      return [[sums.in_order(values) for values in zip(*packed, strict=True)]]

  def _summed_everywhere(
    self, operations: list[tf.Operation], packed: list[list[tf.Tensor]]
  ) -> list[list[tf.Tensor]]:
    """The mean over workers of their devices' sums; for the chief, as others only give."""
    means = []
    for i, value in enumerate(self._summed_here(packed)[0]):
      accumulator = self._accumulator(f'state/{i}', self._state_place, value)
      operations.append(accumulator.give(value))
      if self.worker == 0:
        with tf.device(self._state_place):
          value = accumulator.take() * (1.0 / self.num_workers)
      means.append(value)
    return [means]

  def _read(self, variable: tf.Variable, place: str, device: str) -> tf.Tensor:
    if place not in self._ps_devices:
      return super()._read(variable, place, device)
    # One copy crosses, to this worker's CPU; its devices take theirs from there.
    value = super()._read(variable, place, place)
    here = self._cached.setdefault(tf.compat.v1.get_default_graph(), {})
    if value.name not in here:
      with tf.device(CPU):
        here[value.name] = tf.identity(value)
    if device == CPU:
      return here[value.name]
    with tf.device(device):
      return tf.identity(here[value.name])

  def _place(self, params, state):
    sizes = {n: math.prod(v.shape) * v.dtype.size for n, v in params.items()}
    of_state = sum(math.prod(v.shape) * v.dtype.size for v in state.values())
    places = balance({**sizes, _STATE: of_state}, self._ps_devices)
    self._state_place = places.pop(_STATE)
    return [Copy(params, state, {**places, **dict.fromkeys(state, self._state_place)})]


def _totals(towers: Sequence[TowerResult]) -> dict[str, tf.Tensor]:
  """Name -> float64 scalar, the sum of what this worker's towers report; on the current device."""
  totals: dict[str, list[tf.Tensor]] = {}
  for tower in towers:
    for name, value in tower.sums.items():
      totals.setdefault(name, []).append(tf.cast(value, tf.float64))
  return {name: sums.of_scalars(values) for name, values in totals.items()}
