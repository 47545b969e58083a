"""What a directory of data is, by what lies in it. Imports no TensorFlow."""

from collections.abc import Iterable
import glob
import os
import re
from typing import Any

from hpm import json_file, pipelines
from hpm.errors import DataError

__all__ = ['SHARD', 'add_source', 'source', 'splits_of']

SHARD = re.compile(r'^(.+)-(\d+)-of-(\d+)$')


def source(directory: str, flag: str = '--source') -> str:
  """The name of the source that a directory looks like, such as imagenet, raw or tfds:mnist.

  Args:
    directory: of a data set.
    flag: by which a command's user says it instead.

  Raises:
    DataError: none, or several of TFDS's.
  """
  try:
    names = os.listdir(directory)
  except OSError as error:
    raise DataError(f'{directory} cannot be read: {error.strerror}') from None
  prepared = _prepared_tfds(directory)
  if len(prepared) > 1:
    raise DataError(
      f'{directory} holds the TFDS data sets {", ".join(prepared)}: say which one, as in '
      f'{flag}=tfds:{prepared[0]}'
    )
  if prepared:
    return f'tfds:{prepared[0]}'
  if splits_of(names):
    return 'imagenet'
  if any(name.endswith('.raw') for name in names):
    return 'raw'
  if 'data_batch_1.bin' in names or 'cifar-10-batches-bin' in names:
    return 'cifar10'
  if 'train.bin' in names or 'cifar-100-binary' in names:
    return 'cifar100'
  if any(os.path.isdir(os.path.join(directory, name)) for name in names):
    return 'folder'
  raise DataError(
    f'{directory} holds no TFRecords (train-*-of-*), no raw files, no directories of classes and '
    f'no CIFAR files: give the directory of a data set, or say what it is with {flag}'
  )


def splits_of(names: Iterable[str]) -> list[str]:
  """The splits that files named as shards are, SPLIT-00000-of-00001, belong to, sorted."""
  return sorted({match[1] for match in map(SHARD.match, names) if match})


def add_source(parser: Any, directory: str = 'DIR') -> None:
  """Declares the flag that says what a directory is; without it, `source` has to."""
  names = ', '.join(name for name in pipelines.SOURCES if name != 'iterable')
  parser.add_argument(
    '--source', help=f'what {directory} is: {names} (tfds:NAME); default: what it looks like'
  )


def _prepared_tfds(directory: str) -> list[str]:
  """Names of the TFDS data sets that are prepared in a directory, or in NAME/VERSION below it."""
  names = set()
  for place in ('', os.path.join('*', '[0-9]*'), os.path.join('*', '*', '[0-9]*')):
    for path in glob.glob(os.path.join(glob.escape(directory), place, 'dataset_info.json')):
      try:
        found = json_file.read(path)
      except (OSError, ValueError):
        continue
      if isinstance(found, dict) and 'name' in found:
        names.add(found['name'])
  return sorted(names)
