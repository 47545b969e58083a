"""A worker of the driver: what it tells the others, and how it ends before there is a training."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
import types

import pytest

from benchmarks import member, watching
from hpm.cluster import heartbeat, listening
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages

ROOT = Path(__file__).parents[2]


def started(index: int, hosts: list[str], *flags: str) -> subprocess.Popen:
  command = [sys.executable, 'benchmarks/run.py', '--variable_update=collective_all_reduce']
  model = ('--model=lenet', '--device=cpu', '--batch_size=2', '--num_batches=2')
  place = (f'--worker_hosts={",".join(hosts)}', '--job_name=worker', f'--task_index={index}')
  return subprocess.Popen(
    [*command, *model, *place, *flags],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def addresses(count: int) -> list[str]:
  return [f'127.0.0.1:{port}' for port in listening.free_ports(count)]


def test_workers_with_other_numbers_of_devices_end_with_one_line():
  hosts = addresses(2)
  workers = [started(i, hosts, f'--num_gpus={i + 1}') for i in (0, 1)]
  try:
    for worker in workers:
      _, err = worker.communicate(timeout=120)
      assert worker.returncode == 3
      assert 'worker:1 was started otherwise than worker:0: --num_gpus 2 instead of 1' in err
  finally:
    for worker in workers:
      worker.kill()


def test_who_waits_for_others_says_so_and_ends_when_told_to(tmp_path):
  hosts = addresses(2)
  result = tmp_path / 'result.json'
  worker = started(1, hosts, f'--result_json={result}')
  try:
    line = worker.stdout.readline()
    assert line.startswith(
      f'Notice: worker:1 waits for worker:0 ({hosts[0]}), 120 s from its start'
    )
    told = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=30)
    assert time.monotonic() - told < 10
    assert worker.returncode == 143
    assert err == 'stopped by SIGTERM before the training began\n'
    assert json.loads((tmp_path / 'result.worker-1.json').read_text())['status'] == 'stopped'
  finally:
    worker.kill()


@pytest.mark.parametrize('pause_s', [0.0, 1.5])
def test_the_total_is_over_the_time_from_the_first_to_the_last(pause_s):
  hosts = addresses(2)
  options = types.SimpleNamespace(cross_replica_sync=False, variable_update='parameter_server')
  clusters = [Cluster('worker', i, hosts) for i in (0, 1)]
  watches = [heartbeat.Watch(one, on_death=lambda death: None) for one in clusters]
  chief, other = (
    member.Worker(one, options, watch, Stages(), watching.Ending())
    for one, watch in zip(clusters, watches, strict=True)
  )
  with watches[0], watches[1]:
    watches[0].wait_for_all()
    ended = time.monotonic()
    assert other.total(30, 1.0, 0.5)[0] == 30.0
    time.sleep(pause_s)
    between = time.monotonic() - ended
    total, lines = chief.total(20, 1.0, 0.5)
  assert total == pytest.approx(50 / (1.0 + between), rel=0.05)
  assert lines.splitlines()[0] == 'images/sec of worker:0: 20.00'
