"""Makes indexed JPEGs, in a process that may die of a damaged file, and checks each one.

    with Recoder() as recoder:
      indexed, reason = recoder.recode(jpeg)    # (bytes, ''), or (None, why it stays as it is)

One recoder serves one thread; a thread each with a recoder of its own keeps all cores busy.
"""

from collections.abc import Callable
import contextlib
import importlib.util
import io
import os
from pathlib import Path
import signal
import struct
import subprocess
import sys
from typing import BinaryIO

import numpy as np

from hpm.errors import DataError
from hpm.pipelines import indexed_jpeg, jpeg_transcode

__all__ = ['Recoder', 'serve']


class Recoder:
  """A child process that re-codes; it is started anew whenever a file ends it.

  Args:
    optimize: Huffman tables for each image: some 3 % smaller, and half as fast.

  Raises:
    DataError: Pillow isn't there, or no libjpeg-turbo is.
  """

  def __init__(self, optimize: bool = True):
    if importlib.util.find_spec('PIL') is None:
      raise DataError('re-coding JPEGs needs Pillow: pip install pillow')
    jpeg_transcode.load()
    self._optimize = optimize
    self._child: subprocess.Popen | None = None

  def recode(self, jpeg: bytes) -> tuple[bytes | None, str]:
    """The file with an index, proven to give its pixels; or None, and in a line why not."""
    for attempt in range(2):
      child = self._child = self._child or _start()
      try:
        _send(child.stdin, self._optimize, jpeg)  # type: ignore[arg-type]
        break
      except OSError:
        # The file before this one ended the child after its answer.
        self.close()
        if attempt:
          raise
    try:
      done, content = _receive(child.stdout)  # type: ignore[arg-type]
    except EOFError:  # before its answer, or in the middle of it
      code = child.wait()
      self.close()
      return None, f'libjpeg ended with code {code}'
    return (content, '') if done else (None, content.decode(errors='replace'))

  def close(self) -> None:
    """Ends the child process."""
    child, self._child = self._child, None
    if child:
      with contextlib.suppress(OSError):
        child.stdin.close()  # type: ignore[union-attr]
      child.stdout.close()  # type: ignore[union-attr]
      child.kill()
      child.wait()

  def __enter__(self) -> 'Recoder':
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


# A message is a flag, a length and so many bytes: the child reads files that may be hostile, so
# nothing that it answers may be more than bytes.
_HEAD = struct.Struct('<?Q')


def _send(stream: BinaryIO, flag: bool, content: bytes) -> None:
  stream.write(_HEAD.pack(flag, len(content)))
  stream.write(content)
  stream.flush()


def _receive(stream: BinaryIO) -> tuple[bool, bytes]:
  """The flag and the bytes of a message; EOFError: it isn't whole."""
  head = stream.read(_HEAD.size)
  if len(head) < _HEAD.size:
    raise EOFError
  flag, length = _HEAD.unpack(head)
  content = stream.read(length)
  if len(content) < length:
    raise EOFError
  return flag, content


def _start() -> subprocess.Popen:
  # The child finds the same hpm, wherever this process has it from.
  root = Path(__file__).resolve().parents[2]
  path = os.pathsep.join(filter(None, [str(root), os.environ.get('PYTHONPATH')]))
  return subprocess.Popen(
    [sys.executable, '-c', 'from hpm.pipelines import jpeg_recoder; jpeg_recoder.serve()'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=os.environ | {'PYTHONPATH': path},
  )


def serve() -> None:
  """Answers the requests of a `Recoder` on stdin until it is closed."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: whoever asks closes this
  answers = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)  # what a library might print is no answer
  requests = sys.stdin.buffer

  def answer(indexed: bytes | None, reason: str) -> None:
    try:
      _send(answers, indexed is not None, reason.encode() if indexed is None else indexed)
    except BrokenPipeError:  # whoever asked was ended
      os._exit(1)

  while True:
    try:
      optimize, jpeg = _receive(requests)
    except EOFError:  # closed, or whoever asked was ended
      return
    try:
      answer(_recode(jpeg, optimize, lambda message: answer(None, message)), '')
    except Exception as error:  # whatever a damaged file brings about, it is this file's alone
      answer(None, (str(error).splitlines() or [type(error).__name__])[0])


def _recode(jpeg: bytes, optimize: bool, on_error: Callable[[str], None]) -> bytes:
  """The indexed JPEG; DataError: it can't be made. `on_error` as for `jpeg_transcode`."""
  if not jpeg.startswith(b'\xff\xd8\xff'):
    raise DataError('not a JPEG')
  pixels = _decode(jpeg)
  recoded = jpeg_transcode.transcode(
    jpeg, on_error, max_segments=indexed_jpeg.MAX_SEGMENTS, optimize=optimize
  )
  indexed = indexed_jpeg.add_index(recoded)
  _verify(indexed, pixels)
  return indexed


def _decode(jpeg: bytes) -> np.ndarray:
  """uint8 [H, W] or [H, W, channels], as the file has them."""
  from PIL import Image

  with Image.open(io.BytesIO(jpeg), formats=['JPEG']) as image:
    return np.asarray(image)


def _verify(indexed: bytes, pixels: np.ndarray) -> None:
  """Raises a DataError unless the image, all its segments and its middle come out as they were."""
  height, width = pixels.shape[:2]
  middle = (height // 4, width // 4, (height + 1) // 2, (width + 1) // 2)
  for window in ((0, 0, height, width), middle):
    jpeg, y, x = indexed_jpeg.assemble(indexed, window)
    top, left, rows, columns = window
    found = _decode(jpeg)[y : y + rows, x : x + columns]
    if not np.array_equal(found, pixels[top : top + rows, left : left + columns]):
      raise DataError('re-coded, it has other pixels')
  if not np.array_equal(_decode(indexed), pixels):
    raise DataError('re-coded, it has other pixels')
