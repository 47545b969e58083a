"""The order in which records come, as arithmetic on seed, epoch and position.

Each epoch permutes the files, reads a fixed number of them in turn, and shuffles within a buffer;
all by stateless ops or explicit seeds. So the order is the same in every process and for any
number of threads, whatever tf.random.set_seed says, and a position in it is one number.
"""

from collections.abc import Sequence
import hashlib

import tensorflow as tf

__all__ = ['sample_id', 'samples', 'split_id', 'subseed']

_INT64_MAX = 2**63 - 1
_CYCLE = 16  # files read in turn: a part of the order, so it doesn't depend on the machine
_MAX_READERS = 4  # threads that read them
_ID_BITS = 32


def samples(
  paths: Sequence[str],
  *,
  skip: int,
  epoch_size: int | None,
  num_epochs: int | None,
  seed: int | None,
  shuffle_buffer: int,
) -> tf.data.Dataset:
  """The undecoded samples of a set of TFRecord files from a position on.

  Args:
    paths: the files.
    skip: samples of the stream that are passed over.
    epoch_size: records in all files; may be None where nothing is skipped (to count takes time).
    num_epochs: passes over the data; None: without end.
    seed: of the order; None: the same fixed order every epoch.
    shuffle_buffer: records that are shuffled among one another, if there is a seed.

  Returns:
    Elements (position int64, (record string, id int64)).
  """
  epoch, skipped = divmod(skip, epoch_size) if epoch_size else (0, skip)
  end = _INT64_MAX if num_epochs is None else max(num_epochs, epoch)

  def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
    return _epoch(paths, epoch, seed, shuffle_buffer)

  stream = tf.data.Dataset.range(epoch, end).flat_map(one_epoch).skip(skipped)
  return tf.data.Dataset.zip((tf.data.Dataset.range(skip, _INT64_MAX), stream))


def _epoch(
  paths: Sequence[str], epoch: tf.Tensor, seed: int | None, shuffle_buffer: int
) -> tf.data.Dataset:
  """(record string, id int64) of one epoch (int64 []) in its order."""
  names = tf.constant(paths)
  files = tf.range(len(paths), dtype=tf.int64)
  if seed is not None:
    files = tf.random.experimental.stateless_shuffle(
      files, seed=tf.stack([subseed(seed, 'files'), epoch]), alg='philox'
    )

  def read(file: tf.Tensor) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(sample_id(file, 0), _INT64_MAX)
    return tf.data.Dataset.zip((tf.data.TFRecordDataset(tf.gather(names, file)), numbers))

  stream = tf.data.Dataset.from_tensor_slices(files).interleave(
    read,
    cycle_length=min(_CYCLE, len(paths)),
    block_length=1,
    num_parallel_calls=min(_MAX_READERS, len(paths)),
    deterministic=True,
  )
  if seed is not None and shuffle_buffer > 1:
    stream = _shuffle(stream, shuffle_buffer, subseed(seed, 'records'), epoch)
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


def sample_id(file: tf.Tensor, record: int) -> tf.Tensor:
  """A record's id, int64 []: its file's index (int64 []) << 32 | its number in that file."""
  return file * (1 << _ID_BITS) + record


def split_id(ident: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """(index of the file, number of the record in it), of an id."""
  return ident // (1 << _ID_BITS), ident % (1 << _ID_BITS)


def subseed(seed: int, use: str) -> int:
  """A seed for one use: 62 bits, never 0 (which tf.data takes for none)."""
  digest = hashlib.sha256(f'{seed}/{use}'.encode()).digest()
  return int.from_bytes(digest[:8], 'little') >> 2 | 1
