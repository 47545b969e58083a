"""Every mode over processes: the weights of one process with the summed batch, and orderly ends."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from hpm.cluster import listening
from tests.cluster import cases as programs
from tests.cluster import training
from tests.parity import harness

ROOT = Path(__file__).parents[2]
NUM_DEVICES = training.NUM_DEVICES
END_S = 30.0  # tests/cluster/test_driver.py has the bound of a machine that is not busy


def run(
  num_workers: int, num_ps: int, cases: list[dict[str, Any]], out: Path, timeout_s: float = 400.0
) -> list[list[dict[str, np.ndarray]]]:
  """What each worker saw of each case; all processes have ended well, soon after the last step."""
  ports = listening.free_ports(num_workers + num_ps)
  hosts = [f'127.0.0.1:{port}' for port in ports]
  settings = {
    'worker_hosts': hosts[:num_workers],
    'ps_hosts': hosts[num_workers:],
    'cases': cases,
    'out': str(out),
  }
  tasks = [f'ps:{i}' for i in range(num_ps)] + [f'worker:{i}' for i in range(num_workers)]
  processes = {}
  for task in tasks:
    with open(out / f'{task}.log', 'w') as log:
      processes[task] = subprocess.Popen(
        [sys.executable, 'tests/cluster/training.py', json.dumps({'task': task, **settings})],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '2'},
        stdout=log,
        stderr=subprocess.STDOUT,
      )
  logs = {task: out / f'{task}.log' for task in tasks}
  try:
    until = time.monotonic() + timeout_s
    for process in processes.values():
      code = process.wait(max(0.1, until - time.monotonic()))
      assert code == 0, '\n'.join(f'{t}: {log.read_text()[-2000:]}' for t, log in logs.items())
    ended = time.monotonic()
  finally:
    for process in processes.values():
      process.kill()
  workers = [logs[task].read_text() for task in tasks if task.startswith('worker')]
  assert ended - max(float(re.findall('done at (.*)', log)[-1]) for log in workers) < END_S
  return [
    [dict(np.load(out / f'{number}-{worker}.npz')) for worker in range(num_workers)]
    for number in range(len(cases))
  ]


def check_synchronous(case: dict[str, Any], workers: list[dict[str, np.ndarray]]) -> None:
  """Values, losses and counts are those of one process with the batches of all."""
  if 'reached' in case:  # all end with the step after
    case = {**case, 'sizes': case['sizes'][: case['reached'][1] + 1]}
  expected = programs.expected(case)
  values = {n.removeprefix('values/'): v for n, v in workers[0].items() if n.startswith('values/')}
  assert set(values) == {'step', 'samples', *expected.values}
  tolerance = case.get('tolerance', harness.FP32)
  errors = {n: harness.relative_error(values[n], v) for n, v in expected.values.items()}
  assert not {n: e for n, e in errors.items() if not e <= tolerance}, errors
  sizes = np.array(case['sizes'])
  own = sizes.reshape(len(sizes), len(workers), -1).sum(axis=2)
  assert values['step'] == len(sizes)
  assert values['samples'] == sizes.sum()
  if 'evaluate_after' in case:
    found = {n: v for n, v in workers[0].items() if n.startswith('evaluated/')}
    assert found['evaluated/num_samples'] == 9
    assert float(found['evaluated/loss']) == pytest.approx(programs.expected_loss(case), rel=1e-5)
  for index, worker in enumerate(workers):
    np.testing.assert_allclose(worker['losses'], expected.losses, rtol=tolerance)
    np.testing.assert_array_equal(worker['losses'], workers[0]['losses'])
    np.testing.assert_array_equal(worker['steps'], np.arange(1, len(sizes) + 1))
    np.testing.assert_array_equal(worker['num_samples'], sizes.sum(axis=1))
    np.testing.assert_array_equal(worker['own_samples'], own[:, index])
    np.testing.assert_array_equal(worker['consumed'], own.sum(axis=0))
    copies = {name: value for name, value in worker.items() if name.startswith('copy/')}
    assert bool(copies) == (case['mode'] != 'parameter_server')
    for name, value in copies.items():
      of = name.split('/', 2)[2]
      np.testing.assert_array_equal(value, values[of], err_msg=name)


def check_asynchronous(case: dict[str, Any], workers: list[dict[str, np.ndarray]]) -> None:
  """When all are done every worker's own mean has been applied, once for each of its steps."""
  for name, value in programs.linear_values(case, len(workers)).items():
    assert harness.relative_error(workers[0][f'values/{name}'], value) <= harness.FP32
  sizes = np.array(case['sizes'])
  assert workers[0]['values/step'] == len(sizes) * len(workers)
  assert workers[0]['values/samples'] == sizes.sum()
  for worker in workers:
    assert len(worker['losses']) == len(sizes)


def check(case: dict[str, Any], workers: list[dict[str, np.ndarray]]) -> None:
  if case.get('options', {}).get('cross_replica_sync', True):
    check_synchronous(case, workers)
  else:
    check_asynchronous(case, workers)


def over_ps(num_workers: int, num_steps: int = 5) -> list[dict[str, Any]]:
  """The cases of one group of processes with parameter servers."""
  whole = [[4] * (NUM_DEVICES * num_workers)] * num_steps
  # Workers that run out of data at different times: the first has one batch more than all others.
  ending = [*whole[:2], [3, 4] * num_workers, [2, 0] + [0, 0] * (num_workers - 1)]
  return [
    {'mode': 'parameter_server', 'sizes': whole, 'evaluate_after': 2},
    {'mode': 'distributed_replicated', 'sizes': whole, 'optimizer': 'adam', 'evaluate_after': 3},
    {'mode': 'parameter_server', 'sizes': ending, 'optimizer': 'rmsprop'},
    {'mode': 'distributed_replicated', 'sizes': ending},
    {'mode': 'parameter_server', 'sizes': whole, 'model': 'normalized'},
    {'mode': 'parameter_server', 'sizes': whole, 'reached': [num_workers - 1, 2]},
    {
      'mode': 'parameter_server',
      'sizes': whole,
      'model': 'linear',
      'options': {'cross_replica_sync': False},
      'pause_s': 3.0,  # others may still be training when the chief has finished
    },
  ]


def test_two_workers_with_two_parameter_servers_are_as_one_process(tmp_path):
  cases = over_ps(2)
  for case, workers in zip(cases, run(2, 2, cases, tmp_path), strict=True):
    check(case, workers)


def by_collectives(num_workers: int, num_steps: int = 5) -> list[dict[str, Any]]:
  """The cases of one group of processes without parameter servers."""
  sizes = [case['sizes'] for case in over_ps(num_workers, num_steps)]
  mode = 'collective_all_reduce'
  # Batch norm's means are sums that nearly cancel, and a ring forms them in an order of its own:
  # their last bits are 1.02e-6 of the largest one apart with three workers.
  cancelling = {'model': 'normalized', 'tolerance': 2e-6}
  return [
    {'mode': mode, 'sizes': sizes[0], 'evaluate_after': 2},
    {'mode': mode, 'sizes': sizes[2], 'optimizer': 'adam'},
    {'mode': mode, 'sizes': sizes[2], 'steps_per_call': 3, 'evaluate_after': 3},
    {'mode': mode, 'sizes': sizes[0], 'steps_per_call': 2, 'reached': [num_workers - 1, 2]},
    {'mode': mode, 'sizes': sizes[0], **cancelling},
    {'mode': mode, 'sizes': sizes[0], 'options': {'agg_small_grads_max_bytes': 1024}},
  ]


def test_two_workers_with_collectives_are_as_one_process(tmp_path):
  cases = by_collectives(2)
  for case, workers in zip(cases, run(2, 0, cases, tmp_path), strict=True):
    check(case, workers)


@pytest.mark.long
@pytest.mark.parametrize(('num_workers', 'num_ps'), [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)])
def test_so_is_any_other_number(num_workers, num_ps, tmp_path):
  cases = over_ps(num_workers)
  for case, workers in zip(cases, run(num_workers, num_ps, cases, tmp_path), strict=True):
    check(case, workers)


@pytest.mark.long
@pytest.mark.parametrize('num_workers', [1, 3])
def test_so_is_any_other_number_with_collectives(num_workers, tmp_path):
  cases = by_collectives(num_workers)
  for case, workers in zip(cases, run(num_workers, 0, cases, tmp_path), strict=True):
    check(case, workers)


@pytest.mark.long
@pytest.mark.parametrize('num_ps', [6, 4, 0])
def test_so_are_eight_workers(num_ps, tmp_path):
  cases = over_ps(8)[:3] if num_ps else by_collectives(8)[:3]
  for case, workers in zip(cases, run(8, num_ps, cases, tmp_path, 900.0), strict=True):
    check(case, workers)
