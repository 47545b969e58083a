"""What a measurement was made on and with; nothing that names the machine."""

from importlib import metadata
import os
from pathlib import Path
import platform
import resource
import subprocess
from typing import Any

__all__ = ['ONEDNN', 'describe', 'onednn', 'peak_rss_mib']

ONEDNN = 'TF_ENABLE_ONEDNN_OPTS'


def describe() -> dict[str, Any]:
  """Versions, processor and revision, read without importing TensorFlow."""
  return {
    'tensorflow': metadata.version('tensorflow'),
    'python': platform.python_version(),
    'numpy': metadata.version('numpy'),
    'cpu': _cpu(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
    'gpus': [],  # known once TensorFlow has started
    'onednn': onednn(),
    'git_revision': _revision(),
  }


def onednn() -> str:
  """Whether TensorFlow uses oneDNN on the CPU, as its environment variable says."""
  return {'1': 'on', '0': 'off'}.get(os.environ.get(ONEDNN, ''), "TensorFlow's default")


def peak_rss_mib() -> float:
  """The most memory that this process has held so far, in MiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def _cpu() -> str:
  try:
    with open('/proc/cpuinfo') as file:
      for line in file:
        if line.startswith('model name'):
          return line.partition(':')[2].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


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
