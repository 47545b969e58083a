"""The commands in README, docs and manuals are ones that the programs take."""

import importlib
from pathlib import Path
import re
import shlex

import pytest

from benchmarks import flags, sweep
from hpm.errors import DataError, UsageError
from hpm.pipelines import __main__ as pipelines
from tests.benchmarks.conftest import ROOT

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
MANUALS = sorted((ROOT / 'benchmarks').glob('*.py')) + sorted((ROOT / 'examples').glob('*.py'))
COMMAND = re.compile(
  r'^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*python (benchmarks/run\.py|-m [\w.]+)((?: [^\n|>&]*)?)$', re.M
)


def commands():
  """(page, program, arguments) of every command line that stands by itself."""
  for path in (*PAGES, *MANUALS):
    text = path.read_text(encoding='utf-8').replace('\\\n', ' ')
    for program, rest in COMMAND.findall(text):
      yield str(path.relative_to(ROOT)), program.removeprefix('-m '), rest.split(' #')[0].strip()


FOUND = list(dict.fromkeys(commands()))
DRIVER = [one for one in FOUND if one[1] in ('benchmarks/run.py', 'benchmarks.plan')]


def test_there_are_such_commands():
  assert len(FOUND) > 40 and len(DRIVER) > 15


@pytest.mark.parametrize(('page', 'program', 'rest'), DRIVER, ids=str)
def test_the_driver_takes_them(page, program, rest, sample, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('os.environ', {'PATH': '/usr/bin'})
  given = []
  for word in shlex.split(rest):
    name, _, value = word.partition('=')
    if name in ('--data_dir', '--train_dir') and '...' not in value:
      place = sample if name == '--data_dir' else tmp_path
      word = f'{name}={place}'
    given.append(word)
  if any(mark in rest for mark in ('...', '[', 'HOST', '$', 'my_')):
    pytest.skip('a form, not a command')
  try:
    flags.parse(given)
  except UsageError as error:
    # What other machines have: their hosts, and the environment of their launchers.
    assert re.search('is not known here|SLURM_|TF_CONFIG', str(error)), f'{page}: {error}'
  except DataError as error:
    pytest.fail(f'{page}: {error}')


@pytest.mark.parametrize('program', sorted({program for _, program, _ in FOUND}))
def test_each_program_exists(program):
  if program == 'benchmarks/run.py':
    assert (ROOT / program).exists()
  elif program == 'hpm.pipelines':
    named = {rest.split()[0] for _, found, rest in FOUND if found == program and rest}
    assert named - {'COMMAND'} <= set(pipelines.COMMANDS)
  else:
    assert importlib.util.find_spec(program), program


def test_every_flag_that_a_page_names_exists():
  known = {*flags._define(), *sweep.OWN}
  for path in (ROOT / 'benchmarks').rglob('*.py'):
    text = path.read_text(encoding='utf-8')
    known |= set(re.findall(r"add_argument\(\s*'--([\w-]+)'", text))
    known |= set(re.findall(r"(?:DEFINE_\w+|string)\(\s*'(\w+)'", text))
  for path in (ROOT / 'hpm' / 'pipelines').glob('*.py'):
    known |= set(re.findall(r"add_argument\(\s*'--([\w-]+)'", path.read_text(encoding='utf-8')))
  lacking = set()
  for path in PAGES:
    if path.name == 'flags.md':  # written from the code, and about the predecessor's flags too
      continue
    for name in re.findall(r'(?<![\w-])--([a-z][\w]*)', path.read_text(encoding='utf-8')):
      if name not in known and name.removeprefix('no') not in known:
        lacking.add(f'{Path(path).name}: --{name}')
  # Of pip, srun and Bazel; and the beginning of several.
  others = {'help', 'no', 'ntasks', 'nodes', 'config', 'copt', 'eval_during_training_'}
  assert {one for one in lacking if one.rpartition('--')[2] not in others} == set()
