"""ImageNet's TFRecords: `DIR/train-*-of-*` and `DIR/validation-*-of-*`.

Labels in the records run from 1, and 0 is background. With 1001 classes they are kept; with any
other number 1 is subtracted, so that 1000 classes are 0 .. 999.
"""

import os

import tensorflow as tf

from hpm import errors
from hpm.errors import UsageError
from hpm.pipelines import records, sources

__all__ = ['ImageNetSource']

SPLITS = ('train', 'validation')


class ImageNetSource(sources.RecordFiles):
  """Records with ImageNet's features.

  Args:
    data_dir: the directory of the shards.
    split: 'train' or 'validation'.

  Raises:
    UsageError: no directory given, an unknown split.
    DataError: no such directory, no files, a set of shards that is incomplete.
  """

  has_boxes = True
  label_hint = ' (labels are taken to run from 1; num_classes=1001 keeps a background class 0)'

  def __init__(self, data_dir: str, split: str = 'train'):
    if split not in SPLITS:
      raise errors.unknown('split', split, SPLITS)
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give the directory of the {split}-*-of-* files')
    directory = os.fspath(data_dir)
    super().__init__(directory, split, records.shard_files(directory, split))

  def label_offset(self, num_classes: int) -> int:
    return 0 if num_classes == 1001 else -1

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    features: dict[str, object] = {
      records.ENCODED: tf.io.FixedLenFeature([], tf.string),
      records.LABEL: tf.io.FixedLenFeature([], tf.int64),
    }
    if with_boxes:
      features |= {side: tf.io.VarLenFeature(tf.float32) for side in records.BBOX}
    parsed = tf.io.parse_single_example(item, features)
    boxes = None
    if with_boxes:
      boxes = tf.stack([tf.sparse.to_dense(parsed[side]) for side in records.BBOX], -1)
    return sources.Sample(parsed[records.ENCODED], parsed[records.LABEL], boxes)

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    data = self.record(file, record) if item is None else item
    features = sources.features_of(
      data, {records.ENCODED: 'bytes_list', records.LABEL: 'int64_list'}
    )
    key = b''.join(features[records.FILENAME].bytes_list.value[:1]).decode(errors='replace')
    boxes = zip(*(features[side].float_list.value for side in records.BBOX))
    return sources.Contents(
      features[records.ENCODED].bytes_list.value[0],
      features[records.LABEL].int64_list.value[0],
      key,
      list(boxes),
    )
