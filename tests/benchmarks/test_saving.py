"""Checkpoints while a run goes on, and what a SIGTERM leaves."""

import contextlib
import re
import signal
import subprocess
import sys

import pytest

from benchmarks import process, results
import hpm
from tests.benchmarks.conftest import ROOT, environment


def checkpoints(directory):
  return sorted(path.name for path in directory.iterdir())


def test_checkpoints_come_every_so_many_steps_and_stay_few(in_process, tmp_path):
  train = tmp_path / 'train'
  run = in_process(
    *('--model=lenet', '--num_batches=10', '--num_warmup_batches=1', f'--train_dir={train}'),
    *('--save_model_steps=3', '--max_ckpts_to_keep=2', f'--result_json={tmp_path}/run.json'),
  )
  assert run.code == 0, run.errors
  assert checkpoints(train) == ['ckpt-11', 'ckpt-9']  # of 3, 6, 9 and the end
  assert results.read(str(tmp_path / 'run.json'))['checkpoint'] == f'{train}/ckpt-11'
  facts = hpm.checkpoint.facts(str(train / 'ckpt-11'))
  assert facts['model'] == 'lenet'
  assert facts['pipeline'] == {'seed': 1234, 'samples': 44}


def test_all_stay_where_none_is_to_go_and_seconds_count_too(in_process, tmp_path):
  run = in_process(
    *('--model=trivial', '--num_batches=4', '--num_warmup_batches=1', f'--train_dir={tmp_path}'),
    *('--save_model_secs=1e-9', '--max_ckpts_to_keep=0'),
  )
  assert run.code == 0, run.errors
  assert checkpoints(tmp_path) == [f'ckpt-{step}' for step in range(1, 6)]


def test_within_a_call_of_several_steps_nothing_is_saved(in_process, tmp_path):
  run = in_process(
    *('--model=trivial', '--num_batches=8', '--num_warmup_batches=2', f'--train_dir={tmp_path}'),
    *('--save_model_steps=4', '--steps_per_call=2', '--max_ckpts_to_keep=0'),
  )
  assert run.code == 0, run.errors
  assert checkpoints(tmp_path) == ['ckpt-10', 'ckpt-4', 'ckpt-8']
  values, _ = hpm.checkpoint.read(str(tmp_path / 'ckpt-8'))
  assert values['step'] == 8


def test_the_same_command_ends_where_it_was_to_end(in_process, tmp_path):
  flags = ('--model=trivial', '--num_warmup_batches=2', f'--train_dir={tmp_path}')
  assert in_process(*flags, '--num_batches=3').code == 0
  run = in_process(*flags, '--num_batches=6')
  assert 'Going on after step 5, 20 images' in run.lines
  assert checkpoints(tmp_path) == ['ckpt-5', 'ckpt-8']
  run = in_process(*flags, '--num_batches=7')  # one step is left: it is timed
  assert run.code == 0
  assert checkpoints(tmp_path) == ['ckpt-5', 'ckpt-8', 'ckpt-9']
  assert any('no warm-up' in line for line in run.lines)
  again = in_process(*flags, '--num_batches=7')
  assert again.code == 0
  assert again.lines[-1].startswith('Nothing to do: ')
  assert '9 steps and 36 images, all of --num_batches=7 after 2 of warm-up' in again.lines[-1]


def test_another_seed_is_refused_since_the_data_would_be_others(in_process, tmp_path):
  flags = ('--model=trivial', f'--train_dir={tmp_path}', '--num_warmup_batches=1')
  assert in_process(*flags, '--num_batches=1').code == 0
  run = in_process(*flags, '--num_batches=9', '--tf_random_seed=5')
  assert run.code == 2
  assert 'ckpt-2 does not fit the data of this run: seed=5' in run.errors
  assert run.errors.count('\n') == 1


def test_a_directory_that_can_not_be_written_ends_the_run(in_process, tmp_path, monkeypatch):
  def full(*arguments):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(hpm.checkpoint, 'write', full)
  run = in_process(
    *('--model=trivial', '--num_batches=2', f'--train_dir={tmp_path}', '--num_warmup_batches=1')
  )
  assert run.code == 1
  assert 'No space left on device' in run.errors
  assert run.errors.count('\n') == 1


@pytest.mark.parametrize('kept', [True, pytest.param(False, marks=pytest.mark.long)])
def test_sigterm_ends_a_run_cleanly_and_the_same_command_goes_on(kept, tmp_path, in_process):
  train, path = tmp_path / 'train', tmp_path / 'run.json'
  flags = ['--model=lenet', '--num_gpus=1', f'--result_json={path}']
  flags += [f'--train_dir={train}'] if kept else []
  process = subprocess.Popen(
    [sys.executable, '-m', 'benchmarks.run', '--device=cpu', '--num_batches=100000', *flags],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  while not re.match(r'\d+\timages/sec', process.stdout.readline()):
    assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 143, errors
  result = results.read(str(path))
  assert result['status'] == 'stopped'
  assert errors.count('\n') == 1 and errors.strip() == result['reason']
  assert 'images_per_second' not in result
  if not kept:
    assert errors.strip() == 'stopped by SIGTERM; nothing is kept'
    return
  step = int(re.search(r'after step (\d+): saved', errors)[1])
  assert checkpoints(train) == [f'ckpt-{step}']
  run = in_process(*flags, f'--num_batches={step}')  # 2 of warm-up were made already
  assert run.code == 0, run.errors
  assert f'Going on after step {step}, {2 * step} images' in run.lines
  assert checkpoints(train) == sorted([f'ckpt-{step}', f'ckpt-{step + 2}'])


class Noted(process.Terminations):
  """A list of signals that fills after so many looks at it."""

  def __init__(self, after):
    self._after = after
    super().__init__()

  def __bool__(self):
    self._after -= 1
    return self._after < 0


def test_an_evaluation_stops_too_and_keeps_nothing(monkeypatch, sample, in_process, tmp_path):
  train = tmp_path / 'train'
  flags = ('--model=lenet', f'--data_dir={sample}', f'--train_dir={train}', '--batch_size=2')
  assert in_process(*flags, '--num_batches=1', '--num_warmup_batches=1').code == 0
  monkeypatch.setattr(process, 'terminations', lambda _: contextlib.nullcontext(Noted(after=2)))
  run = in_process(*flags, '--eval', f'--result_json={tmp_path}/run.json')
  assert run.code == 143
  assert run.errors == 'stopped by SIGTERM; nothing is kept\n'
  result = results.read(str(tmp_path / 'run.json'))
  assert result['status'] == 'stopped' and 'accuracy' not in result
  assert checkpoints(train) == ['ckpt-2']
