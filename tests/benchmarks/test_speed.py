"""The figures of a run, by hand."""

import pytest

from benchmarks import speed
from benchmarks.speed import RULE, Speed, summary


def speed_of(seconds, images=8):
  timed = Speed()
  for s in seconds:
    timed.add(s, images)
  return timed


def test_mean_is_batch_over_mean_time():
  timed = speed_of([1.0, 3.0])  # 8 and 2.67 images/s
  assert timed.mean == pytest.approx(8 / 2.0)


def test_a_smaller_last_batch_counts_its_own_images():
  timed = speed_of([1.0])
  timed.add(1.0, 2)
  assert timed.mean == pytest.approx(5.0)


def test_standard_error_and_jitter():
  timed = speed_of([8 / s for s in (10.0, 12.0, 14.0, 40.0)])
  assert timed.median == pytest.approx(13.0)
  # Deviations from 13: 3, 1, 1, 27; their median is 2.
  assert timed.jitter == pytest.approx(1.4826 * 2)
  # Mean 19, squared deviations 81, 49, 25, 441.
  assert timed.standard_error == pytest.approx((596 / 4) ** 0.5 / 2)


def test_step_line_is_tf_cnn_benchmarks_to_the_character():
  timed = speed_of([2.0])
  assert timed.line(10, 8.16949) == '10\timages/sec: 4.0 +/- 0.0 (jitter = 0.0)\t8.169'
  assert len(timed.line(10, 8.16949).split()) == 9


def test_summary_stands_between_rules():
  assert summary(2.904) == f'{RULE}\ntotal images/sec: 2.90\n{RULE}'
  assert RULE == '-' * 64


def test_accuracies_are_two_more_words():
  line = speed_of([2.0]).line(3, 1.0, (0.25, 0.5))
  assert line == '3\timages/sec: 4.0 +/- 0.0 (jitter = 0.0)\t1.000\t0.250\t0.500'
  assert len(line.split()) == 11
  assert speed.title('base_loss', False) == 'Step\tImg/sec\tbase_loss'
  columns = 'Step\tImg/sec\ttotal_loss\ttop_1_accuracy\ttop_5_accuracy'
  assert speed.title('total_loss', True) == columns


def test_the_weighted_mean_is_for_the_lines_alone():
  timed = Speed(ewma=0.25)
  for seconds in (1.0, 2.0, 4.0):
    timed.add(seconds, 8)
  # 1, then 0.25 * 2 + 0.75 * 1 = 1.25, then 0.25 * 4 + 0.75 * 1.25 = 1.9375 seconds for 8 images.
  assert timed.line(3, 0.0).startswith(f'3\timages/sec: {8 / 1.9375:.1f} +/-')
  assert timed.mean == pytest.approx(24 / 7)


def test_interval_is_students_on_the_mean_time():
  # Mean 3, standard deviation 1, three values: 2 degrees of freedom, t = 4.303.
  low, high = speed.interval([2.0, 3.0, 4.0], 8.0)
  half = 4.303 / 3**0.5
  assert (low, high) == (pytest.approx(8.0 / (3 + half)), pytest.approx(8.0 / (3 - half)))
  # The same about 2 would reach below no time at all: any rate, however high, is possible.
  assert speed.interval([1.0, 2.0, 3.0], 8.0) is None
  # Two runs of 147.38 and 152.96 images/s: t = 12.706, wider than the two are apart.
  low, high = speed.interval([1 / 147.38, 1 / 152.96], 1.0)
  assert (low, high) == (pytest.approx(121.45, abs=0.01), pytest.approx(196.38, abs=0.5))
  low, high = speed.interval([2.0, 2.0, 2.0, 2.0], 8.0)
  assert low == high == pytest.approx(4.0)
  assert speed.interval([2.0], 8.0) is None


def test_percentiles_lie_between_neighbours():
  values = speed.percentiles([3.0, 1.0, 2.0, 4.0, 5.0])
  assert (values['p50'], values['p25'], values['p75']) == (3.0, 2.0, 4.0)
  assert values['p95'] == pytest.approx(4.8)
  assert speed.percentiles([7.0]) == dict.fromkeys(values, 7.0)


def test_drift_is_found_and_noise_is_none():
  noise = [0.01 * ((7 * i) % 5 - 2) for i in range(60)]
  steady = [1.0 + n for n in noise]
  assert speed.drift(steady) is None
  slower = [1.0 + n + (0.2 if i >= 40 else 0.0) for i, n in enumerate(noise)]
  assert speed.drift(slower) == pytest.approx(0.2, abs=0.03)
  spikes = [9.0 if i % 20 == 19 else t for i, t in enumerate(steady)]
  assert speed.drift(spikes) is None
  assert speed.drift([1.0] * 5 + [2.0] * 5) is None  # too few to tell
