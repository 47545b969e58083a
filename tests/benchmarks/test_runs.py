"""Several runs of one command: times are averaged, and each run's rate stands beside them."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks import loop, results, runs
from benchmarks.saving import Stopped
from benchmarks.speed import RULE
from tests.benchmarks.conftest import ROOT, environment


def planted(seconds, images=8, **more):
  """A result of steps that took so long."""
  return {
    'images_per_second': images * len(seconds) / sum(seconds),
    'images_per_second_total': images * len(seconds) / (sum(seconds) + 1.0),
    'step_seconds': seconds,
    'step_images': [images] * len(seconds),
    'loop_wall_s': sum(seconds) + 1.0,
    'losses': [1.0] * len(seconds),
    'cpu_s': 3.0,
    'peak_rss_mib': 100.0,
    'time_to_first_step_s': 2.0,
    'machine': {},
    'flags': {},
    **more,
  }


def test_images_over_the_mean_time_of_all_steps():
  # 8 images in 1 s, and in 4 s: rates 8 and 2, whose mean is 5. The mean time is 2.5 s.
  record = runs.combined([planted([1.0]), planted([4.0])])
  assert record['images_per_second'] == pytest.approx(8 / 2.5)
  assert [run['images_per_second'] for run in record['runs']] == [8.0, 2.0]
  assert record['step_seconds'] == [1.0, 4.0]
  assert record['step_seconds_mean'] == 2.5
  assert record['runs_spread'] == {
    'lowest': 2.0,
    'highest': 8.0,
    'standard_deviation': pytest.approx(18**0.5),  # deviations of 3 from 5, over 1
  }


def test_a_run_of_more_steps_weighs_more():
  record = runs.combined([planted([1.0, 1.0, 1.0]), planted([2.0])])
  assert record['images_per_second'] == pytest.approx(32 / 5.0)


def test_the_interval_is_between_runs():
  # Times an image of 1.9/8 and 2.1/8 s: mean 2/8, standard deviation 0.1 sqrt(2)/8, t of 1 freedom
  # 12.706.
  low, high = runs.combined([planted([1.9] * 50), planted([2.1] * 50)])[
    'images_per_second_interval'
  ]
  assert low == pytest.approx(8 / (2 + 1.2706))
  assert high == pytest.approx(8 / (2 - 1.2706))
  far = runs.combined([planted([1.0] * 50), planted([3.0] * 50)])
  assert far['images_per_second_interval'] is None
  assert runs.combined([planted([1.0] * 50)])['images_per_second_interval'] is None


def test_what_is_no_rate_is_added_or_the_worst():
  record = runs.combined(
    [
      planted([1.0], warnings=['busy'], peak_rss_mib=300.0),
      planted([1.0], warnings=['drift', 'busy']),
    ]
  )
  assert record['warnings'] == ['run 1: busy', 'run 2: drift', 'run 2: busy']
  assert (record['cpu_s'], record['peak_rss_mib']) == (6.0, 300.0)
  assert record['images_per_second_total'] == pytest.approx(16 / 4.0)


def test_each_run_has_a_process_of_its_own(command_line, tmp_path):
  path = tmp_path / 'run.json'
  run = command_line(
    *('--device=cpu', '--model=trivial', '--num_gpus=1', '--num_batches=3', '--num_runs=2'),
    f'--result_json={path}',
  )
  assert run.code == 0, run.errors
  assert [line for line in run.lines if line.startswith('Run ')] == ['Run 1 of 2', 'Run 2 of 2']
  result = results.read(str(path))
  assert len(result['runs']) == 2 and len(result['step_seconds']) == 6
  assert result['flags']['batch_size'] == 2
  assert run.lines[-1].startswith(f'Result: {path}. Next: ')
  assert len([line for line in run.lines if line.startswith('Result: ')]) == 1
  assert result['flags_given']['num_runs'] == 2
  mean = sum(result['step_seconds']) / 6
  assert result['images_per_second'] == pytest.approx(2 / mean)
  last = len(run.lines) - 1 - run.lines[::-1].index(RULE)
  assert run.lines[last - 1] == f'total images/sec: {result["images_per_second"]:.2f}'
  assert re.match(r'Runs: \d+\.\d\d, \d+\.\d\d images/sec; standard dev', run.lines[last - 3])
  assert os.listdir(tmp_path) == ['run.json']


def test_a_run_that_ends_without_a_result_fails_them_all():
  with pytest.raises(loop.RunError, match='run 1 of 2 ended with code 2'):
    runs.repeated(['--batch_size=0'], 2, {})


def test_no_run_starts_once_the_process_is_told_to_stop():
  with pytest.raises(Stopped, match='before run 1 of 2'):
    runs.repeated(['--batch_size=0'], 2, {}, [15])


@pytest.mark.long
def test_sigterm_reaches_the_run_and_ends_them_all(tmp_path):
  path = tmp_path / 'run.json'
  process = subprocess.Popen(
    [
      *(sys.executable, '-m', 'benchmarks.run', '--device=cpu', '--model=trivial'),
      *('--num_batches=1000000', '--num_runs=3', f'--result_json={path}'),
    ],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  while not re.match(r'\d+\timages/sec', process.stdout.readline()):
    assert process.poll() is None
  process.terminate()
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 143
  assert 'run 1 of 3: stopped by SIGTERM; nothing is kept' in errors
  assert results.read(str(path))['status'] == 'stopped'


@pytest.mark.long
def test_a_failed_run_fails_them_all_with_its_reason(command_line, tmp_path):
  path = tmp_path / 'run.json'
  run = command_line(
    *('--device=cpu', '--model=lenet', '--init_learning_rate=1e10', '--num_runs=3'),
    f'--result_json={path}',
  )
  assert run.code == 1
  result = results.read(str(path))
  assert result['status'] == 'failed'
  assert re.search(r'run 1 of 3: RunError: the loss is', result['reason'])
  assert 'images_per_second' not in result
