"""TFRecord files without TensorFlow: listing shards, finding, checking and writing records.

A record is its length (uint64), a checksum of these 8 bytes, the data, a checksum of the data; all
little-endian, the checksums being masked CRC-32C
(https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

from collections.abc import Iterable, Mapping, Sequence
import concurrent.futures
import functools
import os
import re
import struct
from typing import BinaryIO

import numpy as np

from hpm.errors import DataError

__all__ = [
  'BBOX',
  'ENCODED',
  'FILENAME',
  'LABEL',
  'count_records',
  'crc32c',
  'encode_example',
  'read_record',
  'record_offsets',
  'shard_files',
  'write_record',
]

# The features of ImageNet's records that the pipelines read.
ENCODED = 'image/encoded'
LABEL = 'image/class/label'
FILENAME = 'image/filename'
BBOX = tuple(f'image/object/bbox/{side}' for side in ('ymin', 'xmin', 'ymax', 'xmax'))

_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_SHARD = re.compile(r'^(.+)-(\d+)-of-(\d+)$')


def shard_files(data_dir: str, split: str) -> list[str]:
  """The sorted paths of all shards of `split`, `DIR/split-*-of-*`, none missing and none empty.

  Raises:
    DataError: no such directory, no such files, a shard that is missing, double or empty.
  """
  try:
    names = sorted(os.listdir(data_dir))
  except FileNotFoundError:
    raise DataError(
      f'data_dir {data_dir!r} does not exist: give the directory that holds the '
      f'{split}-*-of-* files'
    ) from None
  except NotADirectoryError:
    raise DataError(
      f'data_dir {data_dir!r} is a file: give the directory that holds the {split}-*-of-* files'
    ) from None
  except OSError as error:
    raise DataError(f'data_dir {data_dir!r} cannot be read: {error.strerror}') from None
  shards: dict[int, str] = {}
  totals: dict[int, str] = {}
  for name in names:
    match = _SHARD.match(name)
    if match and match[1] == split:
      index = int(match[2])
      if index in shards:
        raise DataError(
          f'{data_dir} holds shard {index} twice, {shards[index]} and {name}: '
          'move one set of shards elsewhere'
        )
      shards[index] = name
      totals[int(match[3])] = name
  pattern = os.path.join(data_dir, f'{split}-*-of-*')
  if not shards:
    raise DataError(f'no files match {pattern}: {_contents(names)}')
  if len(totals) > 1:
    raise DataError(
      f'files of several sets of shards match {pattern}, such as '
      f'{" and ".join(list(totals.values())[:2])}: keep one set a directory'
    )
  (total,) = totals
  width = len(_SHARD.match(shards[min(shards)])[2])  # type: ignore[index]
  missing = [f'{split}-{i:0{width}d}-of-{total:0{width}d}' for i in range(total) if i not in shards]
  if missing:
    more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    raise DataError(
      f'{data_dir} holds {len(shards)} of {total} {split} shards; missing: '
      f'{", ".join(missing[:3])}{more}. Copy them, or write the set anew'
    )
  if max(shards) >= total:
    raise DataError(f'{shards[max(shards)]} in {data_dir} has a number beyond its set of {total}')
  paths = [os.path.join(data_dir, shards[i]) for i in sorted(shards)]
  for path in paths:
    try:
      size = os.stat(path).st_size
    except OSError as error:
      raise DataError(f'{path} cannot be read: {error.strerror}') from None
    if size == 0:
      raise DataError(f'{path} is empty (0 bytes): copy or write this shard again')
  return paths


def _contents(names: Sequence[str]) -> str:
  if not names:
    return 'the directory is empty'
  return f'found {len(names)} {"file" if len(names) == 1 else "files"} such as ' + (
    ', '.join(names[:3])
  )


def record_offsets(path: str) -> np.ndarray:
  """Where each record of a file begins: int64 [N], in bytes. Reads headers alone.

  Raises:
    DataError: a header whose checksum is wrong, or a file that ends inside a record.
  """
  offsets, headers, offset = [], [], 0
  try:
    file = os.open(path, os.O_RDONLY)
    try:
      size = os.fstat(file).st_size
      while offset < size:
        # pread lets go of the interpreter's lock, which a page fault in a mapping would not.
        header = os.pread(file, _HEADER_BYTES, offset)
        offsets.append(offset)
        headers.append(header)
        if len(header) < _HEADER_BYTES:
          break
        offset += _HEADER_BYTES + int.from_bytes(header[:8], 'little') + _FOOTER_BYTES
    finally:
      os.close(file)
  except OSError as error:
    raise DataError(f'{path} cannot be read: {error.strerror}') from None
  whole = len(headers) - (bool(headers) and len(headers[-1]) < _HEADER_BYTES)
  table = np.frombuffer(b''.join(headers[:whole]), np.uint8).reshape(whole, _HEADER_BYTES)
  wrong = np.flatnonzero(
    _mask(_crc_rows(table[:, :8])) != table[:, 8:].copy().view('<u4').reshape(-1)
  )
  if wrong.size:
    record = int(wrong[0])
    if record == 0:
      raise not_a_tfrecord(path)
    raise DataError(
      f'{path}: record {record} (at byte {offsets[record]}) is damaged: the '
      'checksum of its length is wrong; copy or write this shard again'
    )
  if offset != size:
    raise DataError(
      f'{path}: the file ends inside record {len(offsets) - 1} (at byte '
      f'{offsets[-1]}): copy or write this shard again'
    )
  return np.asarray(offsets, np.int64)


def not_a_tfrecord(path: str) -> DataError:
  """The error for a file whose first bytes are no record."""
  with open(path, 'rb') as file:
    start = file.read(64)
  if start.startswith(b'version https://git-lfs'):
    return DataError(f'{path} is a Git LFS pointer, not a TFRecord: fetch the data (git lfs pull)')
  if start.startswith(b'\x1f\x8b'):
    return DataError(f'{path} is compressed with gzip: uncompress the shards')
  kind = f'it begins with {start[:16]!r}'
  if start and all(32 <= byte < 127 or byte in b'\t\r\n' for byte in start):
    kind = f'it is text that begins with {start[:24].decode()!r}'
  return DataError(
    f'{path} is not a TFRecord ({kind}), or its first record is damaged: '
    'give the directory of the data set, or write this shard again'
  )


def read_record(path: str, offset: int = 0, index: int = 0) -> bytes:
  """The data of the record at `offset` bytes, both checksums verified.

  Args:
    path: a TFRecord file.
    offset: from `record_offsets`.
    index: the record's number, for the message.

  Raises:
    DataError: not a TFRecord, a file that ends too early, or a wrong checksum.
  """
  try:
    with open(path, 'rb') as file:
      file.seek(offset)
      header = file.read(_HEADER_BYTES)
      if len(header) < _HEADER_BYTES or masked_crc32c(header[:8]) != int.from_bytes(
        header[8:], 'little'
      ):
        if offset == 0:
          raise not_a_tfrecord(path)
        raise DataError(f'{path}: no record begins at byte {offset}')
      length = int.from_bytes(header[:8], 'little')
      # A wrong length with the right checksum is not to be had by chance, but reading it may be
      # asking for more bytes than there are.
      data = file.read(min(length, os.fstat(file.fileno()).st_size))
      footer = file.read(_FOOTER_BYTES)
  except OSError as error:
    raise DataError(f'{path} cannot be read: {error.strerror}') from None
  if len(data) < length or len(footer) < _FOOTER_BYTES:
    raise DataError(
      f'{path}: the file ends inside record {index} (at byte {offset}): '
      'copy or write this shard again'
    )
  if masked_crc32c(data) != int.from_bytes(footer, 'little'):
    raise DataError(
      f'{path}: record {index} (at byte {offset}) is damaged: the checksum of its '
      'data is wrong; copy or write this shard again'
    )
  return data


def count_records(paths: Sequence[str], num_threads: int = 16) -> list[int]:
  """Records in each file, from the headers alone (about half a million a second from memory).

  Raises:
    DataError: as `record_offsets` does.
  """
  with concurrent.futures.ThreadPoolExecutor(min(num_threads, len(paths) or 1)) as pool:
    return list(pool.map(lambda path: len(record_offsets(path)), paths))


def write_record(file: BinaryIO, data: bytes) -> None:
  """Appends one record to a binary file."""
  length = struct.pack('<Q', len(data))
  file.write(length + struct.pack('<I', masked_crc32c(length)))
  file.write(data + struct.pack('<I', masked_crc32c(data)))


def encode_example(features: Mapping[str, bytes | int | Iterable[float] | Iterable[int]]) -> bytes:
  """A serialised tf.train.Example.

  Args:
    features: name -> bytes, an int, a float32 array or an int64 array. Written in this order.
  """
  entries = []
  for name, value in features.items():
    if isinstance(value, bytes):
      feature = _field(1, _field(1, value))
    elif isinstance(value, np.ndarray) and value.dtype == np.float32:
      feature = _field(2, _field(1, value.astype('<f4').tobytes()) if value.size else b'')
    else:
      numbers = [value] if isinstance(value, int) else value
      packed = b''.join(_varint(int(number)) for number in numbers)
      feature = _field(3, _field(1, packed) if packed else b'')
    entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
  return _field(1, b''.join(entries))


def _field(number: int, data: bytes) -> bytes:
  # Protocol buffers: wire type 2, a length and that many bytes.
  return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
  number &= (1 << 64) - 1
  parts = bytearray()
  while number > 127:
    parts.append(number & 127 | 128)
    number >>= 7
  parts.append(number)
  return bytes(parts)


# CRC-32C in NumPy. The checksum with a zero start value is linear: zeros in front of the data
# change nothing, a start value is the same as inverting the first bytes, and the checksum of A + B
# is that of A moved on by len(B) zeros, xor that of B. So rows of equal length are computed side
# by side, and their results are folded pairwise.
_ROW_BYTES = 64


@functools.cache
def _table() -> np.ndarray:
  table = np.arange(256, dtype=np.uint32)
  for _ in range(8):
    table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
  return table


@functools.cache
def _moved_on(num_bytes: int) -> np.ndarray:
  """uint32 [4, 256]: what each byte of a checksum becomes after `num_bytes` zeros."""
  if num_bytes > 1:
    half = _moved_on(num_bytes // 2)
    return _move_on(half, half)
  checksums = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
  return _table()[checksums & 255] ^ (checksums >> 8)


def _move_on(checksums: np.ndarray, moved: np.ndarray) -> np.ndarray:
  return (
    moved[0][checksums & 255]
    ^ moved[1][checksums >> 8 & 255]
    ^ moved[2][checksums >> 16 & 255]
    ^ moved[3][checksums >> 24]
  )


def _crc_linear(rows: np.ndarray) -> np.ndarray:
  """Checksums of uint8 [N, length] with start value 0: uint32 [N]."""
  table, checksums = _table(), np.zeros(len(rows), np.uint32)
  for column in np.ascontiguousarray(rows.T):
    checksums = table[(checksums ^ column) & 255] ^ (checksums >> 8)
  return checksums


def _crc_rows(rows: np.ndarray) -> np.ndarray:
  """CRC-32C of each row of uint8 [N, length >= 4]: uint32 [N]."""
  rows = rows.copy()
  rows[:, :4] ^= 255
  return ~_crc_linear(rows)


def crc32c(data: bytes) -> int:
  """CRC-32C (Castagnoli, RFC 3720 appendix B.4) of `data`; about 100 MB/s."""
  if len(data) < 4:
    checksum = 0xFFFFFFFF
    for byte in data:
      checksum = int(_table()[(checksum ^ byte) & 255]) ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF
  num_rows = 1 << max(0, (len(data) - 1) // _ROW_BYTES).bit_length()
  rows = np.zeros(num_rows * _ROW_BYTES, np.uint8)
  start = len(rows) - len(data)
  rows[start:] = np.frombuffer(data, np.uint8)
  rows[start : start + 4] ^= 255
  checksums, num_bytes = _crc_linear(rows.reshape(num_rows, _ROW_BYTES)), _ROW_BYTES
  while len(checksums) > 1:
    checksums = _move_on(checksums[0::2], _moved_on(num_bytes)) ^ checksums[1::2]
    num_bytes *= 2
  return int(checksums[0]) ^ 0xFFFFFFFF


def _mask(checksums: np.ndarray) -> np.ndarray:
  return ((checksums >> 15) | (checksums << 17)) + np.uint32(0xA282EAD8)


def masked_crc32c(data: bytes) -> int:
  """The checksum as TFRecord files hold it."""
  return int(_mask(np.array([crc32c(data)], np.uint32))[0])
