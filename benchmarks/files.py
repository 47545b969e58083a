"""Files that appear whole or not at all."""

import os
import tempfile

__all__ = ['write']


def write(path: str, content: str | bytes) -> None:
  """Writes a file; its directory is made, and a file of that name is replaced at the end."""
  directory = os.path.dirname(path) or '.'
  os.makedirs(directory, exist_ok=True)
  descriptor, scratch = tempfile.mkstemp(prefix='.writing-', dir=directory)
  try:
    with os.fdopen(descriptor, 'wb') as file:
      file.write(content.encode() if isinstance(content, str) else content)
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)
  except BaseException:
    os.unlink(scratch)
    raise
