"""The local cluster: all processes here, their lines, their signals, and none of them left."""

import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import flags, local_cluster

ROOT = Path(__file__).parents[2]


class Local:
  """A local cluster of actors, as a process of its own."""

  def __init__(self, tasks: dict[str, str], **settings):
    self.process = subprocess.Popen(
      [sys.executable, 'tests/cluster/group.py', json.dumps({'tasks': tasks, **settings})],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.pids: list[int] = []

  def started(self, *words: str) -> None:
    """Waits until each task has said who it is, and all words have been said by someone."""
    wanted, count = set(words), len(json.loads(self.process.args[2])['tasks'])
    while len(self.pids) < count or wanted:
      line = self.process.stdout.readline()
      assert line, self.process.stderr.read()
      if match := re.search(r'\[(.*)\] (\d+) is (.*)', line):
        assert match[1] == match[3]
        self.pids.append(int(match[2]))
      wanted -= {word for word in wanted if word in line}

  def end(self, within_s: float = 20.0) -> tuple[int, str, str]:
    """Exit code and the rest of what was written."""
    out, err = self.process.communicate(timeout=within_s)
    return self.process.returncode, out, err

  def alive(self) -> list[int]:
    """Those of its processes that there still are, after a moment."""
    until = time.monotonic() + 3
    while left := [pid for pid in self.pids if os.path.exists(f'/proc/{pid}')]:
      if time.monotonic() > until:
        break
      time.sleep(0.05)
    return left


def test_lines_carry_their_task_and_success_is_0():
  group = Local({'worker:0': 'cry', 'worker:1': '', 'ps:0': 'sleep 0.3'})
  group.started()
  code, _, err = group.end()
  assert code == 0
  assert err == '[worker:0] a cry\n'
  assert group.alive() == []


def test_the_worst_code_is_returned_and_the_rest_has_its_time_to_end():
  group = Local({'worker:0': 'sleep 0.8; exit 2', 'worker:1': 'exit 3', 'ps:0': 'sleep 0.5'})
  group.started()
  code, out, err = group.end()
  assert code == 2  # 3 would be that of another's victim
  assert err.splitlines()[-1] == (
    'local cluster: worker:0 ended with code 2, worker:1 ended with code 3, ps:0 ended with code 0'
  )
  assert 'Notice' not in out


def test_who_stays_when_another_has_died_is_told_to_end_and_then_killed():
  group = Local(
    {'worker:0': 'polite; sleep 60', 'worker:1': 'kill 9', 'ps:0': 'stubborn; sleep 60'}
  )
  group.started()
  code, out, err = group.end()
  assert code == 128 + 9
  assert 'did not end by itself: told to' in out
  assert 'Notice: ps:0 did not end when told to: killed' in out
  assert 'worker:0 ended with code 143, worker:1 killed by SIGKILL, ps:0 killed by SIGKILL' in err
  assert group.alive() == []


def test_asynchronous_workers_outlive_another_but_not_the_chief():
  tasks = {'worker:0': 'sleep 2.5', 'worker:1': 'exit 3', 'worker:2': 'sleep 2', 'ps:0': 'sleep 60'}
  group = Local(tasks, lasting=True, alone_s=0.3)
  group.started()
  begun = time.monotonic()
  code, out, err = group.end()
  assert time.monotonic() - begun > 1.5
  assert 'worker:0 ended with code 0, worker:1 ended with code 3, worker:2 ended with code 0' in err
  assert 'Notice: ps:0 did not end by itself: told to' in out
  assert code == 3


@pytest.mark.parametrize(('number', 'expected'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_passed_on_and_all_may_end_by_themselves(number, expected):
  group = Local({'worker:0': 'polite; sleep 60', 'worker:1': 'polite; sleep 60'})
  group.started()
  time.sleep(0.3)
  group.process.send_signal(number)
  code, out, _ = group.end()
  assert code == expected
  assert out.count('bowed') == 2
  assert group.alive() == []


def test_a_signal_ends_those_that_ignore_it_in_bounded_time():
  group = Local({'worker:0': 'stubborn; sleep 60'}, stopping_s=0.5, told_s=0.5)
  group.started('deaf')
  group.process.terminate()
  code, _, _ = group.end()
  assert code == 128 + 9
  assert group.alive() == []


def test_no_process_outlives_a_killed_parent():
  group = Local({'worker:0': 'sleep 60', 'worker:1': 'stubborn; sleep 60'})
  group.started('deaf')
  assert len(group.pids) == 2
  group.process.kill()
  group.process.wait()
  assert group.alive() == []


def test_lines_that_nobody_reads_end_nothing():
  group = Local({'worker:0': 'sleep 0.2', 'worker:1': 'sleep 0.4'})
  group.process.stdout.close()
  assert group.process.wait(20) == 0
  group.process.stderr.close()


def commands(*arguments: str, **environment: str):
  arguments = ('--variable_update=parameter_server', *arguments)
  return local_cluster.commands(arguments, flags.parse(arguments), environment)


def test_each_process_gets_the_flags_and_its_place():
  found = commands('--local_cluster=workers:2,ps:1', '--model=lenet')
  assert list(found) == ['worker:0', 'worker:1', 'ps:0']
  clusters = [flags.cluster.cluster(flags.parse(command), {}) for command, _ in found.values()]
  assert [one.task for one in clusters] == list(found)
  assert len({(one.worker_hosts, one.ps_hosts, one.heartbeat_port) for one in clusters}) == 1
  for command, _ in found.values():
    options = flags.parse(command)
    assert (options.model, options.device, options.local_cluster) == ('lenet', 'cpu', '')
  assert all(host.startswith('127.0.0.1:') for host in clusters[0].worker_hosts)


def test_the_flags_may_stand_in_a_file(tmp_path):
  (tmp_path / 'flags').write_text('--local_cluster=workers:1,ps:1\n--model=lenet\n')
  found = commands(f'--flagfile={tmp_path}/flags')
  for task, (command, _) in found.items():
    assert flags.cluster.cluster(flags.parse(command), {}).task == task


def test_a_command_for_a_host_starts_its_tasks_with_the_hosts_that_were_given():
  hosts = ('--worker_hosts=a:1,b:1', '--ps_hosts=a:2,b:2', '--job_name=host')
  for index, tasks in ((0, ['worker:0', 'ps:0']), (1, ['worker:1', 'ps:1'])):
    found = commands(*hosts, f'--task_index={index}')
    assert list(found) == tasks
    for task, (command, environment) in found.items():
      own = flags.cluster.cluster(flags.parse(command), {})
      assert own.task == task
      assert own.worker_hosts == ('a:1', 'b:1') and own.ps_hosts == ('a:2', 'b:2')
      assert environment.get('CUDA_VISIBLE_DEVICES') == ('' if task.startswith('ps') else None)
  # Six parameter servers of eight workers: the last hosts have none.
  hosts = ('--worker_hosts=n[0-7]:1', '--ps_hosts=n[0-5]:2', '--job_name=host')
  assert list(commands(*hosts, '--task_index=7')) == ['worker:7']


def test_each_worker_has_its_own_gpus_and_a_parameter_server_none():
  gpus = ('--local_cluster=workers:2,ps:1', '--device=gpu', '--num_gpus=2')
  for environment, expected in (
    ({}, ['0,1', '2,3', '']),
    ({'CUDA_VISIBLE_DEVICES': '7,5,3,1'}, ['7,5', '3,1', '']),
  ):
    found = commands(*gpus, **environment)
    assert [env['CUDA_VISIBLE_DEVICES'] for _, env in found.values()] == expected
