"""What the commands `python -m benchmarks.NAME` share: their flags, help, errors, and workers.

@command.line(__doc__)
def main(arguments):
  values = flags.FlagValues()
  ...
  command.parse(values, arguments)

With `command.Parser`, argparse's with these errors, it is `@command.line()`.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import functools
import math
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from absl import flags

from benchmarks import memory
from benchmarks.flags import check_argument
from benchmarks.flags.devices import MOST
from benchmarks.flags.steps import LARGEST
from hpm import writable
from hpm.errors import DataError, UsageError, printable
from hpm.pipelines import __main__ as pipelines

__all__ = ['Failed', 'Parser', 'line', 'parse', 'work']

ROOT = Path(__file__).resolve().parent.parent
_HELP = {'--help', '--helpfull', '-h'}
_SMALLEST = 28  # pixels, of all models here
_FILES = ('json', 'result_json', 'plot')  # what commands call those that they write
_DIRECTORIES = ('out', 'work_dir')
_COUNTS = (
  *('batch_size', 'image_size', 'num_batches', 'num_gpus', 'num_images', 'num_rounds'),
  *('num_threads', 'rounds', 'seconds', 'steps'),
)

Main = Callable[[Sequence[str]], int]


class Failed(Exception):
  """A process that the command started has ended with an error, or not in time."""


class Parser(pipelines.Parser):
  """argparse's, with one line for what is wrong, and the checks that all commands share."""

  def __init__(self, **options: Any):
    super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

  def parse_args(self, args=None, namespace=None):
    found = super().parse_args(args, namespace)
    _check(vars(found))
    return found


def line(doc: str | None = None, interrupted: str = 'interrupted') -> Callable[[Main], Main]:
  """Makes a command of its work.

  Help is `doc`; without it the command's parser gives its own. An error is one line, and exit code
  2 if it is in the flags, otherwise 1; Ctrl-C is the line `interrupted`, and 130.
  """

  def of(main: Main) -> Main:
    @functools.wraps(main)
    def command(arguments: Sequence[str]) -> int:
      if doc is not None and _HELP.intersection(arguments):
        print(doc)
        return 0
      try:
        return main(arguments)
      except (UsageError, DataError, Failed, OSError) as error:
        print(f'error: {printable(error)}', file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
      except MemoryError as error:
        print(f'error: out of memory ({error}): lower the batch', file=sys.stderr)
        return 1
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
  for argument in arguments:
    check_argument(argument)
  try:
    rest = values(['command', *arguments])[1:]
  except flags.Error as error:
    raise UsageError(' '.join(f'{error} (--help shows the flags)'.split())) from None
  if rest and not positional:
    raise UsageError(f'unexpected {rest[0]!r}: flags are written --name=value')
  _check({name: values[name].value for name in values})
  return rest


def _check(values: Mapping[str, Any]) -> None:
  """Refuses what no command can work with, before it begins.

  Raises:
    UsageError: that names the flag.
  """
  for name, value in values.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise UsageError(f'--{name}={value}: a finite number is needed')
    if isinstance(value, int) and abs(value) > LARGEST:
      raise UsageError(f'--{name}={value}: at most {LARGEST}, as far as TensorFlow counts')
    if name in _COUNTS and isinstance(value, (int, float)) and not value > 0:
      raise UsageError(f'--{name}={value}: above 0 is needed')
    if name in _FILES and value is not None:
      writable.check_file(name, value)
    if name in _DIRECTORIES and value is not None:
      writable.check_directory(name, value)
  count = values.get('num_gpus')
  if isinstance(count, int) and count > MOST:
    raise UsageError(f'--num_gpus={count}: at most {MOST} devices in one process')
  batch, size = values.get('batch_size'), values.get('image_size') or _SMALLEST
  if isinstance(batch, int) and isinstance(size, int):
    needed, available = memory.least_bytes(0, size, batch, 0), memory.available_bytes()
    if available is not None and needed > available:
      raise UsageError(
        f'--batch_size={batch} of {size} x {size} pixels needs {needed / 2**30:.1f} GiB of memory '
        f'at least, and {available / 2**30:.1f} GiB are free: lower it'
      )


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
