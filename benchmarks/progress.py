"""A progress bar, where somebody watches: on a terminal, on stderr, never in a pipe."""

from collections.abc import Callable, Iterator
import contextlib
import sys

__all__ = ['bar']


@contextlib.contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[], None]]:
  """Shows a bar while the context lasts; yields a function that advances it by one step.

  Args:
    title: the word beside the bar.
    total: the number of steps; None if it isn't known.
  """
  if not sys.stderr.isatty():
    yield lambda: None
    return
  from rich.console import Console
  from rich.progress import Progress

  # Lines on stdout pass above the bar where both are the terminal; into a file they go as ever.
  with Progress(
    console=Console(stderr=True),
    transient=True,
    redirect_stdout=sys.stdout.isatty(),
    redirect_stderr=True,
  ) as progress:
    task = progress.add_task(title, total=total)
    yield lambda: progress.advance(task)
