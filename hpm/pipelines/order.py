"""The order in which records come, as arithmetic on seed, epoch and position.

Each epoch of a stream permutes the files, reads a fixed number of them in turn, and shuffles
within a buffer; a source with random access is permuted as a whole. All of it by stateless ops or
explicit seeds. So the order is the same in every process and for any number of threads, whatever
tf.random.set_seed says, and a position in it is one number.

Several workers share a data set without overlap or loss, each with an order of its own length: by
record (each takes every n-th of the common order, before records are shuffled) or by file (each
has files of its own, and reads nothing else).
"""

from collections.abc import Sequence
import dataclasses
import hashlib

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import UsageError
from hpm.pipelines import base, inline, sources

__all__ = ['Order', 'sample_id', 'samples', 'split_id', 'subseed']

SHARD_BY = ('record', 'file')

_INT64_MAX = 2**63 - 1
MAX_READERS = 4  # threads that read them
_ID_BITS = 32


@dataclasses.dataclass(frozen=True)
class Order:
  """Everything that decides which records come when.

  Attributes:
    seed: of the order; None: the same fixed order every epoch.
    shuffle_buffer: records of a stream that are shuffled among one another, if there is a seed.
    num_shards: workers that share the data.
    shard_index: which of them this is.
    shard_by: 'record' or 'file'.
  """

  seed: int | None
  shuffle_buffer: int = 1
  num_shards: int = 1
  shard_index: int = 0
  shard_by: str = 'record'

  def __post_init__(self) -> None:
    base.positive('num_shards', self.num_shards, 'give the number of workers')
    base.at_least(0, 'shard_index', self.shard_index, 'workers are numbered from 0')
    if self.shard_index >= self.num_shards:
      raise UsageError(
        f'shard_index={self.shard_index} with num_shards={self.num_shards}: workers are numbered '
        f'0 .. {self.num_shards - 1}'
      )
    if self.shard_by not in SHARD_BY:
      raise errors.unknown('shard_by', self.shard_by, SHARD_BY)

  def files(self, num_files: int) -> list[int]:
    """Indices of the files that this worker reads.

    Raises:
      UsageError: by file, and there are more workers than files.
    """
    if self.shard_by == 'record':
      return list(range(num_files))
    if num_files < self.num_shards:
      raise UsageError(
        f"{self.num_shards} workers (num_shards) but {num_files} files, and shard_by='file': "
        "write more files, or share them with shard_by='record'"
      )
    return list(range(self.shard_index, num_files, self.num_shards))

  def epoch_size(self, counts: Sequence[int]) -> int:
    """Records of an epoch of this worker, of files with so many records."""
    total = sum(counts[file] for file in self.files(len(counts)))
    if self.shard_by == 'file':
      return total
    return len(range(self.shard_index, total, self.num_shards))


def samples(
  source: sources.Source,
  order: Order,
  *,
  skip: int = 0,
  num_epochs: int | None = 1,
  strict: bool = True,
) -> tf.data.Dataset:
  """The undecoded samples of a source from a position on.

  Args:
    source: what is read; its records are counted only if samples are skipped, or it is
      random-access.
    order: how.
    skip: samples of the stream that are passed over.
    num_epochs: passes over the data; None: without end.
    strict: False goes on behind records that can't be read (see `sources.Stream.read`).

  Returns:
    Elements (position int64, id int64, item string); `source.load(id, item, boxes)` makes a
    sample of them.
  """
  if isinstance(source, sources.RandomAccess):
    return _permuted(source, order, skip, num_epochs, strict)
  assert isinstance(source, sources.Stream)
  stream = source
  epoch, skipped = 0, 0
  if skip:
    epoch, skipped = divmod(
      skip, order.epoch_size(source.counts if strict else source.tolerant_counts)
    )
  end = _INT64_MAX if num_epochs is None else max(num_epochs, epoch)

  def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
    return _epoch(stream, order, epoch, strict)

  epochs = tf.data.Dataset.range(epoch, end).flat_map(one_epoch).skip(skipped)
  numbered = tf.data.Dataset.zip((tf.data.Dataset.range(skip, _INT64_MAX), epochs))
  return numbered.map(lambda position, sample: (position, *sample))


def _epoch(source: sources.Stream, order: Order, epoch: tf.Tensor, strict: bool) -> tf.data.Dataset:
  """(id int64, item string) of one epoch (int64 []) in its order."""
  own = order.files(len(source.files))
  files = tf.constant(own, tf.int64)
  if order.seed is not None:
    files = tf.random.experimental.stateless_shuffle(
      files, seed=tf.stack([subseed(order.seed, 'files'), epoch]), alg='philox'
    )

  def read(file: tf.Tensor) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(sample_id(file, 0), _INT64_MAX)
    return tf.data.Dataset.zip((numbers, source.read(file, strict)))

  stream = tf.data.Dataset.from_tensor_slices(files).interleave(
    read,
    cycle_length=min(source.cycle_length, len(own)),
    block_length=source.block_length,
    num_parallel_calls=min(MAX_READERS, source.cycle_length, len(own)),
    deterministic=True,
  )
  if order.num_shards > 1 and order.shard_by == 'record':
    stream = stream.shard(order.num_shards, order.shard_index)
  if order.seed is not None and order.shuffle_buffer > 1:
    stream = _shuffle(stream, order.shuffle_buffer, subseed(order.seed, 'records'), epoch)
  return stream


def _shuffle(stream: tf.data.Dataset, buffer: int, seed: int, epoch: tf.Tensor) -> tf.data.Dataset:
  """`stream.shuffle`, but by these two seeds alone: Dataset.shuffle mixes in the global one."""
  specs = tf.nest.flatten(stream.element_spec)
  shuffled = tf.raw_ops.ShuffleDataset(
    input_dataset=tf.data.experimental.to_variant(stream),
    buffer_size=buffer,
    seed=seed,
    seed2=epoch,
    output_types=[spec.dtype for spec in specs],
    output_shapes=[spec.shape for spec in specs],
    reshuffle_each_iteration=False,
  )
  return tf.data.experimental.from_variant(shuffled, stream.element_spec)


def _permuted(
  source: sources.RandomAccess, order: Order, skip: int, num_epochs: int | None, strict: bool
) -> tf.data.Dataset:
  """The samples of a source with random access: every position's id is computed."""
  table = source.counts if strict else source.tolerant_counts
  own = order.files(len(table))
  ends = np.cumsum([table[file] for file in own], dtype=np.int64)
  total, size = int(ends[-1]), order.epoch_size(table)
  by_record = order.shard_by == 'record'
  stride, start = (order.num_shards, order.shard_index) if by_record else (1, 0)
  seed = None if order.seed is None else subseed(order.seed, 'records')

  def locate(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    index = position % size * stride + start
    if seed is not None:
      index = tf.raw_ops.RandomIndexShuffle(
        index=index,
        seed=_three(seed, position // size),
        max_index=tf.constant(total - 1, tf.int64),
        rounds=4,
      )
    place = tf.searchsorted(tf.constant(ends), index[tf.newaxis], side='right')[0]
    before = tf.gather(tf.constant(np.concatenate([[0], ends])), place)
    ident = sample_id(tf.gather(tf.constant(own, tf.int64), place), index - before)
    return position, ident, tf.constant('')

  end = _INT64_MAX if num_epochs is None else max(num_epochs * size, skip)
  positions = tf.data.Dataset.zip((tf.data.Dataset.range(skip, end),))
  return inline.map_inline(positions, locate)


def _three(seed: int, epoch: tf.Tensor) -> tf.Tensor:
  """int32 [3], as index_shuffle wants its seeds, of a seed of 62 bits and an epoch."""
  low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
  return tf.stack([tf.constant(low), tf.constant(high), tf.cast(epoch, tf.int32)])


def sample_id(file: tf.Tensor, record: 'int | tf.Tensor') -> tf.Tensor:
  """A record's id, int64 []: its file's index (int64 []) << 32 | its number in that file."""
  return file * (1 << _ID_BITS) + record


def split_id(ident: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """(index of the file, number of the record in it), of an id."""
  return ident // (1 << _ID_BITS), ident % (1 << _ID_BITS)


def subseed(seed: int, use: str) -> int:
  """A seed for one use: 62 bits, never 0 (which tf.data takes for none)."""
  digest = hashlib.sha256(f'{seed}/{use}'.encode()).digest()
  return int.from_bytes(digest[:8], 'little') >> 2 | 1
