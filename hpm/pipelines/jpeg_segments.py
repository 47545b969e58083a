"""JPEGs cut into segments, of which a small JPEG of just a window is put together.

A decoder has to entropy-decode a JPEG from its start, whatever part of it is wanted. With restart
markers it can begin at any of them; so a file that was re-coded with markers at equal distances
(`jpeg_transcode`) is kept as a header and a table of segments, each about 64 pixels of one row of
MCUs. The segments that a window touches, behind a header that says how many they are, form a valid
JPEG that any decoder reads, and its pixels are those of the whole image. docs/indexed_jpeg.md
describes the layout; this module needs neither TensorFlow nor a decoder.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from hpm.errors import DataError

__all__ = [
  'HEADER',
  'LAYOUT',
  'LENGTHS',
  'SCAN',
  'VERSION',
  'Segments',
  'assemble',
  'cover',
  'split',
  'whole',
]

VERSION = 1

# The features of a record.
HEADER = 'jpeg/header'
LAYOUT = 'jpeg/layout'
LENGTHS = 'jpeg/lengths'
SCAN = 'jpeg/scan'

# A decoder interpolates chroma only where a component is more than two samples wide.
MIN_WIDTH = 5

_SOI, _EOI, _SOS, _DRI = 0xD8, 0xD9, 0xDA, 0xDD
_SOF = (0xC0, 0xC1)  # sequential, Huffman-coded
_RESTARTS = tuple(bytes([0xFF, 0xD0 + number]) for number in range(8))
_END = b'\xff\xd9'


@dataclasses.dataclass(frozen=True)
class Segments:
  """One JPEG in segments.

  Attributes:
    header: from SOI to the end of the SOS header, for the whole coded frame.
    layout: int64 [9]: version; the offset of the height in the header (the width follows; both are
      two bytes, big-endian); height and width of the image; width of the coded frame, which may
      be larger; height and width of a segment in pixels; the pixels above and below, and to the
      left and right of a window that its own pixels depend on.
    lengths: uint16 [rows * columns], the bytes of each segment, row by row.
    scan: the segments, joined without markers.
  """

  header: bytes
  layout: tuple[int, ...]
  lengths: np.ndarray
  scan: bytes

  def features(self) -> dict[str, bytes | np.ndarray]:
    """The features of a record, as `records.encode_example` takes them."""
    return {
      HEADER: self.header,
      LAYOUT: np.asarray(self.layout, np.int64),
      LENGTHS: self.lengths.astype('<u2').tobytes(),
      SCAN: self.scan,
    }


def split(jpeg: bytes, width: int | None = None) -> Segments:
  """Cuts a JPEG whose restart interval divides its rows of MCUs.

  Args:
    jpeg: as `jpeg_transcode.transcode` makes it.
    width: of the image, pixels, where the coded frame is wider; None: the frame's.

  Raises:
    DataError: any other JPEG: several scans, no restart markers, intervals across rows.
  """
  offset, interval, frame, scan = _parse(jpeg)
  height, coded_width = _uint16(jpeg, frame + 1), _uint16(jpeg, frame + 3)
  factors = [divmod(jpeg[frame + 7 + 3 * i], 16) for i in range(jpeg[frame + 5])]
  if len(factors) == 1:
    factors = [(1, 1)]  # one component is never interleaved: its MCU is a block
  most_across, most_down = (max(sides) for sides in zip(*factors))
  segment = (8 * most_down, 8 * most_across * interval)
  pieces = _pieces(jpeg, scan)
  num_mcus = -(-coded_width // (8 * most_across))
  if not interval or num_mcus % interval:
    raise DataError(f'a restart interval of {interval} does not divide a row of {num_mcus} MCUs')
  rows, columns = -(-height // segment[0]), num_mcus // interval
  if len(pieces) != rows * columns:
    raise DataError(f'{len(pieces)} segments where {rows} rows of {columns} were expected')
  lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
  if lengths.max() > 0xFFFF:
    raise DataError(f'a segment of {lengths.max()} bytes is longer than 65535')
  reach_down = int(any(down < most_down for _, down in factors))
  reach_across = int(any(across < most_across for across, _ in factors))
  layout = (
    VERSION,
    offset,
    height,
    width or coded_width,
    coded_width,
    *segment,
    reach_down,
    reach_across,
  )
  return Segments(jpeg[:scan], layout, lengths.astype(np.uint16), b''.join(pieces))


def _parse(jpeg: bytes) -> tuple[int, int, int, int]:
  """Offset of the height, restart interval, offset of the frame's parameters, and of the scan."""
  if jpeg[:2] != bytes([0xFF, _SOI]):
    raise DataError('not a JPEG')
  position, frame, interval = 2, 0, 0
  while position + 4 <= len(jpeg):
    marker, length = jpeg[position + 1], _uint16(jpeg, position + 2)
    if jpeg[position] != 0xFF:
      break
    if marker in _SOF:
      frame = position + 4
    elif marker == _DRI:
      interval = _uint16(jpeg, position + 4)
    elif marker == _SOS:
      if not frame or jpeg[position + 4] != jpeg[frame + 5]:
        break
      return frame + 1, interval, frame, position + 2 + length
    position += 2 + length
  raise DataError('not a JPEG of one sequential, Huffman-coded scan')


def _pieces(jpeg: bytes, start: int) -> list[bytes]:
  """The entropy-coded segments between the restart markers from `start` on, up to EOI."""
  data = np.frombuffer(jpeg, np.uint8)[start:]
  escapes = np.flatnonzero(data[:-1] == 0xFF)
  markers = escapes[data[escapes + 1] != 0]  # FF 00 is a byte FF of the data
  kinds = data[markers + 1]
  expected = 0xD0 + np.arange(len(markers)) % 8
  expected[-1:] = _EOI
  if not np.array_equal(kinds, expected):
    raise DataError('not a JPEG of one scan with restart markers in turn')
  starts = [start, *(start + markers + 2).tolist()]
  ends = (start + markers).tolist()
  return [jpeg[i:j] for i, j in zip(starts, ends)]


def _uint16(data: bytes, offset: int) -> int:
  return int.from_bytes(data[offset : offset + 2], 'big')


def cover(layout: Sequence[int], window: Sequence[int]) -> tuple[int, int, int, int]:
  """The segments that the pixels of a window depend on: first and last row, and column.

  Args:
    layout: of `Segments`.
    window: top, left, height, width in pixels, inside the image.
  """
  _, _, height, _, coded_width, down, across, reach_down, reach_across = map(int, layout)
  top, left, rows, columns = map(int, window)
  first_column = max(left - reach_across, 0) // across
  last_column = min(left + columns - 1 + reach_across, coded_width - 1) // across
  end = min((last_column + 1) * across, coded_width)
  if reach_across and first_column and end - first_column * across < MIN_WIDTH:
    first_column -= 1
  return (
    max(top - reach_down, 0) // down,
    min(top + rows - 1 + reach_down, height - 1) // down,
    first_column,
    last_column,
  )


def assemble(
  header: bytes,
  layout: Sequence[int],
  lengths: np.ndarray,
  scan: bytes,
  window: Sequence[int],
) -> tuple[bytes, int, int]:
  """A JPEG of the segments that a window touches, and where in it the window begins.

  Args:
    header: and `layout`, `lengths`, `scan`: of `Segments`.
    window: top, left, height, width in pixels, inside the image.

  Returns:
    The JPEG, and the window's top and left in it, pixels.
  """
  _, offset, height, _, coded_width, down, across, _, _ = map(int, layout)
  first_row, last_row, first, last = cover(layout, window)
  per_row = -(-coded_width // across)
  count = last + 1 - first
  ends = np.cumsum(lengths, dtype=np.int64)
  rows = ends.reshape(-1, per_row)[first_row : last_row + 1, first : last + 1]
  starts = rows[:, 0] - lengths.reshape(-1, per_row)[first_row : last_row + 1, first]
  # starts and ends of the segments of each row, in one flat list
  bounds = np.concatenate([starts[:, None], rows], 1).ravel().tolist()
  step = count + 1
  parts: list[bytes] = [b''] * (2 * len(rows) * count)
  parts[0::2] = [
    scan[bounds[i] : bounds[i + 1]]
    for row in range(0, len(bounds), step)
    for i in range(row, row + count)
  ]
  parts[1::2] = itertools.islice(itertools.cycle(_RESTARTS), len(parts) // 2)
  parts[-1] = _END
  top, left = first_row * down, first * across
  size = (min((last_row + 1) * down, height) - top) << 16 | (
    min((last + 1) * across, coded_width) - left
  )
  return (
    b''.join([header[:offset], size.to_bytes(4, 'big'), header[offset + 4 :], *parts]),
    int(window[0]) - top,
    int(window[1]) - left,
  )


def whole(segments: Segments) -> bytes:
  """The JPEG that was split: all coefficients of the original, and the frame that was coded."""
  _, _, height, _, coded_width, *_ = segments.layout
  window = (0, 0, height, coded_width)
  return assemble(segments.header, segments.layout, segments.lengths, segments.scan, window)[0]
