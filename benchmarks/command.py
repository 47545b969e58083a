"""What the commands `python -m benchmarks.NAME` share: their flags, help, errors, and workers.

@command.line(__doc__)
def main(arguments):
  values = flags.FlagValues()
  ...
  command.parse(values, arguments)
"""

from collections.abc import Callable, Sequence
import functools
import os
from pathlib import Path
import subprocess
import sys

from absl import flags

from hpm.errors import DataError, UsageError

__all__ = ['Failed', 'line', 'parse', 'work']

ROOT = Path(__file__).resolve().parent.parent
_HELP = {'--help', '--helpfull', '-h'}

Main = Callable[[Sequence[str]], int]


class Failed(Exception):
  """A process that the command started has ended with an error, or not in time."""


def line(doc: str | None, interrupted: str = 'interrupted') -> Callable[[Main], Main]:
  """Makes a command of its work.

  Help is `doc`. An error is one line, and exit code 2 if it is in the flags, otherwise 1; Ctrl-C is
  the line `interrupted`, and 130.
  """

  def of(main: Main) -> Main:
    @functools.wraps(main)
    def command(arguments: Sequence[str]) -> int:
      if _HELP.intersection(arguments):
        print(doc)
        return 0
      try:
        return main(arguments)
      except (UsageError, DataError, Failed, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
      except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130

    return command

  return of


def parse(
  values: flags.FlagValues, arguments: Sequence[str], positional: bool = False
) -> list[str]:
  """Reads the flags into `values`; what is left, which may only be something if `positional`.

  Raises:
    UsageError: what can't be read.
  """
  try:
    rest = values(['command', *arguments])[1:]
  except flags.Error as error:
    raise UsageError(' '.join(f'{error} (--help shows the flags)'.split())) from None
  if rest and not positional:
    raise UsageError(f'unexpected {rest[0]!r}: flags are written --name=value')
  return rest


def work(label: str, arguments: Sequence[str]) -> str:
  """Runs Python with these arguments from the repository's root; the last line that it prints.

  Raises:
    Failed: it ended with an error; with its last words.
  """
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    words = done.stderr.strip().splitlines() or [f'ended with {done.returncode}']
    raise Failed(f'{label}: {words[-1].removeprefix("error: ")}')
  return (done.stdout.splitlines() or [''])[-1]
