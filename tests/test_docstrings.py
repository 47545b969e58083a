"""Everything public says what it does: what is in `__all__` of hpm and its modules."""

import importlib
import inspect
from pathlib import Path
import pkgutil
import re

import pytest

import hpm

OPTIONAL = ('torch', 'nvidia')  # what some modules need at once
MODULES = sorted(
  module.name
  for module in pkgutil.walk_packages(hpm.__path__, 'hpm.')
  if not module.name.endswith('__main__')
)


def public(name):
  """(name, object) of what a module hands out; its own, not what it passes on."""
  module = importlib.import_module(name)
  for attribute in getattr(module, '__all__', ()):
    value = getattr(module, attribute)
    if inspect.isfunction(value) or inspect.isclass(value):
      yield attribute, value


def problems(value) -> list[str]:
  """What a docstring lacks."""
  text = inspect.getdoc(value) or ''
  if inspect.isclass(value) and text.startswith(f'{value.__name__}('):  # a dataclass's own
    text = ''
  if not text.strip():
    return ['no docstring']
  found = []
  first = text.strip().split('\n\n')[0]
  if not re.search(r'[.:;)`>?]\s*$', first) and len(first.split()) > 3:
    found.append(f'its first sentence has no end: {first!r}')
  if len(first.split()) < 2:
    found.append(f'no sentence: {first!r}')
  return found


@pytest.mark.parametrize('name', MODULES)
def test_everything_public_is_documented(name):
  assert importlib.import_module(name).__doc__, f'{name} has no docstring'
  for attribute, value in public(name):
    assert not problems(value), f'{name}.{attribute}: {problems(value)}'


def test_what_hpm_hands_out_is_there_and_documented():
  assert set(hpm.__all__) <= set(dir(hpm)) | {name for name in hpm.__all__ if hasattr(hpm, name)}
  for name in hpm.__all__:
    assert inspect.getdoc(getattr(hpm, name)), name


def test_what_is_refused_is_documented():
  """A public function that raises an error of ours itself says so, or says so of what it calls."""
  lacking = []
  for name in MODULES:
    for attribute, value in public(name):
      if not inspect.isfunction(value) or value.__module__ != name:
        continue
      body, text = inspect.getsource(value), inspect.getdoc(value) or ''
      body = body.replace(text, '')
      for error in ('UsageError', 'DataError'):
        if re.search(rf'raise (errors\.)?{error}\(', body) and error not in text:
          lacking.append(f'{name}.{attribute}: {error}')
  assert lacking == []


def test_a_lack_is_found():
  def bare(): ...

  def unfinished():
    """Does something with several words and no end"""

  assert problems(bare) == ['no docstring']
  assert problems(unfinished)
  assert Path(hpm.__file__).exists()
