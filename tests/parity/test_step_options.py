"""Clipping, weight decay, loss scales, accumulation, loops in the graph and XLA, in every mode."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import UsageError
from hpm.precision import DynamicLossScale
from tests.parity import harness, simulation

SIZES = [[4, 4]] * 5
SCALE_NAMES = ('loss_scale', 'finite_steps')


def simulated(steps, optimizer='momentum', **options):
  start = harness.start_values(harness.two_layers())
  return simulation.train(start, steps, harness.OPTIMIZERS[optimizer][1], **options)


def without(result, names=SCALE_NAMES):
  values = {name: value for name, value in result.values.items() if name not in names}
  return dataclasses.replace(result, values=values)


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
@pytest.mark.parametrize(
  'options',
  [
    {'weight_decay': 0.1},
    {'clip_norm': 0.5},
    {'clip_value': 0.02},
    {'clip_norm': 0.5, 'clip_value': 0.05, 'weight_decay': 0.01},
  ],
  ids=str,
)
def test_clipping_and_weight_decay_agree_with_the_simulation(mode, options, cpu_devices):
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager(mode, cpu_devices[:2])
  result = harness.train(harness.create_step(manager, loss_scale=8.0, **options), steps)
  harness.assert_agrees(result, simulated(steps, **options))
  harness.assert_replicas_equal(result.copies)
  plain = simulated(steps)  # the options do something
  with pytest.raises(AssertionError, match='differ'):
    harness.assert_agrees(result, plain)


def test_clipping_and_weight_decay_agree_in_a_session(cpu_devices):
  steps = harness.random_steps(SIZES)
  options = {'clip_norm': 0.5, 'weight_decay': 0.01, 'loss_scale': DynamicLossScale(4.0)}
  for mode in ('parameter_server_spread', 'replicated_collective'):

    def create(mode=mode):
      return harness.create_step(harness.create_manager(mode, cpu_devices[:2]), **options)

    expected = harness.train(create(), steps)
    harness.assert_agrees(harness.train_in_session(create, steps), expected, tolerance=0.0)


def test_weight_decay_takes_the_parameters_that_it_is_given(cpu_devices):
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager, 'sgd', weight_decay=0.5, decayed=lambda name: False)
  harness.assert_agrees(harness.train(step, steps), simulated(steps, 'sgd'))


class Overflowing:
  """A loss that is infinite for one label, so that its step's gradients are."""

  def __init__(self, label):
    self._label = label
    self._loss = hpm.losses.softmax_cross_entropy()

  def __call__(self, labels, logits):
    bad = tf.equal(labels, self._label)
    return self._loss(tf.where(bad, tf.zeros_like(labels), labels), logits) * tf.where(
      bad, np.inf, 1.0
    )


@pytest.mark.parametrize(
  ('mode', 'optimizer'),
  harness.chosen(
    [
      *((mode, 'momentum') for mode in harness.SYNCHRONOUS),
      *(('replicated_spread', name) for name in harness.OPTIMIZERS if name != 'momentum'),
      ('parameter_server_spread', 'rmsprop'),
    ],
    [
      *((mode, 'momentum') for mode in harness.TWO),
      ('parameter_server_spread', 'rmsprop'),
      ('replicated_spread', 'adam'),
    ],
  ),
)
def test_an_overflow_changes_no_variable_and_halves_the_scale(mode, optimizer, cpu_devices):
  steps = harness.random_steps(SIZES)
  for t in range(5):
    for _, labels in steps[t]:
      labels[labels == 4] = 3
  steps[2][1][1][0] = 4  # one sample of one tower
  manager = harness.create_manager(mode, cpu_devices[:2])
  scale = DynamicLossScale(64.0, increase_every=2)
  step = harness.create_step(manager, optimizer, loss=Overflowing(4), loss_scale=scale)
  result = harness.train(step, steps)

  assert [bool(m.finite) for m in result.metrics] == [True, True, False, True, True]
  assert [float(m.loss_scale) for m in result.metrics] == [64, 64, 128, 64, 64]
  assert result.values['loss_scale'] == 128
  harness.assert_replicas_equal(result.copies)
  if optimizer == 'adam':  # its correction counts steps, the skipped one too
    return
  steps[2][1][1][0] = 3
  expected = simulated(steps, optimizer, skipped=[2])
  expected.losses[2] = np.inf
  harness.assert_agrees(without(result), expected)


def test_the_scale_stays_within_its_bounds(cpu_devices):
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  scale = DynamicLossScale(2.0, increase_every=1)
  always = Overflowing(int(steps[0][0][1][0]))
  step = harness.create_step(manager, loss=always, loss_scale=scale)
  result = harness.train(step, [steps[0]] * 3)
  assert [float(m.loss_scale) for m in result.metrics] == [2, 1, 1]

  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  scale = DynamicLossScale(2.0**23, increase_every=1)
  result = harness.train(harness.create_step(manager, loss_scale=scale), [steps[0]] * 3)
  assert [float(m.loss_scale) for m in result.metrics] == [2**23, 2**24, 2**24]


def test_batch_norm_statistics_survive_an_overflow(cpu_devices):
  def network(b, images):
    return b.dense('logits', b.flatten(b.batch_norm('bn', images)), 5)

  model = hpm.models.Model(network, name='bn', image_shape=(4, 4, 3), num_classes=5)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  steps = harness.random_steps([[4, 4]])
  loss = Overflowing(int(steps[0][0][1][0]))
  step = harness.create_step(manager, model=model, loss=loss, loss_scale=DynamicLossScale(2.0))
  before = {name: value.numpy() for name, value in step.snapshot().items()}
  result = harness.train(step, steps)
  for name, value in result.values.items():
    if name.startswith(('params', 'state', 'slots')):
      np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_fp16_underflows_without_a_scale_and_trains_with_one(cpu_devices):
  """Gradients of 1e-8 are nought in float16, whose smallest number is 6e-8."""

  def network(b, images):
    # The cast to float16 of the gradient that comes back is where it is lost.
    x = tf.cast(tf.cast(b.dense('hidden', b.flatten(images), 16), tf.float16), images.dtype)
    return b.dense('logits', x, 5) * 1e-8

  steps = harness.random_steps([[4, 4]])
  moved = {}
  for scale in (1.0, 2.0**16):
    model = hpm.models.Model(network, name='m', image_shape=(4, 4, 3), num_classes=5)
    manager = harness.create_manager('replicated_spread', cpu_devices[:2])
    step = harness.create_step(manager, 'momentum', model=model, loss_scale=scale)
    moved[scale] = np.abs(harness.train(step, steps).values['slots/momentum/hidden/kernel']).max()
  assert moved[1.0] == 0.0 < moved[2.0**16]


@pytest.mark.parametrize('mode', ['parameter_server_cpu', 'replicated_spread'])
@pytest.mark.parametrize('sizes', [[4, 4], [6, 2]], ids=str)
def test_accumulation_agrees_with_the_whole_batch(mode, sizes, cpu_devices):
  steps = harness.random_steps([sizes] * 5)
  manager = harness.create_manager(mode, cpu_devices[:2])
  result = harness.train(harness.create_step(manager, accumulate=2), steps)
  harness.assert_agrees(result, simulated(steps))


def test_accumulation_takes_partial_batches(cpu_devices):
  steps = harness.random_steps([[4, 3], [1, 0]])
  images = np.concatenate([batch for step in steps for batch, _ in step])
  labels = np.concatenate([batch for step in steps for _, batch in step])
  dataset = tf.data.Dataset.from_tensor_slices((images[:8], labels[:8])).batch(3)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager, accumulate=2)
  metrics = list(step.run(dataset))
  assert [int(m.num_samples) for m in metrics] == [6, 2]
  expected = simulated([[(images[:6], labels[:6])], [(images[6:], labels[6:])]])
  for name, value in step.snapshot().items():
    if name.startswith('params'):
      assert harness.relative_error(value.numpy(), expected.values[name]) <= harness.FP32


def test_a_batch_that_does_not_part_evenly_is_refused(cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager, accumulate=3)
  with pytest.raises(UsageError, match='a batch of 4 is not to be had in 3 equal parts'):
    step(harness.random_steps([[4, 4]])[0])


@pytest.mark.parametrize(
  ('mode', 'finite'),
  harness.chosen(
    [(mode, finite) for mode in harness.MODES for finite in (True, False)],
    [*((mode, True) for mode in harness.TWO), ('replicated_spread', False)],
  ),
)
def test_steps_in_one_call_are_the_steps_one_by_one(mode, finite, cpu_devices):
  images, labels = harness.random_steps([[26]])[0][0]
  dataset = tf.data.Dataset.from_tensor_slices((images, labels))
  dataset = dataset.batch(4) if finite else dataset.repeat().batch(4, drop_remainder=True)
  runs = []
  for steps_per_call in (1, 3):
    step = harness.create_step(harness.create_manager(mode, cpu_devices[:2]))
    metrics = list(step.run(dataset, None if finite else 7, steps_per_call))
    assert step.num_traces == 1
    runs.append((metrics, {name: v.numpy() for name, v in step.snapshot().items()}))
  (one_by_one, expected), (in_calls, actual) = runs
  assert len(in_calls) == len(one_by_one) == (4 if finite else 7)
  for a, b in zip(in_calls, one_by_one):
    assert [x.numpy() for x in a] == [x.numpy() for x in b]
  for name, value in actual.items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize('mode', ['parameter_server_spread', 'replicated_spread'])
def test_xla_agrees_with_the_simulation(mode, cpu_devices):
  steps = harness.random_steps(SIZES)
  manager = harness.create_manager(mode, cpu_devices[:2])
  result = harness.train(harness.create_step(manager, xla=True), steps)
  harness.assert_agrees(result, simulated(steps))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'loss_scale': 0.0}, 'loss_scale 0.0'),
    ({'accumulate': 0}, 'accumulate 0'),
    ({'weight_decay': -0.1}, 'weight_decay -0.1'),
    ({'clip_norm': 0.0}, 'clip_norm 0.0'),
    ({'clip_value': -1.0}, 'clip_value -1.0'),
  ],
  ids=str,
)
def test_impossible_options_are_refused_before_variables_are_made(options, message, cpu_devices):
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  with pytest.raises(UsageError, match=message):
    harness.create_step(manager, **options)
  assert not manager.copies


def test_impossible_loss_scales_are_refused():
  with pytest.raises(UsageError, match='initial loss scale 0.5'):
    DynamicLossScale(0.5)
  with pytest.raises(UsageError, match='increase_every 0'):
    DynamicLossScale(increase_every=0)
