"""The plan of a step: by hand for a small one, and against what TensorFlow allocates for real."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import published
import hpm
from hpm import planning
from hpm.errors import UsageError
from tests.parity import harness

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


def plan_of_chief(mode, num_workers, num_ps):
  """LeNet in the chief of a cluster, over two GPUs."""
  options = {'worker': 0, 'num_workers': num_workers}
  if num_ps:
    options['ps_devices'] = [f'/job:ps/task:{i}/device:CPU:0' for i in range(num_ps)]
  with tf.Graph().as_default(), tf.device('/job:worker/task:0'):
    return hpm.plan(make_step(hpm.models.create('lenet'), mode, **options), 10)


@pytest.mark.parametrize('mode', ['parameter_server', 'distributed_replicated'])
def test_parameter_servers_have_the_variables_and_each_worker_moves_them_once(mode):
  plan = plan_of_chief(mode, 3, 2)
  model = 4 * hpm.models.create('lenet').num_params
  places = [f'/job:ps/task:{i}/device:CPU:0' for i in range(2)]
  held = [device for device in plan.devices if device.device in places]
  assert [device.device for device in held] == places
  assert sum(device.slots for device in held) == model
  assert sum(device.variables for device in held) == model
  own = [device for device in plan.devices if 'GPU' in device.device]
  assert {device.device for device in own} == {
    f'/job:worker/task:0/device:GPU:{i}' for i in range(2)
  }
  copied = mode == 'distributed_replicated'
  assert [device.variables for device in own] == [model * copied] * 2
  moved = [t for t in plan.transfers if t.link == 'network']
  for place, device in zip(places, held, strict=True):
    for found in (
      sum(t.bytes for t in moved if t.source == place),
      sum(t.bytes for t in moved if t.destination == place),
    ):
      assert found == pytest.approx(device.slots, rel=1e-3)  # some scalars beside


def test_collectives_between_processes_are_planned_as_a_ring_of_workers():
  plan = plan_of_chief('collective_all_reduce', 4, 0)
  model = 4 * hpm.models.create('lenet').num_params
  moved = [t for t in plan.transfers if t.link == 'network']
  assert {t.destination for t in moved} == {'all workers'}
  assert sum(t.bytes for t in moved) == pytest.approx(2 * 3 / 4 * model, rel=1e-3)
  # Half of the buckets are summed on each device and cross from there.
  assert len({t.source for t in moved}) == 2


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


def test_sums_of_several_towers_take_the_memory_of_one():
  """Its own gradients, those of two others, and the sums, which are formed in one place."""
  plan = plan_of(10, two_layers(), num_devices=3, local_parameter_device='/GPU:0')
  aggregation = {device.device[8:]: device.aggregation for device in plan.devices}
  scalars = 32  # losses and what the optimizer and the transform take
  assert 4 * 268 <= aggregation['GPU:0'] <= 4 * 268 + scalars
  for other in ('GPU:1', 'GPU:2'):
    assert 2 * 268 <= aggregation[other] <= 2 * 268 + scalars


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
  assert collective.source == collective.destination == 'all'


def test_collectives_within_groups_are_one_transfer_a_group():
  plan = plan_of(10, two_layers(), num_devices=5, all_reduce_spec='nccl/xring')
  groups = {t.source: (t.tensors, t.bytes) for t in plan.transfers if t.link == 'collective'}
  assert groups == {
    '/device:GPU:0, /device:GPU:1': (4, 268),
    '/device:GPU:2, /device:GPU:3, /device:GPU:4': (4, 268 * 4 // 3),
  }


def test_synchronised_batch_norm_sums_inside_the_towers():
  def network(b, images):
    x = b.batch_norm('bn', b.conv('conv', images, 5, 1))
    return b.dense('logits', b.flatten(x), 3)

  model = hpm.models.Model(network, name='bn', image_shape=(2, 2, 3), num_classes=3)
  plan = plan_of(4, model, num_devices=4, batch_norm_statistics='cross_replica')
  (collective,) = [t for t in plan.transfers if t.link == 'collective']
  assert collective.source == 'all'
  assert collective.tensors == 2  # forward and back: sums, sums of squares, counts of 5 channels
  assert collective.bytes == 2 * (3 * 5 * 4) * 2 * 3 // 4


GRADIENTS = 268  # bytes of the small model's gradients
CPU_SERVER = (lambda n: n, lambda n: n, lambda n: 0)
ON_DEVICES = (lambda n: 0, lambda n: 0, lambda n: 2 * (n - 1))
# Manager, its options -> how many times the gradients (or parameters) cross from n GPUs to the
# host, from the host to them, and between them.
CROSSINGS = [
  ('independent', {}, (lambda n: 0, lambda n: 0, lambda n: 0)),
  ('parameter_server', {}, CPU_SERVER),
  ('parameter_server', {'staged_vars': True}, CPU_SERVER),
  ('parameter_server', {'variable_consistency': 'relaxed'}, CPU_SERVER),
  ('parameter_server', {'local_parameter_device': 'spread'}, ON_DEVICES),
  ('parameter_server', {'local_parameter_device': '/GPU:1'}, ON_DEVICES),
  ('replicated', {}, ON_DEVICES),
  ('replicated', {'variable_consistency': 'relaxed'}, ON_DEVICES),
  ('replicated', {'local_parameter_device': 'cpu'}, CPU_SERVER),
  ('replicated', {'local_parameter_device': '/GPU:1'}, ON_DEVICES),
  *(
    ('replicated', {'all_reduce_spec': spec}, ON_DEVICES)
    for spec in ('psgpu', 'psgpu#3', 'xring', 'xring#2', 'rechd', 'hierarchical_copy')
  ),
  ('replicated', {'all_reduce_spec': 'pscpu'}, CPU_SERVER),
  ('replicated', {'all_reduce_spec': 'pscpu#2', 'gradient_repacking': 3}, CPU_SERVER),
  ('replicated', {'all_reduce_spec': 'pscpu:64:pscpu#3'}, CPU_SERVER),
  ('replicated', {'gradient_repacking': 4}, ON_DEVICES),
  ('replicated', {'agg_small_grads_max_bytes': 64}, ON_DEVICES),
  (
    'replicated',
    {'transfer_dtype': 'float16', 'all_reduce_spec': 'xring'},
    (lambda n: 0, lambda n: 0, lambda n: n - 1),
  ),
  *(
    ('replicated', {'all_reduce_spec': spec}, (lambda n: 0, lambda n: 0, lambda n: 0))
    for spec in ('collective', 'nccl', 'nccl_all_reduce')
  ),
  # One ring between two groups, of 2 gradients in all, and from the speaker to the n - 2 others.
  ('replicated', {'all_reduce_spec': 'nccl/xring'}, (lambda n: 0, lambda n: 0, lambda n: n)),
]


def tokens_of(plan):
  """Bytes of what keeps collectives in order: a float32 on each device that takes part."""
  groups = [t.source for t in plan.transfers if t.link == 'collective']
  return 4 * sum(len(plan.towers) if g == 'all' else len(g.split(', ')) for g in groups)


@pytest.mark.parametrize('num_devices', harness.chosen(range(2, 9), [2, 5]))
@pytest.mark.parametrize(
  ('mode', 'options', 'formula'), CROSSINGS, ids=[f'{m} {o}' for m, o, _ in CROSSINGS]
)
def test_what_crosses_is_what_each_mode_s_formula_says(mode, options, formula, num_devices):
  plan = plan_of(10, two_layers(), mode, num_devices, **options)
  assert plan.towers == [f'/device:GPU:{i}' for i in range(num_devices)]
  crossed = collections.Counter()
  for t in plan.transfers:
    if t.link in ('host-device', 'device-device'):
      crossed[t.source[8:11], t.destination[8:11]] += t.bytes
  to_host, from_host, between = (times(num_devices) * GRADIENTS for times in formula)
  assert crossed['GPU', 'CPU'] == to_host + 4 * num_devices  # and each tower's loss
  updating = [device for device in plan.devices if device.slots and 'GPU' in device.device]
  assert crossed['CPU', 'GPU'] == from_host + 4 * len(updating)  # one over the number of samples
  assert crossed['GPU', 'GPU'] == between
  sent = {t.source: t.bytes for t in plan.transfers if t.link == 'collective'}
  if options.get('all_reduce_spec') in ('collective', 'nccl', 'nccl_all_reduce'):
    assert sent == {'all': GRADIENTS * 2 * (num_devices - 1) // num_devices}
  # A copy on every device, slots beside it, or one in all.
  copies = num_devices if mode != 'parameter_server' else 1
  staged = num_devices if options.get('staged_vars') else 0
  in_flight = num_devices if options.get('variable_consistency') else 0
  tokens = 0 if options.get('all_reduce_spec') == 'nccl_all_reduce' else tokens_of(plan)
  variables = sum(device.variables for device in plan.devices) - tokens
  assert variables == (copies + staged + in_flight) * GRADIENTS + 16 + 8 * in_flight
  assert sum(device.slots for device in plan.devices) == copies * GRADIENTS


# Bytes of parameters and of batch norm's averages, number of tensors.
PUBLISHED = {
  'resnet50': (4 * 25_557_032, 4 * 2 * 26_560, 161),
  'alexnet': (4 * 61_100_840, 0, 16),
  'vgg16': (4 * 138_357_544, 0, 32),
}


def published_rows():
  """(model, devices, batch size a device, with NCCL) of the page's EC2 and DGX-1 rows."""
  found = {
    (row.model, row.num_gpus, row.batch_size_per_gpu, row.nccl)
    for row in published.results()
    if (row.platform, row.model) in (
      ('ec2_k80', 'resnet50'), ('dgx1_p100', 'alexnet'), ('dgx1_p100', 'vgg16')
    )
    and row.num_gpus > 1
  }  # fmt: skip
  return [
    pytest.param(*row, marks=() if row[1] == 8 and row[2] >= 64 else pytest.mark.long)
    for row in sorted(found)
  ]


@pytest.mark.parametrize(('name', 'num_devices', 'batch_size', 'nccl'), published_rows())
def test_published_rows_move_their_gradients_between_gpus_alone(
  name, num_devices, batch_size, nccl
):
  spec = 'nccl' if nccl else 'copy'
  model = hpm.models.create(name, num_classes=1000)
  plan = plan_of(
    batch_size, model, 'replicated', num_devices, all_reduce_spec=spec, gradient_repacking=0
  )
  params, averages, count = PUBLISHED[name]
  assert nccl == (name != 'resnet50')  # as the page has it: NCCL on DGX-1, sums on GPUs on EC2
  between = [t for t in plan.transfers if t.link == 'device-device']
  collectives = [(t.source, t.tensors, t.bytes) for t in plan.transfers if t.link == 'collective']
  if nccl:
    assert between == []
    assert collectives == [('all', count, params * 2 * (num_devices - 1) // num_devices)]
  else:
    assert collectives == []
    assert sum(t.bytes for t in between) == 2 * (num_devices - 1) * (params + averages)
    assert {(t.source, t.destination) for t in between} == set(
      itertools.permutations(plan.towers, 2)
    )
  host = [t for t in plan.transfers if t.link == 'host-device']
  assert {(t.source, t.destination, t.bytes) for t in host} == {
    *((tower, '/device:CPU:0', 4) for tower in plan.towers),  # its loss
    *(('/device:CPU:0', tower, 4) for tower in plan.towers),  # one over the number of samples
  }
  for device in plan.devices:
    if device.device in plan.towers:
      assert (device.variables, device.slots) == (params + averages + 4 * nccl, params)


def test_memory_alone_does_not_explain_the_published_batches_of_vgg16():
  """32 images on a K80 of 12 GB, 64 on a P100 of 16 GB: the tensors of 64 would fit into either."""
  batches = {
    row.platform: published.headline_batch(row.platform, 'vgg16')
    for row in published.results()
    if row.model == 'vgg16'
  }
  assert (batches['gce_k80'], batches['dgx1_p100']) == (32, 64)
  with tf.Graph().as_default():
    step = make_step(hpm.models.create('vgg16'), num_devices=1, optimizer='sgd')
    made = hpm.plan(step, 64)
    k80, p100 = planning.largest_batches(step, made, [12 * 10**9, 16 * 10**9])
  assert 64 < k80 < p100


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


def buckets_of(*args, **options):
  return [(bucket.names, bucket.share) for bucket in plan_of(4, *args, **options).buckets]


def test_a_bucket_waits_for_all_of_its_gradients():
  # Kernels of 48 and 3 values: backprop's three products are of 10 x 12 x 4, and two of 10 x 4 x 3.
  each = dict(buckets_of(two_layers()))
  first, second = ('first/kernel',), ('second/kernel',)
  assert each[('second/bias',)] == 0.0
  assert each[second] == 12 / (12 + 12 + 48)
  assert each[first] == (12 + 48) / (12 + 12 + 48)
  everything = ('first/bias', 'first/kernel', 'second/bias', 'second/kernel')
  for options in ({'gradient_repacking': 1}, {'gradient_repacking': 1, 'all_reduce_spec': 'nccl'}):
    assert buckets_of(two_layers(), **options) == [(everything, 1.0)]
  halves = dict(buckets_of(two_layers(), gradient_repacking=2, all_reduce_spec='xring'))
  # 67 values: the first 33 are of the second layer and of the first one's bias and kernel.
  assert len(halves) == 2
  assert halves[('first/kernel',)] == each[first]


def test_every_algorithm_has_the_same_buckets():
  specs = ('copy', 'psgpu#2', 'pscpu', 'xring', 'rechd', 'hierarchical_copy', 'nccl', 'copy/xring')
  alone = {'num_devices': 4, 'gradient_repacking': 0}
  found = [buckets_of(two_layers(), all_reduce_spec=spec, **alone) for spec in specs]
  found.append(buckets_of(two_layers(), 'parameter_server', num_devices=4))
  assert all(set(own) == set(found[0]) for own in found)
  assert len(found[0]) == 4


@pytest.mark.parametrize(
  'options',
  [{'mode': 'independent'}, {'num_devices': 1}, {'variable_consistency': 'relaxed'}],
  ids=str,
)
def test_where_nothing_of_this_step_is_reduced_there_is_no_bucket(options):
  assert buckets_of(two_layers(), **options) == []


@pytest.mark.parametrize('options', [{'xla': True}, {'accumulate': 2}], ids=str)
def test_towers_that_hand_on_all_gradients_at_once_let_every_bucket_wait(options):
  manager = hpm.variable_mgr.create('replicated', ['/GPU:0', '/GPU:1'])
  with tf.Graph().as_default():
    step = hpm.TrainStep(two_layers(), manager, hpm.optimizers.create('sgd', 0.1), **options)
    plan = hpm.plan(step, 4)
  assert {wait.share for wait in plan.waits} == {bucket.share for bucket in plan.buckets} == {1.0}


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
  ('name', 'batch_size', 'image_size'),
  [
    ('resnet50', 8, 96),
    ('vgg11', 8, 64),
    ('mobilenet_v2', 8, 96),
    pytest.param('resnet50', 16, 64, marks=pytest.mark.long),
    pytest.param('vgg16', 4, 224, marks=pytest.mark.long),
  ],
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
  def total(batch_size):
    plan = plan_of(batch_size, hpm.models.create('lenet', num_classes=10))
    return max(device.total_bytes for device in plan.devices)

  limits = [total(50), total(50) - 1, total(3), 1000]
  with tf.Graph().as_default():
    step = make_step(hpm.models.create('lenet', num_classes=10))
    assert planning.largest_batches(step, hpm.plan(step, 7), limits) == [50, 49, 3, 0]


def test_plan_wants_a_graph_of_its_own(cpu_devices):
  step = make_step(two_layers(), kind='CPU')
  with pytest.raises(UsageError, match=r'plan\(\) reads a tf.Graph'):
    hpm.plan(step, 4)
  with tf.Graph().as_default(), pytest.raises(UsageError, match='reads a tf.Graph'):
    hpm.plan(step, 4)
  with tf.Graph().as_default(), pytest.raises(UsageError, match='batch_size 0'):
    hpm.plan(make_step(two_layers()), 0)
