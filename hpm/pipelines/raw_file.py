"""Files of decoded images, mapped into memory: nothing is left to decode, and any image is at hand.

A file holds the images' pixels one after another, uint8, RGB, row by row; then a table of `ROW`,
one an image; then the images' names, a line each; then `FOOTER`. All little-endian. Needs NumPy
alone.
"""

from collections.abc import Iterable
import functools
import mmap
import os
import struct
from typing import NamedTuple
import zlib

import numpy as np

from hpm.errors import DataError

__all__ = ['RawFile', 'RawImage', 'write']

# Offset of its pixels, its size, the label as ImageNet's records have it, and the pixels' CRC-32.
ROW = np.dtype(
  [('offset', '<u8'), ('height', '<u4'), ('width', '<u4'), ('label', '<i4'), ('crc', '<u4')]
)
# Images, offset of the table, bytes of the names, CRC-32 of table and names, version, magic.
FOOTER = struct.Struct('<QQQIi8s')
VERSION, MAGIC = 1, b'hpmRaw\r\n'
_REMEDY = 'copy or convert this shard again'


class RawImage(NamedTuple):
  """An image on its way into a file.

  Attributes:
    pixels: uint8 [H, W, 3].
    label: as ImageNet's records have it, from 1 on.
    key: its name.
  """

  pixels: np.ndarray
  label: int
  key: str = ''


def write(path: str, images: Iterable[RawImage]) -> int:
  """Writes a file; returns the number of images."""
  rows, keys, offset = [], [], 0
  with open(path, 'wb') as file:
    for image in images:
      data = np.ascontiguousarray(image.pixels).tobytes()
      height, width = image.pixels.shape[:2]
      rows.append((offset, height, width, image.label, zlib.crc32(data)))
      keys.append(image.key.replace('\n', ' '))
      file.write(data)
      offset += len(data)
    tail = np.array(rows, ROW).tobytes()
    names = '\n'.join(keys).encode()
    file.write(tail + names)
    checksum = zlib.crc32(names, zlib.crc32(tail))
    file.write(FOOTER.pack(len(rows), offset, len(names), checksum, VERSION, MAGIC))
  return len(rows)


class RawFile:
  """A file, opened for reading; threads may share it.

  Args:
    path: what `write` made.

  Attributes:
    path: the same.
    table: `ROW` [N].

  Raises:
    DataError: it can't be read, is no such file, of another version, cut off or damaged.
  """

  def __init__(self, path: str):
    self.path = path
    try:
      with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        if size < FOOTER.size:
          raise DataError(f'{path} is no file of raw images, or only its beginning: {_REMEDY}')
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
      raise DataError(f'{path} cannot be read: {error.strerror}') from None
    count, table, names, checksum, version, magic = FOOTER.unpack_from(
      self._map, size - FOOTER.size
    )
    if magic != MAGIC:
      raise DataError(f'{path} is no file of raw images, or only its beginning: {_REMEDY}')
    if version != VERSION:
      raise DataError(f'{path} is a file of raw images of version {version}, not {VERSION}')
    self._names = slice(table + count * ROW.itemsize, size - FOOTER.size)
    if self._names.stop - self._names.start != names:
      raise DataError(f'{path} is not as long as it says: {_REMEDY}')
    if zlib.crc32(memoryview(self._map)[table : self._names.stop]) != checksum:
      raise DataError(f'{path}: the checksum of its table is wrong: {_REMEDY}')
    if count * ROW.itemsize + names + FOOTER.size > size:
      raise DataError(f'{path} is not as long as it says: {_REMEDY}')
    self.table = np.frombuffer(self._map, ROW, count, table)
    ends = [
      offset + 3 * height * width
      for offset, height, width in self.table[['offset', 'height', 'width']].tolist()
    ]
    if max(ends, default=0) > table:
      raise DataError(f'{path}: its table leads out of the pixels: {_REMEDY}')
    # Plain integers: reading fields of NumPy's rows would take longer than cutting an image.
    places = zip(*(self.table[name].tolist() for name in ('offset', 'height', 'width')))
    self._places = list(places)
    self._bytes = np.frombuffer(self._map, np.uint8)

  def __len__(self) -> int:
    return len(self._places)

  @functools.cached_property
  def keys(self) -> list[str]:
    """The images' names."""
    return self._map[self._names].decode(errors='replace').split('\n')

  def image(self, index: int) -> np.ndarray:
    """An image, uint8 [H, W, 3]: a view of the file, of which only what is used is read."""
    offset, height, width = self._places[index]
    return self._bytes[offset : offset + height * width * 3].reshape(height, width, 3)

  def check(self, index: int) -> None:
    """Raises a DataError if an image's checksum is wrong."""
    if zlib.crc32(self.image(index).data) != self.table['crc'][index]:
      raise DataError(
        f'{self.path}: record {index} is damaged: the checksum of its pixels is wrong; {_REMEDY}'
      )
