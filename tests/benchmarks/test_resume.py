"""A training that is broken off and started again ends with the bits of one that is not.

Broken off in every way: by SIGTERM after any step, by SIGKILL at any moment, by a full disk, by a
damaged checkpoint. Compared are all values of the last checkpoints (weights, slots, averages, loss
scale, counters, values in flight), and the position in the data. Another order of the samples, or
another crop of one of them, would change the weights.
"""

import contextlib
import os
from pathlib import Path
import random
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import process
import hpm
from tests.benchmarks.conftest import ROOT, environment
from tests.benchmarks.test_saving import Noted

STEPS = 12  # with one of warm-up
# Name -> flags of a training: managers, optimizers, schedules, values in flight.
TRAININGS = {
  'replicated': ['--optimizer=momentum', '--learning_rate_schedule=cosine'],
  'loss scale': [
    *('--precision=fp16', '--fp16_enable_auto_loss_scale', '--fp16_inc_loss_scale_every_n=3'),
  ],
  'parameter_server': ['--variable_update=parameter_server', '--optimizer=adam'],
  'independent': ['--variable_update=independent', '--optimizer=rmsprop'],
  'collective': ['--all_reduce_spec=collective', '--gradient_repacking=2'],
  'relaxed': ['--variable_consistency=relaxed'],
  'staged': ['--variable_update=parameter_server', '--staged_vars'],
  'average': ['--weight_average_decay=0.9', '--accumulate=2'],
}
DEFAULT = 'loss scale'
PIPELINES = ('tfdata', 'indexed', 'raw', 'dali', 'digits', 'synthetic')


@pytest.fixture(scope='module')
def data(sample, tmp_path_factory):
  """Flags of each pipeline: 64 images, which 3 a device and 2 devices don't divide."""
  root = tmp_path_factory.mktemp('formats')

  def flags(name: str) -> list[str]:
    if name == 'synthetic':
      return ['--model=lenet', '--data_name=synthetic', '--num_batches=11']
    if name == 'digits':
      return [
        *('--model=lenet', '--data_name=digits', '--image_size=8', '--num_classes=10'),
        '--num_batches=11',
      ]
    directory = sample
    if name in ('indexed', 'raw'):
      directory = root / name
      if not directory.exists():
        command = [sys.executable, '-m', 'hpm.pipelines', 'convert', f'--format={name}']
        subprocess.run([*command, sample, directory], cwd=ROOT, check=True, capture_output=True)
    chosen = [f'--pipeline={name}'] if name != 'raw' else ['--data_name=raw']
    return ['--model=lenet', f'--data_dir={directory}', *chosen, '--num_batches=11']

  return flags


def of(training: str, data: list[str], directory: Path) -> list[str]:
  """The command's flags."""
  return [
    *('--num_warmup_batches=1', '--batch_size=4', '--num_gpus=2', f'--train_dir={directory}'),
    *(*data, *TRAININGS[training], '--display_every=1', '--max_ckpts_to_keep=0'),
  ]


def last(directory: Path) -> tuple[dict[str, np.ndarray], dict]:
  """Values and position of the newest checkpoint."""
  values, facts = hpm.checkpoint.read(hpm.checkpoint.latest(str(directory)))
  return values, facts['pipeline']


def assert_same(broken: Path, whole: Path) -> None:
  values, position = last(broken)
  expected, expected_position = last(whole)
  assert expected['step'] == STEPS
  assert position == expected_position
  assert values.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(values[name], value, err_msg=name)


def terminated(in_process, monkeypatch, flags: list[str], after: int) -> list[str]:
  """A run that is told to stop after so many of its steps, at each of which it looks twice."""
  with monkeypatch.context() as patch:
    stopping = lambda *_: contextlib.nullcontext(Noted(after=2 * after - 1))  # noqa: E731
    patch.setattr(process, 'terminations', stopping)
    run = in_process(*flags)
  assert run.code == 143, run.errors
  return run.lines


def check_terminated(in_process, monkeypatch, tmp_path, training, data, after) -> None:
  """Stopped after each of these steps in turn, counted within a run."""
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  run = in_process(*of(training, data, whole))
  assert run.code == 0, run.errors
  for count in after:
    terminated(in_process, monkeypatch, of(training, data, broken), count)
  run = in_process(*of(training, data, broken))
  assert run.code == 0, run.errors
  done = sum(after)
  assert any(line.startswith(f'Going on after step {done}, ') for line in run.lines)
  assert_same(broken, whole)


def test_stopped_and_started_again_a_training_ends_with_the_same_bits(
  in_process, monkeypatch, tmp_path, data
):
  check_terminated(in_process, monkeypatch, tmp_path, DEFAULT, data('tfdata'), [5, 3])


@pytest.mark.long
@pytest.mark.parametrize('step', range(1, STEPS))
def test_so_it_does_after_any_step(in_process, monkeypatch, tmp_path, data, step):
  check_terminated(in_process, monkeypatch, tmp_path, DEFAULT, data('tfdata'), [step])


@pytest.mark.long
@pytest.mark.parametrize('pipeline', PIPELINES)
@pytest.mark.parametrize('training', TRAININGS)
def test_so_it_does_with_every_manager_and_pipeline(
  in_process, monkeypatch, tmp_path, data, training, pipeline
):
  if pipeline == 'dali':
    pytest.importorskip('nvidia.dali')
  check_terminated(in_process, monkeypatch, tmp_path, training, data(pipeline), [5, 4])


def killed(flags: list[str], line: str, wait_s: float = 0.0) -> list[str]:
  """Starts a training in a process and kills it when it has printed such a line; its lines."""
  lines = []
  with subprocess.Popen(
    [sys.executable, 'benchmarks/run.py', '--device=cpu', *flags],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ) as started:
    for one in started.stdout:
      lines.append(one.rstrip('\n'))
      if re.match(line, one):
        with contextlib.suppress(subprocess.TimeoutExpired):
          started.wait(wait_s)
        started.send_signal(signal.SIGKILL)
    started.wait()
  return lines


def check_killed(in_process, tmp_path, training, data, moments) -> None:
  """Killed at these lines and so many seconds later, in turn."""
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  assert in_process(*of(training, data, whole)).code == 0
  flags = [*of(training, data, broken), '--save_model_steps=2']
  for line, wait_s in moments:
    killed(flags, line, wait_s)
  run = in_process(*flags)
  assert run.code == 0, run.errors
  assert_same(broken, whole)


def test_killed_at_once_a_training_goes_on_with_the_same_bits(in_process, tmp_path, data):
  check_killed(in_process, tmp_path, 'replicated', data('tfdata'), [(r'7\timages', 0.0)])


@pytest.mark.long
@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('training', TRAININGS)
def test_so_it_does_at_any_moment(in_process, tmp_path, data, training, seed):
  moments = random.Random(seed)
  lines = [(rf'{moments.randint(1, 5)}\timages', moments.uniform(0, 0.2)) for _ in range(3)]
  check_killed(in_process, tmp_path, training, data('tfdata'), lines)


@pytest.mark.parametrize('file', ['values.data-00000-of-00001', 'values.index', 'meta.json'])
def test_a_truncated_newest_checkpoint_is_passed_over_and_said(in_process, tmp_path, data, file):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  flags = of('replicated', data('tfdata'), whole)
  assert in_process(*flags, '--save_model_steps=4').code == 0
  shutil.copytree(whole, broken)
  shutil.rmtree(broken / f'ckpt-{STEPS}')
  path = broken / 'ckpt-8' / file
  os.truncate(path, path.stat().st_size // 2)
  run = in_process(*of('replicated', data('tfdata'), broken), '--save_model_steps=4')
  assert run.code == 0, run.errors
  (notice,) = [line for line in run.lines if 'damaged' in line]
  assert notice.startswith(f'Notice: {broken}/ckpt-8 is damaged (')
  assert f'renamed to {broken}/ckpt-8.damaged: the one before it is taken' in notice
  assert f'Successfully loaded model from {broken}/ckpt-4.' in run.lines
  assert (broken / 'ckpt-8').is_dir() and (broken / 'ckpt-8.damaged').is_dir()
  assert_same(broken, whole)


def test_the_only_checkpoint_being_damaged_the_run_ends_and_changes_nothing(
  in_process, tmp_path, data
):
  flags = of('replicated', data('tfdata'), tmp_path)
  assert in_process(*flags).code == 0
  os.truncate(tmp_path / f'ckpt-{STEPS}' / 'meta.json', 5)
  run = in_process(*flags)
  assert run.code == 1
  assert run.errors.startswith(f'error: {tmp_path}/ckpt-{STEPS} is no readable checkpoint (')
  assert run.errors.count('\n') == 1
  assert os.listdir(tmp_path) == [f'ckpt-{STEPS}']


def test_a_disk_that_is_full_leaves_the_checkpoint_before(in_process, tmp_path, data):
  """A file system of its own, that is too small for two checkpoints, and then large enough."""
  whole, disk, kept = tmp_path / 'whole', tmp_path / 'disk', tmp_path / 'kept'
  assert in_process(*of('replicated', data('tfdata'), whole)).code == 0
  size = sum(path.stat().st_size for path in whole.rglob('*'))
  disk.mkdir()
  flags = [*of('replicated', data('tfdata'), disk), '--save_model_steps=3', '--device=cpu']
  script = """
  mount -t tmpfs -o size=$SIZE tmpfs $DISK || exit 77
  "$@"; echo "code $?"; ls -A $DISK
  mount -o remount,size=$((10 * SIZE)) $DISK
  "$@"; echo "code $?"
  cp -r $DISK $KEPT
  """
  done = subprocess.run(
    ['unshare', '-rm', 'sh', '-c', script, 'sh', sys.executable, 'benchmarks/run.py', *flags],
    cwd=ROOT,
    env=environment() | {'SIZE': str(size * 3 // 2), 'DISK': str(disk), 'KEPT': str(kept)},
    capture_output=True,
    text=True,
  )
  if 'code' not in done.stdout:
    pytest.skip(f'no file system of its own can be mounted here: {done.stderr}')
  first, second = re.findall(r'code (\d+)', done.stdout)
  assert (first, second) == ('1', '0'), done.stdout + done.stderr
  assert 'error: no checkpoint could be written' in done.stderr
  assert done.stdout.split('code 1\n')[1].startswith('ckpt-3\nTensorFlow')  # and nothing else
  assert 'Going on after step 3, ' in done.stdout
  assert_same(kept, whole)
