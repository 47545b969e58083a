"""What TensorFlow is told before it starts."""

import json
import subprocess
import sys

import pytest

from benchmarks import flags
from tests.benchmarks.conftest import ROOT, environment


def changes(*arguments, **current):
  return flags.runtime.environment(flags.parse(arguments), current)


def test_cpu_devices_get_onednn_and_nothing_of_gpus():
  assert changes('--device=cpu') == {'TF_ENABLE_ONEDNN_OPTS': '1'}
  assert changes('--device=cpu', '--mkl=false') == {'TF_ENABLE_ONEDNN_OPTS': '0'}


def test_gpus_get_private_threads_and_cudnns_faster_kernels():
  assert changes('--device=gpu') == {
    'TF_GPU_THREAD_MODE': 'gpu_private',
    'TF_GPU_THREAD_COUNT': '2',
    'TF_ENABLE_WINOGRAD_NONFUSED': '1',
    'TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT': '1',
    'TF_SYNC_ON_FINISH': '0',
  }


@pytest.mark.parametrize(
  ('argument', 'variable', 'value'),
  [
    ('--num_intra_threads=3', 'TF_NUM_INTRAOP_THREADS', '3'),
    ('--num_inter_threads=0', 'TF_NUM_INTEROP_THREADS', '0'),
    ('--gpu_thread_mode=gpu_shared', 'TF_GPU_THREAD_MODE', 'gpu_shared'),
    ('--per_gpu_thread_count=0', 'TF_GPU_THREAD_COUNT', '2'),
    ('--allow_growth', 'TF_FORCE_GPU_ALLOW_GROWTH', 'true'),
    ('--use_unified_memory', 'TF_FORCE_UNIFIED_MEMORY', '1'),
    ('--tf32=false', 'NVIDIA_TF32_OVERRIDE', '0'),
    ('--tf32', 'NVIDIA_TF32_OVERRIDE', None),
    ('--cudnn_autotune=false', 'TF_CUDNN_USE_AUTOTUNE', '0'),
    ('--autotune_threshold=2', 'TF_AUTOTUNE_THRESHOLD', '2'),
    ('--winograd_nonfused=false', 'TF_ENABLE_WINOGRAD_NONFUSED', '0'),
    ('--batchnorm_persistent=false', 'TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT', '0'),
    ('--sync_on_finish', 'TF_SYNC_ON_FINISH', '1'),
  ],
)
def test_a_flag_stands_over_the_users_variable(argument, variable, value):
  assert changes(argument, **{variable: 'x'})[variable] == value


def test_the_users_variable_stands_over_a_default():
  user = {'TF_GPU_THREAD_MODE': 'global', 'TF_ENABLE_ONEDNN_OPTS': '0'}
  assert 'TF_GPU_THREAD_MODE' not in changes(**user)
  assert changes(**user)['TF_ENABLE_ONEDNN_OPTS'] == '0'


def test_every_variable_is_known_to_this_tensorflow():
  import tensorflow as tf

  libraries = [
    *(ROOT / tf.sysconfig.get_lib()).glob('libtensorflow_framework.so*'),
    *(ROOT / tf.sysconfig.get_lib()).glob('libtensorflow_cc.so*'),
  ]
  wanted = {knob.variable.encode() for knob in flags.runtime.KNOBS.values()}
  wanted -= {b'NVIDIA_TF32_OVERRIDE'}  # CUDA's own libraries read this one
  for library in libraries:
    if not wanted:
      break
    with open(library, 'rb') as file:
      tail = b''
      while block := file.read(2**24):
        wanted -= {name for name in wanted if name in tail + block}
        tail = block[-100:]
  assert not wanted


def test_threads_are_set_before_tensorflow_starts_and_recorded(tmp_path):
  path = tmp_path / 'run.json'
  command = [
    *(sys.executable, 'benchmarks/run.py', '--device=cpu', '--model=trivial', '--num_gpus=1'),
    *('--num_batches=2', '--num_intra_threads=1', '--num_inter_threads=3', '--mkl=false'),
    *('--datasets_num_private_threads=1', f'--result_json={path}'),
  ]
  done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert (
    'Environment: TF_ENABLE_ONEDNN_OPTS=0 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=3'
    in done.stdout
  )
  machine = json.loads(path.read_text())['machine']
  assert machine['onednn'] == 'off'
  assert machine['environment']['TF_NUM_INTRAOP_THREADS'] == '1'
  assert machine['tensorflow_build']['version'] == machine['tensorflow']


def test_tensorflow_starts_without_scikit_learn_which_stays_importable():
  """Keras would import it; in a process of its own, since this one has TensorFlow already."""
  script = (
    'import sys\n'
    'from benchmarks import process\n'
    "process.devices('cpu', 1)\n"
    "assert 'tensorflow' in sys.modules and 'sklearn' not in sys.modules\n"
    'import sklearn\n'
    'assert sklearn.__version__\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True, cwd=ROOT, env=environment()
  )
  assert done.returncode == 0, done.stderr
