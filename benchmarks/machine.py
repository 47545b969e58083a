"""What a measurement was made on and with; nothing that names the machine."""

from collections.abc import Sequence
from importlib import metadata
import os
from pathlib import Path
import platform
import resource
import subprocess
from typing import Any, NamedTuple

__all__ = [
  'ONEDNN',
  'STARTED_BY',
  'Load',
  'build',
  'describe',
  'load',
  'onednn',
  'other_load',
  'peak_gpu_mib',
  'peak_rss_mib',
]

ONEDNN = 'TF_ENABLE_ONEDNN_OPTS'
STARTED_BY = 'HPM_STARTED_BY'  # the id of the process that has started all tasks on this machine
# Variables that change what TensorFlow and CUDA's libraries do, by their beginnings. Not all of
# 'TF_': Terraform's begin like that too.
_VARIABLES = (
  *('TF_AUTOTUNE', 'TF_CPP', 'TF_CUDNN', 'TF_DETERMINISTIC', 'TF_DISABLE', 'TF_ENABLE', 'TF_FORCE'),
  *('TF_GPU', 'TF_NUM', 'TF_ONEDNN', 'TF_SYNC', 'TF_USE', 'TF_XLA', 'XLA_', 'ONEDNN_', 'DNNL_'),
  *('CUDA_DEVICE', 'CUDA_LAUNCH', 'CUDA_VISIBLE', 'NVIDIA_TF32', 'NCCL_', 'OMP_NUM', 'MALLOC_'),
)
_TICKS = os.sysconf('SC_CLK_TCK')


class Load(NamedTuple):
  """CPU seconds of the whole machine and of this process, at one moment."""

  machine: float
  process: float


def describe() -> dict[str, Any]:
  """Versions, processor and revision, read without importing TensorFlow."""
  return {
    'tensorflow': metadata.version('tensorflow'),
    'python': platform.python_version(),
    'numpy': metadata.version('numpy'),
    'system': f'{platform.system()} {platform.release()}',
    'cpu': _cpu(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'memory_mib': _memory_mib(),
    'gpus': [],  # known once TensorFlow has started
    'gpu_driver': None,
    'onednn': onednn(),
    'environment': environment(),
    'git_revision': _revision(),
  }


def environment() -> dict[str, str]:
  """The variables that TensorFlow and CUDA's libraries read, as they are set.

  And what is loaded before all libraries, an allocator as a rule, without its directory.
  """
  found = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)}
  if preloaded := os.environ.get('LD_PRELOAD'):
    found['LD_PRELOAD'] = ' '.join(map(os.path.basename, preloaded.replace(':', ' ').split()))
  return found


def build() -> dict[str, Any]:
  """How the imported TensorFlow was built."""
  import tensorflow as tf

  info = tf.sysconfig.get_build_info()
  names = ('cuda_version', 'cudnn_version', 'is_cuda_build', 'cpu_compiler')
  return {
    'version': tf.version.VERSION,
    'git': tf.version.GIT_VERSION,
    'compiler': tf.version.COMPILER_VERSION,
    **{name: info[name] for name in names if name in info},
  }


def gpu_driver() -> str | None:
  """The version of the NVIDIA driver; None without one."""
  try:
    text = Path('/proc/driver/nvidia/version').read_text()
  except OSError:
    return None
  words = [word for word in text.split() if word[0].isdigit() and '.' in word]
  return words[0] if words else None


def onednn() -> str:
  """Whether TensorFlow uses oneDNN on the CPU, as its environment variable says."""
  return {'1': 'on', '0': 'off'}.get(os.environ.get(ONEDNN, ''), "TensorFlow's default")


def peak_rss_mib() -> float:
  """The most memory that this process has held so far, in MiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def peak_gpu_mib(devices: Sequence[str]) -> list[float]:
  """The most memory in use on each of the GPUs among `devices`, in MiB."""
  gpus = [device.removeprefix('/') for device in devices if 'GPU' in device]
  if not gpus:
    return []
  import tensorflow as tf

  return [tf.config.experimental.get_memory_info(gpu)['peak'] / 2**20 for gpu in gpus]


def load() -> Load | None:
  """CPU seconds until now; None where the system doesn't count them (not Linux).

  The other tasks of a local cluster belong to the measurement as this process does.
  """
  try:
    with open('/proc/stat') as file:
      user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
  except (OSError, ValueError):
    return None
  times = os.times()
  busy = (user + nice + system + irq + softirq) / _TICKS
  return Load(busy, times.user + times.system + _other_tasks())


def other_load(before: Load | None, after: Load | None, wall_s: float) -> float | None:
  """Cores that others kept busy, on average, between two moments."""
  if before is None or after is None or wall_s <= 0:
    return None
  others = (after.machine - before.machine) - (after.process - before.process)
  return max(0.0, others / wall_s)


def _other_tasks() -> float:
  """CPU seconds of the other tasks that were started with this process, ended ones included."""
  parent = os.getppid()
  if os.environ.get(STARTED_BY) != str(parent):
    return 0.0
  try:
    children = Path(f'/proc/{parent}/task/{parent}/children').read_text().split()
  except OSError:  # the kernel doesn't say
    return 0.0
  living = (_cpu_seconds(child, 2) for child in children if child != str(os.getpid()))
  return _cpu_seconds(str(parent), 4) + sum(living)


def _cpu_seconds(pid: str, kinds: int) -> float:
  """User and system; with 4 kinds, those of its children that have ended too (man 5 proc)."""
  try:
    words = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  except OSError:  # it has ended
    return 0.0
  return sum(map(int, words[11 : 11 + kinds])) / _TICKS


def _cpu() -> str:
  try:
    with open('/proc/cpuinfo') as file:
      for line in file:
        if line.startswith('model name'):
          return line.partition(':')[2].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


def _memory_mib() -> int:
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2**20


def _revision() -> str | None:
  """The checkout's commit, '+changes' if files differ from it; None outside a checkout."""
  root = Path(__file__).parent.parent
  try:
    revision = _git(root, 'rev-parse', 'HEAD')
    changed = _git(root, 'status', '--porcelain', '--untracked-files=no')
  except (OSError, subprocess.SubprocessError):
    return None
  return revision + ('+changes' if changed else '')


def _git(root: Path, *arguments: str) -> str:
  command = ['git', '-C', str(root), *arguments]
  return subprocess.run(
    command, capture_output=True, text=True, check=True, timeout=10
  ).stdout.strip()
