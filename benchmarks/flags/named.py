"""A named set of flags: what presets and recipes share. The command line goes before it."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ['overridden', 'put']

# (a flag of the set) -> the flag of the command line that says the same in another way, if any.
Replaced = Callable[[str], str | None]


def put(options, settings: Mapping[str, Any], replaced: Replaced) -> None:
  """Sets each flag that the command line leaves to the set."""
  for name, value in settings.items():
    if name not in options.given and replaced(name) is None:
      setattr(options, name, value)
      if name in options.open:
        options.open.remove(name)


def overridden(options, kind: str, settings: Mapping[str, Any], replaced: Replaced) -> list[str]:
  """What the command line puts in the place of the set's flags, each in words."""
  words = []
  for name, value in settings.items():
    instead = name if name in options.given else replaced(name)
    if instead is not None and options.given[instead] != value:
      words.append(f'{options.spelled(instead)} ({kind}: {name}={shown(value)})')
  return words


def shown(value: Any) -> str:
  """A value as on the command line."""
  return str(value).lower() if isinstance(value, bool) else f'{value}'
