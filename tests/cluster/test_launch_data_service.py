"""A tf.data service of real processes: what arrives, what is refused, how it ends."""

from collections import Counter
from collections.abc import Iterator
import json
import os
from pathlib import Path
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import data_service
from hpm import pipelines
from hpm.cluster import listening
from hpm.errors import UsageError
from hpm.pipelines import sample

ROOT = Path(__file__).parents[2]
SMALL = {'batch_size': 4, 'image_size': 32, 'num_classes': 1000}


class Service:
  """A dispatcher and two workers, as a user starts them."""

  def __init__(self, *arguments: str):
    self.process = subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.data_service', *arguments],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      text=True,
    )

  def serving(self, count: int) -> None:
    while count:
      line = self.process.stdout.readline()
      assert line, 'it has ended'
      count -= 'serves at' in line
    threading.Thread(target=self.process.stdout.read, daemon=True).start()


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory) -> str:
  directory = tmp_path_factory.mktemp('data') / 'sample'
  sample.write_sample(str(directory), num_images=48)
  return str(directory)


@pytest.fixture(scope='module')
def address() -> Iterator[str]:
  here = f'127.0.0.1:{listening.free_ports(1)[0]}'
  service = Service(f'--address={here}', '--num_workers=2')
  try:
    service.serving(3)
    yield here
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0
  finally:
    service.process.kill()
    service.process.wait()


def create(data_dir: str, **options):
  return pipelines.create('imagenet', data_dir=data_dir, **{**SMALL, **options})


def images_of(dataset) -> list[tuple[int, bytes]]:
  return [
    (int(ident), image.tobytes())
    for images, _, idents in dataset
    for image, ident in zip(images.numpy(), idents.numpy(), strict=True)
  ]


def test_every_image_comes_once_and_is_that_of_the_local_pipeline(address, data_dir):
  options = {'num_epochs': 2, 'with_ids': True, 'seed': 3}
  local = create(data_dir, **options)
  remote = create(data_dir, pipeline='service', service=address, **options)
  assert remote.epoch_size == local.epoch_size
  assert Counter(images_of(remote.dataset())) == Counter(images_of(local.dataset()))


def test_two_trainings_that_share_a_job_share_the_images(address, data_dir):
  options = {'num_epochs': 1, 'with_ids': True, 'service': address, 'service_job': 'shared'}
  pair = [create(data_dir, pipeline='service', **options) for _ in range(2)]
  found: list[list[tuple[int, bytes]]] = [[], []]
  threads = [
    threading.Thread(target=lambda i=i: found[i].extend(images_of(pair[i].dataset())))
    for i in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120)
  idents = [ident for part in found for ident, _ in part]
  assert sorted(idents) == sorted(set(idents))
  assert len(idents) == pair[0].epoch_size


def test_a_position_is_where_it_goes_on(address, data_dir):
  remote = create(data_dir, pipeline='service', service=address, num_epochs=1, with_ids=True)
  local = create(data_dir, num_epochs=1, with_ids=True)
  for one in (remote, local):
    one.restore(local.state(20))
  assert Counter(images_of(remote.dataset())) == Counter(images_of(local.dataset()))


def test_a_training_has_full_batches_without_end(address, data_dir):
  remote = create(data_dir, pipeline='service', service=address)
  shapes = {tuple(images.shape) for images, _ in remote.dataset().take(30)}
  assert shapes == {(4, 32, 32, 3)}


def test_a_worker_that_waits_for_its_dispatcher_ends_when_told_to():
  here, there = (f'127.0.0.1:{port}' for port in listening.free_ports(2))
  worker = subprocess.Popen(
    [
      *(sys.executable, '-m', 'benchmarks.data_service'),
      f'--address={here}',
      f'--dispatcher={there}',
    ],
    cwd=ROOT,
    env={name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'},
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    with pytest.raises(subprocess.TimeoutExpired):
      worker.wait(15)  # it imports TensorFlow, and waits
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=10)
    assert (worker.returncode, err) == (0, '')
  finally:
    worker.kill()


@pytest.mark.long
def test_the_driver_trains_from_it_and_says_what_does_not_hold(address, data_dir, tmp_path):
  done = subprocess.run(
    [
      *(sys.executable, 'benchmarks/run.py', '--model=lenet', '--device=cpu', '--num_batches=6'),
      *(f'--data_dir={data_dir}', f'--data_service={address}', f'--train_dir={tmp_path}/train'),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert 'Notice: a tf.data service delivers in no fixed order: a run that goes on' in done.stdout
  assert 'total images/sec' in done.stdout


class Tree:
  """A tf.data service of which each process can be killed or stopped."""

  def __init__(self):
    self.address, *self.workers = (f'127.0.0.1:{port}' for port in listening.free_ports(3))
    self.services = {
      self.address: Service(f'--address={self.address}', f'--workers={",".join(self.workers)}'),
      **{
        worker: Service(f'--address={worker}', f'--dispatcher={self.address}')
        for worker in self.workers
      },
    }
    for service in self.services.values():
      service.serving(1)

  def send(self, address: str, number: int) -> None:
    self.services[address].process.send_signal(number)

  def kill(self) -> None:
    for service in self.services.values():
      service.process.kill()
      service.process.wait()


@pytest.fixture
def tree() -> Iterator[Tree]:
  tree = Tree()
  try:
    yield tree
  finally:
    tree.kill()


def trained(tree: Tree, data_dir: str, number: int, victim: str, *flags: str):
  """A training, one process of whose service gets a signal in the middle."""
  process = subprocess.Popen(
    [
      *(sys.executable, 'benchmarks/run.py', '--model=lenet', '--device=cpu', '--batch_size=4'),
      *(f'--data_dir={data_dir}', f'--data_service={tree.address}', '--num_batches=1000000'),
      *flags,
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    for line in process.stdout:
      if 'images/sec' in line:
        break
    began = time.monotonic()
    tree.send(victim, number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - began
  finally:
    process.kill()


@pytest.mark.parametrize(
  ('victim', 'number'),
  [
    ('worker', signal.SIGKILL),
    pytest.param('worker', signal.SIGSTOP, marks=pytest.mark.long),
    pytest.param('dispatcher', signal.SIGKILL, marks=pytest.mark.long),
    pytest.param('dispatcher', signal.SIGSTOP, marks=pytest.mark.long),
  ],
)
def test_a_training_ends_with_one_line_when_its_service_dies(
  tree, data_dir, tmp_path, victim, number
):
  address = tree.address if victim == 'dispatcher' else tree.workers[1]
  file = tmp_path / 'run.json'
  code, _, err, seconds = trained(tree, data_dir, number, address, f'--result_json={file}')
  how = 'has died: its connection broke' if number == signal.SIGKILL else 'has not answered for 10'
  assert code == 3
  assert err.startswith(f"error: the tf.data service's {victim} {address} {how}"), err
  assert err.count('\n') == 1
  assert seconds < 18
  record = json.loads(file.read_text())
  assert record['status'] == 'failed'
  assert address in record['reason']


@pytest.mark.long
def test_every_worker_of_a_cluster_ends_when_the_service_dies(tree, data_dir):
  worker = tree.workers[0]
  code, _, err, seconds = trained(
    *(tree, data_dir, signal.SIGKILL, worker, '--heartbeat_timeout_s=5'),
    *('--local_cluster=workers:2', '--variable_update=collective_all_reduce', '--num_gpus=1'),
  )
  assert code == 3
  for task in ('worker:0', 'worker:1'):
    assert f'[{task}] error: ' in err
  assert f"the tf.data service's worker {worker} has died" in err
  assert 'Traceback' not in err
  assert seconds < 18


def test_a_watch_names_who_is_dead_and_only_then(tree):
  found: queue.Queue = queue.Queue()
  with pipelines.ServiceWatch(tree.address, lambda *death: found.put(death), timeout_s=3):
    with pytest.raises(queue.Empty):
      found.get(timeout=5)
    tree.send(tree.workers[0], signal.SIGSTOP)
    who, how = found.get(timeout=10)
  assert who == f"the tf.data service's worker {tree.workers[0]}"
  assert how == 'has not answered for 3 s'
  assert found.empty()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'service': '127.0.0.1'}, 'host:port of the dispatcher is needed'),
    ({'service': '127.0.0.1:9'}, 'no tf.data service answers there'),
    ({'service': 'a:1', 'bad_records': 'skip'}, "bad_records='skip' do not go together"),
    ({'service': 'a:1', 'num_shards': 2}, 'share a service by its service_job'),
    ({'service': 'a:1', 'image_size': {0: 32, 1: 48}}, 'could mix two sizes'),
    ({}, "needs 'service'"),
  ],
)
def test_what_can_not_work_is_refused(data_dir, options, message):
  with pytest.raises(UsageError, match=message):
    create(data_dir, pipeline='service', **options)


def test_a_python_iterable_stays_with_its_process():
  with pytest.raises(UsageError, match='is read by this process'):
    pipelines.create('iterable', samples=[(b'', 0)], pipeline='service', service='a:1', **SMALL)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], '--address is missing'),
    (['--address=127.0.0.1:5050'], 'give one of --num_workers=N'),
    (['--address=127.0.0.1:5050', '--num_workers=1', '--workers=a:1'], 'give one of'),
    (['--address=127.0.0.1:5050', '--num_workers=-1'], '1 or more is needed'),
    (['--address=127.0.0.1', '--num_workers=1'], 'host:port is needed'),
    (['--address=192.0.2.1:5050', '--num_workers=1'], 'no address of this machine'),
    (['--address=127.0.0.1:5050', '--dispatcher=b'], "'b' of --dispatcher is no address"),
    (['5050'], 'flags are written --name=value'),
    (['--adress=x'], 'adress'),
  ],
)
def test_flags_that_can_not_work_are_refused_in_one_line(arguments, message, capsys):
  assert data_service.main(arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ')
  assert message in error
  assert error.count('\n') == 1
