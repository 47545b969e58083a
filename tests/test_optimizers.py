"""Update rules against NumPy, one parameter and given gradients at a time."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness, simulation

START = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.5]])
GRADIENTS = [
  np.array([[0.5, -1.0, 2.0], [1e-4, 0.0, -3.0]]),
  np.array([[-0.25, -1.0, 0.0], [2e-4, 0.0, 1.0]]),
  np.array([[0.125, 4.0, -2.0], [-1e-3, 1e-6, 0.5]]),
]
BETA2 = float(np.float32(0.999))  # what an update in float32 computes with

# Name, options, the simulation's rule; the defaults first.
RULES = {
  'sgd': ('sgd', {}, simulation.SGD(0.1)),
  'momentum': ('momentum', {}, simulation.Momentum(0.1)),
  'momentum_0.5': ('momentum', {'momentum': 0.5}, simulation.Momentum(0.1, 0.5)),
  'nesterov': ('nesterov', {}, simulation.Momentum(0.1, nesterov=True)),
  'nesterov_0.5': ('nesterov', {'momentum': 0.5}, simulation.Momentum(0.1, 0.5, nesterov=True)),
  'rmsprop': ('rmsprop', {}, simulation.RMSProp(0.1)),
  'rmsprop_plain': (
    'rmsprop',
    {'decay': 0.5, 'momentum': 0.0, 'epsilon': 1e-3},
    simulation.RMSProp(0.1, 0.5, 0.0, 1e-3),
  ),
  'adam': ('adam', {}, simulation.Adam(0.1, beta2=BETA2)),
  'adam_short': (
    'adam',
    {'beta1': 0.5, 'beta2': 0.75, 'epsilon': 1e-3},
    simulation.Adam(0.1, 0.5, 0.75, 1e-3),
  ),
}


def run(optimizer, gradients, start=START):
  """The parameter and its slots after the gradients, each update a step."""
  variable = tf.Variable(start, dtype=tf.float32)
  slots = {name: tf.Variable(tf.fill(start.shape, fill)) for name, fill in optimizer.slots.items()}

  @tf.function(autograph=False)
  def update(step, gradient):
    optimizer.apply(variable, slots, gradient, optimizer.scalars(step))

  for step, gradient in enumerate(gradients):
    update(tf.constant(step, tf.int64), tf.constant(gradient, tf.float32))
  return variable.numpy(), {name: slot.numpy() for name, slot in slots.items()}


def simulate(rule, gradients):
  param, slots = START, rule.start(START)
  for number, gradient in enumerate(gradients, 1):
    param, slots = rule.update(param, slots, gradient, number)
  return param, slots


@pytest.mark.parametrize(('name', 'options', 'rule'), RULES.values(), ids=RULES)
@pytest.mark.parametrize('num_steps', [1, 3])
def test_rules_agree_with_numpy(name, options, rule, num_steps):
  optimizer = hpm.optimizers.create(name, learning_rate=0.1, **options)
  param, slots = run(optimizer, GRADIENTS[:num_steps])
  expected, expected_slots = simulate(rule, GRADIENTS[:num_steps])
  assert harness.relative_error(param, expected) <= harness.FP32
  assert set(slots) == set(expected_slots)
  for slot, value in expected_slots.items():
    assert harness.relative_error(slots[slot], value) <= harness.FP32, slot


@pytest.mark.parametrize(
  ('name', 'after'),
  [
    # w = 1, gradients 1 and 2, rate 0.5.
    ('sgd', 1 - 0.5 * 1 - 0.5 * 2),
    # a = 1, then 0.9 + 2 = 2.9.
    ('momentum', 1 - 0.5 * 1 - 0.5 * 2.9),
    # 1 + 0.9 * 1, then 2 + 0.9 * 2.9.
    ('nesterov', 1 - 0.5 * 1.9 - 0.5 * 4.61),
    # r = 0.9 + 0.1 = 1, a = 0.5 / sqrt(2); r = 0.9 + 0.4 = 1.3, a = 0.9 a + 1 / sqrt(2.3).
    ('rmsprop', 1 - 0.5 / 2**0.5 - (0.45 / 2**0.5 + 1 / 2.3**0.5)),
    # m / sqrt(v), both corrected: 1, then (0.29 / 0.19) / sqrt(0.004999 / 0.001999).
    ('adam', 1 - 0.5 - 0.5 * (0.29 / 0.19) / (0.004999 / 0.001999) ** 0.5),
  ],
)
def test_two_steps_by_hand(name, after):
  gradients = [np.ones(1), np.full(1, 2.0)]
  param, _ = run(hpm.optimizers.create(name, 0.5), gradients, np.ones(1))
  np.testing.assert_allclose(param, [after], rtol=0, atol=1e-6)


def test_adam_s_correction_stays_exact_for_a_million_steps():
  # By formula in float64; in float32, 1 - beta2 ** t has lost five of seven digits at t = 2.
  scalars = hpm.optimizers.create('adam', 0.1).scalars
  beta1 = float(np.float32(0.9))
  for step in (0, 1, 2, 10, 1000, 10**6):
    rate = 0.1 * np.sqrt(1 - BETA2 ** (step + 1)) / (1 - beta1 ** (step + 1))
    got = scalars(tf.constant(step, tf.int64))['learning_rate']
    np.testing.assert_allclose(got, rate, rtol=1e-6)


@pytest.mark.parametrize('name', hpm.optimizers.OPTIMIZERS)
def test_a_schedule_gets_the_number_of_finished_steps(name):
  seen = []

  def schedule(step):
    seen.append(step.dtype)
    return 0.1 / tf.cast(step + 1, tf.float32)

  changing = hpm.optimizers.create(name, schedule)
  for step in range(3):
    fixed = hpm.optimizers.create(name, 0.1 / (step + 1))
    now = tf.constant(step, tf.int64)
    rates = [optimizer.scalars(now)['learning_rate'] for optimizer in (changing, fixed)]
    np.testing.assert_allclose(*rates, rtol=1e-7)
    assert rates[0].dtype == tf.float32
  assert set(seen) == {tf.int64}


@pytest.mark.parametrize(
  ('name', 'slots'),
  [
    ('sgd', {}),
    ('momentum', {'momentum': 0.0}),
    ('nesterov', {'momentum': 0.0}),
    ('rmsprop', {'rms': 1.0, 'momentum': 0.0}),
    ('adam', {'m': 0.0, 'v': 0.0}),
  ],
)
def test_slots_start_at_what_the_rule_says(name, slots, cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  snapshot = harness.create_step(manager, name).snapshot()
  found = {key: value.numpy() for key, value in snapshot.items() if key.startswith('slots/')}
  params = {key.removeprefix('params/') for key in snapshot if key.startswith('params/')}
  assert set(found) == {f'slots/{slot}/{param}' for slot in slots for param in params}
  for key, value in found.items():
    _, slot, param = key.split('/', 2)
    assert value.shape == snapshot[f'params/{param}'].shape
    assert np.all(value == slots[slot])


def test_an_unknown_rule_names_the_nearest():
  with pytest.raises(hpm.errors.UsageError, match="'momentun': did you mean momentum"):
    hpm.optimizers.create('momentun', 0.1)


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'learning_rate': -0.1}, 'learning_rate -0.1: a finite number, 0 or more'),
    ({'learning_rate': float('nan')}, 'learning_rate nan: a finite number'),
    ({'learning_rate': 'fast'}, "learning_rate 'fast': a number is needed"),
    ({'learning_rate': 0.1, 'momentum': 1.5}, r'momentum 1.5: must lie in \[0, 1\)'),
    ({'learning_rate': 0.1, 'beta1': 0.9}, "unknown option of momentum 'beta1'"),
  ],
  ids=str,
)
def test_what_no_rule_can_work_with_is_refused(options, words):
  with pytest.raises(hpm.errors.UsageError, match=words):
    hpm.optimizers.create('momentum', **options)
