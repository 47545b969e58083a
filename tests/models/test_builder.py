"""The builder: names, batch norm, dropout."""

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
