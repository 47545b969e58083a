"""Holds back what native code writes to stderr while it starts."""

from collections.abc import Iterator
import contextlib
import os
import shutil
import sys
import tempfile

from hpm.errors import DataError, UsageError

__all__ = ['LEVEL', 'native_log']

LEVEL = 'TF_CPP_MIN_LOG_LEVEL'
_ERRORS = '2'


@contextlib.contextmanager
def native_log() -> Iterator[bool]:
  """Holds back what C++ code writes to stderr; shows it if the block fails for no known reason.

  TensorFlow's own variable for it doesn't reach the lines that are written before its log is set
  up. A user who sets that variable sees everything as TensorFlow decides; then this yields False.
  """
  if os.environ.setdefault(LEVEL, _ERRORS) != _ERRORS:
    yield False
    return
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as held:
    os.dup2(held.fileno(), 2)
    try:
      yield True
    except (DataError, UsageError, KeyboardInterrupt):
      raise
    except BaseException:
      os.dup2(kept, 2)
      held.seek(0)
      shutil.copyfileobj(held, os.fdopen(os.dup(2), 'wb'))
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)
