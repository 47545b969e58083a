"""Every mode and option agrees with the NumPy simulation over six steps, with every optimizer.

`CASES` is the list of what there is. The default run holds each case to the simulation once, and a
choice of them with more optimizers; the long one runs the whole product.
"""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness, simulation
from tests.parity.test_step_options import Overflowing

NUM_STEPS = 6
SIZES = {1: [8], 2: [6, 2], 3: [4, 3, 1], 4: [2, 2, 2, 2], 8: [1] * 8}
LINKS = [[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]

STALE_VARIABLES = {'variable_delay': 1}
STALE_GRADIENTS = {'gradient_delay': 1}
RELAXED = {'variable_consistency': 'relaxed'}

# (manager, its options, the simulation's).
CASES = [
  *(
    ('parameter_server', {'local_parameter_device': place}, {})
    for place in ('cpu', 'spread', '/CPU:0')
  ),
  *(
    ('parameter_server', {'local_parameter_device': place, 'staged_vars': True}, STALE_VARIABLES)
    for place in ('cpu', 'spread', '/CPU:0')
  ),
  ('parameter_server', {'local_parameter_device': 'spread', **RELAXED}, STALE_GRADIENTS),
  ('parameter_server', {'staged_vars': True, **RELAXED}, STALE_VARIABLES | STALE_GRADIENTS),
  *(
    ('replicated', {'all_reduce_spec': spec}, {})
    for spec in (
      'copy', 'psgpu', 'psgpu#3', 'pscpu', 'pscpu#2', 'xring', 'xring#2', 'rechd',
      'hierarchical_copy', 'collective', 'copy/xring', 'collective/psgpu', 'pscpu/pscpu',
      'xring/collective', 'pscpu:64:xring', 'copy:32:rechd:1k:collective',
    )
  ),
  ('replicated', {'local_parameter_device': 'cpu'}, {}),
  ('replicated', {'local_parameter_device': '/CPU:0'}, {}),
  *(
    ('replicated', {'all_reduce_spec': spec, **packing, **consistency}, simulated)
    for spec, packing in (
      ('copy', {'gradient_repacking': 1}),
      ('xring#2', {'gradient_repacking': 4}),
      ('collective', {'gradient_repacking': 3}),
      ('psgpu', {'agg_small_grads_max_bytes': 64}),
      ('pscpu:100:rechd', {'agg_small_grads_max_bytes': 400, 'agg_small_grads_max_group': 2}),
    )
    for consistency, simulated in (({}, {}), (RELAXED, STALE_GRADIENTS))
  ),
]  # fmt: skip


def name_of(case):
  manager, options, _ = case
  return ' '.join([manager, *(f'{k}={v}' for k, v in options.items())])


def agreement(case, devices, optimizer, session=False, train_options=None, **simulated):
  manager, options, of_case = case
  steps = harness.random_steps([SIZES[len(devices)]] * NUM_STEPS)

  def create():
    created = hpm.variable_mgr.create(manager, devices, **options)
    return harness.create_step(created, optimizer, **(train_options or {}))

  result = harness.train_in_session(create, steps) if session else harness.train(create(), steps)
  rule = harness.OPTIMIZERS[optimizer][1]
  start = harness.start_values(harness.two_layers())
  harness.assert_agrees(result, simulation.train(start, steps, rule, **of_case, **simulated))
  harness.assert_replicas_equal(result.copies)
  return result


@pytest.mark.parametrize('case', CASES, ids=name_of)
def test_every_mode_agrees_with_the_simulation(case, cpu_devices):
  agreement(case, cpu_devices[:2], 'momentum')


SOME = [case for case in CASES if 'relaxed' in case[1].values() or 'staged_vars' in case[1]]


@pytest.mark.parametrize('optimizer', ['nesterov', 'adam'])
@pytest.mark.parametrize('case', [SOME[0], SOME[3], SOME[-2]], ids=name_of)
def test_stale_modes_agree_with_two_more_optimizers(case, optimizer, cpu_devices):
  agreement(case, cpu_devices[:2], optimizer)


@pytest.mark.long
@pytest.mark.parametrize('optimizer', harness.OPTIMIZERS)
@pytest.mark.parametrize('num_devices', SIZES)
@pytest.mark.parametrize('case', CASES, ids=name_of)
def test_every_mode_with_every_optimizer_on_1_to_8_devices(
  case, num_devices, optimizer, cpu_devices
):
  agreement(case, cpu_devices[:num_devices], optimizer)


@pytest.mark.parametrize('case', [CASES[3], CASES[7], CASES[-3]], ids=name_of)
def test_stale_modes_agree_in_a_session(case, cpu_devices):
  agreement(case, cpu_devices[:2], 'momentum', session=True)


@pytest.mark.long
@pytest.mark.parametrize('case', CASES, ids=name_of)
def test_every_mode_agrees_in_a_session(case, cpu_devices):
  for num_devices in (1, 3, 4):
    agreement(case, cpu_devices[:num_devices], 'adam', session=True)


def test_hierarchical_copy_takes_a_link_matrix(cpu_devices):
  options = {'all_reduce_spec': 'hierarchical_copy', 'network_topology': LINKS}
  agreement(('replicated', options, {}), cpu_devices[:4], 'momentum')


@pytest.mark.parametrize(
  'case',
  [
    ('parameter_server', {'local_parameter_device': 'spread'}, {}),
    ('parameter_server', {'staged_vars': True}, STALE_VARIABLES),
    ('replicated', {'all_reduce_spec': 'xring'}, {}),
    ('replicated', {'gradient_repacking': 2, **RELAXED}, STALE_GRADIENTS),
  ],
  ids=name_of,
)
@pytest.mark.parametrize('loss_scale', [1.0, 128.0])
def test_sum_is_over_devices_of_each_ones_mean(case, loss_scale, cpu_devices):
  train_options = {'gradient_reduction': 'sum', 'loss_scale': loss_scale}
  agreement(case, cpu_devices[:3], 'momentum', False, train_options, reduction='sum')


def test_sum_with_equal_batches_is_the_mean_with_as_many_times_the_rate(cpu_devices):
  steps = harness.random_steps([[2, 2, 2, 2]] * NUM_STEPS)
  sums = harness.create_step(
    harness.create_manager('replicated_spread', cpu_devices[:4]),
    hpm.optimizers.create('sgd', 0.025),
    gradient_reduction='sum',
  )
  expected = harness.simulate('replicated_spread', steps, 'sgd')  # at 0.1
  harness.assert_agrees(harness.train(sums, steps), expected)


@pytest.mark.parametrize(
  'options',
  [{'clip_norm': 0.5, 'weight_decay': 0.01}, {'clip_value': 0.02}],
  ids=str,
)
@pytest.mark.parametrize('case', [SOME[1], SOME[3], SOME[-1]], ids=name_of)
def test_clipping_and_decay_of_stale_gradients(case, options, cpu_devices):
  train_options = {**options, 'loss_scale': 8.0}
  agreement(case, cpu_devices[:2], 'momentum', False, train_options, **options)


@pytest.mark.parametrize('manager', ['parameter_server', 'replicated'])
def test_a_loss_scale_that_changes_leaves_no_trace_in_stale_gradients(manager, cpu_devices):
  # The scale doubles after every step, so a gradient is applied under another than it was made.
  scale = hpm.precision.DynamicLossScale(4.0, increase_every=1)
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  created = hpm.variable_mgr.create(manager, cpu_devices[:2], **RELAXED)
  result = harness.train(harness.create_step(created, loss_scale=scale), steps)
  assert [float(m.loss_scale) for m in result.metrics] == [4, 8, 16, 32, 64, 128]
  start = harness.start_values(harness.two_layers())
  expected = simulation.train(start, steps, harness.OPTIMIZERS['momentum'][1], **STALE_GRADIENTS)
  for name, value in expected.values.items():
    assert harness.relative_error(result.values[name], value) <= harness.FP32, name


def test_an_overflow_of_stale_gradients_stops_their_update_alone(cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  for towers in steps:
    for _, labels in towers:
      labels[labels == 4] = 3
  steps[2][1][1][0] = 4
  scale = hpm.precision.DynamicLossScale(64.0, increase_every=100)
  created = hpm.variable_mgr.create('replicated', cpu_devices[:2], **RELAXED)
  step = harness.create_step(created, loss=Overflowing(4), loss_scale=scale)
  result = harness.train(step, steps)
  # Made in the third step, found out in the fourth.
  assert [bool(m.finite) for m in result.metrics] == [True, True, True, False, True, True]
  steps[2][1][1][0] = 3
  start = harness.start_values(harness.two_layers())
  expected = simulation.train(
    start, steps, harness.OPTIMIZERS['momentum'][1], **STALE_GRADIENTS, skipped=[3]
  )
  for name, value in expected.values.items():
    assert harness.relative_error(result.values[name], value) <= harness.FP32, name


@pytest.mark.parametrize('case', [SOME[0], SOME[-1]], ids=name_of)
def test_steps_in_one_call_are_the_steps_one_by_one_in_stale_modes(case, cpu_devices):
  manager, options, _ = case
  images, labels = harness.random_steps([[26]])[0][0]
  dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)
  values = []
  for steps_per_call in (1, 3):
    created = hpm.variable_mgr.create(manager, cpu_devices[:2], **options)
    step = harness.create_step(created)
    assert len(list(step.run(dataset, steps_per_call=steps_per_call))) == 4
    values.append({name: v.numpy() for name, v in step.snapshot().items()})
  for name, value in values[0].items():
    np.testing.assert_array_equal(values[1][name], value, err_msg=name)


def test_evaluation_sees_the_newest_variables_where_training_sees_staged_ones(cpu_devices):
  steps = harness.random_steps([[4, 4]])
  values = []
  for staged in (False, True):
    manager = hpm.variable_mgr.create('parameter_server', cpu_devices[:2], staged_vars=staged)
    step = harness.create_step(manager)
    harness.train(step, steps)
    evaluation = hpm.EvalStep(step.model, manager)
    data = tf.data.Dataset.from_tensor_slices(steps[0][0]).batch(2)
    values.append(evaluation.evaluate(data)['loss'])
  assert values[0] == values[1]
