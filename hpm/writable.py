"""Whether a place can be written to: asked before anything is built, since the end is too late."""

import os
import tempfile

from hpm.errors import UsageError

__all__ = ['check_directory', 'check_file']

_NAME_BYTES = 255  # the longest name that file systems take
_TRIED_BYTES = 2**16  # written and removed again, so that a full disk is seen


def check_file(flag: str, path: str) -> None:
  """Refuses a file that could not be written, its directories made; leaves nothing behind.

  Raises:
    UsageError: that names the flag, the path and the reason.
  """
  if not path:
    raise UsageError(f'--{flag}= is empty: give a path, or leave the flag out')
  if os.path.isdir(path) or path.endswith(os.sep):
    raise UsageError(f'--{flag}={path} is a directory: give a file')
  if os.path.lexists(path) and not os.path.isfile(path):
    raise UsageError(f'--{flag}={path} is no regular file, which it would replace: choose another')
  _check(flag, path, os.path.dirname(path) or '.')


def check_directory(flag: str, path: str) -> None:
  """The same of a directory to write in.

  Raises:
    UsageError: that names the flag, the path and the reason.
  """
  if not path:
    raise UsageError(f'--{flag}= is empty: give a path, or leave the flag out')
  _check(flag, path, path)


def _check(flag: str, path: str, directory: str) -> None:
  """Tries it where the path already exists: what the system says of rights is not all of it."""
  if '\0' in path:
    raise UsageError(f'--{flag}={path!r}: a path holds no zero byte: choose another place')
  if any(len(os.fsencode(name)) > _NAME_BYTES for name in path.split(os.sep)):
    raise UsageError(
      f'--{flag}={path[:40]}...: a name in it is longer than {_NAME_BYTES} bytes: choose a shorter'
    )
  existing = os.path.abspath(directory)
  while not os.path.lexists(existing):
    existing = os.path.dirname(existing)
  if not os.path.isdir(existing):
    what = 'leads nowhere' if os.path.islink(existing) else 'is a file'
    raise UsageError(f'--{flag}={path}: {existing} {what}, where a directory is needed')
  if not os.access(existing, os.W_OK | os.X_OK):
    raise UsageError(f'--{flag}={path}: {existing} is not writable: choose another place')
  try:
    with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
      file.write(bytes(_TRIED_BYTES))
  except OSError as error:
    raise UsageError(
      f'--{flag}={path}: {existing} can not be written to ({error.strerror}): choose another place'
    ) from None
