"""Running the driver: as a user does, in a process of its own, or within this one."""

from collections.abc import Callable
import dataclasses
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run left: exit code, lines on stdout, text on stderr."""

  code: int
  lines: list[str]
  errors: str

  def facts(self) -> dict[str, str]:
    """The header: label -> text."""
    header = self.lines[: self.lines.index('==========')]
    pairs = (line.partition(':') for line in header)
    return {label: text.strip() for label, colon, text in pairs if colon}


def environment() -> dict[str, str]:
  """Without what the tests set for themselves."""
  hidden = ('TF_CPP_MIN_LOG_LEVEL', 'TF_ENABLE_ONEDNN_OPTS', 'PYTHONPATH')
  return {name: value for name, value in os.environ.items() if name not in hidden}


@pytest.fixture(scope='session')
def command_line(tmp_path_factory) -> Callable[..., Run]:
  """Runs `python benchmarks/run.py` with the given flags, from another directory."""
  elsewhere = tmp_path_factory.mktemp('elsewhere')

  def start(*arguments: str) -> Run:
    done = subprocess.run(
      [sys.executable, str(ROOT / 'benchmarks' / 'run.py'), *arguments],
      cwd=elsewhere,
      env=environment(),
      capture_output=True,
      text=True,
      timeout=120,
    )
    return Run(done.returncode, done.stdout.splitlines(), done.stderr)

  return start


@pytest.fixture
def in_process(capfd) -> Callable[..., Run]:
  """The same within this process, which spares the import of TensorFlow."""
  from benchmarks import run

  def start(*arguments: str) -> Run:
    capfd.readouterr()
    code = run.main(['--device=cpu', *arguments])
    captured = capfd.readouterr()
    return Run(code, captured.out.splitlines(), captured.err)

  return start


@pytest.fixture(scope='session')
def sample(tmp_path_factory) -> Path:
  """A small data set of photographs: 64 images for training, 16 for validation."""
  directory = tmp_path_factory.mktemp('data') / 'sample'
  command = [sys.executable, '-m', 'hpm.pipelines', 'sample', '--num_images=80']
  subprocess.run([*command, f'--out={directory}'], cwd=ROOT, check=True, capture_output=True)
  return directory
