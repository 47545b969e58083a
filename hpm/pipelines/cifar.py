"""CIFAR-10 and CIFAR-100 as their authors' binary files (https://www.cs.toronto.edu/~kriz/).

A record is one byte of label (CIFAR-100: a coarse and a fine one) and 32 x 32 pixels, a plane each
of red, green and blue. So there is nothing to decompress, and nothing that could be found damaged
but a file's size and a label out of range.
"""

from collections.abc import Callable, Sequence
import os

import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, sources

__all__ = ['Cifar10Source', 'Cifar100Source']

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_FOLDERS = ('cifar-10-batches-bin', 'cifar-100-binary')  # as the archives unpack


class _CifarSource(sources.Stream):
  """The records of some of the files.

  Args:
    data_dir: the directory of the .bin files, or the one above it.
    split: 'train' or 'validation' (the authors' test set).

  Raises:
    UsageError: no directory given, an unknown split.
    DataError: no such directory, a missing file, or one that holds no whole number of records.
  """

  remedy = 'unpack the archive again'
  stores_files = False
  split_files: dict[str, tuple[str, ...]]
  label_bytes: int

  def __init__(self, data_dir: str, split: str = 'train'):
    if split not in self.split_files:
      raise errors.unknown('split', split, self.split_files)
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give the directory of the .bin files')
    names = self.split_files[split]
    roots = [data_dir, *(os.path.join(data_dir, folder) for folder in _FOLDERS)]
    root = next((r for r in roots if os.path.exists(os.path.join(r, names[0]))), None)
    if root is None:
      raise DataError(f'{data_dir} holds no {names[0]}: give the directory of the unpacked archive')
    self.origin, self.split = os.fspath(data_dir), split
    self._paths = [os.path.join(root, name) for name in names]
    self._size = self.label_bytes + _PIXELS
    for path in self._paths:
      if not os.path.exists(path):
        raise DataError(f'{path} is missing: {self.remedy}')

  @property
  def files(self) -> Sequence[str]:
    return self._paths

  def count(self, strict: bool) -> list[int]:
    return [self._count(path, strict) for path in self._paths]

  def _count(self, path: str, strict: bool) -> int:
    count, rest = divmod(os.path.getsize(path), self._size)
    if rest and strict:
      raise DataError(
        f'{path}: the file ends inside record {count}, {rest} bytes of {self._size}: {self.remedy}'
      )
    return count + bool(rest)

  def empty_files(self) -> list[int]:
    self.count(strict=True)  # sizes cost nothing, so that a cut file is refused at the door
    return [i for i, path in enumerate(self._paths) if not os.path.getsize(path)]

  def read(self, file: tf.Tensor, strict: bool = True) -> tf.data.Dataset:
    path = tf.gather(tf.constant(self._paths), file)
    return tf.data.FixedLengthRecordDataset(path, self._size)

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    label = tf.io.decode_raw(tf.strings.substr(item, self.label_bytes - 1, 1), tf.uint8)[0]
    pixels = tf.strings.substr(item, self.label_bytes, _PIXELS)
    return sources.Sample(pixels, tf.cast(label, tf.int64))

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    if item is None:
      with open(self._paths[file], 'rb') as opened:
        opened.seek(record * self._size)
        item = opened.read(self._size)
    if len(item) < self._size:
      raise DataError(f'{self._paths[file]}: the file ends inside record {record}: {self.remedy}')
    return sources.Contents(item[self.label_bytes :], item[self.label_bytes - 1])

  def sides(self, encoded: bytes) -> tuple[int, int]:
    del encoded
    return _SIDE, _SIDE

  def decode(self, encoded: tf.Tensor) -> tf.Tensor:
    planes = tf.reshape(tf.io.decode_raw(encoded, tf.uint8), [3, _SIDE, _SIDE])
    return tf.transpose(planes, [1, 2, 0])

  def decode_crop(self, encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return augment.window_of(self.decode(encoded), choose(tf.constant([_SIDE, _SIDE, 3])))

  def num_pixels(self, encoded: tf.Tensor) -> tf.Tensor:
    return tf.constant(_SIDE * _SIDE, tf.int64)


class Cifar10Source(_CifarSource):
  """50,000 and 10,000 images of 10 classes: data_batch_1.bin to _5.bin, test_batch.bin."""

  class_names = [
    'airplane',
    'automobile',
    'bird',
    'cat',
    'deer',
    'dog',
    'frog',
    'horse',
    'ship',
    'truck',
  ]
  split_files = {
    'train': tuple(f'data_batch_{i}.bin' for i in range(1, 6)),
    'validation': ('test_batch.bin',),
  }
  label_bytes = 1


class Cifar100Source(_CifarSource):
  """50,000 and 10,000 images of 100 classes (fine labels): train.bin, test.bin."""

  class_names = [str(label) for label in range(100)]
  split_files = {'train': ('train.bin',), 'validation': ('test.bin',)}
  label_bytes = 2
