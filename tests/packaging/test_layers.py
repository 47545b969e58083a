"""The arrows between packages point one way, and names cost no import of TensorFlow."""

from pathlib import Path
import subprocess
import sys

import pytest

from tests.packaging.source import Tree

ROOT = Path(__file__).parents[2]
TREE = Tree(ROOT)
LIBRARY = [file for file in TREE.files if file.startswith('hpm/')]
PEERS = ('models', 'pipelines', 'variable_mgr')


def test_library_imports_neither_driver_nor_tests():
  assert LIBRARY
  for file in LIBRARY:
    for item in TREE.imports(file):
      assert item.module.split('.')[0] not in ('benchmarks', 'tests', 'examples'), (
        f'{file}:{item.line}'
      )


@pytest.mark.parametrize('package', PEERS)
def test_models_pipelines_and_managers_do_not_know_one_another(package):
  others = tuple(f'hpm.{peer}.' for peer in PEERS if peer != package)
  files = [file for file in LIBRARY if file.startswith(f'hpm/{package}/')]
  assert files
  for file in files:
    for item in TREE.imports(file):
      assert not f'{item.module}.'.startswith(others), f'{file}:{item.line}: {item.module}'


def test_every_registry_entry_names_a_function_that_exists():
  entries = [(f, item) for f in LIBRARY for item in TREE.imports(f) if item.attribute]
  assert len(entries) > 10  # so many models, managers and pipelines there are at least
  for file, item in entries:
    assert TREE.defines(item.module, item.attribute), (
      f'{file}:{item.line}: no {item.attribute} in {item.module}'
    )


def test_every_public_module_says_what_is_public():
  modules = {module: file for module, file in TREE.modules.items() if file in LIBRARY}
  public = [module for module in modules if not module.rpartition('.')[2].startswith('_')]
  assert [modules[module] for module in public if not TREE.defines(module, '__all__')] == []


def test_packages_and_their_registries_load_without_tensorflow():
  packages = [file for file in LIBRARY if file.endswith('/__init__.py')]
  names = ', '.join(file.removesuffix('/__init__.py').replace('/', '.') for file in packages)
  code = f'import sys, {names}; print("tensorflow" in sys.modules, "keras" in sys.modules)'
  result = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert result.stdout.split() == ['False', 'False']
