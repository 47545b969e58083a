"""What a process is doing, by named stages, for those who ask while it is blocked."""

from collections.abc import Callable, Iterator
import contextlib
import threading
import time

from hpm import errors

__all__ = ['STAGES', 'Stages']

STAGES = ('start', 'service', 'data', 'staging', 'step', 'checkpoint', 'evaluation', 'end')


class Stages:
  """The stage that the training thread is in, and since when; read from any thread.

  Entering and leaving cost under a microsecond, so a loop may do so in every step. Stages nest: a
  checkpoint within an evaluation is named as that, and the evaluation again when it is written.

  Args:
    clock: seconds, as `time.monotonic`.

  Attributes:
    changes: how often a stage has been entered or left: as long as it stays, nothing has moved.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self.changes = 0
    # Replaced as a whole, never changed, so a reader needs no lock.
    self._stack: tuple[tuple[str, str, float], ...] = (('start', '', clock()),)
    self._owner = threading.get_ident()

  @contextlib.contextmanager
  def stage(self, name: str, detail: object = '') -> Iterator[None]:
    """While it lasts, this is what the process is doing.

    Args:
      name: one of `STAGES`.
      detail: what distinguishes it, such as the number of a step.
    """
    if name not in STAGES:
      raise errors.unknown('stage', name, STAGES)
    before = self._stack
    self._stack = (*before, (name, str(detail), self._clock()))
    self.changes += 1
    try:
      yield
    finally:
      self._stack = before
      self.changes += 1

  def enter(self, name: str, detail: object = '') -> None:
    """This is what the process is doing from now on, outside of any `stage`."""
    if name not in STAGES:
      raise errors.unknown('stage', name, STAGES)
    self._stack = ((name, str(detail), self._clock()),)
    self.changes += 1

  def current(self) -> tuple[str, str, float]:
    """Name, detail and seconds so far of the innermost stage."""
    name, detail, since = self._stack[-1]
    return name, detail, self._clock() - since

  def what(self) -> str:
    """The same in words, as in 'step 12, for 0.4 s'."""
    name, detail, seconds = self.current()
    return f'{name} {detail}'.rstrip() + f', for {seconds:.1f} s'
