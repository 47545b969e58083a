"""The figures of a run, by hand."""

import pytest

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
