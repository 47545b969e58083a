"""The format of ImageNet's TFRecords with indexed JPEGs, for `convert`; see docs/indexed_jpeg.md.

Every feature of the source's records stays. A file that can't be re-coded to the same pixels is
kept as it is.
"""

from collections.abc import Iterator

import tensorflow as tf

from hpm.pipelines import jpeg_recoder, records, to_tfrecord

__all__ = ['PROCESSES', 'check', 'file_name', 'prepare', 'write']

PROCESSES = False  # the work is done in a child process of each shard's own

file_name = to_tfrecord.file_name
prepare = to_tfrecord.prepare
check = to_tfrecord.check


def write(path: str, items: Iterator[bytes]) -> tuple[int, str]:
  """See `convert.Format`; every image has been decoded and compared with its original."""
  with jpeg_recoder.Recoder() as recoder:
    return to_tfrecord.write(path, (_indexed(record, recoder) for record in items))


def _indexed(record: bytes, recoder: jpeg_recoder.Recoder) -> bytes:
  """The record with an indexed JPEG, or as it is."""
  example = tf.train.Example.FromString(record)
  image = example.features.feature[records.ENCODED].bytes_list.value
  encoded, _ = recoder.recode(image[0])
  if encoded is None:
    return record
  image[0] = encoded
  return example.SerializeToString(deterministic=True)
