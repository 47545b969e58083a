"""Names to functions, without importing the functions' modules.

A registry is a plain dictionary from a name to `'module:function'`. Reading it costs nothing, so a
command line can list and check names before TensorFlow is imported.
"""

from collections.abc import Callable, Mapping
import importlib
from typing import Any

from hpm import errors

__all__ = ['by_path', 'lazy', 'resolve']


def resolve(kind: str, registry: Mapping[str, str], name: str) -> Any:
  """The function that `name` stands for; UsageError with the nearest names if there is none."""
  if name not in registry:
    raise errors.unknown(kind, name, registry)
  module, _, attribute = registry[name].partition(':')
  return getattr(importlib.import_module(module), attribute)


def by_path(kind: str, path: str) -> Any:
  """The function that a user's own 'module:function' stands for; UsageError if there is none."""
  module, _, attribute = path.partition(':')
  try:
    return getattr(importlib.import_module(module), attribute)
  except ModuleNotFoundError as error:
    raise errors.UsageError(
      f'{kind} {path!r}: no module {error.name!r}: install it, or put it on PYTHONPATH'
    ) from error
  except AttributeError as error:
    raise errors.UsageError(f'{kind} {path!r}: {module!r} has no {attribute!r}') from error


def lazy(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
  """A module `__getattr__` (PEP 562) that imports what is exported when it is first used.

  Args:
    package: the package's `__name__`, for the error.
    exports: public name -> 'module' (the module itself) or 'module:attribute'.
  """

  def __getattr__(name: str) -> Any:
    if name not in exports:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    module, _, attribute = exports[name].partition(':')
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded

  return __getattr__
