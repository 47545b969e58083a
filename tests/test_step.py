"""The step: one trace for all devices, randomness, evaluation, refusals."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness, simulation

NUM_CLASSES = 12


def wide_model():
  """The simulation's network with more than five classes."""

  def network(b, images):
    x = tf.tanh(b.dense('hidden', b.flatten(images), 16))
    return b.dense('logits', x, NUM_CLASSES)

  return hpm.models.Model(network, name='wide', image_shape=(4, 4, 3), num_classes=NUM_CLASSES)


def dropout_model():
  def network(b, images):
    return b.dense('logits', b.dropout('dropout', b.flatten(images), 0.5), 5)

  return hpm.models.Model(network, name='dropout', image_shape=(4, 4, 3), num_classes=5)


def samples(count, num_classes=5, seed=0):
  ((batch,),) = harness.random_steps([[count]], num_classes=num_classes, seed=seed)
  return batch


@pytest.mark.parametrize('mode', harness.MODES)
def test_the_tower_is_traced_once_for_eight_devices(mode, cpu_devices):
  step = harness.create_step(harness.create_manager(mode, cpu_devices))
  assert step.num_traces == 0
  data = tf.data.Dataset.from_tensor_slices(samples(32)).repeat().batch(2, drop_remainder=True)
  for _ in step.run(data, 3):
    pass
  assert step.num_traces == 1
  step(harness.random_steps([[2] * 8])[0])
  for _ in step.run(data.prefetch(1), 2):
    pass
  assert step.num_traces == 1


def test_a_finite_data_set_needs_one_trace_too_however_its_batches_end(cpu_devices):
  step = harness.create_step(harness.create_manager('replicated_spread', cpu_devices))
  for count in (16, 17, 3):
    for _ in step.run(tf.data.Dataset.from_tensor_slices(samples(count)).batch(2)):
      pass
  assert step.num_traces == 1


def test_the_graph_calls_one_tower_function_once_a_device(cpu_devices):
  with tf.Graph().as_default() as graph:
    step = harness.create_step(harness.create_manager('replicated_spread', cpu_devices))
    step.build([tuple(tf.constant(a) for a in samples(2)) for _ in cpu_devices])
    operations = graph.get_operations()
    calls = [op for op in operations if 'PartitionedCall' in op.type and 'tower_' in op.name]
  assert step.num_traces == 1
  assert len({call.get_attr('f').name for call in calls}) == 1
  assert sorted(call.device for call in calls) == [f'/device:CPU:{i}' for i in range(8)]


def test_towers_of_one_step_drop_out_differently(cpu_devices):
  # Independent devices with the same samples and weights differ by nothing but their masks.
  batch = samples(4)
  for model, equal in ((dropout_model(), False), (harness.two_layers(), True)):
    manager = harness.create_manager('independent', cpu_devices[:2])
    step = harness.create_step(manager, 'sgd', model)
    result = harness.train(step, [[batch, batch]])
    first, second = result.copies
    assert all(np.array_equal(second[name], value) for name, value in first.items()) == equal


def test_steps_drop_out_differently_and_repeat_with_the_seed(cpu_devices):
  steps = [[samples(4), samples(4, seed=1)]] * 4
  still = hpm.optimizers.create('sgd', 0.0)  # the weights stay, so that losses tell the masks

  def losses(seed):
    manager = harness.create_manager('replicated_spread', cpu_devices[:2])
    step = harness.create_step(manager, still, dropout_model(), seed=seed)
    return [float(m.loss) for m in harness.train(step, steps).metrics]

  first = losses(seed=7)
  assert len(set(first)) == 4
  assert losses(seed=7) == first
  assert losses(seed=8) != first


def test_a_run_that_resumes_drops_out_like_one_that_goes_on(cpu_devices):
  steps = [[samples(4), samples(4, seed=1)]] * 4

  def create():
    manager = harness.create_manager('replicated_spread', cpu_devices[:2])
    return harness.create_step(manager, model=dropout_model())

  whole = harness.train(create(), steps)
  first, second = create(), create()
  harness.train(first, steps[:2])
  second.restore(first.snapshot())
  resumed = harness.train(second, steps[2:])
  for name, value in whole.values.items():
    np.testing.assert_array_equal(resumed.values[name], value, err_msg=name)


def test_the_loss_and_the_preprocessing_can_be_one_s_own(cpu_devices):
  def twice(labels, logits):
    return 2.0 * hpm.losses.softmax_cross_entropy()(labels, logits)

  def from_floats(images, dtype, data_format):
    assert (dtype, data_format) == ('float32', 'NHWC')
    return images * 2.0 - 1.0

  images, labels = samples(4)
  manager = harness.create_manager('replicated_spread', cpu_devices[:1])
  step = harness.create_step(manager, 'sgd', loss=twice, preprocess=from_floats)
  metrics = step([((images / 255.0).astype(np.float32), labels)])
  start = harness.start_values(harness.two_layers())
  expected, gradients = simulation.two_layers(start, images, labels)
  np.testing.assert_allclose(metrics.loss, 2 * expected / 4, rtol=1e-6)
  values = step.snapshot()
  for name, gradient in gradients.items():
    moved = start[name] - 0.1 * 2 * gradient / 4
    assert harness.relative_error(values[f'params/{name}'], moved) <= harness.FP32


def test_the_wrong_number_of_batches_is_refused(cpu_devices):
  step = harness.create_step(harness.create_manager('replicated_spread', cpu_devices[:2]))
  with pytest.raises(hpm.errors.UsageError, match='1 batches for 2 devices'):
    step([samples(2)])


@pytest.mark.parametrize('loss_scale', [0.0, -128.0])
def test_a_loss_scale_that_is_not_positive_is_refused(loss_scale, cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  with pytest.raises(hpm.errors.UsageError, match='above 0 is needed'):
    harness.create_step(manager, loss_scale=loss_scale)


def evaluation(mode, devices, model):
  manager = harness.create_manager(mode, devices)
  manager.create(*model.init(3))
  return hpm.EvalStep(model, manager)


def expected_evaluation(images, labels):
  params = harness.start_values(wide_model(), seed=3)
  x = simulation.normalize(images).reshape(len(images), -1)
  hidden = np.tanh(x @ params['hidden/kernel'] + params['hidden/bias'])
  logits = hidden @ params['logits/kernel'] + params['logits/bias']
  ranks = (logits > logits[np.arange(len(labels)), labels][:, None]).sum(1)
  loss, _ = simulation.two_layers(params, images, labels)
  count = len(labels)
  return {
    'loss': loss / count,
    'top_1': (ranks < 1).mean(),
    'top_5': (ranks < 5).mean(),
    'num_samples': count,
  }


@pytest.mark.parametrize('mode', harness.MODES)
@pytest.mark.parametrize('num_devices', [1, 2, 4])
def test_evaluation_counts_every_sample_once(mode, num_devices, cpu_devices):
  images, labels = samples(50, NUM_CLASSES)
  data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)
  result = evaluation(mode, cpu_devices[:num_devices], wide_model()).evaluate(data)
  expected = expected_evaluation(images, labels)
  assert 0 < expected['top_1'] < expected['top_5'] < 1
  np.testing.assert_allclose(result.pop('loss'), expected.pop('loss'), rtol=1e-6)
  assert result == expected


@pytest.mark.parametrize(('count', 'batch_size'), [(1, 16), (35, 8), (32, 8)])
def test_so_it_does_where_devices_get_nothing(count, batch_size, cpu_devices):
  images, labels = samples(count, NUM_CLASSES)
  data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size)
  step = evaluation('replicated_spread', cpu_devices[:4], wide_model())
  for _ in range(2):  # a second pass is the same
    result = step.evaluate(data)
    expected = expected_evaluation(images, labels)
    np.testing.assert_allclose(result.pop('loss'), expected.pop('loss'), rtol=1e-6)
    assert result == expected


def test_evaluation_sees_what_training_has_reached_and_changes_nothing(cpu_devices):
  model = wide_model()
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager, model=model)
  evaluate = hpm.EvalStep(model, manager).evaluate
  images, labels = samples(16, NUM_CLASSES)
  data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
  before = evaluate(data)
  halves = [(images[:8], labels[:8]), (images[8:], labels[8:])]
  metrics = step(halves)
  np.testing.assert_allclose(metrics.loss, before['loss'], rtol=1e-6)  # of the same weights
  snapshot = {name: value.numpy() for name, value in step.snapshot().items()}
  after = evaluate(data)
  assert after['loss'] < before['loss']
  for name, value in step.snapshot().items():
    np.testing.assert_array_equal(value, snapshot[name], err_msg=name)


def test_evaluating_an_endless_data_set_is_refused(cpu_devices):
  data = tf.data.Dataset.from_tensor_slices(samples(4)).repeat().batch(2)
  with pytest.raises(hpm.errors.UsageError, match='needs a finite data set'):
    evaluation('independent', cpu_devices[:1], harness.two_layers()).evaluate(data)


@pytest.mark.parametrize('accumulate', [1, 2])
def test_training_counts_the_hits_of_every_tower_when_asked(accumulate, cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  model = wide_model()
  counting = hpm.TrainStep(
    model,
    manager,
    hpm.optimizers.create('sgd', 0.1),
    count_hits=True,
    accumulate=accumulate,
  )
  images, labels = samples(8, NUM_CLASSES)
  params, state = model.init(0)
  normal = hpm.pipelines.normalize(tf.constant(images), 'float32', 'NHWC')
  logits, _ = model.apply(params, state, normal, training=False)
  rank = (logits.numpy() > np.take_along_axis(logits.numpy(), labels[:, None], 1)).sum(1)
  metrics = counting([(images[:6], labels[:6]), (images[6:], labels[6:])])
  assert (metrics.top_1, metrics.top_5) == (np.sum(rank < 1), np.sum(rank < 5))
  assert 0 < np.sum(rank < 5) < 8


def test_the_reported_loss_holds_the_decay_when_asked(cpu_devices):
  losses = {}
  for report in (False, True):
    step = hpm.TrainStep(
      harness.two_layers(),
      harness.create_manager('replicated_spread', cpu_devices[:2]),
      hpm.optimizers.create('sgd', 0.1),
      weight_decay=0.5,
      report_decay=report,
    )
    before = step.snapshot()
    batch = samples(4)
    metrics = step([batch, batch])
    losses[report] = float(metrics.loss)
    assert (metrics.top_1, metrics.top_5) == (-1, -1)
  kernels = [
    v.numpy() for n, v in before.items() if n.startswith('params/') and n.endswith('kernel')
  ]
  penalty = 0.5 * sum(np.sum(kernel**2) / 2 for kernel in kernels)
  assert losses[True] - losses[False] == pytest.approx(penalty, rel=1e-5)


def test_parts_of_a_batch_are_compiled_by_xla_as_well(cpu_devices):
  def network(b, images):  # ops that want shapes to be constant
    x = tf.nn.relu(b.conv('conv', images, 4, 3))
    return b.dense('logits', b.global_average_pool(x), 5)

  model = hpm.models.Model(network, name='convolved', image_shape=(8, 8, 3), num_classes=5)
  ended = {}
  for xla in (False, True):
    step = hpm.TrainStep(
      model,
      harness.create_manager('replicated_spread', cpu_devices[:2]),
      hpm.optimizers.create('sgd', 0.1),
      accumulate=2,
      xla=xla,
    )
    ((batch, other),) = harness.random_steps([[4, 4]], image_shape=(8, 8, 3))
    step([batch, other])
    ended[xla] = step.snapshot()
  for name, value in ended[False].items():
    np.testing.assert_allclose(ended[True][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
