"""Index files of TFRecords, as NVIDIA DALI's own reader wants them: written, and verified.

    python -m hpm.pipelines index DIR [--out=DIR/idx] [--check]

An index has a line `offset size` for each record of its shard: the byte where the record begins,
and its bytes with header and checksums. It is written by walking through the lengths in the shard,
which have to lead to its last byte exactly; nothing is decoded. Shards whose index is there and
fits are left alone; --check writes nothing and fails at the first index that is missing or doesn't
fit.

The pipelines of this library need no index: `dali` is fed with records that were read, and whose
checksums were verified, by TensorFlow. An index is for recipes that use DALI's reader, which takes
any index at its word and verifies no checksum. `read` gives it one only after a comparison with
the shard.
"""

import concurrent.futures
import os
import tempfile
from typing import Any

import numpy as np

from hpm.errors import DataError
from hpm.pipelines import base, detect, records

__all__ = ['index_path', 'read', 'shards', 'write']


def shards(data_dir: str) -> list[str]:
  """The paths of all shards of a directory, of every split, sorted.

  Raises:
    DataError: no such directory, none in it, or a set with a shard missing.
  """
  try:
    names = os.listdir(data_dir)
  except OSError as error:
    raise DataError(f'{data_dir} cannot be read: {error.strerror}') from None
  splits = detect.splits_of(names)
  if not splits:
    raise DataError(
      f'no files match {os.path.join(data_dir, "*-of-*")}: give the directory of the TFRecords'
    )
  return [path for split in splits for path in records.shard_files(data_dir, split)]


def index_path(path: str, directory: str | None = None) -> str:
  """Where the index of a shard is: `directory` (by default `idx` beside it), NAME.idx."""
  parent, name = os.path.split(path)
  return os.path.join(directory or os.path.join(parent, 'idx'), name + '.idx')


def write(path: str, index: str) -> int:
  """Writes the index of a shard, whole or not at all; returns the number of records.

  Raises:
    DataError: a shard that is damaged, or ends inside a record, or holds none.
  """
  table = _table(path)
  directory = os.path.dirname(index) or '.'
  os.makedirs(directory, exist_ok=True)
  handle, temporary = tempfile.mkstemp(dir=directory, prefix=os.path.basename(index))
  try:
    with os.fdopen(handle, 'w', encoding='ascii') as file:
      file.writelines(f'{offset} {size}\n' for offset, size in table.tolist())
    os.chmod(temporary, 0o644)
    os.replace(temporary, index)
  except BaseException:
    os.unlink(temporary)
    raise
  return len(table)


def read(path: str, index: str) -> np.ndarray:
  """The index of a shard after comparison with it: int64 [N, 2], offset and size in bytes.

  Raises:
    DataError: no index, one that is no index, or one that isn't this shard's; a damaged shard.
  """
  fix = f'write it anew: python -m hpm.pipelines index {os.path.dirname(path) or "."}'
  if os.path.dirname(index) != os.path.dirname(index_path(path)):
    fix += f' --out={os.path.dirname(index) or "."}'
  try:
    with open(index, encoding='ascii') as file:
      lines = [line.split() for line in file]
    found = np.array([[int(part) for part in line] for line in lines], np.int64)
    if found.ndim != 2 or found.shape[1] != 2:
      raise ValueError
  except FileNotFoundError:
    raise DataError(f'{path} has no index {index}: {fix}') from None
  except OSError as error:
    raise DataError(f'{index} cannot be read: {error.strerror}') from None
  except (ValueError, OverflowError):
    raise DataError(f'{index} is no index (a line is not "offset size"): {fix}') from None
  expected = _table(path)
  if len(found) != len(expected):
    raise DataError(
      f'{index} lists {len(found)} records but {path} holds {len(expected)}: it is the index of '
      f'another file, {fix}'
    )
  differing = np.flatnonzero((found != expected).any(1))
  if differing.size:
    record = int(differing[0])
    raise DataError(
      f'{index} has record {record} at bytes {found[record, 0]} + {found[record, 1]}, but {path} '
      f'at {expected[record, 0]} + {expected[record, 1]}: it is the index of another file, {fix}'
    )
  return found


def _table(path: str) -> np.ndarray:
  """What the index of a shard has to hold: int64 [N, 2]."""
  offsets = records.record_offsets(path)
  if not len(offsets):
    raise DataError(f'{path} is empty (0 bytes): copy or write this shard again')
  ends = np.append(offsets[1:], os.path.getsize(path))
  return np.stack([offsets, ends - offsets], 1)


def add_arguments(parser: Any) -> None:
  parser.add_argument('data_dir', metavar='DIR', help='directory of the TFRecords')
  parser.add_argument('--out', metavar='DIR', help='where the index files go (default: DIR/idx)')
  parser.add_argument('--check', action='store_true', help='write nothing, compare alone')


def run(args: Any) -> str:
  """The command; returns what to print."""
  paths = shards(args.data_dir)

  def one(path: str) -> tuple[int, bool]:
    """(records, whether the index was written)."""
    index = index_path(path, args.out)
    try:
      return len(read(path, index)), False
    except DataError:
      if args.check:
        raise
    return write(path, index), True

  with concurrent.futures.ThreadPoolExecutor(4 * base.num_cores()) as pool:
    results = list(pool.map(one, paths))
  written = sum(was_written for _, was_written in results)
  total = sum(count for count, _ in results)
  directory = os.path.dirname(index_path(paths[0], args.out))
  return (
    f'{total} records in {len(paths)} shards; {directory}: {written} index files written, '
    f'{len(paths) - written} fit'
  )
