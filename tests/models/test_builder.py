"""The builder: names, batch norm, ends of blocks, dropout."""

from collections import Counter
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import hpm

IMAGES = (6, 5, 3)


def model_of(network, image_shape=IMAGES, **options):
  return hpm.models.Model(network, name='test', image_shape=image_shape, num_classes=4, **options)


def images(count=4, seed=0):
  return 3.0 + 2.0 * tf.random.stateless_normal([count, *IMAGES], [seed, 0])


def normalized(b, x):
  return b.dense('logits', b.flatten(b.batch_norm('bn', x)), 4)


def forward_and_gradients(model, x, **options):
  params, state = model.init()
  # Away from 1 and 0, where a gradient could be missed.
  params['bn/scale'] += tf.constant([0.5, -0.25, 1.0])
  params['bn/offset'] += tf.constant([1.0, 2.0, -1.0])

  @tf.function(autograph=False)
  def run():
    with tf.GradientTape() as tape:
      tape.watch([params, x])
      logits, new_state = model.apply(params, state, x, training=True, **options)
      loss = tf.reduce_sum(tf.sin(logits))
    gradients, by_image = tape.gradient(loss, [params, x])
    return {'logits': logits, **new_state, 'images': by_image, **{
      f'gradient/{name}': g for name, g in gradients.items()
    }}  # fmt: skip

  return run()


def test_batch_norm_follows_its_formula():
  model, x = model_of(normalized), images()
  params, state = model.init()
  logits, new_state = model.apply(params, state, x, training=True)
  values = x.numpy().astype(np.float64)
  mean, variance = values.mean((0, 1, 2)), values.var((0, 1, 2))
  count = values.size // 3
  y = (values - mean) / np.sqrt(variance + 1e-5)
  expected = y.reshape(4, -1) @ params['logits/kernel'].numpy()
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(new_state['bn/moving_mean'], 0.1 * mean, rtol=1e-5)
  unbiased = variance * count / (count - 1)
  np.testing.assert_allclose(new_state['bn/moving_variance'], 0.9 + 0.1 * unbiased, rtol=1e-5)


def test_in_evaluation_batch_norm_uses_the_moving_averages_and_leaves_them():
  model, x = model_of(normalized), images()
  params, state = model.init()
  state = {
    'bn/moving_mean': tf.constant([3.0, 2.0, 1.0]),
    'bn/moving_variance': tf.constant([4.0, 1.0, 9.0]),
  }
  logits, new_state = model.apply(params, state, x, training=False)
  y = (x - [3.0, 2.0, 1.0]) / np.sqrt(np.array([4.0, 1.0, 9.0]) + 1e-5)
  expected = y.numpy().reshape(4, -1) @ params['logits/kernel'].numpy()
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  for name, value in state.items():
    np.testing.assert_array_equal(new_state[name], value)


def test_cross_replica_batch_norm_over_one_replica_is_fused_batch_norm():
  model, x = model_of(normalized), images()
  fused = forward_and_gradients(model, x)
  synchronised = forward_and_gradients(model, x, cross_replica=tf.identity)
  for name, value in fused.items():
    error = np.max(np.abs(synchronised[name] - value)) / np.max(np.abs(value))
    assert error <= 1e-5, (name, error)  # their sums of 120 squares add in different orders


def test_cross_replica_batch_norm_sums_over_replicas():
  # Two replicas of equal batches: what each adds up is doubled, mean and gradient stay.
  model, x = model_of(normalized), images()
  doubled = forward_and_gradients(model, x, cross_replica=lambda sums: sums + sums)
  whole = forward_and_gradients(model, tf.concat([x, x], 0))
  for name in ('bn/moving_mean', 'bn/moving_variance'):
    np.testing.assert_allclose(doubled[name], whole[name], rtol=1e-5)
  np.testing.assert_allclose(doubled['logits'], whole['logits'][:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('rate', [0.25, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest(rate):
  model = model_of(lambda b, x: b.dropout('drop', b.flatten(x), rate), image_shape=(40, 40, 3))
  x = tf.ones([8, 40, 40, 3])
  y, _ = model.apply({}, {}, x, training=True, rng=tf.constant([1, 2]))
  dropped = y.numpy() == 0
  np.testing.assert_allclose(y.numpy()[~dropped], 1 / (1 - rate), rtol=1e-6)
  np.testing.assert_allclose(dropped.mean(), rate, atol=0.015)  # six deviations of 38400 draws
  still, _ = model.apply({}, {}, x, training=False)
  np.testing.assert_array_equal(still, tf.ones_like(still))


def test_dropout_masks_follow_from_rng_and_name():
  def masks(rng):
    def network(b, x):
      x = b.flatten(x)
      return tf.concat([b.dropout('first', x, 0.5), b.dropout('second', x, 0.5)], 1)

    y, _ = model_of(network).apply({}, {}, tf.ones([4, *IMAGES]), True, rng=tf.constant(rng))
    return np.split(y.numpy() == 0, 2, axis=1)

  first, second = masks([7, 3])
  assert not np.array_equal(first, second)
  for again, mask in zip(masks([7, 3]), (first, second), strict=True):
    np.testing.assert_array_equal(again, mask)
  for other in ([8, 3], [7, 4]):
    assert not np.array_equal(masks(other)[0], first)


def test_dropout_without_rng_is_refused():
  model = model_of(lambda b, x: b.dropout('drop', b.flatten(x), 0.5))
  with pytest.raises(hpm.errors.UsageError, match='needs rng'):
    model.apply({}, {}, tf.ones([1, *IMAGES]), training=True)


def test_two_values_of_one_name_are_refused():
  def network(b, x):
    x = b.dense('fc', b.flatten(x), 4)
    return b.dense('fc', x, 4)

  with pytest.raises(ValueError, match="two values are called 'fc/kernel'"):
    model_of(network).init()


def test_scopes_prefix_names():
  def network(b, x):
    with b.scope('a'), b.scope('b'):
      return b.dense('fc', b.flatten(x), 4)

  assert list(model_of(network).param_specs) == ['a/b/fc/kernel', 'a/b/fc/bias']


@pytest.mark.parametrize('padding', ['SAME', 'VALID', 0, 1, 2])
def test_convolution_pads_as_it_is_told(padding):
  model = model_of(lambda b, x: b.flatten(b.conv('conv', x, 2, 3, padding=padding)))
  params, _ = model.init()
  x = images(1).numpy()
  pixels = {'SAME': 1, 'VALID': 0}.get(padding, padding)
  padded = np.pad(x, [(0, 0), (pixels, pixels), (pixels, pixels), (0, 0)])
  windows = np.lib.stride_tricks.sliding_window_view(padded[0], (3, 3), (0, 1))
  expected = np.einsum('yxcij,ijco->yxo', windows, params['conv/kernel'].numpy())
  y, _ = model.apply(params, {}, x, training=False)
  np.testing.assert_allclose(y, expected.reshape(1, -1), rtol=1e-4, atol=1e-5)


def residual(apart):
  """A block's end in one call, or its parts one by one."""

  def network(b, x):
    beside = b.conv('beside', x, 5, 1, 2)
    if apart:
      y = beside + b.batch_norm('bn', b.conv('conv', x, 5, 3, 2, 1))
    else:
      y = b.conv_norm_add('conv', 'bn', x, beside, 5, 3, 2, 1)
    return b.flatten(tf.nn.relu(y))

  return network


@pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_blocks_end_in_one_call_is_its_parts(training, dtype):
  rng = np.random.default_rng(0)
  norm = hpm.models.BatchNorm(epsilon=1e-2)
  results = []
  for apart in (False, True):
    model = model_of(residual(apart), dtype=dtype, batch_norm=norm)
    if not results:
      params, state = (
        {name: tf.constant(rng.uniform(0.5, 1.5, value.shape), tf.float32)
         for name, value in values.items()} for values in model.init()
      )  # fmt: skip

    @tf.function(autograph=False)
    def run(params, x):
      with tf.GradientTape() as tape:
        tape.watch([params, x])
        logits, new_state = model.apply(params, state, x, training)  # noqa: B023
        loss = tf.reduce_sum(tf.sin(logits))
      return {'logits': logits, 'x': tape.gradient(loss, x), **new_state}

    results.append(run(params, tf.cast(images(), dtype)))
  one, parts = results
  assert one.keys() == parts.keys()
  for name, value in parts.items():
    error = np.max(np.abs(np.asarray(one[name] - value, np.float32))) / np.max(np.abs(value))
    assert error <= 1e-5, (name, error)  # the scale multiplies kernels there, and sums here


FUSED = """
import sys
import numpy as np, tensorflow as tf
import hpm
model = hpm.models.create('resnet18', image_size=32, num_classes=10)
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
  feed = {}
  def given(shape):
    tensor = tf.compat.v1.placeholder(tf.float32, shape)
    feed[tensor] = np.ones(shape, np.float32)
    return tensor
  params, state = (
    {name: given(spec.shape) for name, spec in specs.items()}
    for specs in (model.param_specs, model.state_specs)
  )
  logits, _ = model.apply(params, state, given([2, 32, 32, 3]), False)
  ran = tf.compat.v1.RunMetadata()
  options = tf.compat.v1.RunOptions(output_partition_graphs=True)
  session.run(logits, feed, options=options, run_metadata=ran)
for graph in ran.partition_graphs:
  for node in graph.node:
    if 'fused_ops' in node.attr and 'Conv2D' in node.op:
      print(*(op.decode() for op in node.attr['fused_ops'].list.s))
"""


def test_tensorflow_puts_a_blocks_end_into_its_last_convolution():
  result = subprocess.run(
    [sys.executable, '-c', FUSED],
    cwd=Path(__file__).parents[2],
    env=os.environ | {'TF_ENABLE_ONEDNN_OPTS': '1'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  fused = Counter(result.stdout.splitlines())
  # 8 blocks; the stem and the first convolution of each; three projections.
  assert fused == {'BiasAdd Add Relu': 8, 'FusedBatchNorm Relu': 9, 'FusedBatchNorm': 3}


def test_no_kernel_is_scaled_before_its_input_is_there():
  model = hpm.models.create('resnet18', image_size=32, num_classes=10)
  with tf.Graph().as_default() as graph:
    model.apply(*model.init(), tf.zeros([2, 32, 32, 3]), False)
  convolutions = [op for op in graph.get_operations() if op.type == 'Conv2D']
  scaled = [op.inputs[1].op for op in convolutions if op.inputs[1].op.type == 'Mul']
  scaled = [op for op in scaled if op.control_inputs]
  assert len(scaled) == 8
