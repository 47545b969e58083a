"""Towers compile by XLA: whole, with static shapes, and to the same numbers."""

import re

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness

# Small images that a family takes, where 64 pixels are too few, or more than it needs; residual
# networks 96, so that batch norm has enough of them in the last stage.
SIZES = {'lenet': 28, 'trivial': 16, 'inception3': 107, 'inception4': 75}
QUICK = ('lenet', 'trivial', 'alexnet', 'resnet50')  # one of each kind of layer
ALL = harness.chosen(list(hpm.models.MODELS), QUICK)
# Deeper ones of families that have a shallower one: they have no other layers, and take minutes. Of
# Inception's 94 layers of batch norm rounding leaves 3e-4 at a size that runs in one.
DEEP = re.compile(r'resnet(44|56|101|110|152|200)|vgg(13|16|19)|inception[34]')
COMPILED = harness.chosen([name for name in hpm.models.MODELS if not DEEP.match(name)], QUICK)


def trained(model, xla):
  manager = harness.create_manager('replicated_spread', ['/CPU:0'])
  step = harness.create_step(manager, 'sgd', model=model, xla=xla)
  steps = harness.random_steps([[4]], image_shape=model.image_shape, num_classes=10)
  return step, harness.train(step, steps)


def create(name):
  """With small images, and without what differs from run to run or needs large images."""
  own = {'num_classes': 10}
  if name.startswith('resnet') and hpm.models.create(name).image_size == 32:
    return hpm.models.create(name, **own)
  own['image_size'] = SIZES.get(name, 96 if name.startswith('resnet') else 64)
  # XLA draws other random numbers.
  if name.startswith(('alexnet', 'vgg', 'inception', 'googlenet', 'mobilenet')):
    own['dropout'] = 0.0
  if name in ('inception3', 'googlenet', 'inception1'):
    own['auxiliary'] = False
  return hpm.models.create(name, **own)


def exact(model):
  """In float64, where no ReLU or maximum of the comparison is a tie that rounding decides."""
  model.dtype = 'float64'  # offered to nobody but tests
  return model


@pytest.mark.parametrize('name', COMPILED)
def test_a_compiled_tower_agrees_with_the_plain_one(name, cpu_devices):
  normalized = bool(create(name).state_specs)

  def model():  # batch norm has no float64
    return create(name) if normalized else exact(create(name))

  _, plain = trained(model(), xla=False)
  _, compiled = trained(model(), xla=True)
  np.testing.assert_allclose(compiled.metrics[0].loss, plain.metrics[0].loss, rtol=1e-4)
  start = {f'params/{n}': v.numpy() for n, v in model().init(0)[0].items()}
  if normalized:
    # Layers of ReLU in float32 turn a last bit into another gradient of the first layer, in any two
    # runs: what is before the first comparison backwards, and all of the forward pass.
    for key in (list(start)[-1], *(k for k in plain.values if k.startswith('state/'))):
      # Rounding of all layers before it, under the square.
      bound = 3e-4 if key.endswith('variance') else 1e-4
      expected = plain.values[key]
      error = np.abs(compiled.values[key] - expected).max()
      # The mean of what is normalised already is nought but for rounding.
      assert error <= bound * max(np.abs(expected).max(), 1e-2), key
    return
  for key, before in start.items():
    step = plain.values[key] - before  # what one step of gradient descent has moved
    error = np.abs(compiled.values[key] - plain.values[key]).max()
    assert error <= 1e-4 * max(np.abs(step).max(), 1e-6), key


@pytest.mark.parametrize('name', ALL)
def test_nothing_of_the_tower_is_left_outside_of_xla(name, cpu_devices):
  """`jit_compile` demands it: an op that XLA does not know is an error. HLO has static shapes."""
  model = create(name)
  manager = harness.create_manager('replicated_spread', ['/CPU:0'])
  step = harness.create_step(manager, 'sgd', model=model, xla=True)
  params, state = model.init(0)
  images = tf.zeros([4, *model.image_shape], tf.uint8)
  labels = tf.zeros([4], tf.int64)
  compiled = step._tower.experimental_get_compiler_ir(
    params, state, images, labels, tf.zeros([2], tf.int32), 1.0, None
  )
  text = compiled(stage='hlo')
  assert 'ENTRY' in text
  assert '<=' not in text  # how XLA writes a dynamic dimension
  assert 'custom_call_target="tf.' not in text


def test_an_op_outside_of_xla_is_an_error(cpu_devices):
  def network(b, images):
    tf.strings.as_string(tf.reduce_sum(images))
    x = tf.strings.to_number(tf.strings.as_string(images))
    return b.dense('logits', b.flatten(tf.reshape(x, tf.shape(images)) + images), 10)

  model = hpm.models.Model(network, name='m', image_shape=(4, 4, 3), num_classes=10)
  with pytest.raises(tf.errors.OpError, match='XLA'):
    trained(model, xla=True)
