"""The check for machines with GPUs: what it says here, and its parts on CPU devices."""

import os
import shutil
import subprocess

import numpy as np
import pytest

from benchmarks import flags, gpu_check
from benchmarks.gpu_check import Failure, Outcome

without_driver = pytest.mark.skipif(
  os.path.exists('/proc/driver/nvidia') or shutil.which('nvidia-smi') is not None,
  reason='there is an NVIDIA driver',
)


@without_driver
def test_make_says_so_before_it_installs_anything(tmp_path):
  for name in ('Makefile', 'setup.py', 'pyproject.toml'):
    shutil.copy(gpu_check.ROOT / name, tmp_path)
  done = subprocess.run(
    ['make', '--no-print-directory', 'gpu-check'], cwd=tmp_path, capture_output=True, text=True
  )
  assert done.returncode
  assert done.stdout == ''
  assert done.stderr.startswith('make: gpu-check needs a machine with at least one NVIDIA GPU')
  assert not (tmp_path / '.venv').exists()


@without_driver
def test_without_a_gpu_it_says_in_one_line_what_it_needs(capsys):
  assert gpu_check.main([]) == 1
  captured = capsys.readouterr()
  assert captured.out == ''
  assert captured.err.startswith('error: gpu-check needs a machine with at least one NVIDIA GPU')
  assert captured.err.count('\n') == 1


@pytest.mark.parametrize('name', ['parity', 'half_precision', 'xla'])
def test_comparisons_hold_on_cpu_devices(name, cpu_devices):
  needed, compare = gpu_check.COMPARISONS[name]
  assert needed == 1
  assert 'worst' in compare(cpu_devices[:2])


def test_a_comparison_that_does_not_hold_names_the_tensor():
  expected = {'params/w': np.array([1.0, 2.0]), 'params/b': np.array([1.0])}
  actual = {**expected, 'params/w': np.array([1.0, 2.1])}
  assert gpu_check._difference(expected, expected, 'xla') == 0.0
  with pytest.raises(Failure, match=r'xla: params/w differs by 5\.0e-02'):
    gpu_check._difference(actual, expected, 'xla')
  actual['params/w'] = np.array([1.0, np.nan])
  with pytest.raises(Failure, match='differs by nan'):
    gpu_check._difference(actual, expected, 'xla')


@pytest.mark.parametrize('num_gpus', [1, 8])
def test_every_measurement_is_a_command_that_the_driver_takes(num_gpus):
  devices = tuple(f'/GPU:{i}' for i in range(num_gpus))
  table = gpu_check.measurements(num_gpus, quick=False)
  for needed, arguments in table.values():
    if needed <= num_gpus:
      options = flags.parse(arguments)
      flags.complete(options, devices[: options.num_gpus or num_gpus])
  assert {'resnet50_fp32_64', 'resnet50_fp16_128', 'resnet50_bf16_256', 'nchw_fp16'} <= set(table)
  assert ('resnet50_fp16_256_x8' in table) == (num_gpus == 8)


def test_overlap_is_the_share_of_copies_under_kernels():
  def event(pid, name, begin, duration, **arguments):
    return {'ph': 'X', 'pid': pid, 'name': name, 'ts': begin, 'dur': duration, 'args': arguments}

  trace = {
    'traceEvents': [
      {'ph': 'M', 'name': 'process_name', 'pid': 0, 'args': {'name': '/host:CPU'}},
      {'ph': 'M', 'name': 'process_name', 'pid': 1, 'args': {'name': '/device:GPU:0'}},
      {'ph': 'M', 'name': 'process_name', 'pid': 2, 'args': {'name': '/device:GPU:1'}},
      event(1, 'MemcpyH2D', 0.0, 10.0),
      event(1, 'conv', 4.0, 4.0, tf_op='a:Conv2D'),
      event(1, 'conv', 6.0, 3.0, tf_op='b:Conv2D'),  # 4 to 9 together: half of the copy
      event(2, 'conv', 0.0, 10.0, tf_op='c:Conv2D'),  # on another device
      event(0, 'Conv2D', 0.0, 10.0, tf_op='d:Conv2D'),
    ]
  }
  assert gpu_check.overlap(trace) == pytest.approx(0.5)
  with pytest.raises(Failure, match='no copy'):
    gpu_check.overlap({'traceEvents': trace['traceEvents'][:3]})


def test_the_report_has_a_line_a_check():
  outcomes = [
    Outcome('parity', 'passed', 'worst 1e-7'),
    Outcome('nccl', 'skipped', 'needs 2 GPUs | there is 1'),
    Outcome('xla', 'failed', 'differs'),
  ]
  text = gpu_check.report(outcomes, {'cpu': 'some'})
  assert '1 passed, 1 failed, 1 skipped' in text
  assert '| nccl | skipped | needs 2 GPUs / there is 1 |' in text
  assert '- cpu: some' in text
