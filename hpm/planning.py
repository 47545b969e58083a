"""What a step will need and move, read from its graph, without the hardware.

  with tf.Graph().as_default():
    manager = hpm.variable_mgr.create('replicated', [f'/GPU:{i}' for i in range(8)])
    step = hpm.TrainStep(hpm.models.create('vgg16'), manager, optimizer)
    plan = hpm.plan(step, batch_size=64)
  print(plan.devices[0].total_bytes, plan.transfers)

Memory is counted by liveness: the tower's ops in the order in which they were built, each tensor
from its op to its last use, elementwise ops in place where TensorFlow may do so. What a kernel
takes for itself while it runs (convolution workspace) is not in the graph, and not in here.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math

import tensorflow as tf

from hpm import placement
from hpm.errors import UsageError
from hpm.step import TrainStep

__all__ = [
  'DevicePlan',
  'GradientWait',
  'Plan',
  'Transfer',
  'gradient_waits',
  'largest_batch',
  'peak_bytes',
  'plan',
]

# Ops whose output is their first input's memory.
_VIEWS = {
  'Identity',
  'Reshape',
  'Squeeze',
  'ExpandDims',
  'StopGradient',
  'PreventGradient',
  'ReadVariableOp',
  'CheckNumerics',
  'EnsureShape',
}
# What gradients are summed and packed by.
_AGGREGATING = {'AddN', 'AddV2', 'CollectiveReduceV2', 'ConcatV2', 'NcclAllReduce'}
# Elementwise ops that TensorFlow computes in an input's memory if nothing else needs that input.
_IN_PLACE = {
  'Add',
  'AddN',
  'AddV2',
  'BiasAdd',
  'Mul',
  'Neg',
  'RealDiv',
  'Relu',
  'Relu6',
  'Relu6Grad',
  'ReluGrad',
  'Rsqrt',
  'SelectV2',
  'Sqrt',
  'Square',
  'Sub',
  'Tanh',
  'TanhGrad',
}


@dataclasses.dataclass(frozen=True)
class DevicePlan:
  """Memory of one device, in bytes.

  Attributes:
    device: '/device:GPU:0'.
    variables: parameters and state that live here, and counters.
    slots: the optimizer's.
    batches: the batch that is computed on, and the staged one.
    tower: the largest sum of a tower's live tensors: activations, and the gradients so far.
    aggregation: gradients as received and summed here, beside the tower's own.
  """

  device: str
  variables: int
  slots: int
  batches: int
  tower: int
  aggregation: int

  @property
  def total_bytes(self) -> int:
    """The most that is needed at a time: the tower and the aggregation follow one another."""
    return self.variables + self.slots + self.batches + max(self.tower, self.aggregation)


@dataclasses.dataclass(frozen=True)
class Transfer:
  """What one device sends to another in a step.

  Attributes:
    source, destination: device strings; equal to 'all' for a collective.
    link: 'host-device', 'device-device', 'host' or 'collective'.
    tensors: number.
    bytes: None where a shape isn't static. Of a collective what each device sends in a ring of n,
      2 (n - 1) / n of the tensors (Patarasuk & Yuan 2009, theorem 1).
  """

  source: str
  destination: str
  link: str
  tensors: int
  bytes: int | None


@dataclasses.dataclass(frozen=True)
class GradientWait:
  """How long backprop runs before a gradient is there.

  Attributes:
    name: of the parameter.
    bytes: of its gradient.
    share: of backprop's multiply-adds, those that this gradient depends on.
  """

  name: str
  bytes: int
  share: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """See the module's docstring.

  Attributes:
    batch_size: per device.
    devices: memory, by device.
    variables: variable's name -> device.
    towers: device of each tower.
    transfers: by pair of devices and kind of link.
    waits: of each gradient, the first to be there first.
  """

  batch_size: int
  devices: list[DevicePlan]
  variables: dict[str, str]
  towers: list[str]
  transfers: list[Transfer]
  waits: list[GradientWait]


def plan(step: TrainStep, batch_size: int) -> Plan:
  """Builds the step into the current `tf.Graph` and reads it.

  Args:
    step: made in the same graph, over devices that need not be there.
    batch_size: images per device.

  Raises:
    UsageError: there is no such graph, or the batch is empty.
  """
  graph = tf.compat.v1.get_default_graph()
  if tf.executing_eagerly() or any(
    not tf.is_symbolic_tensor(v.handle) or v.graph is not graph for v in step.variables
  ):
    raise UsageError('plan() reads a tf.Graph: make the step and the plan in the same one')
  if batch_size < 1:
    raise UsageError(f'batch_size {batch_size}: at least 1 is needed')
  devices = [_canonical(device) for device in step.manager.devices]
  metrics = step.build([_batch(step, device, batch_size) for device in step.manager.devices])
  operations = placement.ops_of(graph, metrics)
  calls = [
    op
    for op in operations
    if op.type in ('PartitionedCall', 'StatefulPartitionedCall')
    and placement.device_of(op) in devices
  ]
  # One trace serves all towers, so one of them tells for all.
  body = graph._get_function(calls[0].get_attr('f').name).graph
  copies = placement.copies(graph, metrics)
  params = step.model.param_specs
  gradients = body.outputs[: len(params)]
  tower_bytes = peak_bytes(body)
  aggregation = _aggregation_bytes(operations, calls)
  images = math.prod(step.model.image_shape) * batch_size + 8 * batch_size
  variables = _named(step)
  places = {name: placement.device_of(v.handle.op) for name, v in variables.items()}
  plans = []
  for device in sorted({*devices, *(copy.destination for copy in copies)}, key=_order):
    kept = {name: v for name, v in variables.items() if places[name] == device}
    slots = sum(_size(v) for name, v in kept.items() if '/slots/' in name)
    plans.append(
      DevicePlan(
        device=device,
        variables=sum(map(_size, kept.values())) - slots,
        slots=slots,
        batches=2 * images * devices.count(device),
        tower=tower_bytes * devices.count(device),
        aggregation=aggregation.get(device, 0),
      )
    )
  waits = gradient_waits(body, gradients, sorted(params))  # as a nest is flattened
  return Plan(
    batch_size=batch_size,
    devices=plans,
    variables=places,
    towers=[placement.device_of(op) for op in calls],
    transfers=_transfers(copies, placement.collectives(graph, metrics)),
    waits=waits,
  )


def largest_batch(make_step: Callable[[], TrainStep], memory_bytes: int) -> int:
  """The largest batch per device with which no compute device needs more than `memory_bytes`.

  Args:
    make_step: makes the step, in the `tf.Graph` that is current when it is called.
    memory_bytes: of each compute device.

  Returns:
    0 if not even a batch of one fits.
  """

  def needed(batch_size: int) -> int:
    with tf.Graph().as_default():
      step = make_step()
      compute = {_canonical(device) for device in step.manager.devices}
      made = plan(step, batch_size)
    return max(device.total_bytes for device in made.devices if device.device in compute)

  # Nearly a straight line in the batch size, so that few steps of the secant find the end.
  low, low_bytes = 1, needed(1)
  if low_bytes > memory_bytes:
    return 0
  high, high_bytes = 33, needed(33)
  while high - low > 1:
    per_image = (high_bytes - low_bytes) / (high - low)
    guess = low + int((memory_bytes - low_bytes) / per_image)
    if high_bytes > memory_bytes:
      guess = min(max(guess, low + 1), high - 1)
    elif guess <= high:
      return high
    guess_bytes = needed(guess)
    if guess_bytes <= memory_bytes:
      low, low_bytes = guess, guess_bytes
      if high <= low:
        high, high_bytes = guess + 1, needed(guess + 1)
    else:
      high, high_bytes = guess, guess_bytes
  return low


def peak_bytes(graph: tf.Graph) -> int:
  """The most bytes of tensors that are alive at once while a function's graph runs.

  Arguments and constants are the caller's and don't count; results live to the end.
  """
  arguments = {id(tensor) for tensor in graph.inputs}
  home: dict[int, int] = {}  # tensor -> the tensor whose memory it lies in
  last_use: dict[int, int] = {}
  sizes: dict[int, int] = {}
  operations = graph.get_operations()
  for i, op in enumerate(operations):
    for tensor in op.inputs:
      owner = home.get(id(tensor), id(tensor))
      last_use[owner] = i
    for tensor in op.outputs:
      if op.type in _VIEWS and op.inputs:
        home[id(tensor)] = home.get(id(op.inputs[0]), id(op.inputs[0]))
      else:
        home[id(tensor)] = id(tensor)
        last_use[id(tensor)] = i
        static = op.type in ('Const', 'Placeholder', 'VarHandleOp') or id(tensor) in arguments
        sizes[id(tensor)] = 0 if static else _bytes(tensor)
  for tensor in graph.outputs:
    last_use[home.get(id(tensor), id(tensor))] = len(operations)

  dying: dict[int, list[int]] = {}
  for owner, i in last_use.items():
    dying.setdefault(i, []).append(owner)
  live = peak = 0
  for i, op in enumerate(operations):
    ends = set(dying.get(i, ()))
    made = [id(t) for t in op.outputs if home[id(t)] == id(t)]
    needed = sum(sizes[key] for key in made)
    if op.type in _IN_PLACE and made:
      reusable = {home.get(id(t), id(t)) for t in op.inputs} & ends
      donor = next((key for key in reusable if sizes.get(key) == sizes[made[0]]), None)
      if donor is not None:  # the input's memory becomes the output's
        live -= sizes[donor]
        sizes[donor] = 0
    live += needed
    peak = max(peak, live)
    live -= sum(sizes.get(key, 0) for key in ends)
  return peak


def gradient_waits(
  graph: tf.Graph, gradients: Sequence[tf.Tensor], names: Sequence[str]
) -> list[GradientWait]:
  """For each gradient the share of backprop's multiply-adds before it, the first one first.

  Backprop are the ops that the gradients need and the forward pass does not hold: those after the
  first op of a gradient kernel in the graph's order.
  """
  operations = graph.get_operations()
  backward = {op for op in operations if _is_backward(op)}
  work = {op: _multiply_adds(op) for op in backward}
  total = sum(work.values()) or 1
  waits = []
  for name, gradient in zip(names, gradients, strict=True):
    before = _ancestors(gradient.op)
    share = sum(work.get(op, 0) for op in before) / total
    waits.append(GradientWait(name, _bytes(gradient), share))
  return sorted(waits, key=lambda wait: wait.share)


def _is_backward(op: tf.Operation) -> bool:
  return op.name.startswith('gradient_tape/') or '/gradient_tape/' in op.name


def _multiply_adds(op: tf.Operation) -> int:
  """Of a convolution's or matrix product's gradient kernel."""
  if op.type == 'Conv2DBackpropInput':
    # As the forward pass: output positions times the kernel's size.
    return _positions(op, op.inputs[2]) * (op.inputs[1].shape.num_elements() or 0)
  if op.type == 'Conv2DBackpropFilter':
    return _positions(op, op.inputs[2]) * (op.outputs[0].shape.num_elements() or 0)
  if op.type == 'MatMul':
    rows = op.inputs[0].shape
    inner = rows[0] if op.get_attr('transpose_a') else rows[1]
    return (op.outputs[0].shape.num_elements() or 0) * (inner or 0)
  return 0


def _positions(op: tf.Operation, gradient: tf.Tensor) -> int:
  shape = gradient.shape
  channels = shape[3] if op.get_attr('data_format') == b'NHWC' else shape[1]
  return (shape.num_elements() or 0) // (channels or 1)


def _ancestors(op: tf.Operation) -> set[tf.Operation]:
  seen, pending = {op}, [op]
  while pending:
    for tensor in pending.pop().inputs:
      if tensor.op not in seen:
        seen.add(tensor.op)
        pending.append(tensor.op)
  return seen


def _aggregation_bytes(
  operations: Iterable[tf.Operation], calls: Sequence[tf.Operation]
) -> dict[str, int]:
  """Device -> bytes of gradients once its tower is done: its own, those received, the sums."""
  totals: dict[str, int] = collections.defaultdict(int)
  received = set()
  towers = set(calls)
  for op in operations:
    device = placement.device_of(op)
    if op in towers or op.type in _AGGREGATING:
      totals[device] += sum(map(_bytes, op.outputs))
    for tensor in op.inputs:
      source = placement.device_of(tensor.op)
      if source and source != device and (tensor.ref(), device) not in received:
        received.add((tensor.ref(), device))
        totals[device] += _bytes(tensor)
  return totals


def _transfers(
  copies: Iterable[placement.Copy], collectives: Iterable[placement.Collective]
) -> list[Transfer]:
  pairs: dict[tuple[str, str, str], list[int | None]] = {}
  for copy in copies:
    kinds = {copy.source.split(':')[1], copy.destination.split(':')[1]} == {'CPU'}
    mixed = ('CPU' in copy.source) != ('CPU' in copy.destination)
    link = 'host' if copy.on_host or kinds else 'host-device' if mixed else 'device-device'
    pairs.setdefault((copy.source, copy.destination, link), []).append(copy.bytes)
  transfers = [
    Transfer(source, destination, link, len(sizes), _sum(sizes))
    for (source, destination, link), sizes in pairs.items()
  ]
  parts = list(collectives)
  members = len({part.device for part in parts})
  if parts:
    first = [part for part in parts if part.device == parts[0].device]
    size = _sum([part.bytes for part in first])
    sent = None if size is None else size * 2 * (members - 1) // members
    transfers.append(Transfer('all', 'all', 'collective', len(first), sent))
  return transfers


def _batch(step: TrainStep, device: str, batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
  with tf.device(device):
    images = tf.compat.v1.placeholder(tf.uint8, (batch_size, *step.model.image_shape))
    return images, tf.compat.v1.placeholder(tf.int64, (batch_size,))


def _named(step: TrainStep) -> dict[str, tf.Variable]:
  """Every variable, each copy for itself, by a name that tells its kind."""
  named = {f'counters/{i}': v for i, v in enumerate(step.variables)}
  for i, copy in enumerate(step.manager.copies):
    known = {id(variable) for _, variable in copy.items()}
    named = {name: v for name, v in named.items() if id(v) not in known}
    named |= {f'copy_{i}/{name}': variable for name, variable in copy.items()}
  return named


def _canonical(device: str) -> str:
  spec = tf.DeviceSpec.from_string(device)
  return f'/device:{spec.device_type}:{spec.device_index}'


def _order(device: str) -> tuple[str, int]:
  _, kind, index = device.split(':')
  return kind, int(index)


def _sum(sizes: Sequence[int | None]) -> int | None:
  known = [size for size in sizes if size is not None]
  return sum(known) if len(known) == len(sizes) else None


def _size(variable: tf.Variable) -> int:
  return math.prod(variable.shape) * variable.dtype.size


def _bytes(tensor: tf.Tensor) -> int:
  if tensor.dtype in (tf.resource, tf.variant, tf.string):
    return 0
  elements = tensor.shape.num_elements()
  return (elements or 0) * tensor.dtype.size
