"""Files that a thread of this process is blocked in, as the kernel tells: Linux alone."""

import os
from pathlib import Path
import platform
import stat
import time

__all__ = ['files']

_MARGIN_S = 0.3  # who is in the same call of the same file that much later is blocked in it
# Machine -> number of the system call -> its name, and which argument is a descriptor ('fd') or the
# address of a path.
_CALLS = {
  'x86_64': {
    0: ('read', 'fd'),
    1: ('write', 'fd'),
    2: ('open', 0),
    17: ('pread', 'fd'),
    18: ('pwrite', 'fd'),
    19: ('readv', 'fd'),
    20: ('writev', 'fd'),
    74: ('fsync', 'fd'),
    75: ('fdatasync', 'fd'),
    82: ('rename', 0),
    217: ('getdents', 'fd'),
    257: ('open', 1),
    262: ('stat', 1),
    332: ('stat', 1),
  },
  'aarch64': {
    38: ('rename', 1),
    56: ('open', 1),
    61: ('getdents', 'fd'),
    63: ('read', 'fd'),
    64: ('write', 'fd'),
    65: ('readv', 'fd'),
    66: ('writev', 'fd'),
    67: ('pread', 'fd'),
    68: ('pwrite', 'fd'),
    79: ('stat', 1),
    82: ('fsync', 'fd'),
    83: ('fdatasync', 'fd'),
    291: ('stat', 1),
  },
}
_LONGEST = 4096  # bytes of a path


def files() -> dict[str, str]:
  """Path -> the call that a thread is blocked in; empty where the kernel doesn't tell."""
  before = _calls()
  time.sleep(_MARGIN_S)
  return {
    path: call for thread, (call, path) in _calls().items() if before.get(thread) == (call, path)
  }


def _calls() -> dict[str, tuple[str, str]]:
  """Thread -> the call it is in now, and the file, directory or FIFO that this is about."""
  found = {}
  for thread in os.listdir('/proc/self/task') if os.path.isdir('/proc/self/task') else ():
    try:
      number, *arguments = Path(f'/proc/self/task/{thread}/syscall').read_text().split()
      call, where = _CALLS[platform.machine()][int(number)]
      path = _of_descriptor(int(arguments[0], 16)) if where == 'fd' else _text(arguments[where])
    except (OSError, KeyError, ValueError, IndexError):  # it runs, or is in another call
      continue
    if path is not None:
      found[thread] = (call, path)
  return found


def _of_descriptor(number: int) -> str | None:
  kind = os.fstat(number).st_mode
  path = os.readlink(f'/proc/self/fd/{number}')
  named = path.startswith('/') and not path.startswith('/dev/')
  known = stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISFIFO(kind)
  return path if named and known else None


def _text(address: str) -> str:
  """The path in this process's memory; read as a file, so that a wrong address is an error."""
  memory = os.open('/proc/self/mem', os.O_RDONLY)
  try:
    start = int(address, 16)
    size = min(_LONGEST, 4096 - start % 4096)  # within the page, which is there
    content = os.pread(memory, size, start)
    if b'\0' not in content:
      content += os.pread(memory, _LONGEST, start + size)
  finally:
    os.close(memory)
  return os.fsdecode(content.partition(b'\0')[0])
