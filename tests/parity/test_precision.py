"""Loss scale, half-precision transfer and half-precision towers, held to the simulation."""

import numpy as np
import pytest

from tests.parity import harness

NUM_STEPS = 5
UNIT = {'float16': 2.0**-11, 'bfloat16': 2.0**-8}  # largest relative rounding error
REPLICATED = [mode for mode in harness.MODES if mode.startswith('replicated')]


def largest_error_of_the_change(result, expected):
  """Like `relative_error`, of what training has added to the parameters."""
  start = harness.start_values(harness.two_layers())
  return max(
    harness.relative_error(
      result.values[f'params/{name}'] - value, expected.values[f'params/{name}'] - value
    )
    for name, value in start.items()
  )


@pytest.mark.parametrize('mode', harness.chosen(list(harness.MODES), ['independent', *harness.TWO]))
@pytest.mark.parametrize('loss_scale', [128.0, 1000.0])
def test_the_loss_scale_leaves_no_trace(mode, loss_scale, cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = harness.create_manager(mode, cpu_devices[:2])
  step = harness.create_step(manager, loss_scale=loss_scale)
  harness.assert_agrees(harness.train(step, steps), harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', ['parameter_server_cpu', 'replicated_collective'])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(mode, cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  plain, scaled = (
    harness.train(
      harness.create_step(harness.create_manager(mode, cpu_devices[:2]), loss_scale=loss_scale),
      steps,
    )
    for loss_scale in (1.0, 128.0)
  )
  for name, value in plain.values.items():
    np.testing.assert_array_equal(scaled.values[name], value, err_msg=name)


@pytest.mark.parametrize(
  'mode', harness.chosen(REPLICATED, ['replicated_spread', 'replicated_collective'])
)
@pytest.mark.parametrize('dtype', UNIT)
@pytest.mark.parametrize('num_devices', [2, 4])
def test_half_precision_transfer(mode, dtype, num_devices, cpu_devices):
  # Each of n gradients is rounded once where it is sent, and each of the n - 1 additions once more:
  # n units of the sum, if all towers' gradients point the same way. Measured are 0.4 to 0.5 n.
  steps = harness.random_steps([[8 // num_devices] * num_devices] * NUM_STEPS)
  expected = harness.simulate(mode, steps)
  manager = harness.create_manager(mode, cpu_devices[:num_devices], transfer_dtype=dtype)
  result = harness.train(harness.create_step(manager), steps)
  error = largest_error_of_the_change(result, expected)
  assert UNIT[dtype] / 16 < error <= num_devices * UNIT[dtype]  # not 0: it was used at all
  harness.assert_replicas_equal(result.copies)
  np.testing.assert_allclose([m.loss for m in result.metrics], expected.losses, rtol=UNIT[dtype])


@pytest.mark.parametrize('mode', ['independent', 'parameter_server_cpu', 'replicated_spread'])
@pytest.mark.parametrize('dtype', UNIT)
def test_half_precision_towers(mode, dtype, cpu_devices):
  # Images, kernels, activations and their gradients are rounded once each, there and back again,
  # which adds up to four units of what training changes. Measured are 1.5 to 2.7.
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = harness.create_manager(mode, cpu_devices[:2])
  step = harness.create_step(manager, model=harness.two_layers(dtype), loss_scale=128.0)
  result = harness.train(step, steps)
  error = largest_error_of_the_change(result, harness.simulate(mode, steps))
  assert UNIT[dtype] / 16 < error <= 4 * UNIT[dtype]
  if mode != 'independent':
    harness.assert_replicas_equal(result.copies)
