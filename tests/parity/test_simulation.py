"""The simulation itself: gradients against differences, delays and means by hand."""

import subprocess
import sys

import numpy as np
import pytest

from tests.parity import simulation


def params(rng, n=12, h=7, c=5):
  return {
    'hidden/kernel': rng.normal(size=(n, h)),
    'hidden/bias': rng.normal(size=h),
    'logits/kernel': rng.normal(size=(h, c)),
    'logits/bias': rng.normal(size=c),
  }


def batch(rng, size):
  return rng.integers(0, 256, (size, 2, 2, 3)).astype(np.uint8), rng.integers(0, 5, size)


def parabola(values, targets, unused):
  """Sum of (w - target)^2 / 2, whose gradient is w - target."""
  difference = values['w'] - targets
  return float(np.sum(difference**2) / 2), {'w': np.sum(difference)}


def parabola_steps(*targets):
  return [[(np.array([target]), np.zeros(1))] for target in targets]


def test_it_imports_no_tensorflow():
  code = 'import sys, tests.parity.simulation; print("tensorflow" in sys.modules)'
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == 'False'


def normalized_params(rng):
  return {
    'conv/kernel': rng.normal(size=(1, 1, 3, 3)),
    'bn/scale': rng.normal(size=3),
    'bn/offset': rng.normal(size=3),
    'logits/kernel': rng.normal(size=(12, 5)),
    'logits/bias': rng.normal(size=5),
  }


@pytest.mark.parametrize(
  ('network', 'start'),
  [(simulation.two_layers, params), (simulation.normalized, normalized_params)],
  ids=['two_layers', 'normalized'],
)
def test_gradients_are_the_slopes_of_the_loss(network, start):
  rng = np.random.default_rng(0)
  values, (images, labels) = start(rng), batch(rng, 6)
  gradients = network(values, images, labels)[1]
  for name, value in values.items():
    slope = np.zeros_like(value)
    for index in np.ndindex(value.shape):
      losses = []
      for shift in (1e-5, -1e-5):
        moved = value.copy()
        moved[index] += shift
        losses.append(network({**values, name: moved}, images, labels)[0])
      slope[index] = (losses[0] - losses[1]) / 2e-5
    # A difference of losses near 8 has 16 digits, of which 1e-5 leaves ten.
    np.testing.assert_allclose(gradients[name], slope, rtol=1e-6, atol=3e-8)


@pytest.mark.parametrize('sizes', [(4, 4), (7, 1), (8, 0), (3, 0, 5)])
def test_however_samples_are_dealt_to_towers_the_mean_is_the_same(sizes):
  rng = np.random.default_rng(1)
  values, (images, labels) = params(rng), batch(rng, 8)
  bounds = np.cumsum(sizes)[:-1]
  towers = list(zip(np.split(images, bounds), np.split(labels, bounds)))
  rule = simulation.Momentum(0.1)
  dealt = simulation.train(values, [towers] * 3, rule)
  whole = simulation.train(values, [[(images, labels)]] * 3, rule)
  np.testing.assert_allclose(dealt.losses, whole.losses, rtol=1e-12)
  for name, value in whole.values.items():
    np.testing.assert_allclose(dealt.values[name], value, rtol=1e-11, atol=1e-14)


def test_sgd_by_hand():
  # 1 - (1 - 0) / 2 = 0.5; 0.5 - (0.5 - 2) / 2 = 1.25
  result = simulation.train(
    {'w': np.float64(1)}, parabola_steps(0, 2), simulation.SGD(0.5), network=parabola
  )
  assert result.values['params/w'] == 1.25
  assert result.losses == [0.5, 1.125]


def test_stale_variables_by_hand():
  # Version 0 is 1. Step 1 from version 0: 1 - 1/2 = 0.5. Step 2 from version 0 still: 0.5 - 1/2.
  # Step 3 from version 1: 0 - 0.5/2 = -0.25.
  result = simulation.train(
    {'w': np.float64(1)},
    parabola_steps(0, 0, 0),
    simulation.SGD(0.5),
    network=parabola,
    variable_delay=1,
  )
  assert result.values['params/w'] == -0.25
  assert result.losses == [0.5, 0.5, 0.125]


def test_stale_gradients_by_hand():
  # Step 1 keeps g = 1 - 0 and applies zeros. Step 2 keeps 1 - 3 = -2 and applies 1: 0.5. Step 3
  # applies -2: 1.5.
  result = simulation.train(
    {'w': np.float64(1)},
    parabola_steps(0, 3, 0),
    simulation.SGD(0.5),
    network=parabola,
    gradient_delay=1,
  )
  assert result.values['params/w'] == 1.5


def test_the_first_stale_gradient_is_nought_and_is_applied():
  # rms starts at 1 and decays by 0.9 towards a square of 0: 0.9; then towards 1: 0.91.
  result = simulation.train(
    {'w': np.float64(1)},
    parabola_steps(0, 0),
    simulation.RMSProp(0.5),
    network=parabola,
    gradient_delay=1,
  )
  np.testing.assert_allclose(result.values['slots/rms/w'], 0.91)


def test_sum_of_means_by_hand():
  # Towers of two samples at 0 and one at 3: means 1 and -2, their sum -1, over all samples 0.
  def mean_of(targets, **options):
    tower = [(np.array(t), np.zeros(len(t))) for t in targets]
    return simulation.train(
      {'w': np.float64(1)}, [tower], simulation.SGD(0.5), network=parabolas, **options
    ).values['params/w']

  def parabolas(values, targets, labels):
    return 0.0, {'w': (values['w'] - targets).sum()}

  assert mean_of([[0, 0], [3]], reduction='sum') == 1.5
  assert mean_of([[0, 0], [3]]) == 1.0


@pytest.mark.parametrize(
  ('statistics', 'mean', 'variance'),
  [
    # Towers' pixels -1, 1 and 1, 1: means 0 and 1, unbiased variances 2 and 0.
    ('mean', 0.05, 1.0),
    ('first', 0.0, 1.1),
    ('cross_replica', 0.05, 1.0),  # of all four pixels: 0.5 and 1
  ],
)
def test_moving_statistics_by_hand(statistics, mean, variance):
  rng = np.random.default_rng(0)
  values = normalized_params(rng) | {
    'conv/kernel': np.ones((1, 1, 1, 1)),
    'bn/scale': np.ones(1),
    'bn/offset': np.zeros(1),
    'logits/kernel': rng.normal(size=(2, 5)),
  }
  towers = [np.array([0, 255]), np.array([255, 255])]
  steps = [[(t.reshape(1, 1, 2, 1), np.zeros(1, int)) for t in towers]]
  result = simulation.train(
    values, steps, simulation.SGD(0.1), network=simulation.normalized, statistics=statistics
  )
  np.testing.assert_allclose(result.values['state/bn/moving_mean'], mean)
  np.testing.assert_allclose(result.values['state/bn/moving_variance'], variance)


def test_independent_towers_know_nothing_of_one_another():
  rng = np.random.default_rng(2)
  values = params(rng)
  steps = [[batch(rng, 4), batch(rng, 2)] for _ in range(3)]
  both = simulation.train_independent(values, steps, simulation.SGD(0.1))
  second = simulation.train(values, [[towers[1]] for towers in steps], simulation.SGD(0.1))
  for name, value in second.values.items():
    np.testing.assert_array_equal(both.values[f'replica/1/{name}'], value)
