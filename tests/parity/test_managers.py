"""Every manager agrees with the NumPy simulation: parameters, slots, losses and counts."""

import pytest
import tensorflow as tf

import hpm
from tests.parity import harness, simulation

SIZES = {1: [8], 2: [4, 4], 4: [2, 2, 2, 2], 8: [1] * 8}


def agreement(mode, cpu_devices, num_devices, optimizer):
  steps = harness.random_steps([SIZES[num_devices]] * 6)
  manager = harness.create_manager(mode, cpu_devices[:num_devices])
  step = harness.create_step(manager, optimizer)
  result = harness.train(step, steps)
  harness.assert_agrees(result, harness.simulate(mode, steps, optimizer))
  if mode != 'independent':
    harness.assert_replicas_equal(result.copies)


@pytest.mark.parametrize(
  ('mode', 'optimizer'),
  harness.chosen(
    [(mode, optimizer) for mode in harness.MODES for optimizer in harness.OPTIMIZERS],
    [
      ('independent', 'momentum'),
      ('replicated_collective', 'rmsprop'),
      *(
        (mode, optimizer)
        for mode in ('parameter_server_spread', 'replicated_spread')
        for optimizer in harness.OPTIMIZERS
      ),
    ],
  ),
)
def test_two_devices_agree_with_the_simulation(mode, optimizer, cpu_devices):
  agreement(mode, cpu_devices, 2, optimizer)


@pytest.mark.parametrize('mode', harness.chosen(list(harness.MODES), ['independent', *harness.TWO]))
@pytest.mark.parametrize('num_devices', [1, 4])
def test_one_and_four_devices_agree_with_the_simulation(mode, num_devices, cpu_devices):
  agreement(mode, cpu_devices, num_devices, 'momentum')


@pytest.mark.parametrize(
  'mode', ['parameter_server_spread', 'replicated_spread', 'replicated_collective']
)
def test_eight_devices_agree_with_the_simulation(mode, cpu_devices):
  agreement(mode, cpu_devices, 8, 'adam')


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
def test_a_schedule_sees_the_number_of_finished_steps(mode, cpu_devices):
  class Halving(simulation.SGD):
    def update(self, param, slots, gradient, number):
      return param - self.learning_rate * 0.5 ** (number - 1) * gradient, {}

  steps = harness.random_steps([[4, 4]] * 5)
  schedule = hpm.optimizers.create('sgd', lambda step: 0.1 * 0.5 ** tf.cast(step, tf.float32))
  step = harness.create_step(harness.create_manager(mode, cpu_devices[:2]), schedule)
  start = harness.start_values(harness.two_layers())
  harness.assert_agrees(harness.train(step, steps), simulation.train(start, steps, Halving(0.1)))


def test_equal_samples_end_with_equal_weights_on_1_2_4_and_8_devices(cpu_devices):
  steps = harness.random_steps([[8]] * 5)
  reference = harness.simulate('replicated_spread', steps)
  for num_devices, sizes in SIZES.items():
    dealt = [_deal(towers[0], sizes) for towers in steps]
    manager = harness.create_manager('replicated_spread', cpu_devices[:num_devices])
    harness.assert_agrees(harness.train(harness.create_step(manager), dealt), reference)


def _deal(batch, sizes):
  images, labels = batch
  starts = [sum(sizes[:i]) for i in range(len(sizes))]
  return [(images[s : s + n], labels[s : s + n]) for s, n in zip(starts, sizes)]
