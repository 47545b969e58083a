"""The plan of a step: by hand for a small one, and against what TensorFlow allocates for real."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm import planning
from hpm.errors import UsageError

GIB = 2**30


def make_step(model, mode='replicated', num_devices=2, kind='GPU', optimizer='momentum', **options):
  devices = [f'/{kind}:{i}' for i in range(num_devices)]
  manager = hpm.variable_mgr.create(mode, devices, **options)
  return hpm.TrainStep(model, manager, hpm.optimizers.create(optimizer, 0.1))


def two_layers():
  """Kernels of 12 x 4 and 4 x 3, biases of 4 and 3: 67 numbers, 268 bytes."""

  def network(b, images):
    return b.dense('second', tf.tanh(b.dense('first', b.flatten(images), 4)), 3)

  return hpm.models.Model(network, name='two_layers', image_shape=(2, 2, 3), num_classes=3)


def plan_of(batch_size, *args, **options):
  with tf.Graph().as_default():
    return hpm.plan(make_step(*args, **options), batch_size)


def test_memory_of_a_small_step_by_hand():
  plan = plan_of(10, two_layers())
  assert [device.device for device in plan.devices] == [
    '/device:CPU:0',
    '/device:GPU:0',
    '/device:GPU:1',
  ]
  host, first, second = plan.devices
  assert host.variables == 2 * 8  # step and samples
  assert host.tower == 0
  for gpu in (first, second):
    assert gpu.variables == 268
    assert gpu.slots == 268
    assert gpu.batches == 2 * 10 * (12 + 8)  # the current and the staged: uint8 pixels, an int64
  assert first.total_bytes == 268 + 268 + 400 + max(first.tower, first.aggregation)
  # The batch in float32 (10 x 12), the hidden layer (10 x 4) and logits (10 x 3) at the least.
  assert first.tower >= 4 * 10 * (12 + 4 + 3)


def test_transfers_of_a_small_step_by_hand():
  """Tensor i is summed on device i mod 2 and copied back: 2 of 4 tensors on each, both ways."""
  plan = plan_of(10, two_layers())
  moved = {(t.source[8:], t.destination[8:]): (t.tensors, t.bytes) for t in plan.transfers}
  # In the order of reduction: second/kernel (48 bytes), second/bias (12), first/kernel (192),
  # first/bias (16), or the like: each device sends two gradients and two sums.
  assert moved['GPU:0', 'GPU:1'][0] == moved['GPU:1', 'GPU:0'][0] == 4
  assert moved['GPU:0', 'GPU:1'][1] + moved['GPU:1', 'GPU:0'][1] == 2 * 268
  assert moved['GPU:0', 'CPU:0'] == (1, 4)  # the loss
  kinds = {
    (t.source[8:11], t.destination[8:11]): t.link for t in plan.transfers if t.link != 'host'
  }
  assert kinds == {
    ('GPU', 'GPU'): 'device-device',
    ('GPU', 'CPU'): 'host-device',
    ('CPU', 'GPU'): 'host-device',
  }


def test_a_parameter_server_keeps_the_variables_on_the_host():
  plan = plan_of(10, two_layers(), 'parameter_server')
  host, gpu, _ = plan.devices
  assert (host.variables, host.slots) == (268 + 16, 268)
  assert (gpu.variables, gpu.slots) == (0, 0)
  assert plan.variables['copy_0/params/first/kernel'] == '/device:CPU:0'
  assert plan.towers == ['/device:GPU:0', '/device:GPU:1']
  moved = {(t.source[8:], t.destination[8:], t.link): t.bytes for t in plan.transfers}
  assert moved['CPU:0', 'GPU:0', 'host-device'] == 268
  assert moved['GPU:0', 'CPU:0', 'host-device'] == 268 + 4


def test_a_collective_is_one_transfer_for_all():
  plan = plan_of(10, two_layers(), num_devices=4, all_reduce_spec='nccl')
  (collective,) = [t for t in plan.transfers if t.link == 'collective']
  assert (collective.tensors, collective.bytes) == (4, 268 * 2 * 3 // 4)


def test_the_last_layers_gradients_are_there_first():
  plan = plan_of(4, hpm.models.create('resnet50', image_size=64, num_classes=10), num_devices=1)
  order = [wait.name for wait in plan.waits]
  assert order.index('logits/kernel') < order.index('stage4/block1/conv1/kernel')
  assert order.index('stage4/block1/conv1/kernel') < order.index('conv1/kernel')
  by_name = {wait.name: wait for wait in plan.waits}
  assert by_name['logits/kernel'].bytes == 4 * 2048 * 10
  assert by_name['stage4/block3/conv3/kernel'].share < 0.05
  # The first layer's waits for all gradients of activations, and no other kernel's.
  assert 0.4 < by_name['conv1/kernel'].share < 0.6


def allocated(num_devices, model, batch_size, optimizer='momentum'):
  """(peak bytes of live tensors, bytes allocated by update ops) of one real step on CPU devices."""
  rng = np.random.default_rng(0)
  with tf.Graph().as_default():
    step = make_step(model, num_devices=num_devices, kind='CPU', optimizer=optimizer)
    batches, feed = [], {}
    for _ in range(num_devices):
      images = tf.compat.v1.placeholder(tf.uint8, (batch_size, *model.image_shape))
      labels = tf.compat.v1.placeholder(tf.int64, (batch_size,))
      batches.append((images, labels))
      feed[images] = rng.integers(0, 255, images.shape).astype(np.uint8)
      feed[labels] = rng.integers(0, model.num_classes, batch_size)
    metrics = step.build(batches)
    config = tf.compat.v1.ConfigProto(device_count={'CPU': num_devices})
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    trace = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(config=config) as session:
      session.run([variable.initializer for variable in step.variables])
      session.run(metrics, feed)
      session.run(metrics, feed, options=options, run_metadata=trace)
  records, by_updates = [], 0
  for device in trace.step_stats.dev_stats:
    for node in device.node_stats:
      for memory in node.memory:
        records += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
        if 'ResourceApply' in node.timeline_label:
          by_updates += sum(r.alloc_bytes for r in memory.allocation_records)
  live = np.cumsum([size for _, size in sorted(records)])
  return int(live.max()), by_updates


@pytest.mark.parametrize(
  ('name', 'batch_size', 'image_size'), [('resnet50', 8, 96), ('resnet50', 16, 64)]
)
def test_tower_memory_is_what_tensorflow_allocates_within_15_percent(name, batch_size, image_size):
  def model():
    return hpm.models.create(name, image_size=image_size, num_classes=10)

  measured, _ = allocated(1, model(), batch_size)
  planned = plan_of(batch_size, model(), num_devices=1, kind='CPU').devices[0].tower
  assert abs(planned / measured - 1) < 0.15, (planned, measured)


@pytest.mark.parametrize('optimizer', ['sgd', 'momentum', 'adam'])
def test_updates_copy_no_parameter(optimizer):
  """TensorFlow copies a variable before it updates it if a tensor that was read is still alive."""
  _, by_updates = allocated(2, hpm.models.create('lenet', num_classes=10), 8, optimizer)
  assert by_updates == 0


def test_the_largest_batch_fits_and_one_more_does_not():
  def make():
    return make_step(hpm.models.create('lenet', num_classes=10), num_devices=1)

  def total(batch_size):
    with tf.Graph().as_default():
      return max(device.total_bytes for device in hpm.plan(make(), batch_size).devices)

  limit = total(50)
  assert planning.largest_batch(make, limit) == 50
  assert planning.largest_batch(make, limit - 1) == 49
  assert planning.largest_batch(make, total(3)) == 3
  assert planning.largest_batch(make, 1000) == 0


def test_plan_wants_a_graph_of_its_own(cpu_devices):
  step = make_step(two_layers(), kind='CPU')
  with pytest.raises(UsageError, match=r'plan\(\) reads a tf.Graph'):
    hpm.plan(step, 4)
  with tf.Graph().as_default(), pytest.raises(UsageError, match='reads a tf.Graph'):
    hpm.plan(step, 4)
  with tf.Graph().as_default(), pytest.raises(UsageError, match='batch_size 0'):
    hpm.plan(make_step(two_layers()), 0)
