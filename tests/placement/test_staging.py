"""The staged step: the next batches are fetched beside the towers, each straight to its device."""

import collections

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import hpm
from hpm import placement
from tests.placement import steps

BATCH = 4


def data(repeat):
  images = tf.random.stateless_uniform([3 * BATCH, 2, 2, 3], [0, 1], 0, 256, tf.int32)
  labels = tf.range(3 * BATCH, dtype=tf.int32) % 5
  dataset = tf.data.Dataset.from_tensor_slices((tf.cast(images, tf.uint8), labels))
  return dataset.repeat().batch(BATCH, drop_remainder=True) if repeat else dataset.batch(BATCH)


def traced(repeat, devices):
  """The traced step: its graph, and (metrics, following batches, whether there are any)."""
  manager = hpm.variable_mgr.create('replicated', devices)
  step = hpm.TrainStep(steps.three_variables(), manager, hpm.optimizers.create('momentum', 0.1))
  staged = step._loop._functions(data(repeat))[1]
  graph = staged.get_concrete_function().graph
  assert step.num_traces == 1
  return graph, graph.structured_outputs


@pytest.fixture
def soft_placement():
  """Lets eager variables of '/GPU:i' lie on the CPU: only the traced graph is looked at."""
  before = tf.config.get_soft_device_placement()
  tf.config.set_soft_device_placement(True)
  yield
  tf.config.set_soft_device_placement(before)


def towers(graph):
  operations = graph.get_operations()
  return [op for op in operations if 'PartitionedCall' in op.type and 'tower_' in op.name]


@pytest.mark.usefixtures('soft_placement')
@pytest.mark.parametrize('repeat', [True, False], ids=['endless', 'finite'])
def test_fetch_and_towers_have_no_path_between_them(repeat):
  graph, (metrics, following, more) = traced(repeat, steps.gpus(8))
  calls = set(towers(graph))
  assert sorted(op.device for op in calls) == [f'/device:GPU:{i}' for i in range(8)]
  fetches = {op for op in graph.get_operations() if op.type.startswith('IteratorGetNext')}
  assert len(fetches) == 8

  before_fetch = set(placement.ops_of(graph, [following, more]))
  before_metrics = set(placement.ops_of(graph, metrics))
  assert fetches <= before_fetch
  assert calls <= before_metrics
  assert not before_fetch & calls
  assert not before_metrics & fetches
  # Nor do they meet in what changes variables.
  changes = [
    op
    for op in graph.get_operations()
    if op.type.startswith('Assign') or (op.type == 'StatefulPartitionedCall' and not op.outputs)
  ]
  assert len(changes) == 8 + 2  # one call a device, and two counters
  assert not set(changes) & before_fetch
  assert not fetches & set(placement.ops_of(graph, changes))


@pytest.mark.usefixtures('soft_placement')
@pytest.mark.parametrize('repeat', [True, False], ids=['endless', 'finite'])
def test_each_batch_is_copied_from_the_host_to_its_gpu_once(repeat):
  graph, (_, following, _) = traced(repeat, steps.gpus(8))
  for i, batch in enumerate(following):
    for copied in batch:
      assert copied.op.type == 'Identity'
      assert placement.device_of(copied.op) == f'/device:GPU:{i}'
      assert 'GPU' not in copied.op.inputs[0].device
    assert [t.dtype for t in batch] == [tf.uint8, tf.int64]  # int32 would stay on the host

  copies = [c for c in placement.copies(graph) if 'GPU' in c.destination and 'Cast' in c.tensor]
  counted = collections.Counter(copy.destination for copy in copies)
  assert counted == {f'/device:GPU:{i}': 1 for i in range(8)}  # the labels, cast on the host
  if repeat:
    assert {copy.bytes for copy in copies} == {8 * BATCH}


@pytest.mark.usefixtures('soft_placement')
@pytest.mark.parametrize('repeat', [True, False], ids=['endless', 'finite'])
def test_every_op_of_the_staged_step_is_placed(repeat):
  """By a device; but for the ops that TensorFlow ties to the iterator, or adds for the results."""
  graph, results = traced(repeat, steps.gpus(8))
  flat = {tensor.op for tensor in tf.nest.flatten(results)}
  left = [op for op in placement.undevised_ops(graph) if op not in flat]
  tied = set(placement.colocated_ops(graph))
  assert {op.type for op in tied} <= {
    'IteratorGetNext',
    'IteratorGetNextAsOptional',
    'OptionalHasValue',
  }
  assert {op.type for op in left if op not in tied} <= {'NoOp'}
  assert placement.check_kernels(graph) == []
  assert [edge for edge in placement.resource_edges(graph) if edge.source] == []


def optimized(devices, **options):
  """The graph of a step that runs: after TensorFlow's optimizers, with every node's device."""
  manager = hpm.variable_mgr.create('replicated', devices)
  step = hpm.TrainStep(steps.three_variables(), manager, hpm.optimizers.create('momentum', 0.1))
  context.enable_run_metadata()
  context.context().enable_graph_collection()
  try:
    list(step.run(data(repeat=True), **options))
  finally:
    collected = context.export_run_metadata()
    context.context().disable_graph_collection()
    context.disable_run_metadata()
  (graph,) = [
    functions.post_optimization_graph
    for functions in collected.function_graphs
    if any(node.op.startswith('ResourceApply') for node in functions.post_optimization_graph.node)
  ]
  return graph


def test_optimized_graph_takes_each_batch_straight_to_its_device(cpu_devices):
  """What runs: no other device sees the batch between the host and its own, and no copy waits for
  the step's updates, as TensorFlow's automatic control dependencies would have it.
  """
  devices = cpu_devices[5:8]  # the host's CPU:0 is none of them
  graph = optimized(devices, num_steps=2)
  nodes = {node.name: node for node in graph.node}
  seen, waiting = [], []
  for node in graph.node:
    if node.op == '_Retval' and node.attr['T'].type in (tf.uint8, tf.int64):
      route = [node.device]
      waits = []
      while node.op in ('_Retval', 'Identity', 'Cast'):
        node = nodes[node.input[0].split(':')[0]]
        route.append(node.device)
        waits += [name for name in node.input if name.startswith('^')]
      if node.op == 'IteratorGetNext':
        waiting += [name for name in waits if not name.startswith('^IteratorGetNext')]
        seen.append([tf.DeviceSpec.from_string(place).device_index for place in route])
  assert sorted(route[0] for route in seen) == [5, 5, 6, 6, 7, 7]  # images and labels
  assert not waiting
  for route in seen:  # backwards: on the device, then on the host
    assert route == sorted(route, reverse=True), route
    assert set(route) == {0, route[0]}, route


def test_optimized_loop_carries_each_batch_on_its_device(cpu_devices):
  """Several steps in one call: the staged batches go from iteration to iteration where they are,
  and none of them waits for an update.
  """
  graph = optimized(cpu_devices[5:8], num_steps=6, steps_per_call=3)
  carriers = [
    node
    for node in graph.node
    if node.op in ('Enter', 'Merge', 'Switch', 'NextIteration', 'Exit', '_Retval')
    and node.attr['T'].type == tf.uint8
  ]
  kinds = collections.Counter(node.op for node in carriers)
  assert kinds == dict.fromkeys(('Enter', 'Merge', 'Switch', 'NextIteration', 'Exit', '_Retval'), 3)
  places = collections.Counter(
    (node.op, tf.DeviceSpec.from_string(node.device).device_index) for node in carriers
  )
  assert places == {(kind, i): 1 for kind in kinds for i in (5, 6, 7)}
  updates = {node.name for node in graph.node if node.op.startswith(('ResourceApply', 'Assign'))}
  waits = {name.lstrip('^') for node in carriers for name in node.input if name.startswith('^')}
  assert not waits & updates
