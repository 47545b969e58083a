"""Files of JSON that others may have written."""

import json
import os
from typing import Any

__all__ = ['parse', 'read']

_MOST_BYTES = 2**28


def read(path: str | os.PathLike[str]) -> Any:
  """What a file holds, of any of JSON's kinds.

  Raises:
    OSError: it can't be read.
    ValueError: it is no JSON, no regular file, too large or nested too deeply.
  """
  if os.path.exists(path) and not os.path.isfile(path):
    raise ValueError('not a regular file')
  with open(path, 'rb') as file:
    text = file.read(_MOST_BYTES + 1)
  if len(text) > _MOST_BYTES:
    raise ValueError(f'more than {_MOST_BYTES >> 20} MiB')
  return parse(text)


def parse(text: str | bytes) -> Any:
  """What a text holds.

  Raises:
    ValueError: it is no JSON, or nested too deeply.
  """
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError('nested too deeply') from None
