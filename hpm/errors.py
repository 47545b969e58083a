"""The two kinds of failure that a user can mend, and how they are worded.

Both carry one line that quotes the value, the file or the record and says how to go on; a
command line prints that line and no traceback. Every other exception is a fault of the library.
"""

from collections.abc import Callable, Iterable
import difflib
import math
import numbers
import operator

__all__ = ['DataError', 'UsageError', 'number', 'printable', 'unknown', 'whole']


_MOST_CHARACTERS = 2000


class UsageError(ValueError):
  """An option, argument or combination that can't work; raised before anything is built."""


class DataError(RuntimeError):
  """Input data that is missing, damaged or does not fit the model; names file and record."""


def unknown(
  kind: str, value: object, valid: Iterable[str], instead: str | None = None
) -> UsageError:
  """The error for a name that is not in a registry, with the nearest names that are.

  Args:
    kind: of what.
    value: the name.
    valid: all names that there are.
    instead: of the list of them, where they are too many for one line.
  """
  names = sorted(valid)
  nearest = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
  hint = f'did you mean {" or ".join(nearest)}? ' if nearest else ''
  rest = f'valid: {", ".join(names)}' if instead is None else instead
  return UsageError(f'unknown {kind} {str(value)!r}: {hint}{rest}')


def number(
  name: str, value: object, need: str = 'a number', fits: Callable[[float], bool] = math.isfinite
) -> float:
  """`value` as a float: any real number, bool excepted.

  Args:
    name: of the argument.
    value: what was given.
    need: what is needed, in words.
    fits: whether a number is that.

  Raises:
    UsageError: that quotes the value and says what is needed.
  """
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not fits(float(value)):  # type: ignore[arg-type]
    raise UsageError(f'{name} {value!r}: {need} is needed')
  return float(value)  # type: ignore[arg-type]


def whole(name: str, value: object, least: int = 1) -> int:
  """`value` as an int of at least `least`: any integer type, bool excepted.

  Raises:
    UsageError: that quotes the value and says what is needed.
  """
  try:
    found = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
  except TypeError:
    found = None
  if found is None or found < least:
    raise UsageError(f'{name} {value!r}: a whole number of at least {least} is needed')
  return found


def printable(text: object) -> str:
  """A text in one line, in which nothing moves a terminal's cursor: names of files may be anything.

  What can't be printed is written as in a string of Python's, `\\n` and `\\x1b`; of a text of more
  than 2,000 characters, which quotes something endless, the middle is left out.
  """
  line = ''.join(
    c if c.isprintable() else c.encode('unicode_escape', 'surrogatepass').decode()
    for c in str(text)
  )
  return line if len(line) <= _MOST_CHARACTERS else f'{line[:1200]} ... {line[-700:]}'
