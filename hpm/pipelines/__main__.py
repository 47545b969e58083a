"""The command line of the pipelines: `python -m hpm.pipelines COMMAND --help`.

A command is one file and one line of `COMMANDS`: its module has `add_arguments(parser)` and
`run(args)`, which returns the text to print, or (text, exit code). The module's docstring is the
command's manual. A fault that the user can mend ends with one line on stderr: exit code 2 for
wrong usage, 130 for Ctrl-C, 1 for everything else.
"""

import argparse
import contextlib
import importlib
import os
import sys
from typing import NoReturn

from hpm import errors, quiet, writable

# name -> (module, what it does)
COMMANDS = {
  'compile': ('hpm.pipelines.compile', 'build the fast reader of JPEGs for this machine'),
  'convert': ('hpm.pipelines.convert', 'write a data set again in another format, verified'),
  'doctor': ('hpm.pipelines.doctor', 'read a data set to its end and say what is wrong with it'),
  'index': ('hpm.pipelines.index', "write or check the index files that DALI's reader needs"),
  'parity': ('hpm.pipelines.parity', 'compare tf.data, DALI and PIL on the same images'),
  'sample': ('hpm.pipelines.sample', 'write a small data set of real photographs'),
  'show': ('hpm.pipelines.show', 'draw a contact sheet of what a model gets'),
}


def main(argv: list[str]) -> int:
  """Runs one command and returns the exit code."""
  program = 'python -m hpm.pipelines'
  parser = Parser(
    prog=program,
    description='Tools around the data of the input pipelines.',
    epilog='commands: ' + '; '.join(f'{name}: {text}' for name, (_, text) in COMMANDS.items()),
  )
  parser.add_argument('command', metavar='COMMAND', help=', '.join(COMMANDS))
  # Only the chosen command's module is imported, so that --help answers at once.
  made: list[str] = []
  try:
    args, _ = parser.parse_known_args(argv[:1])
    if args.command not in COMMANDS:
      raise errors.unknown('command', args.command, COMMANDS)
    with quiet.native_log():
      module = importlib.import_module(COMMANDS[args.command][0])
      if 'tensorflow' in sys.modules:  # it looks for GPUs when it is first used, and not quietly
        sys.modules['tensorflow'].config.list_physical_devices()
    command = Parser(
      prog=f'{program} {args.command}',
      description=module.__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(command)
    chosen = command.parse_args(argv[1:])
    made += _make_directories(chosen)
    result = module.run(chosen)
    text, code = result if isinstance(result, tuple) else (result, 0)
    print('\n'.join(map(errors.printable, text.split('\n'))))
  except errors.UsageError as error:
    print(f'{program}: {errors.printable(error)}', file=sys.stderr)
    return 2
  except (errors.DataError, OSError) as error:
    print(f'{program}: {errors.printable(error)}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print(f'{program}: interrupted; the same command begins anew, or goes on', file=sys.stderr)
    return 130
  finally:
    for directory in reversed(made):  # what nothing was written to goes again
      with contextlib.suppress(OSError):
        os.rmdir(directory)
  return code


class Parser(argparse.ArgumentParser):
  """Says what is wrong with a command line as all other errors are said: in one line."""

  def error(self, message: str) -> NoReturn:
    raise errors.UsageError(' '.join(f'{message} (--help shows the arguments)'.split()))


def _make_directories(args: argparse.Namespace) -> list[str]:
  """Makes those of what the command will write, before it works for it; refuses other places."""
  made = []
  for name in ('out', 'json'):
    path = getattr(args, name, None)
    if path is None or os.path.lexists(path):  # of what is there the command says what it may be
      continue
    writable.check_directory(name, path)
    missing = []
    directory = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(directory):
      missing.append(directory)
      directory = os.path.dirname(directory)
    for one in reversed(missing):
      os.mkdir(one)
      made.append(one)
  return made


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
