"""What a step will need and move, read from its graph, without the hardware.

  with tf.Graph().as_default():
    manager = hpm.variable_mgr.create('replicated', [f'/GPU:{i}' for i in range(8)])
    step = hpm.TrainStep(hpm.models.create('vgg16'), manager, optimizer)
    plan = hpm.plan(step, batch_size=64)
    (largest,) = planning.largest_batches(step, plan, [16 * 10**9])
  print(plan.devices[0].total_bytes, plan.transfers, largest)

Memory is counted by liveness: the tower's ops in the order in which they were built, each tensor
from its op to its last use, elementwise ops in place where TensorFlow may do so. What a kernel
takes for itself while it runs (convolution workspace) is not in the graph, and not in here.
"""

import bisect
import collections
from collections.abc import Iterable, Sequence
import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from hpm import placement
from hpm.errors import UsageError
from hpm.step import TrainStep

__all__ = [
  'Bucket',
  'DevicePlan',
  'GradientWait',
  'Peak',
  'Plan',
  'Transfer',
  'gradient_waits',
  'largest_batches',
  'peak',
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
_COLLECTIVES = {'CollectiveReduceV2', 'NcclAllReduce'}
# Where the gradients of several towers, or of several processes, meet.
_MEETINGS = {*_COLLECTIVES, 'AccumulatorApplyGradient', 'ResourceAccumulatorApplyGradient'}
_AGGREGATING = {'AddN', 'AddV2', 'ConcatV2', *_COLLECTIVES}
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
    activations, gradients: the tower's tensors when most of them are alive: the gradients that are
      there by then, and all others.
    aggregation: gradients as received and summed here, beside the tower's own.
  """

  device: str
  variables: int
  slots: int
  batches: int
  activations: int
  gradients: int
  aggregation: int

  @property
  def tower(self) -> int:
    return self.activations + self.gradients

  @property
  def total_bytes(self) -> int:
    """The most that is needed at a time: the tower and the aggregation follow one another."""
    return self.variables + self.slots + self.batches + max(self.tower, self.aggregation)


@dataclasses.dataclass(frozen=True)
class Transfer:
  """What one device sends to another in a step.

  Attributes:
    source, destination: device strings; of a collective both are its members: 'all' (of the
      towers' devices), or '/device:GPU:0, /device:GPU:1'; of one between processes, the device here
      and 'all workers'.
    link: 'host-device', 'device-device', 'host' or 'collective'; between processes 'network'.
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
class Bucket:
  """Gradients that are reduced as one.

  Attributes:
    names: of the parameters.
    bytes: of these gradients in whole, of which a bucket may hold a part.
    share: of backprop's multiply-adds, those before the last of these gradients.
  """

  names: tuple[str, ...]
  bytes: int
  share: float


class Peak(NamedTuple):
  """The most bytes that are alive at once.

  Attributes:
    results: of the graph's results, that are there by then.
    others: of all other tensors.
  """

  results: int
  others: int


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
    buckets: what is reduced between devices, the first to be there first; none where nothing is, or
      where it is last step's.
  """

  batch_size: int
  devices: list[DevicePlan]
  variables: dict[str, str]
  towers: list[str]
  transfers: list[Transfer]
  waits: list[GradientWait]
  buckets: list[Bucket]


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
    and op.name.startswith('tower_')
    and placement.device_of(op) in devices
  ]
  # One trace serves all towers, so one of them tells for all.
  body = graph._get_function(calls[0].get_attr('f').name).graph
  copies = placement.copies(graph, metrics)
  params = sorted(step.model.param_specs)  # as a nest is flattened
  gradients = body.outputs[: len(params)]
  tower = _Liveness(body, gradients).peak()
  aggregation = _aggregation_bytes(operations, calls)
  variables = _named(step)
  places = {name: placement.device_of(v.handle.op) for name, v in variables.items()}
  plans = []
  for device in sorted({*devices, *(copy.destination for copy in copies)}, key=_order):
    kept = {name: v for name, v in variables.items() if places[name] == device}
    slots = sum(_size(v) for name, v in kept.items() if '/slots/' in name)
    towers = devices.count(device)
    plans.append(
      DevicePlan(
        device=device,
        variables=sum(map(_size, kept.values())) - slots,
        slots=slots,
        batches=towers * _batch_bytes(step, batch_size),
        activations=towers * tower.others,
        gradients=towers * tower.results,
        aggregation=aggregation.get(device, 0),
      )
    )
  work = _Backprop(body, gradients, compiled=_is_compiled(calls[0]))
  return Plan(
    batch_size=batch_size,
    devices=plans,
    variables=places,
    towers=[placement.device_of(op) for op in calls],
    transfers=[
      *_transfers(copies),
      *_collective_transfers(placement.collectives(graph, metrics), devices),
      *_tower_transfers(placement.collectives(body), devices),
    ],
    waits=work.waits(params),
    buckets=work.buckets(params, _buckets(operations, calls, len(params)))
    if step.manager.synchronous
    else [],
  )


def largest_batches(step: TrainStep, made: Plan, memories: Sequence[int]) -> list[int]:
  """For each of `memories` the largest batch per device that fits into every compute device.

  Everything in a tower's memory grows in a straight line with the batch, so two traces of the tower
  tell the memory of any batch.

  Args:
    step: that was planned, in the same graph.
    made: its plan.
    memories: bytes of each compute device.

  Returns:
    0 where not even a batch of one fits.
  """
  small, large = (_Liveness(step.tower_graph(size)) for size in _TRACED_BATCHES)
  compute = [device for device in made.devices if device.device in made.towers]

  def needed(batch_size: int) -> int:
    tower = sum(small.towards(large, (batch_size - 1) / (_TRACED_BATCHES[1] - 1)).peak())
    return max(
      device.variables
      + device.slots
      + made.towers.count(device.device) * _batch_bytes(step, batch_size)
      + max(made.towers.count(device.device) * tower, device.aggregation)
      for device in compute
    )

  found = []
  for memory_bytes in memories:
    least = needed(1)
    if least > memory_bytes:
      found.append(0)
      continue
    most = 2 + (memory_bytes - least) // _batch_bytes(step, 1)
    sizes = range(1, most + 1)
    found.append(bisect.bisect_right(sizes, memory_bytes, key=needed))
  return found


def peak(graph: tf.Graph) -> Peak:
  """The most bytes of tensors that are alive at once while a function's graph runs.

  Arguments and constants are the caller's and don't count; results live to the end.
  """
  return _Liveness(graph).peak()


def gradient_waits(
  graph: tf.Graph, gradients: Sequence[tf.Tensor], names: Sequence[str]
) -> list[GradientWait]:
  """For each gradient the share of backprop's multiply-adds before it, the first one first."""
  return _Backprop(graph, gradients).waits(names)


_TRACED_BATCHES = (1, 9)


class _Liveness:
  """When each tensor of a function's graph comes to be and ends, and how large it is.

  Args:
    graph: of the function.
    results: outputs that `Peak.results` counts; all without any.
  """

  def __init__(self, graph: tf.Graph, results: Sequence[tf.Tensor] | None = None):
    arguments = {id(tensor) for tensor in graph.inputs}
    operations = graph.get_operations()
    owner: dict[int, int] = {}  # tensor -> number of the tensor whose memory it lies in
    last_use: list[int] = []
    self._sizes: list[float] = []
    self._made: list[list[int]] = []  # for each op
    self._donors: list[list[int]] = []  # inputs whose memory its first output may take
    for i, op in enumerate(operations):
      inputs = [owner[id(tensor)] for tensor in op.inputs if id(tensor) in owner]
      for number in inputs:
        last_use[number] = i
      made = []
      for tensor in op.outputs:
        if op.type in _VIEWS and inputs:
          owner[id(tensor)] = inputs[0]
          continue
        owner[id(tensor)] = len(self._sizes)
        made.append(len(self._sizes))
        last_use.append(i)
        static = op.type in ('Const', 'Placeholder', 'VarHandleOp') or id(tensor) in arguments
        self._sizes.append(0 if static else _bytes(tensor))
      self._made.append(made)
      self._donors.append(inputs if op.type in _IN_PLACE else [])
    for tensor in graph.outputs:
      last_use[owner[id(tensor)]] = len(operations)
    kept = graph.outputs if results is None else results
    self._results = {owner[id(tensor)] for tensor in kept}
    self._ending: list[list[int]] = [[] for _ in range(len(operations) + 1)]
    for number, i in enumerate(last_use):
      self._ending[i].append(number)

  def towards(self, other: '_Liveness', share: float) -> '_Liveness':
    """With sizes that are so far on the way (1 is there, and more is beyond) to another's."""
    if self._made != other._made:
      raise UsageError('the tower of this model has other ops for another batch size')
    between = object.__new__(_Liveness)
    between.__dict__.update(self.__dict__)
    between._sizes = [a + (b - a) * share for a, b in zip(self._sizes, other._sizes, strict=True)]
    return between

  def peak(self) -> Peak:
    sizes, results = list(self._sizes), self._results
    live = alive_results = most = results_then = 0.0
    for made, donors, ending in zip(self._made, self._donors, self._ending):
      if donors and made:
        ends = set(ending)
        donor = next((d for d in donors if d in ends and sizes[d] == sizes[made[0]]), None)
        if donor is not None:  # the input's memory becomes the output's
          live -= sizes[donor]
          sizes[donor] = 0
      for number in made:
        live += sizes[number]
        alive_results += sizes[number] if number in results else 0
      if live > most:
        most, results_then = live, alive_results
      for number in ending:
        live -= sizes[number]
    return Peak(round(results_then), round(most) - round(results_then))


class _Backprop:
  """How much of backprop comes before each gradient in a tower's graph.

  Backprop are the ops of gradient kernels; counted are the multiply-adds of convolutions and matrix
  products. Where none is in sight, since they stand inside a loop, or where XLA hands on all
  results at once, a gradient waits for everything.
  """

  def __init__(self, graph: tf.Graph, gradients: Sequence[tf.Tensor], compiled: bool = False):
    work = {op: _multiply_adds(op) for op in graph.get_operations() if _is_backward(op)}
    self._work = {op: count for op, count in work.items() if count}
    self._total = sum(self._work.values())
    self._gradients = gradients
    whole = compiled or not self._total
    self._before = [
      None if whole else {op for op in _ancestors(gradient.op) if op in self._work}
      for gradient in gradients
    ]

  def waits(self, names: Sequence[str]) -> list[GradientWait]:
    found = [
      GradientWait(name, _bytes(gradient), self._share([i]))
      for i, (name, gradient) in enumerate(zip(names, self._gradients, strict=True))
    ]
    return sorted(found, key=lambda wait: wait.share)

  def buckets(self, names: Sequence[str], members: Iterable[frozenset[int]]) -> list[Bucket]:
    """One for each set of numbers of gradients."""
    found = [
      Bucket(
        tuple(names[i] for i in sorted(own)),
        sum(_bytes(self._gradients[i]) for i in own),
        self._share(own),
      )
      for own in members
    ]
    return sorted(found, key=lambda bucket: bucket.share)

  def _share(self, numbers: Iterable[int]) -> float:
    before: set[tf.Operation] = set()
    for i in numbers:
      own = self._before[i]
      if own is None:
        return 1.0
      before |= own
    return sum(self._work[op] for op in before) / self._total


def _buckets(
  operations: Sequence[tf.Operation], calls: Sequence[tf.Operation], num_gradients: int
) -> list[frozenset[int]]:
  """Which of a tower's gradients meet those of other towers together.

  Followed from the calls to the ops where several towers' values meet, here or with those of other
  processes.
  """
  numbers = {call: i for i, call in enumerate(calls)}
  origin: dict[int, frozenset[tuple[int, int]]] = {}  # tensor -> (tower, gradient)
  found: dict[frozenset[int], None] = {}
  for op in operations:
    if op in numbers:
      for k, tensor in enumerate(op.outputs[:num_gradients]):
        origin[id(tensor)] = frozenset([(numbers[op], k)])
      continue
    held = [origin[id(tensor)] for tensor in op.inputs if id(tensor) in origin]
    if not held:
      continue
    union = held[0] if len(held) == 1 else frozenset().union(*held)
    if op.type in _MEETINGS or len({tower for tower, _ in union}) > 1:
      found[frozenset(k for _, k in union)] = None
    else:
      origin.update((id(tensor), union) for tensor in op.outputs)
  return list(found)


def _is_compiled(call: tf.Operation) -> bool:
  attribute = '_XlaMustCompile'
  return attribute in call.node_def.attr and call.get_attr(attribute)


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
    if op in towers or op.type in _AGGREGATING or _is_sum(op):
      totals[device] += sum(map(_bytes, op.outputs))
    for tensor in op.inputs:
      source = placement.device_of(tensor.op)
      if source and source != device and (tensor.ref(), device) not in received:
        received.add((tensor.ref(), device))
        totals[device] += _bytes(tensor)
  return totals


def _is_sum(op: tf.Operation) -> bool:
  """Whether this is a call of additions traced once (see `hpm.variable_mgr.sums`)."""
  if op.type != 'PartitionedCall':
    return False
  body = op.graph._get_function(op.get_attr('f').name).graph
  return any(inner.type in _AGGREGATING for inner in body.get_operations())


def _transfers(copies: Iterable[placement.Copy]) -> list[Transfer]:
  pairs: dict[tuple[str, str, str], list[int | None]] = {}
  for copy in copies:
    ends = [tf.DeviceSpec.from_string(end) for end in (copy.source, copy.destination)]
    on_cpu = [end.device_type == 'CPU' for end in ends]
    if (ends[0].job, ends[0].task) != (ends[1].job, ends[1].task):
      link = 'network'
    elif copy.on_host or all(on_cpu):
      link = 'host'
    else:
      link = 'host-device' if any(on_cpu) else 'device-device'
    pairs.setdefault((copy.source, copy.destination, link), []).append(copy.bytes)
  return [
    Transfer(source, destination, link, len(sizes), _sum(sizes))
    for (source, destination, link), sizes in pairs.items()
  ]


def _collective_transfers(
  parts: Iterable[placement.Collective], towers: Sequence[str]
) -> list[Transfer]:
  """One for each set of devices that reduce together."""
  instances: dict[object, list[placement.Collective]] = {}
  for part in parts:
    instances.setdefault(part.instance, []).append(part)
  groups: dict[tuple[tuple[str, ...], int], list[int | None]] = {}
  for members in instances.values():
    devices = tuple(sorted((part.device for part in members), key=_order))
    size = members[0].size or len(members)
    groups.setdefault((devices, size), []).append(members[0].bytes)
  return [_ring(devices, sizes, towers, size) for (devices, size), sizes in groups.items()]


def _tower_transfers(
  parts: Sequence[placement.Collective], towers: Sequence[str]
) -> list[Transfer]:
  """What synchronised batch norm sums inside the towers, whose trace all devices share."""
  sizes = [part.bytes for part in parts]
  return [_ring(tuple(towers), sizes, towers, len(towers))] if parts else []


def _ring(
  devices: tuple[str, ...], sizes: list[int | None], towers: Sequence[str], num_members: int
) -> Transfer:
  total = _sum(sizes)
  sent = None if total is None else total * 2 * (num_members - 1) // num_members
  if num_members > len(devices):
    return Transfer(', '.join(devices), 'all workers', 'network', len(sizes), sent)
  name = 'all' if set(devices) == set(towers) else ', '.join(devices)
  return Transfer(name, name, 'collective', len(sizes), sent)


def _batch(step: TrainStep, device: str, batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
  with tf.device(device):
    images = tf.compat.v1.placeholder(tf.uint8, (batch_size, *step.model.image_shape))
    return images, tf.compat.v1.placeholder(tf.int64, (batch_size,))


def _batch_bytes(step: TrainStep, batch_size: int) -> int:
  """The current batch and the staged one: uint8 images, int64 labels."""
  return 2 * batch_size * (math.prod(step.model.image_shape) + 8)


def _named(step: TrainStep) -> dict[str, tf.Variable]:
  """Every variable, each copy for itself, by a name that tells its kind."""
  named = {f'counters/{i}': v for i, v in enumerate(step.variables)}
  for i, copy in enumerate(step.manager.copies):
    known = {id(variable) for _, variable in copy.items()}
    named = {name: v for name, v in named.items() if id(v) not in known}
    named |= {f'copy_{i}/{name}': variable for name, variable in copy.items()}
  return named


def _canonical(device: str) -> str:
  """As the graph has it: with the job and task of the scope around it, if there is one."""
  with tf.device(device):
    return placement.device_of(tf.no_op())


def _order(device: str) -> tuple[str, int, str, int]:
  """This process's devices, or the workers', behind those of parameter servers."""
  spec = tf.DeviceSpec.from_string(device)
  return spec.job or '', spec.task or 0, spec.device_type, spec.device_index


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
