"""When a run counts as stalled, and what it is found to be blocked in."""

import os
from pathlib import Path
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import blocked, stalls
from hpm.cluster.watchdog import Stages
from tests.benchmarks.conftest import ROOT, environment


class Machine:
  """A clock, and what this process has used of the processors."""

  def __init__(self):
    self.now = self.used = 0.0
    self.stalled = []
    self.patient = False
    self.stages = Stages(lambda: self.now)
    self.dog = stalls.Watchdog(
      self.stages,
      20.0,
      lambda *what: self.stalled.append(what),
      lambda: self.patient,
      lambda: self.now,
      lambda: self.used,
    )

  def passes(self, seconds: float, cores: float = 0.0) -> bool:
    """Whether the watchdog has come to its end within that time."""
    for _ in range(round(seconds / self.dog.interval_s)):
      self.now += self.dog.interval_s
      self.used += cores * self.dog.interval_s
      if self.dog.look():
        return True
    return False


def test_a_step_that_takes_too_long_has_stalled_however_busy_the_processor():
  machine = Machine()
  machine.stages.enter('step', 2)
  assert not machine.passes(19)
  assert machine.passes(3, cores=2)
  assert machine.stalled == [('step 2', 20.0)]


def test_each_step_has_the_whole_time():
  machine = Machine()
  for number in range(2, 20):
    machine.stages.enter('step', number)
    assert not machine.passes(15)


@pytest.mark.parametrize('stage', [('start', ''), ('step', 1), ('evaluation', '')])
def test_what_may_take_long_does_not_stall_while_the_processor_is_at_work(stage):
  machine = Machine()
  machine.stages.enter(*stage)
  assert not machine.passes(1000, cores=0.5)
  assert machine.passes(45)  # the work that was done has been forgotten by then


def test_a_step_after_an_evaluation_has_its_whole_time():
  machine = Machine()
  machine.stages.enter('step', 5)
  with machine.stages.stage('evaluation'):
    assert not machine.passes(100, cores=1)
  assert not machine.passes(19)
  assert machine.passes(3)


def test_a_process_that_was_stopped_itself_counts_from_when_it_woke():
  machine = Machine()
  machine.stages.enter('step', 5)
  assert not machine.passes(5)
  machine.now += 3600
  assert not machine.passes(10)
  assert machine.passes(10)


def test_who_waits_for_the_evaluation_of_another_has_not_stalled():
  machine = Machine()
  machine.stages.enter('step', 5)
  machine.patient = True
  assert not machine.passes(100)
  machine.patient = False
  assert not machine.passes(19)
  assert machine.passes(3)


@pytest.mark.parametrize('stage', ['end', 'service'])
def test_who_waits_for_the_others_at_the_end_has_not_stalled(stage):
  machine = Machine()
  machine.stages.enter(stage)
  assert not machine.passes(1000)


def test_others_are_waited_for_where_a_step_needs_them():
  doing = {'worker:0': 'evaluation, for 70.0 s', 'worker:1': 'step 3, for 80.0 s'}
  assert stalls.Run('x', None, {'worker:0': 'a:1'}, lambda: doing).waits_for_others()
  assert not stalls.Run('x', None, {'worker:1': 'a:1'}, lambda: doing).waits_for_others()
  assert not stalls.Run('x').waits_for_others()


def test_the_file_that_a_thread_waits_for_is_found(tmp_path):
  fifo = tmp_path / 'a file'
  os.mkfifo(fifo)
  reader = threading.Thread(target=fifo.read_bytes)
  reader.start()
  try:
    until = time.monotonic() + 10
    while (held := blocked.files()).get(str(fifo)) != 'open':
      assert time.monotonic() < until, held
    with fifo.open('wb'):
      until = time.monotonic() + 10
      while (held := blocked.files()).get(str(fifo)) != 'read':
        assert time.monotonic() < until, held
  finally:
    reader.join(10)
  assert str(fifo) not in blocked.files()


FOUND = {
  'source': 'data: Sleeper gives no batch',
  'staging': 'staging: no batch arrives at /CPU:0, /CPU:1',
  'computing': 'computing: data and devices answer, /CPU:0, /CPU:1',
}


@pytest.mark.parametrize('fault', FOUND)
def test_a_part_that_stops_is_named_and_the_stacks_are_shown(fault):
  done = subprocess.run(
    [sys.executable, str(Path(__file__).with_name('stalling.py')), '2', fault],
    env=environment() | {'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3'},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == stalls.EXIT_CODE, done.stderr
  assert done.stderr.splitlines()[-1].startswith('error: stalled in step ')
  assert f' (--stall_timeout_s=2): {FOUND[fault]}' in done.stderr
  assert ('in __getitem__' if fault == 'source' else 'in main') in done.stderr


def test_a_long_first_step_and_evaluations_are_no_stall(in_process, tmp_path):
  run = in_process(
    *('--model=resnet56', '--data_name=digits', '--image_size=8', '--num_classes=10'),
    *('--num_gpus=1', '--batch_size=2', '--num_batches=3', '--num_warmup_batches=1'),
    *('--eval_during_training_every_n_steps=2', '--stall_timeout_s=1.5'),
    f'--result_json={tmp_path}/run.json',
  )
  assert run.code == 0, run.errors


def test_a_timeout_below_nothing_is_refused(in_process):
  run = in_process('--model=trivial', '--stall_timeout_s=-1')
  assert run.code == 2
  assert '--stall_timeout_s=-1: seconds are needed, or 0 to wait for ever' in run.errors
