"""What every variable manager is, and what they share.

A manager sees devices, names, values and gradients; never the model, the data, the flags or the
driver. All of its graph-building works in a `tf.function` and in a `tf.Graph` run by a `Session`:
it relies on no automatic control dependency. What a tower has read is read before anything is
updated, because state-changing ops wait for a barrier, one a device, which waits for the reads
there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple
import weakref

import tensorflow as tf

from hpm import errors
from hpm.calls import Shared
from hpm.devices import CPU
from hpm.errors import UsageError
from hpm.optimizers.rules import Optimizer
from hpm.variable_mgr import packing
from hpm.variable_mgr.collective import CrossReplica
from hpm.variable_mgr.transform import Transform, total

__all__ = ['STATISTICS', 'Copy', 'TowerResult', 'Update', 'VariableManager']

STATISTICS = ('mean', 'first', 'cross_replica')

Tensors = Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class TowerResult:
  """What one tower hands to the manager.

  Attributes:
    gradients: parameter name -> float32 sum over the tower's samples, times a constant that is the
      same for all towers and that the transform takes out again.
    state: the new state, without what no step changes (frozen variables); the old one if the tower
      had no samples.
    num_samples: int64 scalar on the CPU.
    sums: name -> scalar, what the step reports: sums over the tower's samples, 'loss' among them,
      and 'num_samples'. For managers of several processes, see `Update.totals`.
  """

  gradients: Tensors
  state: Tensors
  num_samples: tf.Tensor
  sums: Tensors = dataclasses.field(default_factory=dict)


class Update(NamedTuple):
  """What `VariableManager.update` built.

  Attributes:
    operations: everything that changes state.
    finite: bool scalar at the manager's home, whether the variables were updated at all; None where
      the transform doesn't ask.
    totals: `TowerResult.sums` over the towers of all processes that train one model, float64
      scalars at home; None where there are no others.
  """

  operations: list[tf.Operation]
  finite: tf.Tensor | None
  totals: Tensors | None = None


class Copy:
  """One copy of all variables: parameters, state, and the optimizer's slots.

  Attributes:
    places: variable name -> device, for parameters and state.
    params, state: name -> variable.
    slots: slot name -> parameter name -> variable, on the parameter's device.
  """

  def __init__(self, params: Tensors, state: Tensors, places: Mapping[str, str], scope: str = ''):
    self.places = places
    self._scope = scope
    self.params = {name: self._variable(name, value, name) for name, value in params.items()}
    self.state = {name: self._variable(name, value, name) for name, value in state.items()}
    self.slots: dict[str, dict[str, tf.Variable]] = {}

  def add_slots(self, fills: Mapping[str, float | None], params: Tensors) -> None:
    """Slot name -> what it starts with: a number, or with None the values of `params`."""
    for slot, fill in fills.items():
      self.slots[slot] = {}
      for name, param in self.params.items():
        with tf.device(CPU):
          value = params[name] if fill is None else tf.fill(param.shape, fill)
        self.slots[slot][name] = self._variable(f'{slot}/{name}', value, name)

  def items(self) -> Iterable[tuple[str, tf.Variable]]:
    """(canonical name, variable), the names that checkpoints use."""
    for name, variable in self.params.items():
      yield f'params/{name}', variable
    for name, variable in self.state.items():
      yield f'state/{name}', variable
    for slot, variables in self.slots.items():
      for name, variable in variables.items():
        yield f'slots/{slot}/{name}', variable

  def _variable(self, name: str, value: tf.Tensor, placed_as: str) -> tf.Variable:
    with tf.device(self.places[placed_as]):
      return tf.Variable(value, name=self._scope + name)


class Scalars(NamedTuple):
  """What updates need beside gradients.

  Attributes:
    at: device -> the transform's and the optimizer's scalars, lying there.
    finite: see `Update`.
  """

  at: dict[str, tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]]
  finite: tf.Tensor | None


class VariableManager:
  """Base of all managers; see the module's docstring and DESIGN's contract.

  Life: `create` once; then, while a step's graph is built, `read(i)` for each tower and `update`
  with all towers' results.

  Args:
    devices: one device string a tower.
    batch_norm_statistics: what becomes of the state that towers return, batch norm's moving
      averages above all: 'mean' over towers (None is the same), that of the 'first' tower alone, or
      'cross_replica': batch norm uses the statistics of the global batch, so all towers return the
      same. That costs two collectives a layer.

  Attributes:
    devices: as given.
    home: where what exists once (counters, scalars, metrics) lives.
    copies: the copies of the variables; `copy_of(tower)` is the one that a tower computes with.
    cross_replica: sums over towers inside towers, for synchronised batch norm; None without it.
    synchronous: whether all towers train one model.
    worker, num_workers: which of how many processes that train one model this one is.
  """

  synchronous = True
  worker = 0
  num_workers = 1

  def __init__(self, devices: Sequence[str], batch_norm_statistics: str | None = None):
    if not devices:
      raise UsageError('a variable manager needs at least one device')
    self._statistics = batch_norm_statistics or 'mean'
    if self._statistics not in STATISTICS:
      raise errors.unknown('batch_norm_statistics', batch_norm_statistics, STATISTICS)
    self.devices = tuple(devices)
    self.home = CPU
    self.copies: list[Copy] = []
    synchronised = self._statistics == 'cross_replica'
    self.cross_replica = CrossReplica(self.devices) if synchronised else None
    # Keyed by graph: a manager may be built into several (the step, its staged twin, evaluation).
    self._reads: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    self._reading: Shared | None = None

  def create(self, params: Tensors, state: Tensors, optimizer: Optimizer | None = None) -> None:
    """Places the copies. Without an optimizer (evaluation) there are no slots."""
    if self.copies:
      raise UsageError('this variable manager has its variables already: make one for each model')
    self.copies = self._place(params, state)
    for copy in self.copies:
      copy.add_slots(optimizer.slots if optimizer else {}, params)

  @property
  def name(self) -> str:
    """What checkpoints call the mode that wrote them."""
    return type(self).__name__

  def read(
    self, tower: int, training: bool = True
  ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Parameters and state for one tower: read once where they live, then copied to its device.

    Evaluation, `training` False, gets the current values where training computes with older ones.
    """
    del training
    copy = self.copy_of(tower)
    device = self.devices[tower]
    params = {n: self._read(v, copy.places[n], device) for n, v in copy.params.items()}
    state = {n: self._read(v, copy.places[n], device) for n, v in copy.state.items()}
    return params, state

  def update(
    self,
    towers: Sequence[TowerResult],
    transform: Transform,
    optimizer: Optimizer,
    step: tf.Tensor,
  ) -> Update:
    """Aggregates the towers' results, transforms the gradients and applies them.

    Args:
      towers: one result a device.
      transform: from the aggregate to what is applied.
      optimizer: the rule that `create` was given.
      step: int64 scalar at home, the number of finished steps.
    """
    raise NotImplementedError

  def copy_of(self, tower: int) -> Copy:
    """The copy that a tower computes with."""
    return self.copies[min(tower, len(self.copies) - 1)]

  def named_variables(self) -> dict[str, tf.Variable]:
    """What a snapshot holds: canonical name -> the variable that stands for all its copies."""
    return dict(self.copies[0].items())

  def snapshot(self) -> dict[str, tf.Tensor]:
    """Canonical name -> value, the same for every manager. Graph-building outside eager mode."""
    return {name: self._value(variable) for name, variable in self.named_variables().items()}

  def restore(self, values: Tensors) -> list[tf.Operation]:
    """Sets all copies from a snapshot of any manager. Graph-building outside eager mode."""
    return [
      self._assign(variable, values[name])
      for copy in self.copies
      for name, variable in copy.items()
    ]

  @property
  def variables(self) -> list[tf.Variable]:
    """Every variable, for a session's initialisation."""
    tokens = self.cross_replica.variables if self.cross_replica else []
    return [*(variable for copy in self.copies for _, variable in copy.items()), *tokens]

  # For the managers' own use.

  def _place(self, params: Tensors, state: Tensors) -> list[Copy]:
    """One copy a device, on that device."""
    return [
      Copy(params, state, dict.fromkeys([*params, *state], device), scope=f'replica_{i}/')
      for i, device in enumerate(self.devices)
    ]

  def _read(self, variable: tf.Variable, place: str, device: str) -> tf.Tensor:
    reads = self._reads.setdefault(tf.compat.v1.get_default_graph(), {})
    if variable.ref() not in reads or tf.executing_eagerly():
      with tf.device(place):
        # The raw op: `read_value` would add an identity to each of them.
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        reads[variable.ref()] = (place, value)
    value = reads[variable.ref()][1]
    if place == device:
      return value
    with tf.device(device):
      return tf.identity(value)

  def _read_own(self, tower: int) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """`read` where each tower has a copy of its own on its device: by one call for each device."""
    copy, device = self.copy_of(tower), self.devices[tower]
    if tf.executing_eagerly():
      return (
        {name: self._read(variable, device, device) for name, variable in copy.params.items()},
        {name: self._read(variable, device, device) for name, variable in copy.state.items()},
      )
    variables = [*copy.params.values(), *copy.state.values()]
    handles = [variable.handle for variable in variables]
    if self._reading is None:
      self._reading = Shared(lambda: [_value(variable) for variable in variables], handles)
    with tf.device(device):
      read = self._reading(handles)
    self._reads.setdefault(tf.compat.v1.get_default_graph(), {})[read] = (device, read.outputs[0])
    values = dict(zip([*copy.params, *copy.state], read.outputs, strict=True))
    params = {name: values.pop(name) for name in copy.params}
    return params, values

  def _barriers(self) -> dict[str, tf.Operation]:
    """Device -> an op that runs when everything read there has been read."""
    reads: dict[str, list[tf.Tensor]] = {}
    for place, value in self._reads.pop(tf.compat.v1.get_default_graph(), {}).values():
      reads.setdefault(place, []).append(value)
    barriers = {}
    for place, values in reads.items():
      with tf.device(place), tf.control_dependencies(values):
        barriers[place] = tf.no_op()
    return barriers

  def _scalars(
    self,
    gradients: Tensors,
    copy: Copy,
    num_samples: tf.Tensor,
    transform: Transform,
    optimizer: Optimizer,
    step: tf.Tensor,
    places: Iterable[str],
  ) -> Scalars:
    """The transform's and the optimizer's scalars, computed at home and copied to each place.

    Args:
      gradients: the aggregate, each where `copy` has its parameter.
      copy: see `gradients`.
      num_samples: int64 scalar at home.
      transform, optimizer, step: as for `update`.
      places: devices.
    """
    statistics: dict[str, list[tf.Tensor | None]] = {}
    for name, gradient in gradients.items():
      place = copy.places[name]
      with tf.device(place):
        statistics.setdefault(place, []).append(transform.statistic(gradient))
    sums = []
    for place, values in statistics.items():  # so that each device sends one scalar home
      with tf.device(place):
        sums.append(total(values))
    with tf.device(self.home):
      of_transform = transform.scalars(total(sums), num_samples)
      of_optimizer = optimizer.scalars(step)
    finite = of_transform.pop('finite', None)
    copied = {}
    for place in dict.fromkeys(places):
      if place == self.home:
        copied[place] = (of_transform, of_optimizer)
      else:
        with tf.device(place):
          copied[place] = (_copied(of_transform), _copied(of_optimizer))
    return Scalars(copied, finite)

  def _apply(
    self,
    copy: Copy,
    gradients: Tensors,
    state: Tensors,
    transform: Transform,
    optimizer: Optimizer,
    scalars: Scalars,
    barriers: Mapping[str, tf.Operation],
  ) -> list[tf.Operation]:
    """Updates one copy, or leaves it as it is where the gradients are not finite."""
    here: dict[str, list[str]] = {}
    for name in [*copy.params, *state]:
      here.setdefault(copy.places[name], []).append(name)
    operations = []
    for place, names in here.items():
      own = _Own(copy, names, gradients, state, *scalars.at[place], scalars.finite)
      with tf.device(place), tf.control_dependencies([barriers[place]]):
        operations += own.update(transform, optimizer)
    return operations

  def _apply_to_each(
    self,
    gradients: Sequence[Tensors],
    states: Sequence[Tensors],
    transform: Transform,
    optimizer: Optimizer,
    scalars: Sequence[Scalars],
    barriers: Mapping[str, tf.Operation],
  ) -> list[tf.Operation]:
    """`_apply` for all copies, one on each device: traced once, and called on each.

    Args:
      gradients, states, scalars: for each copy, on its device.
      transform, optimizer: as for `update`.
      barriers: see `_barriers`.
    """
    names = [*self.copies[0].params, *states[0]]
    shared, calls = None, []
    for device, copy, gradient, state, scalar in zip(
      self.devices, self.copies, gradients, states, scalars, strict=True
    ):
      own = _Own(copy, names, gradient, state, *scalar.at[device], scalar.finite)
      if tf.executing_eagerly():
        with tf.device(device):
          calls += own.update(transform, optimizer)
        continue
      if shared is None:
        shared = Shared(functools.partial(own.update, transform, optimizer), own.tensors)
      with tf.device(device), tf.control_dependencies([barriers[device]]):
        calls.append(shared(own.tensors))
    return calls

  def _num_samples(self, towers: Sequence[TowerResult]) -> tf.Tensor:
    with tf.device(self.home):
      return tf.add_n([tower.num_samples for tower in towers])

  def _new_states(
    self,
    towers: Sequence[TowerResult],
    places: Sequence[str],
    reduce: Callable[[list[list[tf.Tensor]]], Sequence[Sequence[tf.Tensor]]],
  ) -> list[dict[str, tf.Tensor]]:
    """The state to store on each of `places`; of integers always the first tower's.

    Floating values cross packed: one tensor a tower.

    Args:
      towers: all towers' results.
      places: devices.
      reduce: from one list of tensors a tower to their sums, one list a place.
    """
    floating = {n: v.shape for n, v in towers[0].state.items() if v.dtype.is_floating}
    mean = self._statistics == 'mean'
    packed = []
    for tower, device in zip(towers if mean else towers[:1], self.devices):
      with tf.device(device):
        packed.append([packing.pack([tower.state[n] for n in floating])] if floating else [])
    sums = reduce(packed) if mean else packed * len(places)
    states = []
    for place, values in zip(places, sums, strict=True):
      state: dict[str, tf.Tensor] = {}
      with tf.device(place):
        if floating:
          value = values[0] * (1.0 / len(towers)) if mean else values[0]
          state = dict(zip(floating, packing.unpack(value, list(floating.values())), strict=True))
        for name, value in towers[0].state.items():
          if name not in floating:
            state[name] = tf.identity(value)
      states.append(state)
    return states

  def _value(self, variable: tf.Variable) -> tf.Tensor:
    with tf.device(variable.device):
      return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

  def _assign(self, variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    with tf.device(variable.device):
      return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _value(variable: tf.Variable) -> tf.Tensor:
  """On the current device. The raw op: `read_value` would add an identity."""
  return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


class _Own:
  """What the update of a copy's variables on one device is made of.

  Args:
    copy: of the variables.
    names: those on the device.
    gradients, state: by name, on the device.
    of_transform, of_optimizer: scalars, there as well.
    finite: whether there is to be an update; None if there always is.
  """

  def __init__(
    self,
    copy: Copy,
    names: Sequence[str],
    gradients: Tensors,
    state: Tensors,
    of_transform: Tensors,
    of_optimizer: Tensors,
    finite: tf.Tensor | None,
  ):
    self._params = {name: copy.params[name] for name in names if name in copy.params}
    self._slots = {
      name: {slot: variables[name] for slot, variables in copy.slots.items()}
      for name in self._params
    }
    self._state = {name: copy.state[name] for name in names if name not in copy.params}
    self._gradients = {name: gradients[name] for name in self._params}
    self._new_state = {name: state[name] for name in self._state}
    self._scalars = of_transform, of_optimizer
    self._finite = finite

  @property
  def tensors(self) -> list[tf.Tensor]:
    """All of them, variables by their handles."""
    variables = tf.nest.flatten([self._params, self._slots, self._state])
    tensors = tf.nest.flatten([self._gradients, self._new_state, self._scalars, self._finite])
    return [variable.handle for variable in variables] + [t for t in tensors if t is not None]

  def update(self, transform: Transform, optimizer: Optimizer) -> list[tf.Operation]:
    """Builds the update, on the current device."""
    if self._finite is None:
      return self._updates(transform, optimizer)

    def build() -> tf.Tensor:
      with tf.control_dependencies(self._updates(transform, optimizer)):
        return tf.constant(True)

    done = tf.cond(self._finite, build, lambda: tf.constant(False))
    return [done if tf.executing_eagerly() else done.op]

  def _updates(self, transform: Transform, optimizer: Optimizer) -> list[tf.Operation]:
    of_transform, of_optimizer = self._scalars
    applied = {
      name: transform.apply(
        name, self._gradients[name], functools.partial(_value, variable), of_transform
      )
      for name, variable in self._params.items()
    }
    # Nothing is updated before all gradients are here: the tower may still need a parameter for
    # another layer's gradient, and TensorFlow would then copy the parameter to update it. (An edge
    # from the tower's call itself would be lost when the call is inlined.)
    with tf.control_dependencies(list(applied.values())):
      ready = tf.no_op()
    with tf.control_dependencies([ready]):
      return [
        *(
          optimizer.apply(variable, self._slots[name], applied[name], of_optimizer)
          for name, variable in self._params.items()
        ),
        *(
          tf.raw_ops.AssignVariableOp(resource=variable.handle, value=self._new_state[name])
          for name, variable in self._state.items()
        ),
      ]


def _copied(scalars: Tensors) -> dict[str, tf.Tensor]:
  """On the current device. Constants are made there once more, so that nothing moves for them."""
  constants = {name: tf.get_static_value(value) for name, value in scalars.items()}
  return {
    name: tf.identity(value) if constants[name] is None else tf.constant(constants[name])
    for name, value in scalars.items()
  }
