"""Prepared TensorFlow Datasets, read from their own files and offline: `tfds:NAME`.

Nothing is downloaded or prepared: `tfds build NAME`, or `tfds.builder(NAME).download_and_prepare()`
does that beforehand. The files are TFRecords, so order, sharding, resuming and bad records are as
for any other; files are read in turn as TFDS's `ReadConfig` says.
"""

from collections.abc import Sequence
import functools
import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpm.errors import DataError, UsageError
from hpm.pipelines import folder, sources

if TYPE_CHECKING:
  import tensorflow_datasets as tfds

__all__ = ['TfdsSource', 'tfds_source']

_FOLDER_BUILDERS = ('image_folder', 'imagefolder')
_INSTALL = 'tensorflow-datasets is not installed: pip install tensorflow-datasets'
_KEYS = ('file_name', 'filename', 'image/filename', 'id', 'image/id')
# Options of ReadConfig that decide what is read in which order, and ours for the same purpose.
_OURS = {
  'shuffle_seed': 'seed',
  'shuffle_reshuffle_each_iteration': 'seed',
  'repeat_filenames': 'num_epochs',
  'add_tfds_id': 'with_ids',
  'input_context': 'num_shards and shard_index',
  'experimental_interleave_sort_fn': 'training=False for a fixed order',
  'file_format': 'a data set prepared as TFRecords',
}


def tfds_source(
  name: str,
  data_dir: str | None = None,
  split: str = 'train',
  read_config: 'tfds.ReadConfig | None' = None,
) -> sources.Source:
  """The source of a prepared data set, or of what TFDS's folder builder would read.

  Args:
    name: as in `tfds.load`, such as 'mnist', 'mnist:3.*.*' or 'cats_vs_dogs'; 'image_folder' is the
      folder builder, whose `data_dir/split/CLASS/image` is read as `folder` reads it.
    data_dir: where TFDS keeps its data, or the directory of one prepared version (with
      dataset_info.json); None: ~/tensorflow_datasets, as for TFDS itself.
    split: of the data set; 'validation' stands for 'test' if it has no validation.
    read_config: TFDS's; how many files are read in turn, and how many records of each.

  Raises:
    UsageError: `read_config` sets what an option of the pipeline sets.
    DataError: TFDS isn't installed, the data set isn't prepared, it has no such split, no image
      and label, or no TFRecords.
  """
  if name.lower() in _FOLDER_BUILDERS:
    if data_dir is None:
      raise UsageError(f'tfds:{name} needs data_dir, the directory of split/CLASS/image')
    return folder.FolderSource(data_dir, split)
  return TfdsSource(name, data_dir, split, read_config)


class TfdsSource(sources.RecordFiles):
  """See `tfds_source`."""

  def __init__(
    self,
    name: str,
    data_dir: str | None,
    split: str,
    read_config: 'tfds.ReadConfig | None',
  ):
    try:
      import tensorflow_datasets as tfds
    except ImportError:
      raise DataError(_INSTALL) from None
    self._builder = _builder(tfds, name, data_dir)
    config = read_config or tfds.ReadConfig()
    default = tfds.ReadConfig()
    for option, ours in _OURS.items():
      if getattr(config, option) != getattr(default, option):
        raise UsageError(f'read_config sets {option}: use the pipeline option {ours} for that')
    if isinstance(config.interleave_cycle_length, int):
      self.cycle_length = config.interleave_cycle_length
    self.block_length = config.interleave_block_length or 1
    self._exact = config.assert_cardinality
    info = self._builder.info
    found = _split(name, info.splits, split)
    if info.file_format is not None and info.file_format.value != 'tfrecord':
      raise DataError(
        f'tfds:{name} is stored as {info.file_format.value}: prepare it with file_format="tfrecord"'
      )
    paths = [os.fspath(path) for path in info.splits[found].filepaths]
    super().__init__(f'tfds:{info.full_name} in {info.data_dir}', split, paths)
    self._lengths = list(info.splits[found].shard_lengths)
    self._image, self._label = _image_and_label(tfds, name, info)
    self.class_names = info.features[self._label].names
    for path in paths:
      if not os.path.exists(path):
        raise DataError(f'{path} is missing: prepare {name} again')

  def count(self, strict: bool) -> list[int]:
    counts = super().count(strict)
    for path, count, expected in zip(self.files, counts, self._lengths):
      if strict and self._exact and count != expected:
        raise DataError(
          f'{path} holds {count} records, but dataset_info.json says {expected}: prepare it again'
        )
    return counts

  @functools.cached_property
  def _features(self) -> dict[str, Any]:
    return {
      self._image: tf.io.FixedLenFeature([], tf.string),
      self._label: tf.io.FixedLenFeature([], tf.int64),
    }

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    parsed = tf.io.parse_single_example(item, self._features)
    return sources.Sample(parsed[self._image], parsed[self._label])

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    data = self.record(file, record) if item is None else item
    features = sources.features_of(data, {self._image: 'bytes_list', self._label: 'int64_list'})
    key = next(
      (
        features[k].bytes_list.value[0]
        for k in _KEYS
        if k in features and features[k].bytes_list.value
      ),
      b'',
    )
    return sources.Contents(
      features[self._image].bytes_list.value[0],
      features[self._label].int64_list.value[0],
      key.decode(errors='replace'),
    )


def _builder(tfds: Any, name: str, data_dir: str | None) -> Any:
  """The builder of what lies on disk; the data set's own code isn't needed."""
  try:
    if data_dir is not None and os.path.exists(os.path.join(data_dir, 'dataset_info.json')):
      builder = tfds.builder_from_directory(data_dir)
      if builder.name != name.split(':')[0].split('/')[0]:
        raise DataError(f'{data_dir} holds {builder.name}, not {name}: say tfds:{builder.name}')
      return builder
    from tensorflow_datasets.core import read_only_builder

    return read_only_builder.builder_from_files(name, data_dir=data_dir)
  except (tfds.core.DatasetNotFoundError, FileNotFoundError):
    where = data_dir or '~/tensorflow_datasets'
    raise DataError(
      f'tfds:{name} is not prepared in {where}: run `tfds build {name} --data_dir={where}` where '
      'there is a network, or give the directory where it is'
    ) from None
  except ValueError as error:
    raise UsageError(
      f'tfds:{name} is no name of a data set ({str(error).strip().splitlines()[0]}): such as '
      'tfds:mnist or tfds:mnist:3.*.* is needed'
    ) from None


def _split(name: str, splits: Any, split: str) -> str:
  if split == 'validation' and split not in splits and 'test' in splits:
    return 'test'
  if split not in splits:
    raise DataError(f'tfds:{name} has no split {split!r}; it has {", ".join(sorted(splits))}')
  return split


def _image_and_label(tfds: Any, name: str, info: Any) -> tuple[str, str]:
  """The names of the features, as the data set's supervised keys or its only ones."""
  features = info.features
  if info.supervised_keys and all(isinstance(key, str) for key in info.supervised_keys):
    keys: Sequence[str] = info.supervised_keys
    if isinstance(features[keys[0]], tfds.features.Image) and isinstance(
      features[keys[1]], tfds.features.ClassLabel
    ):
      return keys[0], keys[1]
  images = [key for key, kind in features.items() if isinstance(kind, tfds.features.Image)]
  labels = [key for key, kind in features.items() if isinstance(kind, tfds.features.ClassLabel)]
  if len(images) != 1 or len(labels) != 1:
    raise DataError(
      f'tfds:{name} has no single image with a single class label (features: '
      f'{", ".join(features)}): it is no data set for classification'
    )
  return images[0], labels[0]
