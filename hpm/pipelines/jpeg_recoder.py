"""Re-codes JPEGs into segments, in a process that may die of a damaged file, and checks each one.

    with Recoder() as recoder:
      result = recoder.recode(jpeg)     # Segments, or the reason why this file stays as it is

One recoder serves one thread; a thread each with a recoder of its own keeps all cores busy.
"""

from collections.abc import Callable, Mapping
import contextlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np

from hpm.errors import DataError
from hpm.pipelines import jpeg_segments, jpeg_transcode

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

  def recode(self, jpeg: bytes) -> jpeg_segments.Segments | str:
    """The file in segments, proven to give its pixels; or why it has to stay whole, in a line."""
    return self._ask({'jpeg': jpeg, 'optimize': self._optimize})

  def restore(self, segments: jpeg_segments.Segments) -> bytes:
    """A JPEG of one segment with the coefficients, tables of quantisation and size of the original.

    Raises:
      DataError: the segments are damaged.
    """
    result = self._ask({'segments': segments, 'optimize': self._optimize})
    if isinstance(result, str):
      raise DataError(f'the image cannot be restored: {result}')
    return result

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

  def _ask(self, request: Mapping[str, object]) -> Any:
    for attempt in range(2):
      child = self._child = self._child or _start()
      try:
        pickle.dump(request, child.stdin)  # type: ignore[arg-type]
        child.stdin.flush()  # type: ignore[union-attr]
        break
      except OSError:
        # The file before this one ended the child after its answer.
        self.close()
        if attempt:
          raise
    try:
      return pickle.load(child.stdout)  # type: ignore[arg-type]
    except EOFError:
      code = child.wait()
      self.close()
      return f'libjpeg ended with code {code}'


def _start() -> subprocess.Popen:
  import hpm

  # The child finds the same hpm, wherever this process has it from.
  root = os.path.dirname(os.path.dirname(os.path.abspath(hpm.__file__)))
  path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
  return subprocess.Popen(
    [sys.executable, '-c', 'from hpm.pipelines import jpeg_recoder; jpeg_recoder.serve()'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=os.environ | {'PYTHONPATH': path},
  )


def serve() -> None:
  """Answers the requests of a `Recoder` on stdin until it is closed."""
  answers = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)  # what a library might print is no answer
  requests = sys.stdin.buffer

  def answer(result: object) -> None:
    pickle.dump(result, answers)
    answers.flush()

  while True:
    try:
      request = pickle.load(requests)
    except EOFError:
      return
    try:
      answer(_serve(answer=answer, **request))
    except Exception as error:  # whatever a damaged file brings about, it is this file's alone
      answer(str(error).splitlines()[0] if str(error) else type(error).__name__)


def _serve(
  answer: Callable[[object], None],
  optimize: bool,
  jpeg: bytes = b'',
  segments: jpeg_segments.Segments | None = None,
) -> jpeg_segments.Segments | bytes | str:
  if segments is not None:
    whole, width = jpeg_segments.whole(segments), segments.layout[3]
    return jpeg_transcode.transcode(whole, answer, restarts=False, width=width, optimize=optimize)[
      0
    ]
  if not jpeg.startswith(b'\xff\xd8\xff'):
    return 'not a JPEG'
  pixels = _decode(jpeg)
  recoded, width = jpeg_transcode.transcode(jpeg, answer, optimize=optimize)
  result = jpeg_segments.split(recoded, width)
  _verify(result, pixels)
  return result


def _decode(jpeg: bytes) -> np.ndarray:
  """uint8 [H, W] or [H, W, channels], as the file has them."""
  from PIL import Image

  with Image.open(io.BytesIO(jpeg), formats=['JPEG']) as image:
    return np.asarray(image)


def _verify(segments: jpeg_segments.Segments, pixels: np.ndarray) -> None:
  """Raises a DataError unless the image and its middle come out as they were."""
  height, width = pixels.shape[:2]
  if segments.layout[2:4] != (height, width):
    raise DataError(f're-coded as {segments.layout[2:4]}, not {(height, width)}')
  middle = (height // 4, width // 4, (height + 1) // 2, (width + 1) // 2)
  for top, left, rows, columns in ((0, 0, height, width), middle):
    jpeg, y, x = jpeg_segments.assemble(
      segments.header, segments.layout, segments.lengths, segments.scan, (top, left, rows, columns)
    )
    found = _decode(jpeg)[y : y + rows, x : x + columns]
    if not np.array_equal(found, pixels[top : top + rows, left : left + columns]):
      raise DataError('re-coded, it has other pixels')
