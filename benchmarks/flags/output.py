"""What is kept: checkpoints and the result file."""

import os

from absl import flags

from hpm.errors import UsageError

TITLE = 'Output'


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'train_dir',
    None,
    'Directory of checkpoints: training goes on from the newest one, if there is any, and '
    'writes one at the end; --eval reads it.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'result_json', None, 'File for everything that was measured, as JSON.', flag_values=values
  )


def check(options) -> None:
  for name in ('train_dir', 'result_json'):
    if getattr(options, name) == '':
      raise UsageError(f'--{name}= is empty: give a path, or leave the flag out')
  path = options.result_json
  if path is not None:
    if os.path.isdir(path) or path.endswith(os.sep):
      raise UsageError(f'--result_json={path} is a directory: give a file')
    _writable('result_json', path, os.path.dirname(path) or '.')
  if options.train_dir is None:
    return
  if options.eval:
    if not os.path.isdir(options.train_dir):
      raise UsageError(
        f'--train_dir={options.train_dir} is no directory: give the one that training wrote '
        'checkpoints to'
      )
  else:
    _writable('train_dir', options.train_dir, options.train_dir)


def complete(options) -> None:
  del options  # nothing is written unless asked for


def _writable(flag: str, value: str, directory: str) -> None:
  """Refuses a directory that can't be written to, or made; makes nothing."""
  existing = os.path.abspath(directory)
  while not os.path.lexists(existing):
    existing = os.path.dirname(existing)
  if not os.path.isdir(existing):
    raise UsageError(f'--{flag}={value}: {existing} is a file, where a directory is needed')
  if not os.access(existing, os.W_OK | os.X_OK):
    raise UsageError(f'--{flag}={value}: {existing} is not writable: choose another place')
