"""What all commands of the benchmarks share."""

import importlib

import pytest

from benchmarks import command
from hpm.errors import DataError, UsageError

COMMANDS = (
  *('allreduce', 'cluster', 'cost', 'data_service', 'mirrored', 'model_step', 'parity'),
  *('startup', 'suite', 'sweep'),
)


@pytest.mark.parametrize('name', COMMANDS)
def test_help_and_unknown_flags(name, capsys):
  main = importlib.import_module(f'benchmarks.{name}').main
  assert main(['--help', '--nonsense']) == 0
  assert f'python -m benchmarks.{name}' in capsys.readouterr().out
  assert main(['--nonsense=1']) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and 'nonsense' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (UsageError('--x=1: no'), 2),
    (DataError('a/b: damaged'), 1),
    (command.Failed('hpm: killed'), 1),
    (PermissionError(13, 'Permission denied', '/x.json'), 1),
    (KeyboardInterrupt(), 130),
  ],
  ids=repr,
)
def test_an_error_is_one_line(error, code, capsys):
  @command.line('help')
  def main(arguments):
    raise error

  assert main([]) == code
  err = capsys.readouterr().err
  assert len(err.splitlines()) == 1
  assert str(error) in err


def test_another_error_is_no_users_mistake():
  @command.line('help')
  def main(arguments):
    raise ValueError('a fault of the program')

  with pytest.raises(ValueError, match='of the program'):
    main([])


def test_a_workers_last_words_are_the_error():
  with pytest.raises(command.Failed, match='^hpm: ValueError: 3$'):
    command.work('hpm', ['-c', 'raise ValueError(3)'])
  with pytest.raises(command.Failed, match='^hpm: ended with 7$'):
    command.work('hpm', ['-c', 'import sys; sys.exit(7)'])
  assert command.work('hpm', ['-c', 'print(1); print(2)']) == '2'
