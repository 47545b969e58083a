"""The plan on the command line: the driver's flags, devices that are not there, nothing run."""

import os
import re
import subprocess
import sys

import pytest

from tests.benchmarks.conftest import ROOT, environment


def run(module, *arguments, cwd):
  return subprocess.run(
    [sys.executable, '-m', module, *arguments],
    cwd=cwd,
    env=environment() | {'PYTHONPATH': str(ROOT), 'COLUMNS': '80'},
    capture_output=True,
    text=True,
    timeout=120,
  )


ARGUMENTS = ('--model=lenet', '--num_gpus=4', '--batch_size=32')


@pytest.mark.parametrize(
  'command', [('benchmarks.run', '--dry_run'), ('benchmarks.plan',)], ids=' '.join
)
def test_a_plan_for_four_gpus_needs_none(command, tmp_path):
  result = run(*command, *ARGUMENTS, cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  out = result.stdout
  assert 'lenet, 32 images on each of 4 GPU devices, replicated' in out
  assert len(re.findall(r'GPU:[0-3]\s+8\.3\s+8\.3 ', out)) == 4  # 2,172,840 in float32
  assert 'collective' in out
  assert '…' not in out  # eighty characters hold every column
  assert max(map(len, out.splitlines())) <= 80
  batches = [int(n) for n in re.findall(r'largest batch per device in \d+ GB: (\d+)', out)]
  assert batches == sorted(batches)
  assert batches[0] > 32
  assert not os.listdir(tmp_path)


def test_a_plan_takes_the_flags_of_the_mode(tmp_path):
  flags = ('--variable_update=parameter_server', '--local_parameter_device=cpu')
  result = run('benchmarks.plan', *ARGUMENTS, *flags, cwd=tmp_path)
  assert re.search(r'CPU:0\s+8\.3 ', result.stdout)
  assert re.search(r'GPU:0\s+0\.0\s+0\.0 ', result.stdout)
  assert re.search(r'CPU:0\s+GPU:3\s+host-device\s+1\s+8\s+8\.29 ', result.stdout)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--eval'], '--eval=true has no effect with --dry_run'),
    (['--result_json=x.json'], '--result_json=x.json has no effect with --dry_run'),
    (['--device=cpu', '--use_nccl=true'], 'NCCL needs GPUs'),
    (['--model=resnet5'], "unknown --model 'resnet5'"),
  ],
  ids=str,
)
def test_what_does_not_go_with_a_plan_is_refused_in_one_line(flags, message, tmp_path):
  result = run('benchmarks.run', '--dry_run', *flags, cwd=tmp_path)
  assert result.returncode == 2
  (line,) = result.stderr.splitlines()
  assert line.startswith('error: ')
  assert message in line
