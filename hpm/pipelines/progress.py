"""A progress bar for the commands: where somebody watches, on stderr, never in a pipe."""

from collections.abc import Callable, Iterator
import contextlib
import sys

__all__ = ['bar']


@contextlib.contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
  """Shows a bar while the context lasts; yields a function that advances it by so many.

  Args:
    title: the word beside the bar.
    total: what there is to do; None if it isn't known.
  """
  try:
    if not sys.stderr.isatty():
      raise ImportError
    from rich import console, progress
  except ImportError:  # a convenience, for which rich is no requirement
    yield lambda count: None
    return
  columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
  with progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as shown:
    task = shown.add_task(title, total=total)
    yield lambda count: shown.advance(task, count)
