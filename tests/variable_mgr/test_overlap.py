"""What overlaps: the first buckets with backprop, fetches and stale gradients with the towers.

A tower is one call in the step's graph, whose results TensorFlow hands on as they become ready once
it has inlined the call. So the dependencies are followed inside the tower's own graph.
"""

import pytest
import tensorflow as tf

import hpm
from hpm import placement, planning
from hpm.variable_mgr import packing
from tests.placement import steps

GPUS = ('/GPU:0', '/GPU:1')


class Tower:
  """A model's tower, traced by itself: its graph, and its gradients in the order of the network."""

  def __init__(self, model, batch_size=8):
    manager = hpm.variable_mgr.create('replicated', hpm.devices.cpu(8)[:1])
    step = hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', 0.1))
    params, state = model.init()
    traced = step._tower.get_concrete_function(
      {name: tf.TensorSpec(v.shape) for name, v in params.items()},
      {name: tf.TensorSpec(v.shape) for name, v in state.items()},
      tf.TensorSpec([batch_size, *model.image_shape], tf.uint8),
      tf.TensorSpec([batch_size], tf.int64),
      tf.TensorSpec([2], tf.int32),
      1.0,
      None,
    )
    gradients = traced.structured_outputs[0]
    self.names = list(params)
    self.gradients = [gradients[name] for name in self.names]
    waits = planning.gradient_waits(traced.graph, self.gradients, self.names)
    self.graph = traced.graph
    self.share = {wait.name: wait.share for wait in waits}

  def buckets(self, num_buckets):
    """Names of the gradients in each bucket, in the order in which `replicated` takes them."""
    names = list(reversed(self.names))
    sizes = dict(zip(self.names, (g.shape.num_elements() for g in self.gradients)))
    repacked = packing.Repacked(None, GPUS, num_buckets)
    counts, pieces = repacked._plan([sizes[name] for name in names])
    of_piece = [name for name, own in zip(names, pieces, strict=True) for _ in own]
    starts = [sum(counts[:i]) for i in range(num_buckets)]
    return [of_piece[s : s + n] for s, n in zip(starts, counts, strict=True)]

  def share_before(self, names):
    """Share of backprop's multiply-adds that these gradients wait for together."""
    wanted = [g for name, g in zip(self.names, self.gradients) if name in names]
    with self.graph.as_default():
      together = tf.add_n([tf.reduce_sum(g) for g in wanted])
    (wait,) = planning.gradient_waits(self.graph, [together], ['together'])
    return wait.share


@pytest.fixture(scope='module')
def resnet50(cpu_devices):
  return Tower(hpm.models.create('resnet50'))


def test_the_first_bucket_waits_for_little_of_backprop(resnet50):
  buckets = resnet50.buckets(8)
  assert 'fc/kernel' in buckets[0] or any('logits' in n or 'fc' in n for n in buckets[0])
  shares = [resnet50.share_before(names) for names in buckets]
  assert shares[0] < 0.15
  assert shares == sorted(shares)
  # The last one waits for the gradients of all activations, not for those of other parameters.
  assert 0.5 < shares[-1] < 1.0
  # All but the gradient of the images, which is in the graph and which nobody needs.
  assert 0.98 < resnet50.share_before(resnet50.names) < 1.0
  # Half of the gradients' bytes are on their way before a third of backprop is done.
  assert shares[3] < 1 / 3


def test_whole_gradients_go_together_in_the_order_of_backprop_too(resnet50):
  names = list(reversed(resnet50.names))
  by_name = dict(zip(resnet50.names, resnet50.gradients, strict=True))
  runs = packing.Buckets(None, GPUS, 8)._runs([by_name[name] for name in names])
  assert [i for run in runs for i in run] == list(range(len(names)))
  sizes = [sum(by_name[names[i]].shape.num_elements() for i in run) for run in runs]
  assert 8 < len(runs) <= 16
  assert all(size <= sum(sizes) / 8 or len(run) == 1 for size, run in zip(sizes, runs, strict=True))
  shares = [resnet50.share_before([names[i] for i in run]) for run in runs]
  assert shares[0] < 0.15
  assert shares == sorted(shares)


def test_in_the_order_of_the_network_the_first_bucket_would_wait_for_most(resnet50):
  resnet50.names.reverse()
  resnet50.gradients.reverse()
  try:
    first = resnet50.share_before(resnet50.buckets(8)[0])
  finally:
    resnet50.names.reverse()
    resnet50.gradients.reverse()
  assert first > 0.7


def test_in_the_step_a_bucket_takes_nothing_of_a_tower_but_its_own_gradients():
  """No op stands between a tower's call and a bucket that would wait for more of the call."""
  manager = hpm.variable_mgr.create('replicated', GPUS, gradient_repacking=3)
  built = steps.build(steps.three_variables(), manager)
  calls = tower_calls(built.graph)
  # 77 elements: the last layer's bias [5] and the first 20 of its kernel [12, 5]; 25; 27.
  sums = [
    op
    for op in placement.ops_of(built.graph, built.metrics)
    if op.type == 'EnsureShape' and op.outputs[0].shape.rank == 1
  ]
  assert [op.outputs[0].shape[0] for op in sums] == [25, 25, 27]
  taken = []
  for op in sums:
    assert not [before for before in _between(op, calls) if before.control_inputs]
    results = {
      t.shape.num_elements() for b in _between(op, calls) for t in b.inputs if t.op in calls
    }
    taken.append(results)
  assert taken == [{5, 60}, {60}, {60, 12}]


def tower_calls(graph):
  operations = graph.get_operations()
  return {op for op in operations if 'PartitionedCall' in op.type and op.name.startswith('tower_')}


def _between(op, calls):
  """The ops that `op` depends on, up to the calls of towers, itself included."""
  seen, pending = [op], [op]
  while pending:
    for tensor in pending.pop().inputs:
      if tensor.op not in calls and tensor.op not in seen:
        seen.append(tensor.op)
        pending.append(tensor.op)
  return seen


@pytest.mark.parametrize('place', ['cpu', 'spread', '/GPU:0'])
def test_the_fetch_of_staged_variables_has_no_path_from_a_tower(place):
  manager = hpm.variable_mgr.create(
    'parameter_server', GPUS, local_parameter_device=place, staged_vars=True
  )
  built = steps.build(steps.batch_norm_model(), manager)
  graph = built.graph
  calls = tower_calls(graph)
  staged = {v.handle.op.name for v in manager.variables if v.name.startswith('staged_')}
  stores = [
    op
    for op in placement.ops_of(graph, built.metrics)
    if op.type == 'AssignVariableOp' and op.inputs[0].op.name in staged
  ]
  assert len(stores) == 2 * 4  # four parameters on each of two devices
  assert len(calls) == 2
  before = set(placement.ops_of(graph, stores))
  assert not before & calls
  # What towers compute with was there before the step: only state is read elsewhere.
  for call in calls:
    reads = {
      op.inputs[0].op.name for op in placement.ops_of(graph, call) if op.type == 'ReadVariableOp'
    }
    assert {name for name in reads if name not in ('step', 'samples')} == {
      *(name for name in staged if name.startswith(f'staged_{call.device[-1]}/')),
      *('bn/moving_mean', 'bn/moving_variance'),
    }
  assert placement.check(graph, built.metrics) == []


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('replicated', {'all_reduce_spec': 'xring', 'gradient_repacking': 2}),
    ('replicated', {'all_reduce_spec': 'nccl'}),
    ('parameter_server', {}),
  ],
  ids=str,
)
def test_stale_gradients_are_combined_without_a_path_from_a_tower(name, options):
  manager = hpm.variable_mgr.create(name, GPUS, variable_consistency='relaxed', **options)
  built = steps.build(steps.three_variables(), manager)
  graph = built.graph
  calls = tower_calls(graph)
  applied = [
    access.outer
    for access in placement.accesses(graph, built.metrics)
    if access.type.startswith('ResourceApply')
  ]
  assert applied
  updates = [graph.get_operation_by_name(name) for name in applied]
  updates += [
    op for op in placement.ops_of(graph, built.metrics) if op.type == 'CollectiveReduceV2'
  ]
  assert not set(placement.ops_of(graph, updates)) & calls
  assert placement.check(graph, built.metrics) == []


def test_evaluation_reads_no_staged_variable():
  manager = hpm.variable_mgr.create('parameter_server', GPUS, staged_vars=True)
  with tf.Graph().as_default() as graph:
    model = steps.three_variables()
    manager.create(*model.init(0), hpm.optimizers.create('sgd', 0.1))
    batches = steps._batches(model, manager.devices, 4)
    metrics = hpm.EvalStep(model, manager).build(batches)
    reads = {
      op.inputs[0].op.name for op in placement.ops_of(graph, metrics) if op.type == 'ReadVariableOp'
    }
  assert reads == {'scale', 'fc/kernel', 'fc/bias'}
