"""Steps for GPUs that aren't there: built into a `tf.Graph`, and what must hold of each."""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import tensorflow as tf

import hpm
from hpm import placement

__all__ = [
  'MODES',
  'Built',
  'batch_norm_model',
  'build',
  'build_eval',
  'create_manager',
  'device',
  'faults',
  'gpus',
  'moved',
  'three_variables',
  'tower_calls',
]

# id -> (manager, its options).
MODES: dict[str, tuple[str, dict[str, str]]] = {
  'independent': ('independent', {}),
  'parameter_server_cpu': ('parameter_server', {'local_parameter_device': 'cpu'}),
  'parameter_server_spread': ('parameter_server', {'local_parameter_device': 'spread'}),
  'replicated_spread': ('replicated', {'local_parameter_device': 'spread'}),
  'replicated_cpu': ('replicated', {'local_parameter_device': 'cpu'}),
  'replicated_collective': ('replicated', {'all_reduce_spec': 'collective'}),
  'replicated_nccl': ('replicated', {'all_reduce_spec': 'nccl'}),
}


@dataclasses.dataclass
class Built:
  """A training step in a graph of its own."""

  graph: tf.Graph
  metrics: Any
  step: hpm.TrainStep


def gpus(count: int) -> tuple[str, ...]:
  return tuple(f'/GPU:{i}' for i in range(count))


def device(name: str) -> str:
  """'GPU:3' in the canonical form that graphs use."""
  return f'/device:{name}'


def create_manager(mode: str, count: int) -> Any:
  name, options = MODES[mode]
  return hpm.variable_mgr.create(name, gpus(count), **options)


def three_variables(**options: Any) -> Any:
  """scale [12], fc/kernel [12, 5] and fc/bias [5]: 48, 240 and 20 bytes."""

  def network(b, images):
    scale = b.param('scale', (12,), lambda shape, seed: tf.ones(shape))
    return b.dense('fc', b.flatten(images) * tf.cast(scale, images.dtype), 5)

  return hpm.models.Model(
    network, name='three_variables', image_shape=(2, 2, 3), num_classes=5, **options
  )


def batch_norm_model(**options: Any) -> Any:
  """Parameters bn/scale, bn/offset [3], fc/kernel [3, 5], fc/bias [5]; state of twice [3]."""

  def network(b, images):
    return b.dense('fc', b.global_average_pool(b.batch_norm('bn', images)), 5)

  return hpm.models.Model(
    network, name='batch_norm', image_shape=(2, 2, 3), num_classes=5, **options
  )


def build(
  model: Any,
  manager: Any,
  optimizer: Any = None,
  batch_size: int | None = 4,
  corrupt: Callable[[hpm.TrainStep], None] = lambda step: None,
  **options: Any,
) -> Built:
  """The training step of a manager that `create` has not been called on.

  Args:
    model, manager, options: as for `TrainStep`.
    optimizer: momentum by default.
    batch_size: None leaves it open, as for a finite data set.
    corrupt: plants a fault in the step before it is built. A function that takes a manager may be
      given as `manager`, so that its faulty twin is made inside the graph.
  """
  with tf.Graph().as_default() as graph:
    optimizer = optimizer or hpm.optimizers.create('momentum', 0.1)
    step = hpm.TrainStep(model, manager, optimizer, **options)
    corrupt(step)
    metrics = step.build(_batches(model, manager.devices, batch_size))
  return Built(graph, metrics, step)


def build_eval(model: Any, manager: Any, batch_size: int | None = 4) -> tuple[tf.Graph, Any]:
  with tf.Graph().as_default() as graph:
    manager.create(*model.init(0))
    return graph, hpm.step.EvalStep(model, manager).build(
      _batches(model, manager.devices, batch_size)
    )


def _batches(model: Any, devices: Sequence[str], batch_size: int | None) -> list[Any]:
  batches = []
  for place in devices:
    with tf.device(place):
      images = tf.compat.v1.placeholder(tf.uint8, (batch_size, *model.image_shape))
      labels = tf.compat.v1.placeholder(tf.int64, (batch_size,))
    batches.append((images, labels))
  return batches


def tower_calls(graph: tf.Graph, fetches: Any) -> list[placement.Call]:
  """The calls of towers, without those of what else is traced once for all devices."""
  return [call for call in placement.calls(graph, fetches) if call.name.startswith('tower_')]


def moved(graph: tf.Graph, fetches: Any) -> dict[str, Counter]:
  """Copies as 'out' (host to GPUs), 'back', 'across' (GPU to GPU): bytes -> how many.

  What doesn't cross the bus, since it lies in host memory at both ends, is under 'host'.
  """
  table: dict[str, Counter] = {}
  for copy in placement.copies(graph, fetches):
    source, destination = ('GPU' in end for end in (copy.source, copy.destination))
    route = 'across' if source and destination else 'out' if destination else 'back'
    table.setdefault('host' if copy.on_host else route, Counter())[copy.bytes] += 1
  return table


def faults(
  built: Built,
  places: dict[str, str],
  table: dict[str, Counter] | None = None,
  sums: dict[int, str] | None = None,
) -> list[str]:
  """What is wrong with a step; the proof of placement is that this is empty.

  Args:
    built: the step.
    places: name of each variable of the model, slots included -> device; what it must be.
    table: what `moved` must give; None leaves it unchecked.
    sums: bytes of each parameter -> device of the sum of its gradients (which ensures a shape, see
      `hpm.variable_mgr.sums`), None likewise.
  """
  graph, metrics = built.graph, built.metrics
  devices = [tf.DeviceSpec.from_string(d).to_string() for d in built.step.manager.devices]
  found = placement.check(graph) + placement.check(graph, metrics)
  if built.step.num_traces != 1:
    found.append(f'the tower was traced {built.step.num_traces} times')

  towers = tower_calls(graph, metrics)
  if sorted(call.device for call in towers) != sorted(devices):
    found.append(f'tower calls on {sorted(call.device for call in towers)}')
  if len({call.function for call in towers}) != 1:
    found.append('towers of several functions')

  handles = [op for op in graph.get_operations() if op.type == 'VarHandleOp']
  if {op.name: op.device for op in handles} != places:
    found.append(f'variables on { ({op.name: op.device for op in handles}) }')

  ops = placement.ops_of(graph, metrics)
  accesses = placement.accesses(graph, metrics)
  reads = Counter(access.variable for access in accesses if access.type == 'ReadVariableOp')
  found += [f'{name} is read {count} times' for name, count in reads.items() if count > 1]
  for access in accesses:
    if access.device != places[access.variable]:
      found.append(f'{access.type} of {access.variable} on {access.device}')

  if table is not None and moved(graph, metrics) != table:
    found.append(f'copies {moved(graph, metrics)}')
  if sums is not None:
    added = {
      op.outputs[0].shape.num_elements() * 4: op.device
      for op in ops
      if _adds_in_order(op) and op.outputs[0].shape.rank
    }
    if added != sums:
      found.append(f'sums on {added}')
  return found


def _adds_in_order(op: tf.Operation) -> bool:
  """Whether it is the end of a sum of two, or the call of one of several."""
  if op.type == 'PartitionedCall':
    body = op.graph._get_function(op.get_attr('f').name).graph
    return any(inner.type == 'EnsureShape' for inner in body.get_operations())
  return op.type == 'EnsureShape'
