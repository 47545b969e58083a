"""What a source of images is: undecoded samples, in files, which every pipeline reads alike.

A source knows its files, how many records each has, how to read them in TensorFlow's graph and
what to call them in an error. Order, sharding, augmentation, batches and the handling of bad
records are not its business (`order`, `tfdata`, `skips`). A new source is one file with a subclass
of `Source`, or of one of the kinds below, and one line of `hpm.pipelines.SOURCES`.

There are two kinds. A `Stream` is read file by file, from the start: `read`. A `RandomAccess`
source hands out any record at once: `load`; its order is a full permutation, and skipping in it is
free.

A record's id is the index of its file (as in `files`) << 32 | its number in that file.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from hpm.errors import DataError
from hpm.pipelines import augment, faults, records

__all__ = ['Contents', 'RandomAccess', 'RecordFiles', 'Sample', 'Source', 'Stream', 'features_of']


_MAX_TABLES = 64  # files whose records' places are remembered


class Sample(NamedTuple):
  """An undecoded sample, as tensors.

  Attributes:
    encoded: string [], what `Source.decode` understands.
    label: int64 [], as stored; a pipeline adds the label offset.
    boxes: float32 [N, 4] (ymin, xmin, ymax, xmax in 0 .. 1) where they were asked for, else None.
  """

  encoded: tf.Tensor
  label: tf.Tensor
  boxes: tf.Tensor | None = None


class Contents(NamedTuple):
  """The same in Python, for checks, errors and conversion.

  Attributes:
    encoded: bytes.
    label: as stored.
    key: what the data set itself calls the image, a file's name as a rule; '' if nothing.
    boxes: (ymin, xmin, ymax, xmax) each.
  """

  encoded: bytes
  label: int
  key: str = ''
  boxes: Sequence[tuple[float, float, float, float]] = ()


class Source(abc.ABC):
  """Undecoded samples in files.

  Attributes:
    origin: what to call the whole in messages: its directory, as a rule.
    split: 'train', 'validation' or another name.
    class_names: of the labels as stored, from 0 on; None if the data doesn't say.
    remedy: what a user can do about a bad record.
    label_hint: what an error about a label adds on how this source counts.
    has_boxes: whether its records can hold bounding boxes, as ImageNet's do.
    stores_files: whether what it stores of an image are the bytes of a file (JPEG, PNG, ...).
  """

  origin: str
  split: str
  class_names: Sequence[str] | None = None
  remedy = 'write the record again or leave it out'
  label_hint = ''
  has_boxes = False
  stores_files = True

  @property
  @abc.abstractmethod
  def files(self) -> Sequence[str]:
    """What to call the files in messages: paths, if they are files."""

  @functools.cached_property
  def counts(self) -> list[int]:
    """Records in each file; may take a while, so it is asked for only where it is needed."""
    return self.count(strict=True)

  @functools.cached_property
  def tolerant_counts(self) -> list[int]:
    """The same where damaged files are read as far as they go."""
    return self.count(strict=False)

  @abc.abstractmethod
  def count(self, strict: bool) -> list[int]:
    """Records in each file.

    Args:
      strict: False counts damaged files up to, and with, the record where they can't be read on.

    Raises:
      DataError: a damaged file, if `strict`.
    """

  @abc.abstractmethod
  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> Sample:
    """The sample of an id, in a graph; runs in parallel, and may fail for the one sample.

    Args:
      ident: int64 [], the id.
      item: what `Stream.read` gave for it; an empty string for random access.
      with_boxes: whether boxes are wanted; sources that have none leave them None.
    """

  @abc.abstractmethod
  def contents(self, file: int, record: int, item: bytes | None = None) -> Contents:
    """The same in Python, read from `item` if it is given, otherwise from the file.

    Raises:
      DataError: it can't be read. The message says what is wrong with it, and the place only if
        the file itself is damaged.
    """

  def label_offset(self, num_classes: int) -> int:
    """What is added to stored labels for a model of so many outputs, unless the user says."""
    known = self.class_names
    # 1001 outputs keep 0 for background, as ImageNet's TFRecords do.
    return int(known is not None and len(known) == 1000 and num_classes == 1001)

  def decode(self, encoded: tf.Tensor) -> tf.Tensor:
    """The whole image, uint8 [H, W, 3]."""
    return augment.decode(encoded)

  def decode_crop(self, encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """A window of the image, uint8 [h, w, 3], equal to decoding it all and slicing.

    Args:
      encoded: string [].
      choose: (shape int32 [3]) -> window int32 [4], of which it has to be called once a branch.
    """

    def jpeg() -> tf.Tensor:
      shape = augment.jpeg_shape(encoded)
      return augment.decode_window(encoded, shape, choose(shape))

    def other() -> tf.Tensor:  # no decoder of these crops
      whole = self.decode(encoded)
      return augment.window_of(whole, choose(tf.shape(whole)))

    return tf.cond(augment.is_jpeg(encoded), jpeg, other)

  def num_pixels(self, encoded: tf.Tensor) -> tf.Tensor:
    """int64 []: height x width as the header says, before anything is decoded; 0 if unknown."""
    return augment.num_pixels(encoded)

  def as_file(self, encoded: bytes) -> bytes:
    """The image as the bytes of a file, without loss, where `stores_files` is False."""
    return bytes(faults.eagerly(lambda: tf.io.encode_png(self.decode(encoded)).numpy()))

  def sides(self, encoded: bytes) -> tuple[int, int]:
    """Width and height of what is stored, pixels, where `stores_files` is False."""
    raise NotImplementedError

  def empty_files(self) -> list[int]:
    """Indices of files that hold nothing at all, though they should."""
    return []

  def find_damage(self, error: Exception) -> str | None:
    """Raises a DataError that names the record behind a DataLossError of TensorFlow's.

    Returns what was searched if there is none to be found; None: this source can't search.
    """
    del error
    return None

  def describe(self, file: int, record: int) -> str:
    """What to call a record in messages."""
    return f'{self.files[file]}: record {record}'


class Stream(Source):
  """A source that is read file by file.

  Attributes:
    cycle_length: files that are read in turn.
    block_length: records of one of them before it is the next one's turn.
  """

  cycle_length = 16
  block_length = 1

  @abc.abstractmethod
  def read(self, file: tf.Tensor, strict: bool = True) -> tf.data.Dataset:
    """The items (string []) of a file (int64 [], its index) in order.

    Args:
      file: index in `files`.
      strict: False gives an empty string for a record that can't be read, and goes on behind it;
        as many items come as `count(strict=False)` says.
    """


class RandomAccess(Source):
  """A source that hands out any record by its id."""


class RecordFiles(Stream):
  """TFRecord files, whatever their records hold.

  Args:
    origin: see `Source`.
    split: see `Source`.
    paths: the files.
  """

  def __init__(self, origin: str, split: str, paths: Sequence[str]):
    self.origin, self.split, self._paths = origin, split, list(paths)
    self._tables: dict[int, Any] = {}

  @property
  def files(self) -> Sequence[str]:
    return self._paths

  def count(self, strict: bool) -> list[int]:
    return records.count_records(self._paths, strict=strict)

  def empty_files(self) -> list[int]:
    return [i for i, path in enumerate(self._paths) if records.is_empty(path)]

  def read(self, file: tf.Tensor, strict: bool = True) -> tf.data.Dataset:
    path = tf.gather(tf.constant(self._paths), file)
    if strict:
      return tf.data.TFRecordDataset(path)
    return records.tolerant_dataset(path)

  def record(self, file: int, record: int) -> bytes:
    """The bytes of a record, its checksums verified; DataError names the place."""
    path = self._paths[file]
    if record == 0:
      return records.read_record(path)
    offsets = self._offsets(file)
    if record >= len(offsets):
      raise DataError(f'{path} has {len(offsets)} records, so no record {record}')
    return records.read_record(path, int(offsets[record]), record)

  def _offsets(self, file: int) -> Any:
    if file not in self._tables:
      if len(self._tables) > _MAX_TABLES:
        self._tables.clear()
      self._tables[file] = records.record_offsets(self._paths[file], strict=False)
    return self._tables[file]

  def find_damage(self, error: Exception) -> str | None:
    return faults.find_damage(self._paths, error)


def features_of(data: bytes, needed: Mapping[str, str]) -> Any:
  """The features (a mapping of tf.train.Feature) of a serialised tf.train.Example.

  Args:
    data: the record.
    needed: name -> 'bytes_list', 'int64_list' or 'float_list': features that have one value.

  Raises:
    DataError: it is no example, or a needed feature isn't there.
  """
  try:
    features = tf.train.Example.FromString(data).features.feature
  except Exception:  # protobuf's DecodeError, whose module depends on its implementation
    raise DataError(
      "not a tf.train.Example: write the data set in the layout of ImageNet's TFRecords"
    ) from None
  missing = [
    name
    for name, kind in needed.items()
    if name not in features or len(getattr(features[name], kind).value) != 1
  ]
  if missing:
    found = ', '.join(sorted(features)[:6]) or 'none'
    raise DataError(
      f'no single value for {" and ".join(missing)} (features found: {found}): write the data '
      "set with the features of ImageNet's TFRecords"
    )
  return features
