"""A directory of images, one directory a class: `DIR/train/CLASS/*.JPEG` or `DIR/CLASS/*`.

Labels are the indices of the class directories in sorted order, from 0 on. Where there are
directories for splits, the classes are those of `train`, whatever split is read.
"""

from collections.abc import Sequence
import concurrent.futures
import os

import tensorflow as tf

from hpm.errors import DataError, UsageError
from hpm.pipelines import order, sources

__all__ = ['FolderSource']

EXTENSIONS = ('.jpeg', '.jpg', '.png', '.gif', '.bmp')
# split -> the names that its directory may have
SPLITS = {'train': ('train',), 'validation': ('validation', 'val', 'test')}
_SHOWN = 3


class FolderSource(sources.RandomAccess):
  """The images below `data_dir`, by class.

  Args:
    data_dir: a directory of split directories (train, validation or val or test), or of class
      directories.
    split: 'train', 'validation', the name of another split directory, or 'all' for a directory of
      classes without splits; such a directory is training data as well, but no validation set.

  Raises:
    UsageError: no directory given.
    DataError: no such directory, no such split, no classes, a class without an image, or one that
      the training set doesn't have.
  """

  remedy = 'replace the file or delete it'

  def __init__(self, data_dir: str, split: str = 'train'):
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give a directory with a directory for each class')
    root = os.fspath(data_dir)
    self.origin, self.split = root, split
    directory, train = _split_directory(root, split)
    own = _directories(directory)
    self.class_names = _directories(train) if train else own
    if not own:
      raise DataError(
        f'{directory} holds no directories of classes: give a directory with '
        f'{split}/CLASS/*.JPEG or CLASS/*.JPEG'
      )
    strange = sorted(set(own) - set(self.class_names))
    if strange:
      raise DataError(
        f'{directory} has {len(strange)} classes that {train} has not, such as '
        f'{", ".join(strange[:_SHOWN])}: labels would not agree'
      )
    labels = {name: label for label, name in enumerate(self.class_names)}

    def images(name: str) -> list[str]:
      with os.scandir(os.path.join(directory, name)) as entries:
        found = [e.path for e in entries if e.name.lower().endswith(EXTENSIONS) and e.is_file()]
      if not found:
        raise DataError(
          f'{os.path.join(directory, name)} holds no images ({", ".join(EXTENSIONS)}): remove it, '
          'or put the images of this class there'
        )
      return sorted(found)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
      listed = list(pool.map(images, own))
    self._paths = [path for paths in listed for path in paths]
    self._labels = [labels[name] for name, paths in zip(own, listed) for _ in paths]

  @property
  def files(self) -> Sequence[str]:
    return self._paths

  def count(self, strict: bool) -> list[int]:
    return [1] * len(self._paths)

  def describe(self, file: int, record: int) -> str:
    return self._paths[file]  # a file is one record

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    file, _ = order.split_id(ident)
    encoded = tf.io.read_file(tf.gather(tf.constant(self._paths), file))
    return sources.Sample(encoded, tf.gather(tf.constant(self._labels, tf.int64), file))

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    path = self._paths[file]
    try:
      with open(path, 'rb') as opened:
        encoded = opened.read()
    except OSError as error:
      raise DataError(f'{path} cannot be read: {error.strerror}') from None
    return sources.Contents(encoded, self._labels[file], os.path.basename(path))


def _split_directory(root: str, split: str) -> tuple[str, str | None]:
  """(the directory of a split's classes, that of the training set's classes if there are splits)"""
  names = _directories(root)
  known = {alias for aliases in SPLITS.values() for alias in aliases}
  splits = [name for name in names if name in known]
  train = os.path.join(root, 'train') if 'train' in names else None
  if not splits:  # classes lie at the top
    if split in ('train', 'all'):
      return root, None
    raise DataError(
      f'{root} has no directory {" or ".join(SPLITS.get(split, (split,)))}: give the directory '
      "above, or split='all' for all images of a directory of classes"
    )
  for name in SPLITS.get(split, (split,)):
    if name in names:
      return os.path.join(root, name), train
  raise DataError(f'{root} has no directory for split {split!r}; it has {", ".join(splits)}')


def _directories(directory: str) -> list[str]:
  try:
    with os.scandir(directory) as entries:
      return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith('.'))
  except FileNotFoundError:
    raise DataError(
      f'data_dir {directory!r} does not exist: give a directory with a directory for each class'
    ) from None
  except OSError as error:
    raise DataError(f'data_dir {directory!r} cannot be read: {error.strerror}') from None
