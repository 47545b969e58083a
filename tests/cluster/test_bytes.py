"""Bytes on the wire: the loopback interface of a network namespace counts what a step moves."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.cluster import cases

ROOT = Path(__file__).parents[2]
NUM_STEPS = 4
CASES = [
  (mode, num_workers, num_ps, compact)
  for mode, num_ps in (
    ('parameter_server', 1),
    ('distributed_replicated', 1),
    ('distributed_replicated', 2),
    ('collective_all_reduce', 0),
  )
  for num_workers in (2, 3)
  for compact in (False, True)
]


def share(mode: str, num_workers: int, compact: bool) -> float:
  """Bytes that a step moves between all processes, over those of the model.

  Gradients to the servers and variables back; or a ring over workers, which each hands all but a
  share of its own on, twice. In half precision what carries gradients is half of it.
  """
  if mode == 'collective_all_reduce':
    return 2 * (num_workers - 1) * (0.5 if compact else 1)
  return num_workers * (1.5 if compact else 2)


def measured(mode: str, num_workers: int, num_ps: int, compact: bool, out: Path) -> float:
  """Bytes a step, of steps 3 to 6, TCP's and gRPC's own included."""
  options = {'transfer_dtype': 'bfloat16'} if compact else {}
  case = {
    **{'mode': mode, 'model': 'wide', 'optimizer': 'sgd', 'options': options},
    **{'sizes': [[1] * (2 * num_workers)] * (NUM_STEPS + 3)},
    'count_bytes_after': [2, 2 + NUM_STEPS],
  }
  hosts = [f'127.0.0.1:{20001 + i}' for i in range(num_workers + num_ps)]
  settings = {
    **{'worker_hosts': hosts[:num_workers], 'ps_hosts': hosts[num_workers:]},
    **{'cases': [case], 'out': str(out)},
  }
  tasks = [f'ps:{i}' for i in range(num_ps)] + [f'worker:{i}' for i in range(num_workers)]
  program = json.dumps([sys.executable, 'tests/cluster/training.py'])
  # A namespace of its own, in which nothing else moves; it goes with its last process.
  starter = (
    'import json, subprocess, sys\n'
    "subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
    f'started = [subprocess.Popen({program} + [json.dumps({{"task": t, **{settings!r}}})]) '
    f'for t in {tasks!r}]\n'
    'sys.exit(max(process.wait() for process in started))\n'
  )
  done = subprocess.run(
    ['unshare', '-rn', sys.executable, '-c', starter],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=400,
  )
  assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
  before, after = np.load(out / '0-0.npz')['received']
  return (after - before) / NUM_STEPS


def check(mode: str, num_workers: int, num_ps: int, compact: bool, out: Path) -> None:
  ours = ['unshare', '-rn', 'ip', 'link', 'set', 'lo', 'up']
  if not shutil.which('unshare') or subprocess.run(ours, capture_output=True).returncode:
    pytest.skip('needs a network namespace of its own (unshare -rn, ip)')
  model = 4 * cases.wide().num_params
  assert 95e6 < model < 105e6
  moved = measured(mode, num_workers, num_ps, compact, out)
  expected = share(mode, num_workers, compact) * model
  print(f'{mode} {num_workers} {num_ps} {compact}: {moved / 1e6:.1f} of {expected / 1e6:.1f} MB')
  assert moved == pytest.approx(expected, rel=0.03)


def test_a_step_moves_what_the_formula_says(tmp_path):
  check('distributed_replicated', 2, 1, False, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(('mode', 'num_workers', 'num_ps', 'compact'), CASES)
def test_so_does_every_mode(mode, num_workers, num_ps, compact, tmp_path):
  check(mode, num_workers, num_ps, compact, tmp_path)
