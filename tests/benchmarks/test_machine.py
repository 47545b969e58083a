"""What is said of the machine, and of who else uses it."""

import os
from pathlib import Path
import subprocess
import sys
import time

import pytest

from benchmarks import machine

ROOT = Path(__file__).parents[2]


def test_facts_are_read_without_tensorflow():
  program = (
    'import sys; from benchmarks import machine; facts = machine.describe(); '
    'assert "tensorflow" not in sys.modules; assert facts["cores"] > 0 < facts["memory_mib"]'
  )
  subprocess.run(
    [sys.executable, '-c', program], check=True, cwd=os.path.dirname(__file__) + '/../..'
  )


def test_variables_that_matter_are_kept_and_others_are_not(monkeypatch):
  monkeypatch.setenv('TF_GPU_THREAD_MODE', 'global')
  monkeypatch.setenv('NCCL_ALGO', 'Ring')
  monkeypatch.setenv('TF_CLI_CONFIG_FILE', '/home/someone/.terraformrc')
  monkeypatch.setenv('LD_PRELOAD', '/usr/lib/libtcmalloc.so.4:/opt/x/other.so')
  kept = machine.environment()
  assert kept['TF_GPU_THREAD_MODE'] == 'global'
  assert kept['NCCL_ALGO'] == 'Ring'
  assert kept['LD_PRELOAD'] == 'libtcmalloc.so.4 other.so'
  assert 'TF_CLI_CONFIG_FILE' not in kept


def test_what_other_processes_use_is_seen_and_what_this_one_uses_is_not():
  before, begun = machine.load(), time.perf_counter()
  busy = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
  try:
    while time.perf_counter() - begun < 1.0:
      pass  # busy itself
  finally:
    busy.kill()
    busy.wait()
  after, wall = machine.load(), time.perf_counter() - begun
  assert machine.other_load(before, after, wall) > 0.1
  own = after.process - before.process
  assert own > 0.1
  quiet = machine.Load(before.machine + own, after.process)  # all of it this process's own
  assert machine.other_load(before, quiet, wall) == pytest.approx(0.0, abs=1e-9)
  assert machine.other_load(None, after, wall) is None


def test_the_tasks_of_a_local_cluster_are_no_others(tmp_path):
  program = tmp_path / 'task.py'
  program.write_text(
    'import sys, time\n'
    'from benchmarks import machine\n'
    'before, begun = machine.load(), time.perf_counter()\n'
    'while sys.argv[1] == "burn" and time.perf_counter() < begun + 2: pass\n'
    'time.sleep(3 if sys.argv[1] == "look" else 0)\n'
    'wall = time.perf_counter() - begun\n'
    'after = machine.load()\n'
    'print(after.process - before.process if sys.argv[1] == "look" else 0)\n'
  )
  parent = (
    'import os, subprocess, sys\n'
    'env = {**os.environ, **eval(sys.argv[2])(os.getpid())}\n'
    'both = [subprocess.Popen([sys.executable, sys.argv[1], what], env=env, text=True,\n'
    '        stdout=subprocess.PIPE) for what in ("look", "burn")]\n'
    'print(sum(float(one.communicate()[0]) for one in reversed(both)))\n'
  )
  seen = [
    float(
      subprocess.run(
        [sys.executable, '-c', parent, str(program), variable],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
      ).stdout
    )
    for variable in (f'lambda pid: {{"{machine.STARTED_BY}": str(pid)}}', 'lambda pid: {}')
  ]
  assert seen[0] > 0.5 > seen[1]  # the other task has ended before the second look
