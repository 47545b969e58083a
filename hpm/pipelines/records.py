"""TFRecord files: listing shards, finding, checking and writing records.

A record is its length (uint64), a checksum of these 8 bytes, the data, a checksum of the data; all
little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord). Lengths are enough to find
where records begin; TensorFlow's own readers check the sums.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import os

import numpy as np
import tensorflow as tf

# TensorFlow's only reader that takes an offset: its TFRecordDatasetV2 loses them on the way into
# a dataset's graph (2.21).
from tensorflow.python.lib.io import _pywrap_record_io

from hpm.errors import DataError
from hpm.pipelines import detect

__all__ = [
  'BBOX',
  'ENCODED',
  'FILENAME',
  'LABEL',
  'count_records',
  'encode_example',
  'is_empty',
  'read_record',
  'record_offsets',
  'scan',
  'shard_files',
  'tolerant_dataset',
  'write_records',
]

# The features of ImageNet's records that the pipelines read.
ENCODED = 'image/encoded'
LABEL = 'image/class/label'
FILENAME = 'image/filename'
BBOX = tuple(f'image/object/bbox/{side}' for side in ('ymin', 'xmin', 'ymax', 'xmax'))

_HEADER_BYTES = 12
_FOOTER_BYTES = 4


def shard_files(data_dir: str, split: str) -> list[str]:
  """The sorted paths of all shards of `split`, `DIR/split-*-of-*`, none missing.

  Raises:
    DataError: no such directory, no such files, a shard that is missing or double.
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
    match = detect.SHARD.match(name)
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
  width = len(detect.SHARD.match(shards[min(shards)])[2])  # type: ignore[index]
  missing = [f'{split}-{i:0{width}d}-of-{total:0{width}d}' for i in range(total) if i not in shards]
  if missing:
    more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    raise DataError(
      f'{data_dir} holds {len(shards)} of {total} {split} shards; missing: '
      f'{", ".join(missing[:3])}{more}. Copy them, or write the set anew'
    )
  if max(shards) >= total:
    raise DataError(f'{shards[max(shards)]} in {data_dir} has a number beyond its set of {total}')
  return [os.path.join(data_dir, shards[i]) for i in sorted(shards)]


def is_empty(path: str) -> bool:
  """Whether a file has no byte at all; TensorFlow takes such a shard for one of no records.

  Raises:
    DataError: it can not be read.
  """
  try:
    return os.stat(path).st_size == 0
  except OSError as error:
    raise DataError(f'{path} cannot be read: {error.strerror}') from None


def _contents(names: Sequence[str]) -> str:
  if not names:
    return 'the directory is empty'
  return f'found {len(names)} {"file" if len(names) == 1 else "files"} such as ' + (
    ', '.join(names[:3])
  )


def record_offsets(path: str, strict: bool = True) -> np.ndarray:
  """Where each record of a file begins: int64 [N], in bytes. Reads lengths alone.

  Args:
    path: a TFRecord file.
    strict: False ends the table with a record that can't be read where the file is damaged, in
      place of raising; what follows it in the file can't be found.

  Raises:
    DataError: a length that is wrong, or a file that ends inside a record.
  """
  offsets, offset = [], 0
  try:
    file = os.open(path, os.O_RDONLY)
    try:
      size = os.fstat(file).st_size
      while offset < size:
        offsets.append(offset)
        # pread lets go of the interpreter's lock, which a page fault in a mapping would not.
        header = os.pread(file, _HEADER_BYTES, offset)
        if len(header) < _HEADER_BYTES:
          offset += _HEADER_BYTES
          break
        offset += _HEADER_BYTES + int.from_bytes(header[:8], 'little') + _FOOTER_BYTES
    finally:
      os.close(file)
  except OSError as error:
    raise DataError(f'{path} cannot be read: {error.strerror}') from None
  if offset != size:  # a wrong length leads anywhere but to the end, so the records say where
    for index, start in enumerate(offsets):
      try:
        read_record(path, start, index)
      except DataError:
        if strict:
          raise
        return np.asarray(offsets[: index + 1], np.int64)
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
  """The data of the record at `offset` bytes, both checksums verified by TensorFlow.

  Args:
    path: a TFRecord file.
    offset: from `record_offsets`.
    index: the record's number, for the message.

  Raises:
    DataError: not a TFRecord, a file that ends too early, or a wrong checksum.
  """
  place = f'{path}: record {index} (at byte {offset})'
  try:
    if _claims_too_much(path, offset):
      raise DataError(
        f'{path}: the file ends inside record {index} (at byte {offset}): '
        'copy or write this shard again'
      )
    return bytes(_pywrap_record_io.RandomRecordReader(path).read(int(offset))[0])
  except tf.errors.DataLossError as error:
    # TensorFlow names the byte where the record's header or its data begins.
    if error.message.startswith('truncated'):
      ends_early = True
    elif f'at {offset + _HEADER_BYTES}' in error.message:
      raise DataError(
        f'{place} is damaged: the checksum of its data is wrong; copy or write this shard again'
      ) from None
    elif offset == 0:
      raise not_a_tfrecord(path) from None
    else:
      rest = os.path.getsize(path) - offset
      raise DataError(
        f'{place} is damaged: the checksum of its length is wrong, so the rest of the file '
        f'({rest} bytes) can not be read; copy or write this shard again'
      ) from None
  except IndexError:  # fewer bytes than a header
    ends_early = offset > 0
  except (tf.errors.OpError, OSError) as error:
    what = error.message.split('; ')[-1] if isinstance(error, tf.errors.OpError) else error.strerror
    raise DataError(f'{path} cannot be read: {what}') from None
  if not ends_early:
    raise not_a_tfrecord(path)
  raise DataError(
    f'{path}: the file ends inside record {index} (at byte {offset}): '
    'copy or write this shard again'
  )


def _claims_too_much(path: str, offset: int) -> bool:
  """Whether a record with a right checksum of its length is longer than what is left of its file.

  TensorFlow takes the memory for it before it reads, and ends the process where there isn't any.
  """
  with open(path, 'rb') as file:
    file.seek(offset)
    header = file.read(_HEADER_BYTES)
    rest = os.fstat(file.fileno()).st_size - offset - _HEADER_BYTES - _FOOTER_BYTES
  length, checksum = header[:8], int.from_bytes(header[8:], 'little')
  return (
    len(header) == _HEADER_BYTES
    and int.from_bytes(length, 'little') > rest
    and _checksum(length) == checksum
  )


def _checksum(data: bytes) -> int:
  """Of TFRecords: CRC-32C, rotated and shifted (see the module's page). For a few bytes."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def scan(path: str) -> Iterator['bytes | DataError']:
  """All records of a file, checksums verified; in place of a damaged one, what is wrong with it."""
  reader, offset, num_read = _pywrap_record_io.RandomRecordReader(path), 0, 0
  size = os.path.getsize(path)
  with open(path, 'rb', buffering=0) as file:
    while offset < size:
      header = os.pread(file.fileno(), _HEADER_BYTES, offset)
      if int.from_bytes(header[:8], 'little') > size - offset:
        break
      try:
        data, offset = reader.read(offset)
        yield data
      except (tf.errors.OpError, IndexError):  # from here on by offsets, which takes longer
        break
      num_read += 1
    else:
      return
  offsets = record_offsets(path, strict=False)
  for index in range(num_read, len(offsets)):
    try:
      yield read_record(path, int(offsets[index]), index)
    except DataError as error:
      yield error


def count_records(paths: Sequence[str], num_threads: int = 16, strict: bool = True) -> list[int]:
  """Records in each file, from their lengths alone (about half a million a second from memory).

  Raises:
    DataError: as `record_offsets` does.
  """
  with concurrent.futures.ThreadPoolExecutor(min(num_threads, len(paths) or 1)) as pool:
    return list(pool.map(lambda path: len(record_offsets(path, strict)), paths))


def tolerant_dataset(path: tf.Tensor) -> tf.data.Dataset:
  """The records (string []) of a file, with an empty string in place of each damaged one.

  TensorFlow reads until a record is damaged, and can't go on in that file; what it didn't deliver
  is read by offset. Where a length is wrong nothing behind it can be found, so one empty string
  stands for the rest of the file. (An intact record is never empty: it would be no example.)

  Args:
    path: string [].
  """

  def table(path: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Offsets, and the file for TensorFlow to read; not where a length leads out of it."""
    offsets = record_offsets(path.decode(), strict=False)
    sound = not len(offsets) or not _claims_too_much(path.decode(), int(offsets[-1]))
    return offsets, np.array([path] * sound, object)

  offsets, paths = tf.numpy_function(table, [path], [tf.int64, tf.string])
  offsets.set_shape([None])
  paths.set_shape([None])
  read = tf.data.TFRecordDataset(paths).ignore_errors(log_warning=False)
  whole = read.map(lambda record: (record, tf.constant(-1, tf.int64)))
  rest = tf.data.Dataset.range(tf.size(offsets, tf.int64)).map(lambda number: ('', number))

  # Every record comes twice, so that those are left that TensorFlow didn't deliver.
  def due(num_read: tf.Tensor, item: tuple) -> tuple[tf.Tensor, tuple]:
    number = item[1]
    is_first = number < 0
    keep = tf.logical_or(is_first, number >= num_read)
    return num_read + tf.cast(is_first, tf.int64), (keep, *item)

  def read_by_offset(path: bytes, offset: int, number: int) -> bytes:
    try:
      return read_record(path.decode(), offset, number)
    except DataError:
      return b''

  def record(_: tf.Tensor, record: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    def by_offset() -> tf.Tensor:
      offset = tf.gather(offsets, number)
      return tf.numpy_function(read_by_offset, [path, offset, number], tf.string)

    return tf.ensure_shape(tf.cond(number < 0, lambda: record, by_offset), [])

  stream = whole.concatenate(rest).scan(tf.constant(0, tf.int64), due)
  return stream.filter(lambda keep, *_: keep).map(record)


def write_records(path: str, contents: Iterable[bytes]) -> None:
  """Writes one file of records, by TensorFlow's writer."""
  with tf.io.TFRecordWriter(path) as writer:
    for data in contents:
      writer.write(data)


def encode_example(features: Mapping[str, bytes | int | Iterable[float] | Iterable[int]]) -> bytes:
  """A serialised tf.train.Example; the same features give the same bytes.

  Args:
    features: name -> bytes, an int, a float32 array, or int64 numbers.
  """
  example = tf.train.Example()
  for name, value in features.items():
    feature = example.features.feature[name]
    if isinstance(value, bytes):
      feature.bytes_list.value.append(value)
    elif isinstance(value, np.ndarray) and value.dtype == np.float32:
      feature.float_list.SetInParent()  # says the kind even where there is no value
      feature.float_list.value.extend(value.tolist())
    else:
      feature.int64_list.SetInParent()
      numbers = [value] if isinstance(value, int) else value
      feature.int64_list.value.extend(int(number) for number in numbers)
  return bytes(example.SerializeToString(deterministic=True))
