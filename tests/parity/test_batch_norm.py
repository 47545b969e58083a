"""Batch norm's statistics in every mode: the first tower's, their mean, or the global batch's."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import UsageError
from tests.parity import harness, simulation

# Variances are differences of squares, so float32 leaves them (and what they divide) less than the
# usual 1e-6 of the largest value; measured are up to 1.2e-6.
TOLERANCE = 4e-6
SPECS = ('copy', 'xring', 'collective')
MANAGERS = [
  ('parameter_server', {}),
  ('parameter_server', {'local_parameter_device': 'spread'}),
  *(('replicated', {'all_reduce_spec': spec}) for spec in SPECS),
]


def create(manager, devices, statistics, step_options=None, **options):
  created = hpm.variable_mgr.create(manager, devices, batch_norm_statistics=statistics, **options)
  return harness.create_step(created, 'momentum', harness.normalized(), **(step_options or {}))


def expected(steps, statistics, **simulated):
  return simulation.train(
    harness.start_values(harness.normalized()),
    steps,
    harness.OPTIMIZERS['momentum'][1],
    network=simulation.normalized,
    statistics=statistics,
    **simulated,
  )


@pytest.mark.parametrize('statistics', ['mean', 'first', 'cross_replica'])
@pytest.mark.parametrize(
  ('manager', 'options'),
  harness.chosen(MANAGERS, [MANAGERS[1], MANAGERS[2], MANAGERS[4]]),
  ids=str,
)
def test_statistics_agree_with_the_simulation(manager, options, statistics, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 6)
  step = create(manager, cpu_devices[:2], statistics, **options)
  result = harness.train(step, steps)
  assert step.num_traces == 1
  harness.assert_agrees(result, expected(steps, statistics), TOLERANCE)
  harness.assert_replicas_equal(result.copies)
  for other in {'mean', 'first', 'cross_replica'} - {statistics}:  # the choice matters
    with pytest.raises(AssertionError, match='differ'):
      harness.assert_agrees(result, expected(steps, other), TOLERANCE)


@pytest.mark.parametrize('num_devices', harness.chosen([1, 3, 4], [1, 3]))
def test_synchronised_towers_are_one_large_one(num_devices, cpu_devices):
  steps = harness.random_steps([[2] * num_devices] * 6)
  step = create('replicated', cpu_devices[:num_devices], 'cross_replica')
  result = harness.train(step, steps)
  harness.assert_agrees(result, expected(steps, 'cross_replica'), TOLERANCE)
  whole = [[tuple(np.concatenate(part) for part in zip(*towers))] for towers in steps]
  alone = harness.train(create('replicated', cpu_devices[:1], 'mean'), whole)
  harness.assert_agrees(result, alone, TOLERANCE)


@pytest.mark.parametrize('sizes', [[5, 1], [4, 0], [0, 3]], ids=str)
def test_synchronised_towers_may_differ_in_size_and_be_empty(sizes, cpu_devices):
  steps = harness.random_steps([sizes] * 6)
  result = harness.train(create('replicated', cpu_devices[:2], 'cross_replica'), steps)
  harness.assert_agrees(result, expected(steps, 'cross_replica'), TOLERANCE)
  harness.assert_replicas_equal(result.copies)


@pytest.mark.parametrize(
  ('manager', 'options', 'simulated'),
  [
    ('parameter_server', {'staged_vars': True}, {'variable_delay': 1}),
    ('replicated', {'variable_consistency': 'relaxed'}, {'gradient_delay': 1}),
  ],
  ids=['staged', 'relaxed'],
)
@pytest.mark.parametrize('statistics', ['mean', 'cross_replica'])
def test_stale_modes_have_the_same_choice(manager, options, simulated, statistics, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 6)
  result = harness.train(create(manager, cpu_devices[:2], statistics, **options), steps)
  harness.assert_agrees(result, expected(steps, statistics, **simulated), TOLERANCE)


def test_a_session_ends_with_the_same_bits(cpu_devices):
  steps = harness.random_steps([[4, 4]] * 3)
  for spec in ('copy', 'collective'):

    def step(spec=spec):
      return create('replicated', cpu_devices[:2], 'cross_replica', all_reduce_spec=spec)

    function = harness.train(step(), steps)
    session = harness.train_in_session(step, steps)
    for name, value in function.values.items():
      np.testing.assert_array_equal(session.values[name], value, err_msg=name)


def test_synchronised_batch_norm_in_a_loop_of_steps(cpu_devices):
  images, labels = harness.random_steps([[26]])[0][0]
  data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
  values = []
  for steps_per_call in (1, 3):
    step = create('replicated', cpu_devices[:2], 'cross_replica', all_reduce_spec='collective')
    assert len(list(step.run(data, steps_per_call=steps_per_call))) == 4
    values.append({name: v.numpy() for name, v in step.snapshot().items()})
  for name, value in values[0].items():
    np.testing.assert_array_equal(values[1][name], value, err_msg=name)


def test_what_can_not_be_synchronised_is_refused_by_name(cpu_devices):
  devices = cpu_devices[:2]
  for statistics in ('mean', 'first', 'cross_replica'):
    with pytest.raises(UsageError, match=f"'{statistics}': independent devices keep their own"):
      hpm.variable_mgr.create('independent', devices, batch_norm_statistics=statistics)
  with pytest.raises(UsageError, match="'frist': did you mean first"):
    hpm.variable_mgr.create('replicated', devices, batch_norm_statistics='frist')
  with pytest.raises(UsageError, match='XLA compiles no collective'):
    create('replicated', devices, 'cross_replica', {'xla': True})
  with pytest.raises(UsageError, match="accumulate 2: .* don't meet from loops inside towers"):
    create('replicated', devices, 'cross_replica', {'accumulate': 2})
