"""Processes that die while they train: who else ends, how soon, and what they say.

The whole matrix is long; one case of each kind stands in the default suite.
"""

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpm.cluster import listening
from hpm.cluster.spec import Address

ROOT = Path(__file__).parents[2]
BOUND_S = 15.0  # from a death until all survivors are gone
MODES = {
  'parameter_server': ['--variable_update=parameter_server', '--local_cluster=workers:2,ps:1'],
  'asynchronous': [
    *('--variable_update=parameter_server', '--cross_replica_sync=false'),
    '--local_cluster=workers:2,ps:1',
  ],
  'distributed_replicated': [
    *('--variable_update=distributed_replicated', '--local_cluster=workers:2,ps:1'),
  ],
  'collective_all_reduce': [
    *('--variable_update=collective_all_reduce', '--local_cluster=workers:2'),
  ],
}
MOMENTS = ('start-up', 'step', 'checkpoint', 'evaluation')
# After each step the chief evaluates 360 images, one by one: longer than a step takes.
EVALUATING = (
  *('--data_name=digits', '--image_size=8', '--num_classes=10', '--batch_size=1'),
  '--eval_during_training_every_n_steps=1',
)


class Training:
  """A local cluster that trains a small model for long, and its lines."""

  def __init__(self, mode: str, directory: Path, *flags: str):
    self.directory = directory
    self.tasks = ['worker:0', 'worker:1'] + ['ps:0'] * (mode != 'collective_all_reduce')
    command = [sys.executable, str(ROOT / 'benchmarks' / 'run.py'), *MODES[mode]]
    common = ('--model=lenet', '--num_gpus=1', '--batch_size=2', '--num_warmup_batches=1')
    self.process = subprocess.Popen(
      [*command, *common, '--display_every=1', f'--train_dir={directory}', *flags],
      cwd=directory,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors='replace',
    )
    self.lines: list[str] = []
    self._changed = threading.Condition()
    threading.Thread(target=self._read, daemon=True).start()

  def _read(self) -> None:
    for line in self.process.stdout:
      with self._changed:
        self.lines.append(line.rstrip('\n'))
        self._changed.notify_all()

  def wait_for(self, pattern: str, within_s: float = 240.0) -> str:
    """The first line that matches."""

    def found() -> str | None:
      return next((line for line in self.lines if re.search(pattern, line)), None)

    with self._changed:
      self._changed.wait_for(lambda: found() or self.process.poll() is not None, within_s)
      line = found()
    assert line is not None, f'no {pattern!r}:\n' + '\n'.join(self.lines[-40:])
    return line

  def processes(self) -> dict[str, int]:
    """Task -> the id of its process, once all have been started."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
      tasks = {}
      for child in children(self.process.pid):
        flags = dict(word[2:].split('=', 1) for word in command_of(child) if '=' in word)
        if 'job_name' in flags:
          tasks[f'{flags["job_name"]}:{flags["task_index"]}'] = child
      if len(tasks) == len(self.tasks):
        return tasks
      time.sleep(0.02)
    raise AssertionError(f'only {list(tasks)} started:\n' + '\n'.join(self.lines[-40:]))

  def reach(self, moment: str) -> None:
    """Blocks until all are there, or a step, a checkpoint or an evaluation is on its way."""
    if moment == 'start-up':
      self.processes()
      time.sleep(2.0)  # the heartbeats have met, TensorFlow is being imported
    elif moment == 'step':
      self.wait_for(r'\[worker:0\] 3\timages/sec')
    elif moment == 'evaluation':
      self.wait_for(r'\[worker:0\] 2\timages/sec')
      time.sleep(0.1)
    else:
      self.wait_for(r'\[worker:0\] 2\timages/sec')
      until = time.monotonic() + 60
      while not any(name.startswith('.writing-') for name in os.listdir(self.directory)):
        assert time.monotonic() < until, os.listdir(self.directory)

  def end(self) -> None:
    self.process.kill()  # and the kernel kills its children
    self.process.wait()


def children(pid: int) -> list[int]:
  """Ids of the processes that this one has started."""
  try:
    return [int(one) for one in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
  except OSError:
    return []


def command_of(pid: int) -> list[str]:
  """Its command line; nothing of a process that is gone."""
  try:
    return Path(f'/proc/{pid}/cmdline').read_text().split('\0')
  except OSError:
    return []


def is_gone(pid: int) -> bool:
  """Whether the process has ended, be it waited for or not."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'Z'
  except OSError:
    return True


@pytest.fixture
def train(tmp_path) -> Iterator[Callable[..., Training]]:
  """Starts trainings in directories of their own; nothing of them is left."""
  started: list[Training] = []

  def start(mode: str, *flags: str) -> Training:
    directory = tmp_path / str(len(started))
    directory.mkdir()
    started.append(Training(mode, directory, *flags))
    return started[-1]

  yield start
  for training in started:
    if training.process.poll() is None:
      training.end()


def gone_after(pid: int, begun: float, bound_s: float) -> float:
  """Seconds from `begun` until the process is gone."""
  while not is_gone(pid) and time.monotonic() - begun < bound_s:
    time.sleep(0.02)
  return time.monotonic() - begun


def check_addresses(processes: dict[str, int]) -> None:
  """Servers and the heartbeat answer at 127.0.0.1 and at no other address of this machine."""
  words = command_of(processes['worker:0'])
  ports = [int(port) for word in words for port in re.findall(r'127\.0\.0\.1:([0-9]+)', word)]
  ports += [int(word.partition('=')[2]) for word in words if word.startswith('--heartbeat_port')]
  assert len(ports) == len(processes) + 1
  for port in ports:
    assert listening.answers(Address('127.0.0.1', port), 5)
    assert not listening.answers(Address('127.0.0.2', port), 0.3)


def check(train: Callable[..., Training], mode: str, victim: str, moment: str, number: int) -> None:
  saving = {'checkpoint': ['--save_model_steps=1'], 'evaluation': EVALUATING}.get(moment, [])
  survives = mode == 'asynchronous' and victim == 'worker:1'
  steps = 60 if survives else 1000000
  if survives and moment == 'evaluation':
    # The victim has to be at work still while the chief evaluates, and there has to be an end.
    steps, saving = 1500, [*saving, '--eval_during_training_every_n_steps=50']
  training = train(mode, f'--num_batches={steps}', *saving)
  processes = training.processes()
  training.reach(moment)
  if moment == 'step':
    check_addresses(processes)
  begun = time.monotonic()
  os.kill(processes[victim], number)
  reason = 'has died' if number == signal.SIGKILL else 'has not answered for 10 s'
  survivors = [task for task in training.tasks if task != victim]
  if survives:
    for task in survivors:
      training.wait_for(rf'^\[{task}\] Notice: worker:1 {reason}.*: asynchronous training goes on')
    training.wait_for(r'^\[worker:0\] total images/sec')
    for task in survivors:
      assert gone_after(processes[task], time.monotonic(), 180) < 180
  else:
    for task in survivors:
      after = gone_after(processes[task], begun, 2 * BOUND_S)
      print(f'{mode}, {victim}, {moment}, {number}: {task} gone after {after:.1f} s')
      assert after < BOUND_S, '\n'.join(training.lines[-40:])
    for task in survivors:
      line = training.wait_for(rf'^\[{task}\] error: {victim} {reason}', 10)
      assert f'; {task} waited in ' in line
      if task == 'worker:0' and moment == 'evaluation':
        assert 'waited in evaluation' in line
      said = [one for one in training.lines if one.startswith(f'[{task}] error: ')]
      assert len(said) == 1, said
  if number == signal.SIGSTOP:
    os.kill(processes[victim], signal.SIGKILL)
  training.process.wait(180)
  (ends,) = [line for line in training.lines if line.startswith('local cluster: ')]
  expected = 'ended with code 0' if survives else 'ended with code 3'
  for task in survivors:
    assert f'{task} {expected}' in ends, ends
  assert f'{victim} killed by SIGKILL' in ends
  assert training.process.returncode == 128 + signal.SIGKILL


CASES = [
  (mode, victim, moment, number)
  for mode in MODES
  for victim in ('worker:0', 'worker:1', 'ps:0')
  if not (mode == 'collective_all_reduce' and victim == 'ps:0')
  for moment, number in [
    *((moment, signal.SIGKILL) for moment in MOMENTS),
    ('step', signal.SIGSTOP),
  ]
]
SAMPLE = [('parameter_server', 'worker:1', 'step', signal.SIGKILL)]


@pytest.mark.parametrize(('mode', 'victim', 'moment', 'number'), SAMPLE)
def test_a_death_ends_the_others_in_time_with_one_line(train, mode, victim, moment, number):
  check(train, mode, victim, moment, number)


@pytest.mark.long
@pytest.mark.parametrize(
  ('mode', 'victim', 'moment', 'number'), [case for case in CASES if case not in SAMPLE]
)
def test_each_death_in_each_mode(train, mode, victim, moment, number):
  check(train, mode, victim, moment, number)


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('told', ['all', 'worker:1'])
def test_sigterm_writes_a_checkpoint_and_ends_all_in_order(train, mode, told):
  training = train(mode, '--num_batches=1000000')
  processes = training.processes()
  training.reach('step')
  if told == 'all':
    training.process.terminate()
  else:
    os.kill(processes[told], signal.SIGTERM)
  if told == 'all' or mode != 'asynchronous':
    training.process.wait(180)
    assert any(name.startswith('ckpt-') for name in os.listdir(training.directory))
    assert training.process.returncode == 128 + signal.SIGTERM
  assert not [line for line in training.lines if '] error: ' in line]
