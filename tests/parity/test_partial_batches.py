"""Short and missing batches: the exact mean over the samples there are, and never a NaN."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness

# Number of samples, batch size a device, devices -> the sizes that each step's towers get.
ENDS = {
  (5, 4, 2): [[4, 1]],
  (10, 4, 2): [[4, 4], [2, 0]],
  (10, 4, 4): [[4, 4, 2, 0]],
  (9, 2, 4): [[2, 2, 2, 2], [1, 0, 0, 0]],
}


def dataset(num_samples, batch_size, image_shape=(4, 4, 3)):
  ((batch,),) = harness.random_steps([[num_samples]], image_shape)
  return batch, tf.data.Dataset.from_tensor_slices(batch).batch(batch_size)


def deal(batch, sizes):
  """The steps' batches: samples in order, `sizes[step][tower]` each."""
  images, labels = batch
  steps, start = [], 0
  for towers in sizes:
    steps.append([])
    for size in towers:
      steps[-1].append((images[start : start + size], labels[start : start + size]))
      start += size
  assert start == len(labels)
  return steps


def run(step, data):
  metrics = [hpm.Metrics(*(m.numpy() for m in result)) for result in step.run(data)]
  return harness.Result(
    {name: value.numpy() for name, value in step.snapshot().items()},
    metrics,
    [{name: v.numpy() for name, v in copy.items()} for copy in step.manager.copies],
  )


def normalized_network():
  """Batch norm on the images, so that its statistics follow from them by hand."""

  def network(b, images):
    return b.dense('logits', b.flatten(b.batch_norm('bn', images)), 5)

  return hpm.models.Model(network, name='normalized', image_shape=(4, 4, 3), num_classes=5)


@pytest.mark.parametrize(
  ('mode', 'end'),
  harness.chosen(
    [(mode, (10, 4, 2)) for mode in harness.SYNCHRONOUS]
    + [('replicated_spread', end) for end in ENDS if end != (10, 4, 2)],
    [(mode, (10, 4, 2)) for mode in harness.TWO]
    + [('replicated_spread', end) for end in ((5, 4, 2), (9, 2, 4))],
  ),
)
def test_the_end_of_the_data_agrees_with_the_simulation(mode, end, cpu_devices):
  num_samples, batch_size, num_devices = end
  sizes = ENDS[end]
  batch, data = dataset(num_samples, batch_size)
  step = harness.create_step(harness.create_manager(mode, cpu_devices[:num_devices]))
  result = run(step, data)
  harness.assert_agrees(result, harness.simulate(mode, deal(batch, sizes)))
  harness.assert_replicas_equal(result.copies)
  assert [m.num_samples for m in result.metrics] == [sum(towers) for towers in sizes]


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
@pytest.mark.parametrize('sizes', [[4, 1], [0, 3]])
def test_batches_given_directly_may_differ_in_size(mode, sizes, cpu_devices):
  steps = harness.random_steps([sizes] * 5)
  step = harness.create_step(harness.create_manager(mode, cpu_devices[:2]), loss_scale=128.0)
  harness.assert_agrees(harness.train(step, steps), harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
def test_a_session_takes_batches_that_differ_in_size(mode, cpu_devices):
  steps = harness.random_steps([[4, 1]] * 5)
  result = harness.train_in_session(
    lambda: harness.create_step(harness.create_manager(mode, cpu_devices[:2]), loss_scale=128.0),
    steps,
  )
  harness.assert_agrees(result, harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
@pytest.mark.parametrize('directly', [False, True])
def test_batch_norm_statistics_are_the_mean_over_towers_with_the_old_ones_of_an_empty_tower(
  mode, directly, cpu_devices
):
  batch, data = dataset(10, 4)
  steps = deal(batch, [[4, 4], [2, 0]])
  step = harness.create_step(
    harness.create_manager(mode, cpu_devices[:2]), model=normalized_network()
  )
  result = harness.train(step, steps) if directly else run(step, data)

  mean, variance = np.zeros(3), np.ones(3)
  for towers in steps:
    means, variances = [], []
    for images, _ in towers:
      pixels = (images.astype(np.float64) - 127.5).reshape(-1, 3) / 127.5
      own = (pixels.mean(0), pixels.var(0, ddof=1)) if len(pixels) else (mean, variance)
      keep = 0.9 if len(pixels) else 0.0
      means.append(keep * mean + (1 - keep) * own[0])
      variances.append(keep * variance + (1 - keep) * own[1])
    mean, variance = np.mean(means, 0), np.mean(variances, 0)
  assert harness.relative_error(result.values['state/bn/moving_mean'], mean) <= harness.FP32
  assert harness.relative_error(result.values['state/bn/moving_variance'], variance) <= harness.FP32
  assert all(np.all(np.isfinite(value)) for value in result.values.values())
  harness.assert_replicas_equal(result.copies)


@pytest.mark.parametrize('num_devices', [2, 4])
def test_a_device_without_samples_gets_through_convolution_and_batch_norm(num_devices, cpu_devices):
  # oneDNN's convolution of no samples has a wrong shape, which only the layer after it notices.
  def network(b, images):
    x = tf.nn.relu(b.batch_norm('bn', b.conv('conv', images, 8, 3)))
    return b.dense('logits', b.global_average_pool(b.max_pool(x, 2, 2)), 5)

  model = hpm.models.Model(network, name='conv_bn', image_shape=(8, 8, 1), num_classes=5)
  batch, data = dataset(4, 4, (8, 8, 1))
  manager = harness.create_manager('replicated_spread', cpu_devices[:num_devices])
  result = run(harness.create_step(manager, model=model), data)
  alone = harness.train(
    harness.create_step(harness.create_manager('replicated_spread', cpu_devices[:1]), model=model),
    [[batch]],
  )
  for name, value in alone.values.items():
    if name.startswith(('params', 'slots')):
      assert harness.relative_error(result.values[name], value) <= harness.FP32, name
    assert np.all(np.isfinite(result.values[name]))


def test_an_independent_device_without_samples_keeps_its_statistics(cpu_devices):
  _, data = dataset(10, 4)
  manager = harness.create_manager('independent', cpu_devices[:2])
  step = harness.create_step(manager, 'sgd', normalized_network())
  after_each = []
  for _ in step.run(data):
    after_each.append({name: value.numpy() for name, value in step.snapshot().items()})
  first, second = after_each
  for name in first:
    assert np.all(np.isfinite(second[name]))
    if name.startswith('replica/1/'):
      np.testing.assert_array_equal(second[name], first[name], err_msg=name)
