"""The two kinds of failure that a user can mend, and how they are worded.

Both carry one line that quotes the value, the file or the record and says how to go on; a
command line prints that line and no traceback. Every other exception is a fault of the library.
"""

from collections.abc import Iterable
import difflib

__all__ = ['DataError', 'UsageError', 'unknown']


class UsageError(ValueError):
  """An option, argument or combination that can't work; raised before anything is built."""


class DataError(RuntimeError):
  """Input data that is missing, damaged or does not fit the model; names file and record."""


def unknown(kind: str, value: object, valid: Iterable[str]) -> UsageError:
  """The error for a name that is not in a registry, with the nearest names that are."""
  names = sorted(valid)
  nearest = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
  hint = f'did you mean {" or ".join(nearest)}? ' if nearest else ''
  return UsageError(f'unknown {kind} {str(value)!r}: {hint}valid: {", ".join(names)}')
