"""Learning-rate schedules, by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import UsageError
from hpm.optimizers import schedules


def rates(schedule, steps):
  in_graph = tf.function(schedule, input_signature=[tf.TensorSpec([], tf.int64)])
  return [float(in_graph(tf.constant(step, tf.int64))) for step in steps]


def test_piecewise_changes_at_its_boundaries():
  schedule = schedules.piecewise([2, 5], [0.4, 0.04, 0.004])
  np.testing.assert_allclose(
    rates(schedule, [0, 1, 2, 4, 5, 99]), [0.4, 0.4] + [0.04] * 2 + [0.004] * 2
  )
  assert rates(schedules.piecewise([], [0.5]), [7]) == [0.5]


def test_exponential_falls_in_stairs_and_not_below_its_minimum():
  schedule = schedules.exponential(1.0, 3, 0.5, minimum=0.2)
  np.testing.assert_allclose(rates(schedule, [0, 2, 3, 5, 6, 9]), [1, 1, 0.5, 0.5, 0.25, 0.2])
  smooth = schedules.exponential(1.0, 4, 0.5, staircase=False)
  np.testing.assert_allclose(rates(smooth, [2, 4]), [math.sqrt(0.5), 0.5], rtol=1e-6)


def test_polynomial_and_cosine_end_and_stay_there():
  np.testing.assert_allclose(
    rates(schedules.polynomial(1.0, 10, 0.1, power=2.0), [0, 5, 10, 20]), [1, 0.325, 0.1, 0.1]
  )
  np.testing.assert_allclose(
    rates(schedules.cosine(1.0, 10, 0.2), [0, 5, 10, 11]), [1, 0.6, 0.2, 0.2], rtol=1e-6
  )


def test_warmup_ramps_to_what_follows():
  np.testing.assert_allclose(
    rates(schedules.warmup(0.8, 3), [0, 1, 2, 3, 9]), [0.2, 0.4, 0.6, 0.8, 0.8], rtol=1e-6
  )
  ramped = schedules.warmup(schedules.piecewise([4], [0.8, 0.08]), 3)
  np.testing.assert_allclose(rates(ramped, [0, 3, 4]), [0.2, 0.8, 0.08], rtol=1e-6)
  assert rates(schedules.warmup(0.5, 0), [0]) == [0.5]


def test_epochs_come_from_the_global_batch():
  assert schedules.epochs(30, 1281167, 1024) == 37534
  assert schedules.epochs(0.5, 100, 8) == 6


def test_a_schedule_drives_the_optimizer():
  optimizer = hpm.optimizers.create('sgd', learning_rate=schedules.piecewise([1], [0.1, 0.01]))
  at = [float(optimizer.scalars(tf.constant(s, tf.int64))['learning_rate']) for s in (0, 1)]
  np.testing.assert_allclose(at, [0.1, 0.01])


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: schedules.piecewise([2, 1], [1, 2, 3]), 'each must be larger'),
    (lambda: schedules.piecewise([2], [1]), '1 boundaries need 2 rates, not 1'),
    (lambda: schedules.exponential(1.0, 0, 0.5), 'decay_steps 0'),
    (lambda: schedules.exponential(1.0, 2, -1.0), 'factor -1.0'),
    (lambda: schedules.cosine(1.0, 0), 'num_steps 0'),
    (lambda: schedules.warmup(1.0, -1), 'num_steps -1'),
  ],
)
def test_impossible_schedules_are_refused(make, message):
  with pytest.raises(UsageError, match=message):
    make()


def test_a_warm_up_in_front_of_steps_takes_a_python_int():
  rate = schedules.warmup(schedules.piecewise([5], [0.5, 0.1]), 3)
  assert [float(rate(step)) for step in (0, 3, 5)] == pytest.approx([0.125, 0.5, 0.1])
