"""The compiled reader of JPEGs: `jpeg_native.c`, built by `python -m hpm.pipelines compile`.

It needs a C compiler and libjpeg-turbo's headers when it is built, and neither when it is used. The
library lies in the user's cache directory, under a name that says what it was made of: another
version of the source, or another CPU, has its own. Without it the same images come out more slowly.
"""

from collections.abc import Sequence
import contextlib
import ctypes
import functools
import hashlib
import os
from pathlib import Path
import platform
import shutil
import subprocess
import tempfile

import numpy as np

from hpm.errors import DataError

__all__ = [
  'INSTALL',
  'build',
  'evaluation_images',
  'is_built',
  'library_path',
  'require',
  'resized_windows',
  'training_images',
]

INSTALL = 'python -m hpm.pipelines compile'
_SOURCE = Path(__file__).with_name('jpeg_native.c')
# Contracted multiply-adds would round otherwise than TensorFlow's kernels do.
_FLAGS = ('-O3', '-march=native', '-ffp-contract=off', '-shared', '-fPIC')
_LINKED = ('-ljpeg', '-lm')
_PACKAGES = 'apt install gcc libjpeg62-turbo-dev (Ubuntu: libjpeg-turbo8-dev)'


def library_path() -> Path:
  """Where the library of this source and this CPU is, or would be."""
  parts = [_SOURCE.read_bytes(), ' '.join(_FLAGS).encode(), platform.machine().encode()]
  with contextlib.suppress(OSError):
    lines = Path('/proc/cpuinfo').read_bytes().splitlines()
    parts += [line for line in lines if line.startswith((b'flags', b'Features'))][:1]
  name = hashlib.sha256(b'\0'.join(parts)).hexdigest()[:16]
  cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  return Path(cache) / 'hpm' / f'jpeg_native-{name}.so'


def is_built() -> bool:
  """Whether the library is there."""
  return library_path().exists()


def require(option: str) -> None:
  """Raises a DataError with the command that builds the library if it isn't there."""
  if not is_built():
    raise DataError(f'{option}: it is not built yet: {INSTALL}')


def build() -> Path:
  """Compiles the library unless it is there; where it is.

  Raises:
    DataError: no compiler, no headers, another libjpeg than libjpeg-turbo, or no room.
  """
  path = library_path()
  if path.exists():
    return path
  compiler = shutil.which('cc') or shutil.which('gcc') or shutil.which('clang')
  if not compiler:
    raise DataError(f'no C compiler: {_PACKAGES}')
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
    made = Path(scratch) / path.name
    command = [compiler, *_FLAGS, str(_SOURCE), '-o', str(made), *_LINKED]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      why = next((line for line in done.stderr.splitlines() if 'error' in line), 'it fails')
      raise DataError(f'{why.strip()}: {_PACKAGES}')
    os.replace(made, path)  # whole or not at all, whoever else builds it
  return path


def training_images(
  files: Sequence[bytes], windows: np.ndarray, flips: np.ndarray, out: np.ndarray
) -> list[int]:
  """Windows of images, resized bilinearly and some of them mirrored.

  Args:
    files: [B], JPEGs with an index or without.
    windows: int32 [B, 4]: top, left, height, width.
    flips: int32 [B]: 1 where left and right are exchanged.
    out: uint8 [B, size, size, 3], filled.

  Returns:
    The numbers of those that it leaves to other decoders: no JPEGs, CMYK, damaged ones.
  """
  return _call('hpm_training_images', *_bytes(files), windows, flips, out.shape[1], out=out)


def evaluation_images(files: Sequence[bytes], short_side: int, out: np.ndarray) -> list[int]:
  """The middles of images whose short side becomes `short_side` pixels, antialiased.

  Args:
    files: as for `training_images`.
    short_side: pixels.
    out: uint8 [B, size, size, 3], filled.

  Returns:
    As `training_images`.
  """
  return _call('hpm_evaluation_images', *_bytes(files), out.shape[1], short_side, out=out)


def resized_windows(windows: Sequence[np.ndarray], flips: np.ndarray, out: np.ndarray) -> None:
  """Resizes bilinearly, and mirrors some.

  Args:
    windows: [B], uint8 [h, w, 3], parts of larger arrays: a byte behind the last one is read.
    flips: int32 [B]: 1 where left and right are exchanged.
    out: uint8 [B, size, size, 3], filled.
  """
  count = len(windows)
  pointers = (ctypes.c_void_p * count)(
    *(window.__array_interface__['data'][0] for window in windows)
  )
  strides = np.fromiter((window.strides[0] for window in windows), np.int64, count)
  sides = np.array([window.shape[:2] for window in windows], np.int32)
  _call('hpm_resized_windows', pointers, strides, sides, flips, out.shape[1], out=out)


def _bytes(files: Sequence[bytes]) -> tuple[ctypes.Array, np.ndarray]:
  """Their addresses and sizes."""
  count = len(files)
  return (ctypes.c_char_p * count)(*files), np.fromiter(map(len, files), np.int64, count)


def _call(
  name: str, pointers: ctypes.Array, *arguments: 'np.ndarray | int', out: np.ndarray
) -> list[int]:
  """The numbers of what was declined."""
  declined = np.zeros(len(pointers), np.int32)
  given = [_address(a) if isinstance(a, np.ndarray) else a for a in (*arguments, out, declined)]
  if getattr(_library(), name)(len(pointers), pointers, *given):
    raise MemoryError(f'no memory for {len(pointers)} images of {out.shape[1]} pixels')
  return np.flatnonzero(declined).tolist()


def _address(array: np.ndarray) -> ctypes.c_void_p:
  assert array.flags.c_contiguous
  return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _library() -> ctypes.CDLL:
  try:
    return ctypes.CDLL(str(library_path()))
  except OSError as error:
    raise DataError(f'{error}: build it ({INSTALL})') from None
