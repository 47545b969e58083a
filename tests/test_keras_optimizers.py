"""Keras optimizers as update rules: what Keras itself computes, in every mode."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.variable_mgr.ps_tasks import ParameterServerTasks

SHAPES = ((4,), (3, 4), (2, 2, 3, 4))
TAKEN = {
  'sgd': lambda: keras.optimizers.SGD(0.1),
  'nesterov': lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True),
  'schedule': lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 5), 0.9),
  'rmsprop': lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
  'adam': lambda: keras.optimizers.Adam(0.01, amsgrad=True),
  'adamw': lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
  'adadelta': lambda: keras.optimizers.Adadelta(1.0),
  'adagrad': lambda: keras.optimizers.Adagrad(0.1),
  'adamax': lambda: keras.optimizers.Adamax(0.01),
  'ftrl': lambda: keras.optimizers.Ftrl(0.1),
  'lion': lambda: keras.optimizers.Lion(0.01),
  'lamb': lambda: keras.optimizers.Lamb(0.01),
}


def random(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_keras(optimizer, num_steps):
  variables = [keras.Variable(random(s, i), name=f'w{i}') for i, s in enumerate(SHAPES)]
  for step in range(num_steps):
    gradients = [tf.constant(random(s, 100 * step + 10 + i)) for i, s in enumerate(SHAPES)]
    optimizer.apply(gradients, variables)
  return [variable.numpy() for variable in variables]


def by_rule(rule, num_steps):
  """In one graph without automatic control dependencies, as a step has it."""
  variables = [tf.Variable(random(s, i), name=f'w{i}') for i, s in enumerate(SHAPES)]
  slots = [
    {name: tf.Variable(tf.fill(shape, fill)) for name, fill in rule.slots.items()}
    for shape in SHAPES
  ]

  @tf.function(autograph=False, experimental_attributes={'_disable_acd': True})
  def update(step, gradients):
    scalars = rule.scalars(step)
    updates = [
      rule.apply(variable, of_variable, gradient, scalars)
      for variable, of_variable, gradient in zip(variables, slots, gradients, strict=True)
    ]
    with tf.control_dependencies(updates):
      return tf.identity(step)

  for step in range(num_steps):
    gradients = [tf.constant(random(s, 100 * step + 10 + i)) for i, s in enumerate(SHAPES)]
    update(tf.constant(step, tf.int64), gradients)
  return [variable.numpy() for variable in variables]


@pytest.mark.parametrize('make', TAKEN.values(), ids=TAKEN)
def test_it_computes_what_keras_computes(make):
  optimizer = make()
  after = by_rule(hpm.optimizers.from_keras(optimizer), 5)
  assert int(optimizer.iterations) == 0  # only a recipe
  for got, expected in zip(after, by_keras(make(), 5), strict=True):
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_weight_decay_leaves_out_what_is_excluded():
  def make():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=['w0'])
    return optimizer

  after = by_rule(hpm.optimizers.from_keras(make()), 3)
  for got, expected in zip(after, by_keras(make(), 3), strict=True):
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
  decayed = by_rule(hpm.optimizers.from_keras(keras.optimizers.AdamW(0.01, weight_decay=0.5)), 3)
  assert np.abs(decayed[0] - after[0]).max() > 1e-3


class Heavy(keras.optimizers.Optimizer):
  """A rule of the user's own: the gradient, bounded, with a memory."""

  def build(self, variables):
    if not self.built:
      super().build(variables)
      self.memories = self.add_optimizer_variables(variables, 'memory')

  def update_step(self, gradient, variable, learning_rate):
    memory = self.memories[self._get_variable_index(variable)]
    self.assign(memory, 0.5 * memory + keras.ops.tanh(gradient))
    self.assign_sub(variable, learning_rate * memory)


def trained(mode, devices, optimizer, num_steps=3):
  model = hpm.models.create('lenet')
  manager = hpm.variable_mgr.create(mode, devices)
  step = hpm.TrainStep(model, manager, optimizer, seed=1)
  images = tf.random.stateless_uniform([8, 28, 28, 3], [0, 1], 0, 256, tf.int32)
  images, labels = tf.cast(images, tf.uint8), tf.range(8, dtype=tf.int64)
  for _ in range(num_steps):
    share = 8 // len(devices)
    step([(images[i * share :][:share], labels[i * share :][:share]) for i in range(len(devices))])
  return {name: value.numpy() for name, value in step.snapshot().items()}


@pytest.mark.parametrize('mode', ['replicated', 'parameter_server'])
def test_managers_train_by_it(mode, cpu_devices, capfd):
  rule = hpm.optimizers.from_keras(keras.optimizers.Adam(1e-3))
  capfd.readouterr()
  after = trained(mode, cpu_devices[:2], rule)
  assert 'sort' not in capfd.readouterr().err  # TensorFlow's optimizer found no cycle
  own = trained(mode, cpu_devices[:2], hpm.optimizers.create('adam', 1e-3, epsilon=1e-7))
  names = {'momentum': 'm', 'velocity': 'v'}
  assert any(name.startswith('slots/velocity/') for name in after)
  for name, value in after.items():
    kind, _, rest = name.partition('/')
    if kind == 'slots':
      slot, _, rest = rest.partition('/')
      name = f'slots/{names[slot]}/{rest}'
    np.testing.assert_allclose(value, own[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_rule_of_one_s_own_trains_alike_in_two_modes(cpu_devices):
  rule = hpm.optimizers.from_keras(Heavy(0.01))
  assert rule.slots == {'memory': 0.0}
  replicated = trained('replicated', cpu_devices[:2], rule)
  one_copy = trained('parameter_server', cpu_devices[:2], rule)
  for name, value in replicated.items():
    np.testing.assert_allclose(value, one_copy[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_it_averages_weights_too(cpu_devices):
  rule = hpm.optimizers.Averaged(hpm.optimizers.from_keras(keras.optimizers.SGD(0.1, 0.9)), 0.5)
  own = hpm.optimizers.create('momentum', 0.1, average_decay=0.5)
  after, expected = (trained('replicated', cpu_devices[:2], r) for r in (rule, own))
  for name, value in expected.items():
    if name.startswith(('params/', 'slots/average/')):
      np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: keras.optimizers.Nadam(), ['Nadam', 'shape ()']),
    (lambda: keras.optimizers.Adafactor(), ['Adafactor', 'shape ()']),
    (lambda: keras.optimizers.Muon(), ['Muon', 'velocity']),
    (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), ['clipnorm=1.0', 'clip_norm']),
    (lambda: keras.optimizers.SGD(0.1, clipvalue=1.0), ['clipvalue=1.0', 'clip_value']),
    (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), ['global_clipnorm', 'clip_norm']),
    (lambda: keras.optimizers.SGD(0.1, use_ema=True), ['use_ema', 'Averaged']),
    (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), ['accumulate=']),
    (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0), ['loss_scale=']),
    (lambda: keras.optimizers.SGD(lambda: 0.1), ['SGD', 'LearningRateSchedule']),
    (lambda: 'adam', ["'adam'", 'keras.optimizers']),
  ],
)
def test_what_has_no_place_is_refused(make, words):
  with pytest.raises(hpm.errors.UsageError) as error:
    hpm.optimizers.from_keras(make())
  assert '\n' not in str(error.value)
  for word in words:
    assert word in str(error.value)


def test_asynchronous_servers_refuse_what_is_not_atomic():
  manager = ParameterServerTasks(
    ['/cpu:0'], ps_devices=['/cpu:0'], worker=0, num_workers=2, cross_replica_sync=False
  )
  rule = hpm.optimizers.from_keras(keras.optimizers.SGD(0.1))
  with pytest.raises(hpm.errors.UsageError, match='SGD.*cross_replica_sync'):
    manager.create({'w': tf.zeros([2])}, {}, rule)
