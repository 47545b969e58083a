"""Models: sizes, initial values, precision, layout, refusals."""

import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import hpm

ROOT = Path(__file__).parents[2]


def small(name, **options):
  sizes = {'trivial': 8, 'lenet': 12, 'alexnet': 63, 'resnet50': 32, 'resnet50_v1.5': 32}
  return hpm.models.create(name, num_classes=4, image_size=sizes[name], **options)


SMALL = ['trivial', 'lenet', 'alexnet', 'resnet50', 'resnet50_v1.5']


@pytest.mark.parametrize(
  ('name', 'count'),
  [
    # By hand: 5*5*3*32 + 32 and 5*5*32*64 + 64; 7*7*64*512 + 512; 512*1000 + 1000.
    ('lenet', 2_432 + 51_264 + 1_606_144 + 513_000),
    # 224*224*3 + 1; 4096 + 4096; 4096*1000 + 1000.
    ('trivial', 150_529 + 8_192 + 4_097_000),
  ],
)
def test_numbers_of_parameters_by_hand(name, count):
  assert hpm.models.create(name).num_params == count


def test_the_two_resnets_differ_in_where_a_block_strides():
  v1, v1_5 = (hpm.models.create(name) for name in ('resnet50', 'resnet50_v1.5'))
  assert [(k, s.shape) for k, s in v1.param_specs.items()] == [
    (k, s.shape) for k, s in v1_5.param_specs.items()
  ]
  params, state = small('resnet50').init()
  images = tf.random.stateless_normal([2, 32, 32, 3], [0, 0])
  first, second = (
    small(name).apply(params, state, images, training=False)[0]
    for name in ('resnet50', 'resnet50_v1.5')
  )
  assert not np.allclose(first, second)


def assert_same(first, second):
  assert list(first) == list(second)
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_initial_values_repeat_with_the_seed():
  assert_same(small('lenet').init(1)[0], small('lenet').init(1)[0])
  one, two = small('lenet').init(1)[0], small('lenet').init(2)[0]
  assert not np.any(one['conv1/kernel'].numpy() == two['conv1/kernel'].numpy())


def test_initial_values_do_not_depend_on_what_was_built_before_nor_on_the_device(cpu_devices):
  expected = small('lenet').init(1)
  small('alexnet').init(1)
  with tf.device(cpu_devices[3]):
    tf.random.uniform([3])
    values = small('lenet').init(1)
  for own, other in zip(values, expected, strict=True):
    assert_same(own, other)


def test_initial_values_are_the_same_in_a_graph():
  expected = small('resnet50').init(5)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    values = session.run(small('resnet50').init(5))
  for own, other in zip(values, expected, strict=True):
    assert_same(own, other)


def test_kernels_start_with_the_variance_of_their_rule():
  params, state = hpm.models.create('resnet50', image_size=32).init(0)
  kernel = params['stage4/block1/conv3/kernel']  # 1x1, 512 to 2048: variance 2 / 2048
  np.testing.assert_allclose(np.var(kernel), 2 / 2048, rtol=0.02)
  np.testing.assert_allclose(np.std(params['logits/kernel']), 0.01, rtol=0.02)
  assert np.all(params['bn1/scale'] == 1) and np.all(params['bn1/offset'] == 0)
  assert np.all(state['bn1/moving_variance'] == 1) and np.all(state['bn1/moving_mean'] == 0)


@pytest.mark.parametrize('name', ['lenet', 'resnet50'])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_each_precision_gives_finite_float32_logits_and_gradients(name, dtype):
  model = hpm.models.create(name, num_classes=4, image_size=64, dtype=dtype)
  params, state = model.init()
  images = tf.cast(tf.random.stateless_uniform([4, *model.image_shape], [0, 0], -1, 1), dtype)

  @tf.function(autograph=False)
  def run():
    with tf.GradientTape() as tape:
      tape.watch(params)
      logits, new_state = model.apply(params, state, images, training=True)
      loss = tf.reduce_mean(hpm.losses.softmax_cross_entropy()(tf.range(4), logits))
    return logits, new_state, tape.gradient(loss, params)

  logits, new_state, gradients = run()
  assert logits.shape == (4, 4)
  assert set(new_state) == set(state)
  for value in (logits, *new_state.values(), *gradients.values()):
    assert value.dtype == tf.float32
    assert np.all(np.isfinite(value))
  assert all(np.any(gradient.numpy() != 0) for gradient in gradients.values())


LAYOUTS = """
import hpm, numpy as np, tensorflow as tf
def run(model, images):
  params, state = model.init()
  @tf.function(autograph=False)
  def step():
    with tf.GradientTape() as tape:
      tape.watch(params)
      logits, _ = model.apply(params, state, images, training=True)
      loss = tf.reduce_sum(logits**2)
    return {'logits': logits, **tape.gradient(loss, params)}
  return step()
images = tf.random.stateless_normal([4, 12, 12, 3], [0, 0])
options = dict(num_classes=4, image_size=12)
nhwc = run(hpm.models.create('lenet', **options), images)
nchw = run(
  hpm.models.create('lenet', data_format='NCHW', **options), tf.transpose(images, [0, 3, 1, 2])
)
for name, value in nhwc.items():
  error = np.max(np.abs(value - nchw[name])) / np.max(np.abs(value))
  assert error < 1e-5, (name, error)
print('equal', len(nhwc))
"""


def test_the_layout_changes_where_numbers_lie_and_nothing_else():
  # On a CPU only oneDNN convolves NCHW, and it is chosen before TensorFlow is imported. Its sums
  # add in another order in each layout: 1e-5, as for all real networks.
  result = subprocess.run(
    [sys.executable, '-c', LAYOUTS],
    cwd=ROOT,
    env=os.environ | {'TF_ENABLE_ONEDNN_OPTS': '1'},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  assert result.stdout.split() == ['equal', '9']


def test_models_that_are_not_there_or_do_not_fit_are_refused():
  refused = {
    "'lenett': did you mean lenet": {'name': 'lenett'},
    "dtype 'float64'": {'name': 'lenet', 'dtype': 'float64'},
    "data_format 'NCWH'": {'name': 'lenet', 'data_format': 'NCWH'},
    'num_classes 0': {'name': 'lenet', 'num_classes': 0},
    'image shape 0: a whole number': {'name': 'lenet', 'image_size': 0},
  }
  for message, options in refused.items():
    with pytest.raises(hpm.errors.UsageError, match=message):
      hpm.models.create(**options)
  with pytest.raises(hpm.errors.UsageError, match='alexnet does not fit images of 20 x 20 x 3'):
    hpm.models.create('alexnet', image_size=20).init()
