"""Data can't run code: nothing that would let it is called. And what we depend on is bound."""

import ast
from pathlib import Path
import re

from packaging.requirements import Requirement
import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
  path for place in ('hpm', 'benchmarks', 'examples') for path in (ROOT / place).rglob('*.py')
)
# What runs code that it reads, or unpacks what it is given: no archive is opened here at all.
MODULES = {
  *('pickle', 'cPickle', '_pickle', 'marshal', 'shelve', 'dill', 'cloudpickle', 'joblib', 'yaml'),
  *('zipfile', 'tarfile', 'gzip', 'bz2', 'lzma', 'xml', 'code', 'pty'),
}
CALLS = {'eval', 'exec', 'compile', '__import__', 'system', 'popen', 'extractall', 'unpack_archive'}
# Of a module: `re.compile` is none of Python's own `compile`.
HARMLESS = {'re', 'platform', 'torch', 'model'}
# Calls that are safe with one option alone.
OPTIONS = {
  'torch.load': ('weights_only', True),
  'load_model': ('safe_mode', True),
}
FORBIDDEN_OPTIONS = {'shell': True, 'allow_pickle': True, 'weights_only': False, 'safe_mode': False}


def faults(text: str) -> list[str]:
  """What in a source would let data run code."""
  found = []
  for node in ast.walk(ast.parse(text)):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
      names = [node.module]
    found += [f'{node.lineno}: imports {name}' for name in names if name.split('.')[0] in MODULES]
    if not isinstance(node, ast.Call):
      continue
    called = ast.unparse(node.func)
    owner, _, name = called.rpartition('.')
    if name in CALLS and owner.split('.')[-1] not in HARMLESS:
      found.append(f'{node.lineno}: calls {called}')
    given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    for option, value in FORBIDDEN_OPTIONS.items():
      if given.get(option, not value) is value:
        found.append(f'{node.lineno}: {called} with {option}={value}')
    for safe, (option, value) in OPTIONS.items():
      if called.endswith(safe) and given.get(option) is not value:
        found.append(f'{node.lineno}: {called} without {option}={value}')
  return found


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_lets_data_run_code(path):
  assert faults(path.read_text(encoding='utf-8')) == []


@pytest.mark.parametrize(
  'line',
  [
    'import pickle',
    'from pickle import loads',
    'import yaml',
    'eval(text)',
    'exec(text)',
    "__import__('os')",
    'os.system(command)',
    'subprocess.run(command, shell=True)',
    'np.load(path, allow_pickle=True)',
    'torch.load(path)',
    'torch.load(path, weights_only=False)',
    'keras.models.load_model(path)',
    'archive.extractall(directory)',
    'import tarfile',
  ],
)
def test_a_planted_fault_is_found(line):
  assert faults(line)


def test_what_is_safe_is_no_fault():
  safe = "import re\nre.compile('x')\ntorch.load(p, weights_only=True)\nnp.load(p)\nrun(['a'])\n"
  assert faults(safe) == []


def requirements() -> list[str]:
  """All of setup.py, read without running it."""
  tree = ast.parse((ROOT / 'setup.py').read_text(encoding='utf-8'))
  strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
  lists = [n for n in ast.walk(tree) if isinstance(n, ast.List)]
  found = [n.value for one in lists for n in one.elts if isinstance(n, ast.Constant)]
  assert set(found) <= set(strings)
  kinds = ('LICENSE', 'hpm', 'hpm.*', 'py.typed', 'pipelines/jpeg_native.c')
  return [text for text in found if text not in kinds and '::' not in text]


def test_the_requirements_are_found():
  names = {Requirement(text).name for text in requirements()}
  assert {'tensorflow', 'numpy', 'hypothesis', 'torch', 'pillow', 'nvidia-dali-cuda120'} <= names
  assert len(requirements()) >= 20


@pytest.mark.parametrize('text', requirements())
def test_each_requirement_has_a_lower_and_an_upper_bound(text):
  operators = {one.operator for one in Requirement(text).specifier}
  assert '==' in operators or {'>=', '<'} <= operators, f'{text}: write NAME>=X,<Y'


def test_the_pinned_versions_lie_within_the_bounds():
  lock = (ROOT / 'requirements_lock.txt').read_text(encoding='utf-8')
  pinned = dict(re.findall(r'^([\w.-]+)==(\S+)$', lock, re.M))
  pinned = {name.lower().replace('_', '-'): version for name, version in pinned.items()}
  checked = 0
  for text in requirements():
    wanted = Requirement(text)
    if version := pinned.get(wanted.name.lower()):
      assert wanted.specifier.contains(version), f'{text} and {wanted.name}=={version}'
      checked += 1
  assert checked >= 10


def test_the_page_on_security_names_what_is_read():
  page = (ROOT / 'SECURITY.md').read_text(encoding='utf-8')
  for word in (
    'pickle',
    'weights_only',
    'max_pixels',
    'module:function',
    '--data_service',
    'doctor',
  ):
    assert word in page, word
