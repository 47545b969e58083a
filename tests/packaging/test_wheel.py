"""The wheel: what it holds, what it says of itself, and that it trains without the checkout."""

from email.message import Message
from email.parser import Parser
import os
from pathlib import Path
import shutil
import subprocess
import sys
import sysconfig
import zipfile

from packaging.requirements import Requirement
import pytest

import hpm

ROOT = Path(__file__).parents[2]
NOT_SOURCE = ('.*', '__pycache__', '*.egg-info', 'build', 'dist', 'results')

# One step of the public API. It stands here as a program of its own because it must run where
# neither the checkout nor pytest is in reach.
TRAIN_ONE_STEP = """
import hpm

devices = hpm.devices.cpu(2)
model = hpm.models.create('lenet', num_classes=10)
manager = hpm.variable_mgr.create('replicated', devices)
step = hpm.TrainStep(model, manager, hpm.optimizers.create('momentum', learning_rate=0.1))
pipeline = hpm.pipelines.create(
  'synthetic', batch_size=4, image_size=model.image_size, num_classes=10
)
losses = [float(metrics.loss) for metrics in step.run(pipeline.dataset(), num_steps=1)]
print(hpm.__file__, *losses)
"""


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
  """The wheel, built from the source archive, as an installer from the archive would."""
  source = tmp_path_factory.mktemp('source') / 'hpm'
  shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
  (source / 'tests' / '__init__.py').touch()  # packages now, which only setup.py keeps out
  (source / 'benchmarks' / '__init__.py').touch()
  _run(sys.executable, '-m', 'build', '--no-isolation', source, cwd=source)
  (built,) = (source / 'dist').glob('*.whl')
  return built


@pytest.fixture(scope='module')
def metadata(wheel) -> Message:
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
    return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_hpm_alone_and_all_of_it(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = {name for name in archive.namelist() if '.dist-info/' not in name}
  package = (path for path in (ROOT / 'hpm').rglob('*') if path.is_file())
  assert names == {
    path.relative_to(ROOT).as_posix() for path in package if '__pycache__' not in path.parts
  }
  assert 'hpm/py.typed' in names


def test_wheel_carries_the_licence(wheel):
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith('/LICENSE'))
    assert archive.read(name) == (ROOT / 'LICENSE').read_bytes()


def test_wheel_runs_on_any_python_3_from_3_11(wheel, metadata):
  assert wheel.name == f'hpm-{hpm.__version__}-py3-none-any.whl'
  assert metadata['Requires-Python'] == '>=3.11'


def test_metadata_names_version_and_licence(metadata):
  assert metadata['Version'] == hpm.__version__
  assert metadata['License-Expression'] == 'Apache-2.0'


def test_metadata_requires_the_full_tensorflow(metadata):
  required = [line for line in metadata.get_all('Requires-Dist') if 'extra ==' not in line]
  names = sorted(Requirement(line).name for line in required)
  assert names == [
    *('absl-py', 'grpcio', 'numpy', 'protobuf', 'rich', 'tensorflow', 'tensorflow-datasets')
  ]


def test_metadata_offers_the_documented_extras(metadata):
  extras = {'gpu', 'dali', 'fuzz', 'indexed', 'report', 'sample', 'test', 'torch'}
  assert set(metadata.get_all('Provides-Extra')) == extras


def test_installed_wheel_trains_one_step_outside_the_checkout(wheel, tmp_path):
  """In an environment that sees this one's requirements but neither its hpm nor the checkout."""
  python = _environment(tmp_path / 'env', '--without-pip')
  # A directory named in a .pth file joins sys.path, but its own .pth files, and with them an
  # editable hpm, are not read. The environment's own packages come first.
  requirements = sysconfig.get_path('purelib')
  (_site_packages(python) / 'requirements.pth').write_text(requirements + '\n')
  _run(sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', wheel, cwd=tmp_path)
  _assert_trains(python, tmp_path)


@pytest.mark.long
def test_wheel_installed_with_its_requirements_trains_one_step(wheel, tmp_path):
  """As a user does it: an empty environment, and everything else downloaded."""
  python = _environment(tmp_path / 'env')
  _run(python, '-m', 'pip', 'install', wheel, cwd=tmp_path)
  _assert_trains(python, tmp_path)


def _environment(directory: Path, *options: str) -> Path:
  _run(sys.executable, '-m', 'venv', *options, directory, cwd=directory.parent)
  return directory / 'bin' / 'python'


def _site_packages(python: Path) -> Path:
  code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
  return Path(_run(python, '-I', '-c', code, cwd=python.parent).strip())


def _assert_trains(python: Path, directory: Path) -> None:
  script = directory / 'train_one_step.py'
  script.write_text(TRAIN_ONE_STEP)
  imported_from, *losses = _run(python, '-I', script, cwd=directory).splitlines()[-1].split()
  assert Path(imported_from).parent == _site_packages(python) / 'hpm'
  assert len(losses) == 1
  assert 0 < float(losses[0]) < 10  # a cross-entropy over 10 classes starts near log(10) = 2.3


def _run(*command: str | Path, cwd: Path) -> str:
  """Standard output of a command that must succeed; fails the test with all it said if not."""
  environment = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
  result = subprocess.run(
    [str(word) for word in command],
    cwd=cwd,
    env=environment | {'PIP_DISABLE_PIP_VERSION_CHECK': '1'},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, f'{command}\n{result.stdout}\n{result.stderr}'
  return result.stdout
