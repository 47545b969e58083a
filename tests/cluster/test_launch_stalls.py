"""Trainings in which a part stops for ever: which stage is named, and how all processes end.

The whole matrix is long; one case of each kind stands in the default suite.
"""

import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster import test_launch_faults as faults

ALONE = {
  'alone': ['--variable_update=replicated'],
  'alone parameter_server': ['--variable_update=parameter_server'],
  'alone independent': ['--variable_update=independent'],
}
CLUSTERS = dict(faults.MODES)
MODES = [*ALONE, *CLUSTERS]
LINE = r'^(\[\S+\] )?error: stalled in '
TIMEOUT_S = 5
BOUND_S = 50.0  # from the fault until all are gone
# fsync waits for ever once the FIFO that $STALLING_FSYNC names is there: a file system that hangs.
HANGING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int fsync(int descriptor) {
  const char *gate = getenv("STALLING_FSYNC");
  if (gate && access(gate, F_OK) == 0) open(gate, O_RDONLY);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
  """Starts a training that checks for stalls; nothing of it is left."""
  monkeypatch.setattr(faults, 'MODES', CLUSTERS | ALONE)
  started = []

  def start(mode: str, *flags: str) -> faults.Training:
    directory = tmp_path / 'train'
    directory.mkdir()
    patient = [] if mode in ALONE else ['--heartbeat_timeout_s=600']
    device = ['--device=cpu'] if mode in ALONE else []
    found = faults.Training(
      mode,
      directory,
      *('--num_batches=1000000', f'--stall_timeout_s={TIMEOUT_S}'),
      f'--result_json={tmp_path}/run.json',
      *(*patient, *device, *flags),
    )
    started.append(found)
    return found

  yield start
  for training in started:
    if training.process.poll() is None:
      training.end()


@pytest.fixture(scope='module')
def hanging(tmp_path_factory) -> Path:
  """The library that is loaded before others."""
  directory = tmp_path_factory.mktemp('hanging')
  (directory / 'hanging.c').write_text(HANGING)
  command = ['cc', '-shared', '-fPIC', '-o', 'hanging.so', 'hanging.c', '-ldl']
  try:
    subprocess.run(command, cwd=directory, check=True)
  except FileNotFoundError:
    pytest.skip('needs a C compiler')
  return directory / 'hanging.so'


def check_end(training: faults.Training, place: str, tmp_path: Path) -> str:
  """All end within bounds, one process with the place in its line; the line."""
  begun = time.monotonic()
  line = training.wait_for(LINE, BOUND_S)
  assert re.search(rf'\(--stall_timeout_s={TIMEOUT_S}\): {place}', line), line
  code = training.process.wait(BOUND_S)
  print(f'{line}: gone {time.monotonic() - begun:.1f} s after the test began to wait')
  assert code not in (0, None)
  assert any('most recent call first' in line for line in training.lines)
  results = [json.loads(path.read_text()) for path in tmp_path.glob('run*.json')]
  assert any(r['status'] == 'failed' and 'stalled in' in r['reason'] for r in results)
  assert not any('images_per_second' in result for result in results)
  return line


def started(training: faults.Training, mode: str) -> None:
  training.wait_for(r'^3\timages/sec' if mode in ALONE else r'\[worker:0\] 3\timages/sec')


def check_data(train, tmp_path: Path, mode: str) -> None:
  data, fifo = tmp_path / 'data', tmp_path / 'fifo'
  command = [sys.executable, '-m', 'hpm.pipelines', 'sample', '--num_images=40', f'--out={data}']
  subprocess.run(command, cwd=faults.ROOT, check=True, capture_output=True)
  training = train(mode, f'--data_dir={data}')
  started(training, mode)
  os.mkfifo(fifo)
  for shard in ('train-00001-of-00008', 'train-00004-of-00008'):  # one of either worker's
    os.link(fifo, tmp_path / shard)
    os.replace(tmp_path / shard, data / shard)
  line = check_end(training, f'data: imagenet of {data} gives no batch', tmp_path)
  assert re.search(rf'\(open of {data}/train-0000\d-of-00008 does not end', line), line
  if mode in CLUSTERS:
    assert re.match(r'\[worker:\d\] error: ', line)


def check_checkpoint(train, tmp_path: Path, mode: str, hanging: Path, monkeypatch) -> None:
  gate = tmp_path / 'gate'
  monkeypatch.setenv('LD_PRELOAD', str(hanging))
  monkeypatch.setenv('STALLING_FSYNC', str(gate))
  training = train(mode, '--save_model_steps=2')
  started(training, mode)
  os.mkfifo(gate)
  line = check_end(training, f'checkpoint: {tmp_path}/train takes no more', tmp_path)
  assert f'(open of {gate} does not end' in line, line
  assert mode in ALONE or line.startswith('[worker:0] ')  # who writes
  assert not [name for name in os.listdir(tmp_path / 'train') if name == 'ckpt-1000002']


def check_peer(train, tmp_path: Path, mode: str, victim: str) -> None:
  training = train(mode)
  processes = training.processes()
  started(training, mode)
  os.kill(processes[victim], signal.SIGSTOP)
  try:
    training.wait_for(LINE, BOUND_S)
  finally:
    os.kill(processes[victim], signal.SIGKILL)  # the command waits for a task that doesn't end
  kind = 'parameter server' if victim == 'ps:0' else 'collective'
  place = rf'{kind}: {victim} \(127\.0\.0\.1:\d+\) does not answer'
  line = check_end(training, place, tmp_path)
  assert not line.startswith(f'[{victim}]')


def test_a_data_file_that_blocks_is_named(train, tmp_path):
  check_data(train, tmp_path, 'alone')


def test_a_checkpoint_that_is_never_written_is_named(train, tmp_path, hanging, monkeypatch):
  check_checkpoint(train, tmp_path, 'alone', hanging, monkeypatch)


@pytest.mark.long
def test_a_peer_that_is_stopped_is_named_by_the_collective_that_waits(train, tmp_path):
  check_peer(train, tmp_path, 'collective_all_reduce', 'worker:1')


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_so_it_is_with_data_in_every_mode(train, tmp_path, mode):
  check_data(train, tmp_path, mode)


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_so_it_is_with_checkpoints_in_every_mode(train, tmp_path, mode, hanging, monkeypatch):
  check_checkpoint(train, tmp_path, mode, hanging, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
  ('mode', 'victim'),
  [
    (mode, victim)
    for mode in CLUSTERS
    for victim in ('worker:0', 'worker:1', 'ps:0')
    if (mode, victim[:2]) not in {('collective_all_reduce', 'ps'), ('asynchronous', 'wo')}
  ],
)
def test_so_it_is_with_every_task_that_is_stopped(train, tmp_path, mode, victim):
  check_peer(train, tmp_path, mode, victim)


@pytest.mark.long
@pytest.mark.parametrize('mode', CLUSTERS)
def test_who_waits_while_the_chief_evaluates_has_not_stalled(train, tmp_path, mode):
  """360 images, one by one, after each step."""
  training = train(mode, *faults.EVALUATING, '--stall_timeout_s=1', '--num_batches=6')
  assert training.process.wait(240) == 0, '\n'.join(training.lines[-30:])
