"""What becomes of a process when another has died, whatever it is blocked in."""

from collections.abc import Callable, Iterator
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import watching
from hpm.cluster import listening
from hpm.cluster.heartbeat import Death
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start() -> Iterator[Callable[..., list[subprocess.Popen]]]:
  """Starts guarded processes, one for each of `then`, workers first."""
  started: list[subprocess.Popen] = []

  def processes(*then: str, num_ps: int = 0, **settings) -> list[subprocess.Popen]:
    hosts = [f'127.0.0.1:{port}' for port in listening.free_ports(len(then))]
    num_workers = len(then) - num_ps
    for index, verb in enumerate(then):
      job = 'worker' if index < num_workers else 'ps'
      task = f'{job}:{index if job == "worker" else index - num_workers}'
      spec = {'worker_hosts': hosts[:num_workers], 'ps_hosts': hosts[num_workers:]}
      own = {'task': task, 'then': verb, **spec, **settings}
      started.append(
        subprocess.Popen(
          [sys.executable, 'tests/cluster/guarded.py', json.dumps(own)],
          cwd=ROOT,
          env={**os.environ, 'PYTHONPATH': str(ROOT)},
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
        )
      )
    for process in started:
      assert process.stdout.readline() == 'all there\n'
    time.sleep(0.5)
    return started

  yield processes
  for process in started:
    process.kill()
    process.wait()


@pytest.mark.parametrize(
  ('number', 'reason'),
  [
    (signal.SIGKILL, 'has died: its connection broke'),
    (signal.SIGSTOP, 'has not answered for 2 s'),
  ],
)
def test_a_process_that_is_blocked_is_ended_with_one_line(start, number, reason):
  chief, worker = start('block', 'block')
  worker.send_signal(number)
  begun = time.monotonic()
  out, err = chief.communicate(timeout=15)
  assert chief.returncode == watching.EXIT_CODE == 3
  assert time.monotonic() - begun < 15
  (line,) = err.splitlines()
  assert line.startswith(f'error: worker:1 {reason}')
  assert '; worker:0 waited in step 3, for ' in line
  assert out.startswith('last words: worker:1')


def test_a_process_that_looks_ends_by_itself(start):
  chief, worker = start('check', 'block')
  worker.kill()
  out, err = chief.communicate(timeout=15)
  assert chief.returncode == 3
  assert out.startswith('by itself: worker:1 has died')
  assert err.count('\n') == 1


def test_an_error_of_the_runtime_is_explained_by_the_death(start):
  chief, worker = start('fail', 'block', after_s=0.0)
  worker.kill()
  out, err = chief.communicate(timeout=15)
  assert chief.returncode == 3
  assert out.startswith('by itself: worker:1 has died')
  assert err.startswith('error: worker:1 has died')


def test_an_error_that_no_death_explains_is_raised_and_told(start):
  chief, worker = start('block', 'fail', after_s=0.0)
  out, _ = worker.communicate(timeout=20)
  assert worker.returncode == 1
  assert out == 'unexplained: UNAVAILABLE\n'
  _, err = chief.communicate(timeout=15)
  assert chief.returncode == 3
  assert err.startswith('error: worker:1 has ended with an error: UNAVAILABLE')


def test_a_run_that_is_told_to_stop_ends_all_in_order(start):
  processes = start('stop', 'stop', 'serve', num_ps=1)
  assert [process.wait(15) for process in processes] == [143, 143, 0]
  assert [process.stderr.read() for process in processes] == ['', '', '']


def test_asynchronous_workers_go_on_without_another_and_say_so(start):
  chief, worker, last, server = start(
    'check', 'block', 'check', 'check', num_ps=1, synchronous=False
  )
  worker.kill()
  for process in (chief, last, server):
    line = process.stdout.readline()
    assert line.startswith('Notice: worker:1 has died: its connection broke')
    assert line.endswith('asynchronous training goes on without it\n')
    assert process.poll() is None
  server.kill()
  for process in (chief, last):
    assert process.wait(15) == 3
    assert process.stderr.read().startswith('error: ps:0 has died')


@pytest.mark.parametrize(
  ('death', 'survived'),
  [
    (Death('worker:1', 'lost', 'is gone'), True),
    (Death('worker:1', 'failed', 'is gone'), True),
    (Death('worker:1', 'absent', 'is gone'), False),
    (Death('worker:1', 'refused', 'is gone'), False),
    (Death('worker:0', 'lost', 'is gone'), False),
    (Death('ps:0', 'silent', 'is gone'), False),
  ],
)
def test_what_asynchronous_training_survives(death, survived):
  cluster = Cluster('worker', 2, ('a:1', 'b:1', 'c:1'), ('d:1',))
  stages = Stages()
  assert watching.Guard(cluster, synchronous=False, stages=stages).survives(death) == survived
  assert not watching.Guard(cluster, synchronous=True, stages=stages).survives(death)


def test_a_public_address_is_warned_of():
  (warning,) = watching.warnings(Cluster('worker', 0, ('8.8.8.8:2222',)))
  assert '8.8.8.8:2222 is a public address' in warning
  assert watching.warnings(Cluster('worker', 0, ('127.0.0.1:2222',))) == []
  assert watching.warnings(Cluster('worker', 0, ('localhost:2222',))) == []


def test_a_name_that_means_loopback_here_alone_is_warned_of(monkeypatch):
  def resolve(host, port, **_):
    return [(2, 1, 6, '', ('127.0.1.1', port))]

  monkeypatch.setattr(listening.socket, 'getaddrinfo', resolve)
  (warning,) = watching.warnings(Cluster('worker', 0, ('myhost:2222',)))
  assert "myhost means this machine's loopback here, so worker:0 listens at all" in warning
