"""The step as a tf.function and as a session graph: the same bits after five steps."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness

IMAGE_SHAPE = (8, 8, 1)


def miniature():
  """Two convolutions with batch norm, a pooling and dropout: parameters, state and randomness."""

  def network(b, images):
    x = tf.nn.relu(b.batch_norm('bn1', b.conv('conv1', images, 4, 3)))
    x = b.max_pool(x, 2, 2)
    x = tf.nn.relu(b.batch_norm('bn2', b.conv('conv2', x, 8, 3)))
    x = b.dropout('dropout', b.global_average_pool(x), 0.25)
    return b.dense('logits', x, 4)

  return hpm.models.Model(network, name='miniature', image_shape=IMAGE_SHAPE, num_classes=4)


def create(mode, devices, optimizer='momentum', loss_scale=1.0, **options):
  manager = harness.create_manager(mode, devices, **options)
  return harness.create_step(manager, optimizer, miniature(), loss_scale=loss_scale)


def assert_same_bits(actual, expected):
  assert set(actual.values) == set(expected.values)
  for name, value in expected.values.items():
    np.testing.assert_array_equal(actual.values[name], value, err_msg=name)
  for own, other in zip(actual.copies, expected.copies, strict=True):
    for name, value in other.items():
      np.testing.assert_array_equal(own[name], value, err_msg=name)
  np.testing.assert_array_equal(np.array(actual.metrics), np.array(expected.metrics))


@pytest.mark.parametrize(
  ('mode', 'optimizer'),
  harness.chosen(
    [(mode, 'momentum') for mode in harness.MODES]
    + [('replicated_spread', name) for name in harness.OPTIMIZERS if name != 'momentum'],
    [(mode, 'momentum') for mode in harness.MODES if mode != 'replicated_cpu']
    + [('replicated_spread', 'adam')],
  ),
)
def test_session_and_function_end_with_the_same_bits(mode, optimizer, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 5, IMAGE_SHAPE, num_classes=4)
  function = harness.train(create(mode, cpu_devices[:2], optimizer), steps)
  session = harness.train_in_session(lambda: create(mode, cpu_devices[:2], optimizer), steps)
  assert_same_bits(session, function)
  for name, value in miniature().init()[1].items():
    assert np.any(function.values[f'state/{name}'] != value), f'{name} has not moved'


@pytest.mark.parametrize(
  ('mode', 'num_devices'),
  harness.chosen(
    [
      ('independent', 1),
      ('parameter_server_spread', 3),
      ('replicated_spread', 3),
      ('replicated_collective', 3),
    ],
    [('independent', 1), ('replicated_spread', 3)],
  ),
)
def test_so_do_one_and_three_devices(mode, num_devices, cpu_devices):
  steps = harness.random_steps([[2] * num_devices] * 5, IMAGE_SHAPE, num_classes=4)
  devices = cpu_devices[:num_devices]
  function = harness.train(create(mode, devices), steps)
  assert_same_bits(harness.train_in_session(lambda: create(mode, devices), steps), function)


@pytest.mark.parametrize(
  ('mode', 'dtype'), [('replicated_spread', 'float16'), ('replicated_collective', 'bfloat16')]
)
def test_so_does_half_precision_transfer(mode, dtype, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 5, IMAGE_SHAPE, num_classes=4)

  def step():
    return create(mode, cpu_devices[:2], loss_scale=128.0, transfer_dtype=dtype)

  assert_same_bits(harness.train_in_session(step, steps), harness.train(step(), steps))


@pytest.mark.parametrize('mode', ['parameter_server_cpu', 'replicated_spread'])
def test_so_do_batches_that_run_out(mode, cpu_devices):
  sizes = [[4, 4], [4, 2], [3, 0]]  # of unknown size in both, as for a data set
  steps = harness.random_steps(sizes, IMAGE_SHAPE, num_classes=4)
  step = create(mode, cpu_devices[:2])
  images, labels = (np.concatenate([b[i] for towers in steps for b in towers]) for i in (0, 1))

  def generate():
    start = 0
    for size in (size for towers in sizes for size in towers if size):
      yield images[start : start + size], labels[start : start + size]
      start += size

  signature = (
    tf.TensorSpec([None, *IMAGE_SHAPE], tf.uint8),
    tf.TensorSpec([None], tf.int64),
  )
  data = tf.data.Dataset.from_generator(generate, output_signature=signature)
  metrics = [hpm.Metrics(*(m.numpy() for m in result)) for result in step.run(data)]
  function = harness.Result(
    {name: value.numpy() for name, value in step.snapshot().items()},
    metrics,
    [{name: v.numpy() for name, v in copy.items()} for copy in step.manager.copies],
  )
  session = harness.train_in_session(lambda: create(mode, cpu_devices[:2]), steps)
  assert_same_bits(session, function)
