"""BUILD and MODULE.bazel agree with the source tree, proved without Bazel."""

import importlib.metadata
from pathlib import Path
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import pytest

from tests.packaging import bazel

ROOT = Path(__file__).parents[2]

# A tree that is right: `app` imports numpy, a module of the core lazily and one by its registry.
FILES = {
  'core/__init__.py': '',
  'core/errors.py': 'import os\n',
  'core/step.py': 'import numpy as np\n',
  'app/run.py': 'import numpy\n\n\ndef f():\n  from core import errors\n\n\nS = "core.step:run"\n',
}
BUILD = """
load('@rules_python//python:defs.bzl', 'py_binary', 'py_library')

py_library(name = 'core', srcs = ['core/__init__.py'])

py_library(name = 'errors', srcs = ['core/errors.py'])

py_library(name = 'step', srcs = glob(['core/s*.py']), deps = ['@pip//numpy'])

py_binary(name = 'run', srcs = ['app/run.py'], deps = [':errors', ':step', '@pip//numpy'])
"""


def test_build_names_every_file_once_and_every_import():
  found = bazel.problems(ROOT)
  assert not found, 'change BUILD:\n' + '\n'.join(found)


def test_a_build_that_fits_has_no_problems(tmp_path):
  assert _problems(tmp_path, BUILD) == []


@pytest.mark.parametrize(
  ('before', 'after', 'problem'),
  [
    ("':errors', ':step'", "':step'", ":run: add ':errors' to deps (app/run.py:5 imports core."),
    ("[':errors', ':step'", "[':errors'", ":run: add ':step' to deps (app/run.py:8 imports core."),
    ("['@pip//numpy'])\n\npy_binary", '[])\n\npy_binary', ":step: add '@pip//numpy' to deps (core"),
    (
      "['core/errors.py']",
      "['core/errors.py'], deps = ['@pip//rich']",
      ":errors: remove '@pip//rich' from deps (no file of the target imports it)",
    ),
    ("srcs = ['core/__init__.py']", 'srcs = []', 'core/__init__.py: in no target'),
    ("glob(['core/s*.py'])", "glob(['core/*.py'])", 'core/errors.py: in 2 targets, :errors, :step'),
    ("['core/errors.py']", "['core/errors.py', 'core/gone.py']", 'core/gone.py: no such file'),
  ],
)
def test_a_fault_in_build_is_named_with_its_cure(tmp_path, before, after, problem):
  assert before in BUILD
  found = _problems(tmp_path, BUILD.replace(before, after))
  assert any(line.startswith(problem) for line in found), found


def test_deps_that_form_a_circle_are_refused(tmp_path):
  files = FILES | {'core/errors.py': 'def f():\n  from core import step\n'}
  files['core/step.py'] = 'from core import errors\nimport numpy\n'
  build = BUILD.replace("['core/errors.py']", "['core/errors.py'], deps = [':step']")
  build = build.replace("glob(['core/s*.py']), deps = [", "['core/step.py'], deps = [':errors', ")
  (found,) = _problems(tmp_path, build, files)
  assert found.startswith('deps form a circle')


def test_a_test_needs_its_runner_and_the_shared_fixtures(tmp_path):
  files = {'tests/conftest.py': 'import os\n', 'tests/test_a.py': 'def test_a():\n  assert 1\n'}
  build = """
py_library(name = 'conftest', srcs = ['tests/conftest.py'])
py_test(name = 'test_a', srcs = ['tests/test_a.py'], main_module = 'pytest')
"""
  assert _problems(tmp_path, build, files) == [
    ":test_a: add '@pip//pytest' to deps (main_module is pytest)",
    ":test_a: add ':conftest' to deps (pytest loads it)",
  ]


def test_a_program_needs_the_library_of_its_main_module(tmp_path):
  build = BUILD + "py_binary(name = 'step_main', srcs = [], main_module = 'core.step')\n"
  assert _problems(tmp_path, build) == [
    ":step_main: add ':step' to deps (main_module is core.step)"
  ]


def test_lock_file_pins_every_package_of_build():
  locked = {name.replace('-', '_') for name in _locked()}
  deps = {dep for target in bazel.read_targets(ROOT) for dep in target.deps}
  named = {dep.removeprefix('@pip//') for dep in deps if dep.startswith('@pip//')}
  assert named - locked == set(), 'add them to requirements_lock.txt: make lock'


def test_lock_file_keeps_to_the_requirements_of_setup():
  locked = _locked()
  for line in importlib.metadata.requires('hpm'):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({'extra': 'test'}):
      version = locked.get(canonicalize_name(requirement.name))
      assert version, f'{line}: not in requirements_lock.txt: make lock'
      assert requirement.specifier.contains(version), f'{line}: locked at {version}: make lock'


def test_module_and_build_name_the_same_hub():
  module = (ROOT / 'MODULE.bazel').read_text(encoding='utf-8')
  assert re.search(r'hub_name = "(\w+)"', module)[1] == 'pip'
  assert re.search(r'requirements_lock = "//:(.+)"', module)[1] == 'requirements_lock.txt'


def _problems(root: Path, build: str, files: dict[str, str] = FILES) -> list[str]:
  for name, text in files.items():
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
  (root / 'BUILD').write_text(build)
  return bazel.problems(root)


def _locked() -> dict[str, str]:
  """Distribution name, in canonical spelling -> its version in requirements_lock.txt."""
  lines = (ROOT / 'requirements_lock.txt').read_text(encoding='utf-8').splitlines()
  pins = (line.split('==') for line in lines if line and not line.startswith('#'))
  return {canonicalize_name(name): version for name, version in pins}
