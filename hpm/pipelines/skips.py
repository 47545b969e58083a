"""What becomes of records that can't be used: an error, or a list of those that were left out."""

import dataclasses
import threading

from hpm.errors import DataError, UsageError
from hpm.pipelines import base

__all__ = ['Policy', 'Skipped', 'Skips']


@dataclasses.dataclass(frozen=True)
class Policy:
  """What `bad_records` says: 'fail', 'skip', or 'limit:N' for at most N different records.

  Attributes:
    skip: whether a bad record is left out, and not an error.
    limit: how many may be left out; None: any number.
  """

  skip: bool
  limit: int | None = None

  @classmethod
  def parse(cls, text: str) -> 'Policy':
    """Raises a UsageError for anything else."""
    if text in ('fail', 'skip'):
      return cls(text == 'skip')
    kind, _, number = str(text).partition(':')
    if kind == 'limit' and number.isdecimal():
      return cls(True, int(number))
    raise UsageError(
      f'bad_records={text!r}: give fail, skip or limit:N, the number of bad records that a run '
      'may leave out'
    )


@dataclasses.dataclass
class Skipped:
  """A record that was left out.

  Attributes:
    id: (index of the file << 32) | number of the record in it.
    what: place, image and fault in one line.
    times: how often it was left out, once an epoch as a rule.
  """

  id: int
  what: str
  times: int = 1


class Skips:
  """The records that a pipeline left out, and where in its stream they were.

  Args:
    policy: how many may be.
    origin: what to call the data in messages.
  """

  def __init__(self, policy: Policy, origin: str):
    self._limit, self._origin = policy.limit, origin
    self._lock = threading.Lock()
    self._records: dict[int, Skipped] = {}
    self._positions: set[int] = set()
    self._run = (-1, 0)  # the position after the last one skipped, and how many in succession
    self.error: DataError | None = None

  def add(self, position: int, ident: int, what: str, epoch_size: int) -> None:
    """Notes a record that is left out.

    Raises:
      DataError: too many, or an epoch of nothing else.
    """
    with self._lock:
      if position not in self._positions:
        self._positions.add(position)
        if ident in self._records:
          self._records[ident].times += 1
        else:
          self._records[ident] = Skipped(ident, what)
      due, length = self._run
      self._run = (position + 1, length + 1 if position == due else 1)
      if self._run[1] >= epoch_size:
        self.error = DataError(
          f'{self._origin}: all {epoch_size} records of an epoch are bad, the last one being {what}'
        )
      elif self._limit is not None and len(self._records) > self._limit:
        self.error = DataError(
          f'more than bad_records=limit:{self._limit} bad records, the last one being {what}'
        )
      if self.error:
        raise self.error

  def note(self, ident: int, what: str) -> None:
    """Notes what is no record of the stream, such as an empty file."""
    self._records.setdefault(ident, Skipped(ident, what))

  def known(self, ident: int) -> str | None:
    """What was wrong with a record when it was seen before."""
    found = self._records.get(ident)
    return found.what if found else None

  def list(self) -> list[Skipped]:
    """In order of files and records."""
    with self._lock:
      return [dataclasses.replace(self._records[ident]) for ident in sorted(self._records)]

  def behind(self, first: int, num_samples: int) -> int:
    """How many were skipped from position `first` on before `num_samples` were delivered."""
    position = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed') + first
    with self._lock:
      ahead = sorted(p for p in self._positions if p >= first)
    skipped = 0
    for place in ahead:
      if place >= position + skipped:
        break
      skipped += 1
    return skipped
