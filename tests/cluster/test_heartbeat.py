"""Who is alive: real processes that are killed, stopped, late, wrong, or simply done."""

from collections.abc import Callable, Iterator
import json
from pathlib import Path
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hpm.cluster import heartbeat, listening
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages
from hpm.errors import UsageError

ROOT = Path(__file__).parents[2]
SOON_S = 15.0  # bounds a test on a busy machine


class Member:
  """A process of tests/cluster/member.py, and the lines that it writes."""

  def __init__(self, task: str, **settings):
    self.task = task
    self.process = subprocess.Popen(
      [sys.executable, 'tests/cluster/member.py', json.dumps({'task': task, **settings})],
      cwd=ROOT,
      env={'PYTHONPATH': str(ROOT)},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      bufsize=1,
    )
    self.seen: list[str] = []
    self._lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=self._read, daemon=True).start()

  def _read(self) -> None:
    for line in self.process.stdout:
      self._lines.put(line.rstrip('\n'))

  def tell(self, order: str) -> None:
    self.process.stdin.write(order + '\n')

  def expect(self, start: str, within_s: float = SOON_S) -> str:
    """The next line that starts so."""
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0:
      try:
        self.seen.append(self._lines.get(timeout=left))
      except queue.Empty:
        break
      if self.seen[-1].startswith(start):
        return self.seen[-1]
    raise AssertionError(f'{self.task} wrote no {start!r} in {within_s} s, but {self.seen}')

  def deaths(self) -> list[str]:
    """What it has said of deaths so far."""
    while not self._lines.empty():
      self.seen.append(self._lines.get())
    return [line for line in self.seen if line.startswith('dead')]

  def kill(self, number: int = signal.SIGKILL) -> None:
    self.process.send_signal(number)

  def code(self) -> int:
    return self.process.wait(SOON_S)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Member]]]:
  """Starts members; all are gone after the test."""
  members: list[Member] = []

  def members_of(
    num_workers: int, num_ps: int = 0, only: str | None = None, **settings
  ) -> list[Member]:
    ports = listening.free_ports(num_workers + num_ps)
    hosts = [f'127.0.0.1:{port}' for port in ports]
    spec = {'worker_hosts': hosts[:num_workers], 'ps_hosts': hosts[num_workers:]}
    settings = {'timeout_s': 30.0, 'startup_timeout_s': 60.0} | spec | settings
    tasks = [f'worker:{i}' for i in range(num_workers)] + [f'ps:{i}' for i in range(num_ps)]
    started = [Member(task, **settings) for task in tasks if only is None or task in only]
    members.extend(started)
    return started

  yield members_of
  for member in members:
    member.kill(signal.SIGCONT)
    member.kill()
    member.process.wait()


def gathered(members: list[Member]) -> None:
  for member in members:
    member.tell('wait')
  for member in members:
    member.expect('wait done')


def test_all_tasks_have_one_name_for_their_run(start):
  members = start(2, 1)
  for member in members:
    member.tell('wait')
  names = {member.expect('run ') for member in members}
  assert len(names) == 1
  assert len(names.pop()) == len('run ') + 32


@pytest.mark.parametrize('victim', [0, 1, 2])
def test_a_killed_task_is_named_by_all_others_within_seconds(start, victim):
  members = start(2, 1)
  gathered(members)
  time.sleep(1.1)  # a beat, which says what it is doing
  killed = members.pop(victim)
  at = time.monotonic()
  killed.kill()
  for member in members:
    line = member.expect('dead')
    assert line.startswith(
      f'dead {killed.task} has died: its connection broke (last seen in step 7'
    )
  assert time.monotonic() - at < 5


@pytest.mark.parametrize('victim', [0, 1])
def test_a_stopped_task_is_named_after_the_time_out(start, victim):
  members = start(2, 1, timeout_s=2.0)
  gathered(members)
  stopped = members.pop(victim)
  at = time.monotonic()
  stopped.kill(signal.SIGSTOP)
  for member in members:
    assert member.expect('dead').startswith(f'dead {stopped.task} has not answered for 2 s')
  assert 1.0 < time.monotonic() - at < 8


def test_a_chief_that_slept_accuses_nobody(start):
  chief, *_ = start(2, only='worker:0')[:1]
  spec = json.loads(chief.process.args[2])
  other = Member('worker:1', **{k: v for k, v in spec.items() if k != 'task'})
  try:
    gathered([chief, other])
    chief.kill(signal.SIGSTOP)
    time.sleep(1.5)
    chief.kill(signal.SIGCONT)
    time.sleep(1.0)
    assert chief.deaths() == other.deaths() == []
  finally:
    other.kill()
    other.process.wait()


def test_silence_is_counted_from_the_end_of_an_own_pause(monkeypatch):
  from hpm.cluster import wire

  now = [100.0]
  monkeypatch.setattr(wire.time, 'monotonic', lambda: now[0])
  ours, theirs = socket.socketpair()
  with ours, theirs, pytest.raises(OSError):
    wire.Line(ours)  # a Unix socket has no TCP_NODELAY; `Line` is for TCP
  line = type('Heard', (), {'heard': 100.0})
  pacer = wire.Pacer(interval_s=1.0, timeout_s=10.0)
  for now[0] in (100.5, 101.0, 101.5):
    pacer.due()
  now[0] = 150.0  # asleep for 48 s
  pacer.due()
  assert not pacer.silent(line)
  for now[0] in (151.0, 152.0, 155.0):
    pacer.due()
  assert not pacer.silent(line)


def test_a_task_that_never_comes_is_named(start):
  chief, worker = start(2, 1, only='worker:0 worker:1', startup_timeout_s=2.0)
  for member in (chief, worker):
    member.tell('wait')
  port = json.loads(chief.process.args[2])['ps_hosts'][0]
  for member in (chief, worker):
    assert member.expect('PeerError').startswith(
      f'PeerError: ps:0 ({port}) has not joined within 2 s: has it been started, and does it reach '
      'the chief at 127.0.0.1:'
    )
    assert member.code() == 4
    assert member.deaths()[0].startswith('dead ps:0')  # who ends for it may come after it


def test_a_chief_that_never_comes_is_named(start):
  (worker,) = start(2, only='worker:1', startup_timeout_s=1.0)
  worker.tell('wait')
  line = worker.expect('PeerError')
  assert 'worker:0 does not answer at 127.0.0.1:' in line
  assert 'within 1 s: Connection refused: has it been started, and is the address right?' in line
  assert worker.code() == 4


def test_tasks_may_come_late_and_in_any_order(start):
  last, first = start(2, only='worker:1'), None
  last[0].tell('wait')
  time.sleep(1.0)
  spec = json.loads(last[0].process.args[2])
  first = Member('worker:0', **{k: v for k, v in spec.items() if k != 'task'})
  try:
    first.tell('wait')
    first.expect('wait done')
    last[0].expect('wait done')
  finally:
    first.kill()
    first.process.wait()


def test_who_finishes_is_missed_by_nobody(start):
  members = chief, worker, late, ps = start(3, 1)
  gathered(members)
  ps.tell('end')
  worker.tell('leave {"images": 8}')
  assert worker.code() == 0
  time.sleep(1.0)
  chief.tell('leave')  # waits for the last worker
  time.sleep(0.5)
  assert chief.process.poll() is None
  late.tell('leave {"images": 4}')
  assert late.code() == 0
  assert chief.expect('reports') == 'reports {"worker:1": {"images": 8}, "worker:2": {"images": 4}}'
  assert chief.code() == 0
  assert ps.code() == 0
  assert [member.deaths() for member in members] == [[], [], [], []]


def test_a_chief_does_not_wait_for_a_worker_that_dies(start):
  chief, worker = start(2)
  gathered([chief, worker])
  chief.tell('leave')
  time.sleep(0.3)
  worker.kill()
  chief.expect('dead worker:1')
  assert chief.code() == 0


def test_who_fails_tells_the_reason(start):
  members = chief, worker, ps = start(2, 1)
  gathered(members)
  ps.tell('end')
  worker.tell('fail the loss is nan in step 7')
  assert worker.code() == 4
  for member in (chief, ps):
    line = member.expect('dead')
    assert line.startswith('dead worker:1 has ended with an error: the loss is nan in step 7')
  chief.tell('fail worker:1 is gone')
  assert ps.expect('PeerError').startswith(
    'PeerError: worker:0 has ended with an error: worker:1 is gone'
  )


def test_a_worker_with_another_list_is_refused_with_both(start):
  (chief,) = start(2, only='worker:0')
  spec = json.loads(chief.process.args[2])
  hosts = spec['worker_hosts']
  del spec['task']
  other = Member('worker:1', **spec | {'worker_hosts': [hosts[0], '127.0.0.1:9']})
  try:
    chief.tell('wait')
    other.tell('wait')
    difference = (
      'worker:1 was started otherwise than worker:0: '
      f'worker_hosts {hosts[0]},127.0.0.1:9 instead of {",".join(hosts)}'
    )
    assert other.expect('UsageError') == f'UsageError: {difference}'
    assert chief.expect('PeerError') == f'PeerError: {difference}'
    assert (chief.code(), other.code()) == (4, 4)
  finally:
    other.kill()
    other.process.wait()


def test_a_worker_with_another_model_is_refused(start):
  (chief,) = start(2, only='worker:0', shared={'--model': 'lenet', '--batch_size': '4'})
  spec = json.loads(chief.process.args[2])
  del spec['task']
  other = Member('worker:1', **spec | {'shared': {'--model': 'vgg16', '--batch_size': '4'}})
  try:
    other.tell('wait')
    assert other.expect('UsageError').endswith('worker:0: --model vgg16 instead of lenet')
    chief.expect('dead worker:1 was started otherwise')
  finally:
    other.kill()
    other.process.wait()


def test_a_task_started_twice_is_refused_and_disturbs_nobody(start):
  members = start(2)
  gathered(members)
  spec = json.loads(members[1].process.args[2])
  del spec['task']
  for task, message in (
    ('worker:1', 'UsageError: there is a worker:1 ('),
    ('worker:0', 'UsageError: the heartbeat of worker:0 can not listen at'),
  ):
    twin = Member(task, **spec)
    try:
      twin.tell('wait')
      twin.expect(message)
      assert twin.code() == 4
    finally:
      twin.kill()
      twin.process.wait()
  assert members[0].deaths() == members[1].deaths() == []


def test_strangers_at_the_port_disturb_nobody(start):
  members = start(2)
  spec = json.loads(members[0].process.args[2])
  address = Cluster('worker', 0, tuple(spec['worker_hosts'])).heartbeat_address
  members[0].expect('started')
  again = {'hello': {'task': 'worker:0', 'shared': {}}}
  texts = (
    *(b'GET / HTTP/1.1\r\n\r\n', b'{"hello": 3}\n', b'[1]\n{}\n', b'\xff' * 5000000),
    *(b'[' * 100000 + b'\n', json.dumps(again).encode() + b'\n'),
  )
  for text in texts:
    with socket.create_connection(address) as stranger:
      stranger.settimeout(5)
      try:
        stranger.sendall(text)
        while stranger.recv(100):
          pass
      except OSError:
        pass
  for text in texts:  # and who has gone again before an answer
    members[0].kill(signal.SIGSTOP)
    with socket.create_connection(address) as stranger:
      stranger.sendall(text[: 1 << 16] + b'\n')
    members[0].kill(signal.SIGCONT)
  gathered(members)
  assert members[0].deaths() == members[1].deaths() == []


@pytest.mark.parametrize('first', [0, 1])
def test_a_worker_that_finds_another_number_of_devices_is_refused_by_all(start, first):
  members = start(3)
  gathered(members)
  for member in (members[first], members[2], members[1 - first]):
    member.tell(f'agree {json.dumps({"--num_gpus": "2" if member is members[1] else "1"})}')
    member.expect('agree done')
  reason = 'dead worker:1 was started otherwise than worker:0: --num_gpus 2 instead of 1'
  for member in members:  # itself too, which may be blocked in a step
    assert member.expect('dead').startswith(reason)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_an_error_of_the_heartbeat_itself_is_a_death_that_is_told():
  cluster = Cluster('worker', 0, [f'127.0.0.1:{port}' for port in listening.free_ports(2)])
  deaths: list[heartbeat.Death] = []

  def what() -> str:
    raise RuntimeError('no words')

  with (
    pytest.raises(heartbeat.PeerError, match='RuntimeError: no words'),
    heartbeat.Watch(cluster, on_death=deaths.append, what=what, timeout_s=1.0) as watch,
  ):
    watch.wait_for_all()
  assert [death.task for death in deaths] == ['worker:0']


def test_it_is_known_who_is_missing(start):
  (late,) = start(2, only='worker:1')
  late.expect('started')
  late.tell('missing')
  assert late.expect('missing') == "missing ('worker:0',)"


def test_the_chief_knows_when_others_have_left():
  hosts = [f'127.0.0.1:{port}' for port in listening.free_ports(2)]
  chief, other = (
    heartbeat.Watch(Cluster('worker', i, hosts), on_death=lambda death: None) for i in (0, 1)
  )
  with chief:
    with other:
      chief.wait_for_all()
      left = time.monotonic()
    time.sleep(0.5)
    chief.wait_until_left(['worker:1'])
    assert chief.left_at['worker:1'] == pytest.approx(left, abs=0.1)


def test_a_server_that_can_not_be_reached_is_named_to_all(start):
  members = start(2, 1, startup_timeout_s=4.0)
  gathered(members)
  addresses = json.loads(members[0].process.args[2])
  servers = [
    socket.create_server(('127.0.0.1', int(host.rpartition(':')[2])))
    for host in addresses['worker_hosts']
  ]
  try:
    members[1].tell('servers')
    assert 'can not be reached from worker:1' in members[1].expect('dead ps:0')  # before it ends
    line = members[1].expect('PeerError')
    assert f'ps:0 ({addresses["ps_hosts"][0]}) can not be reached from worker:1 within 4 s' in line
    assert 'can not be reached from worker:1' in members[0].expect('dead ps:0')
  finally:
    for server in servers:
      server.close()


def test_a_watch_without_others_ends_at_once():
  (port,) = listening.free_ports(1)
  cluster = Cluster('worker', 0, (f'127.0.0.1:{port}',))
  deaths: list[heartbeat.Death] = []
  begun = time.monotonic()
  with heartbeat.Watch(cluster, on_death=deaths.append) as watch:
    watch.wait_for_all()
    watch.wait_for_servers()
    assert watch.death() is None
  assert time.monotonic() - begun < 3
  assert deaths == []


@pytest.mark.parametrize('name', ['timeout_s', 'startup_timeout_s'])
def test_time_outs_are_above_0(name):
  cluster = Cluster('worker', 0, ('127.0.0.1:2222',))
  with pytest.raises(UsageError, match=f'{name}=0: above 0'):
    heartbeat.Watch(cluster, on_death=print, **{name: 0.0})


def test_stages_say_what_is_done_and_for_how_long():
  now = [0.0]
  stages = Stages(lambda: now[0])
  assert stages.what() == 'start, for 0.0 s'
  with stages.stage('step', 12):
    now[0] = 0.4
    assert stages.what() == 'step 12, for 0.4 s'
    with stages.stage('checkpoint'):
      now[0] = 1.5
      assert stages.current() == ('checkpoint', '', 1.1)
    assert stages.what() == 'step 12, for 1.5 s'
  stages.enter('end')
  assert stages.what() == 'end, for 0.0 s'
  with (
    pytest.raises(UsageError, match="unknown stage 'stp': did you mean step"),
    stages.stage('stp'),
  ):
    pass
  with pytest.raises(UsageError, match='unknown stage'):
    stages.enter('')
