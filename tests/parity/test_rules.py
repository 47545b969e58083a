"""Rules that look at a whole parameter, or keep an average of it, in every mode."""

import numpy as np
import pytest

import hpm
from hpm.errors import UsageError
from hpm.precision import DynamicLossScale
from tests.parity import harness, simulation

SIZES = [[4, 3]] * 5
# Name -> (the library's rule, the simulation's).
RULES = {
  'lars': (
    lambda: hpm.optimizers.create('lars', 0.5, trust=0.1, weight_decay=0.05),
    simulation.LARS(0.5, trust=0.1, weight_decay=0.05),
  ),
  'averaged': (
    lambda: hpm.optimizers.create('momentum', 0.05, average_decay=0.3),
    simulation.Averaged(simulation.Momentum(0.05), 0.3),
  ),
  'averaged_lars': (
    lambda: hpm.optimizers.create('lars', 0.5, trust=0.1, average_decay=0.9),
    simulation.Averaged(simulation.LARS(0.5, trust=0.1), 0.9),
  ),
}


@pytest.mark.parametrize('mode', harness.chosen(list(harness.MODES), harness.TWO))
@pytest.mark.parametrize('name', RULES)
def test_rules_agree_with_the_simulation(name, mode, cpu_devices):
  create, rule = RULES[name]
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager(mode, cpu_devices[:2])
  result = harness.train(harness.create_step(manager, create()), steps)
  start = harness.start_values(harness.two_layers())
  run = simulation.train_independent if mode == 'independent' else simulation.train
  harness.assert_agrees(result, run(start, steps, rule))
  if mode != 'independent':
    harness.assert_replicas_equal(result.copies)


@pytest.mark.parametrize('name', ['lars', 'averaged'])
def test_rules_agree_in_a_session(name, cpu_devices):
  steps = harness.random_steps(SIZES)

  def create():
    manager = harness.create_manager('replicated_spread', cpu_devices[:2])
    return harness.create_step(manager, RULES[name][0]())

  expected = harness.train(create(), steps)
  harness.assert_agrees(harness.train_in_session(create, steps), expected, tolerance=0.0)


@pytest.mark.parametrize(
  ('mode', 'options', 'of_simulation'),
  [
    ('relaxed', {}, {'gradient_delay': 1}),
    ('staged', {'staged_vars': True}, {'variable_delay': 1}),
  ],
)
def test_averages_follow_delayed_updates(mode, options, of_simulation, cpu_devices):
  create, rule = RULES['averaged']
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager('parameter_server_spread', cpu_devices[:2], **options)
  if mode == 'relaxed':
    from hpm.variable_mgr.relaxed import Relaxed

    manager = Relaxed(manager)
  result = harness.train(harness.create_step(manager, create()), steps)
  start = harness.start_values(harness.two_layers())
  harness.assert_agrees(result, simulation.train(start, steps, rule, **of_simulation))


def test_an_overflow_leaves_the_average_as_it_is(cpu_devices):
  steps = harness.random_steps([[4, 4]])
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])

  def infinite(labels, logits):
    return hpm.losses.softmax_cross_entropy()(labels, logits) * np.inf

  step = harness.create_step(
    manager, RULES['averaged'][0](), loss=infinite, loss_scale=DynamicLossScale(2.0)
  )
  result = harness.train(step, steps)
  for name, value in result.values.items():
    if name.startswith('slots/average/'):
      same = result.values[f'params/{name.removeprefix("slots/average/")}']
      np.testing.assert_array_equal(value, same, err_msg=name)


@pytest.mark.parametrize('mode', harness.TWO)
def test_evaluation_reads_the_average(mode, cpu_devices):
  (batches,) = harness.random_steps([[6, 6]])
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager(mode, cpu_devices[:2])
  model = harness.two_layers()
  step = harness.create_step(manager, RULES['averaged_lars'][0](), model=model)
  values = harness.train(step, steps).values
  images, labels = batches[0]
  for averaged, prefix in ((False, 'params/'), (True, 'slots/average/')):
    params = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
    expected, _ = simulation.two_layers(params, images, labels)
    found = hpm.EvalStep(model, manager, averaged=averaged).evaluate(_dataset(images, labels))
    assert found['num_samples'] == 6
    assert found['loss'] * 6 == pytest.approx(expected, rel=1e-5)


def test_an_average_that_is_not_kept_is_refused(cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager)
  with pytest.raises(UsageError, match='average_decay'):
    hpm.EvalStep(step.model, manager, averaged=True)
  with pytest.raises(UsageError, match='average_decay 1'):
    hpm.optimizers.create('sgd', 0.1, average_decay=1)


def _dataset(images, labels):
  import tensorflow as tf

  return tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
