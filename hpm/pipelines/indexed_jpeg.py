"""JPEGs with an index, by which a small JPEG of just a window is cut out of them.

A decoder has to entropy-decode a JPEG from its start, whatever part of it is wanted; but at restart
markers it can begin anew. An indexed JPEG has them at the same places of every row, about 64 pixels
apart, and a table of where they are in a marker of its own. The segments that a window touches,
behind a header with their size, form a valid JPEG that any decoder reads, and its pixels are those
of the whole image. To everybody else the file is an ordinary JPEG.

docs/indexed_jpeg.md describes the layout; this module needs neither TensorFlow nor a decoder.
"""

from collections.abc import Sequence
import itertools
import struct
from typing import NamedTuple

import numpy as np

from hpm.errors import DataError

__all__ = [
  'END',
  'LAYOUT_OFFSET',
  'LENGTHS_OFFSET',
  'PREFIX',
  'PREFIX_OFFSET',
  'RESTARTS',
  'START',
  'VERSION',
  'Layout',
  'add_index',
  'assemble',
  'cover',
  'has_index',
  'layout',
  'lengths',
  'without_index',
]

VERSION = 1

PREFIX_OFFSET = 6
PREFIX = b'hpmIndex' + struct.pack('<i', VERSION)
LAYOUT_OFFSET = PREFIX_OFFSET + len(PREFIX)
LENGTHS_OFFSET = LAYOUT_OFFSET + 4 * 10
MAX_SEGMENTS = (0xFFFF - (LENGTHS_OFFSET - 4)) // 2  # what a marker can hold

# Decoders interpolate chroma only where it is more than two samples wide.
MIN_WIDTH = 5

RESTARTS = tuple(bytes([0xFF, 0xD0 + number]) for number in range(8))

START, END = b'\xff\xd8', b'\xff\xd9'

_INDEX = b'\xff\xef'
_SOF, _SOS, _DRI = (0xC0, 0xC1), 0xDA, 0xDD  # frames that are sequential and Huffman-coded


class Layout(NamedTuple):
  """Where things are, as it stands in the index: int32, little-endian, in this order.

  Attributes:
    size: bytes of the whole file; an index in a file of another size isn't one.
    frame: offset of the frame's height; its width follows, each two bytes, big-endian.
    scan: offset of the first segment.
    height, width: of the image, pixels.
    down, across: height and width of a segment, pixels.
    rows, columns: segments.
    reach: bit 0: a window's pixels depend on one more pixel to the left and right; bit 1: above
      and below.
  """

  size: int
  frame: int
  scan: int
  height: int
  width: int
  down: int
  across: int
  rows: int
  columns: int
  reach: int


_LAYOUT = struct.Struct(f'<{len(Layout._fields)}i')


def has_index(encoded: bytes) -> bool:
  """Whether a file is an indexed JPEG of this version, and nothing of it is missing."""
  return (
    encoded[PREFIX_OFFSET:LAYOUT_OFFSET] == PREFIX
    and len(encoded) > LENGTHS_OFFSET
    and layout(encoded).size == len(encoded)
    and _is_sound(layout(encoded))
  )


def _is_sound(where: Layout) -> bool:
  """Whether nothing that the index says leads out of the file, as jpeg_native.c has it too."""
  if min(where) < 0 or min(where.height, where.width, where.down, where.across) < 1:
    return False
  rows, columns = -(-where.height // where.down), -(-where.width // where.across)
  header = LENGTHS_OFFSET + 2 * rows * columns
  return (rows, columns) == (where.rows, where.columns) and (
    header <= where.frame and where.frame + 4 <= where.scan <= where.size
  )


def layout(encoded: bytes) -> Layout:
  """The fixed part of the index of an indexed JPEG."""
  return Layout._make(_LAYOUT.unpack_from(encoded, LAYOUT_OFFSET))


def lengths(encoded: bytes, where: Layout) -> np.ndarray:
  """The bytes of each segment without its marker: uint16 [rows, columns]."""
  count = where.rows * where.columns
  return np.frombuffer(encoded, '<u2', count, LENGTHS_OFFSET).reshape(where.rows, where.columns)


def cover(where: Layout, window: Sequence[int]) -> tuple[int, int, int, int]:
  """The segments that a window's pixels depend on: first row, last row, first and last column.

  Args:
    where: from `layout`.
    window: top, left, height, width in pixels, inside the image.
  """
  top, left, height, width = map(int, window)
  beside, above = where.reach & 1, where.reach >> 1
  first = max(left - beside, 0) // where.across
  last = min(left + width - 1 + beside, where.width - 1) // where.across
  covered = min((last + 1) * where.across, where.width) - first * where.across
  if beside and first and covered < MIN_WIDTH:
    first -= 1
  return (
    max(top - above, 0) // where.down,
    min(top + height - 1 + above, where.height - 1) // where.down,
    first,
    last,
  )


def assemble(encoded: bytes, window: Sequence[int]) -> tuple[bytes, int, int]:
  """A JPEG of the segments that a window touches, and where in it the window begins.

  Args:
    encoded: an indexed JPEG.
    window: top, left, height, width in pixels, inside the image.

  Returns:
    The JPEG, and the window's top and left in it, pixels.
  """
  where = layout(encoded)
  first_row, last_row, first, last = cover(where, window)
  sizes = lengths(encoded, where)
  # Each segment ends in a marker of two bytes, which is left out.
  ends = np.cumsum(sizes.ravel() + np.int64(2)).reshape(sizes.shape) + (where.scan - 2)
  ends = ends[first_row : last_row + 1, first : last + 1]
  starts = ends - sizes[first_row : last_row + 1, first : last + 1]
  parts: list[bytes] = [b''] * (2 * ends.size)
  parts[0::2] = [
    encoded[start:end] for start, end in zip(starts.ravel().tolist(), ends.ravel().tolist())
  ]
  parts[1::2] = itertools.islice(itertools.cycle(RESTARTS), ends.size)
  parts[-1] = END
  top, left = first_row * where.down, first * where.across
  height = min((last_row + 1) * where.down, where.height) - top
  width = min((last + 1) * where.across, where.width) - left
  header = LENGTHS_OFFSET + 2 * sizes.size
  small = b''.join(
    [
      START,
      encoded[header : where.frame],
      (height << 16 | width).to_bytes(4, 'big'),
      encoded[where.frame + 4 : where.scan],
      *parts,
    ]
  )
  return small, int(window[0]) - top, int(window[1]) - left


def without_index(encoded: bytes) -> bytes:
  """The JPEG alone: its restart markers stay."""
  where = layout(encoded)
  return START + encoded[LENGTHS_OFFSET + 2 * where.rows * where.columns :]


def add_index(jpeg: bytes) -> bytes:
  """An indexed JPEG of one whose restart interval divides its rows of MCUs.

  Raises:
    DataError: any other file: several scans, no restart markers, intervals across rows, more or
      longer segments than an index can hold.
  """
  try:
    return _with_index(jpeg)
  except (IndexError, ValueError, struct.error, ZeroDivisionError) as error:
    raise DataError(f'not a whole JPEG ({error})') from None


def _with_index(jpeg: bytes) -> bytes:
  frame, interval, scan = _parse(jpeg)
  height, width = struct.unpack_from('>HH', jpeg, frame)
  factors = [divmod(jpeg[frame + 6 + 3 * i], 16) for i in range(jpeg[frame + 4])]
  if len(factors) == 1:
    factors = [(1, 1)]  # one component is never interleaved: its MCU is a block
  most_across, most_down = (max(sides) for sides in zip(*factors))
  num_mcus = -(-width // (8 * most_across))
  if not interval or num_mcus % interval:
    raise DataError(f'a restart interval of {interval} does not divide a row of {num_mcus} MCUs')
  rows, columns = -(-height // (8 * most_down)), num_mcus // interval
  sizes = _segment_lengths(jpeg, scan)
  if len(sizes) != rows * columns:
    raise DataError(f'{len(sizes)} segments where {rows} rows of {columns} were expected')
  if len(sizes) > MAX_SEGMENTS or sizes.max() > 0xFFFF:
    raise DataError(f'{len(sizes)} segments of up to {sizes.max()} bytes do not fit into an index')
  beside = any(across < most_across for across, _ in factors)
  above = any(down < most_down for _, down in factors)
  moved = LENGTHS_OFFSET + 2 * len(sizes) - len(START)
  index = PREFIX + _LAYOUT.pack(
    len(jpeg) + moved,
    frame + moved,
    scan + moved,
    height,
    width,
    8 * most_down,
    8 * most_across * interval,
    rows,
    columns,
    beside + 2 * above,
  )
  index += sizes.astype('<u2').tobytes()
  return START + _INDEX + struct.pack('>H', len(index) + 2) + index + jpeg[len(START) :]


def _parse(jpeg: bytes) -> tuple[int, int, int]:
  """Offset of the frame's height, restart interval, and offset of the scan's data."""
  if not jpeg.startswith(START):
    raise DataError('not a JPEG')
  position, frame, interval = 2, 0, 0
  while position + 4 <= len(jpeg) and jpeg[position] == 0xFF:
    marker = jpeg[position + 1]
    (length,) = struct.unpack_from('>H', jpeg, position + 2)
    if marker in _SOF:
      frame = position + 5
    elif marker == _DRI:
      (interval,) = struct.unpack_from('>H', jpeg, position + 4)
    elif marker == _SOS:
      if not frame or jpeg[position + 4] != jpeg[frame + 4]:
        break
      return frame, interval, position + 2 + length
    position += 2 + length
  raise DataError('not a JPEG of one sequential, Huffman-coded scan')


def _segment_lengths(jpeg: bytes, start: int) -> np.ndarray:
  """Bytes between the restart markers from `start` on, the last one up to EOI: int64 [N]."""
  data = np.frombuffer(jpeg, np.uint8)[start:]
  escapes = np.flatnonzero(data[:-1] == 0xFF)
  markers = escapes[data[escapes + 1] != 0]  # FF 00 is a byte FF of the data
  expected = 0xD0 + np.arange(len(markers)) % 8
  expected[-1:] = END[1]
  if not len(markers) or not np.array_equal(data[markers + 1], expected):
    raise DataError('not a JPEG of one scan with restart markers in turn')
  return np.diff(markers, prepend=-2) - 2
