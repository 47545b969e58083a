"""The format of ImageNet's TFRecords with indexed JPEGs, for `convert`; see docs/indexed_jpeg.md.

Every feature of the source's records stays. A file that can't be re-coded to the same pixels is
kept as it is.
"""

from collections.abc import Iterator

import tensorflow as tf

from hpm.pipelines import convert, jpeg_recoder, records, to_tfrecord

__all__ = ['PROCESSES', 'check', 'file_name', 'write']

PROCESSES = False  # the work is done in a child process of each shard's own

file_name = to_tfrecord.file_name
check = to_tfrecord.check


def write(path: str, items: Iterator[convert.Item]) -> tuple[int, str]:
  """See `convert.Format`; every image has been decoded and compared with its original."""
  with jpeg_recoder.Recoder() as recoder:
    return to_tfrecord.write(path, (_indexed(item, recoder) for item in items))


def _indexed(item: convert.Item, recoder: jpeg_recoder.Recoder) -> convert.Item:
  encoded, _ = recoder.recode(item.contents.encoded)
  if encoded is None:
    return item
  record = item.record
  if record is not None:
    example = tf.train.Example.FromString(record)
    example.features.feature[records.ENCODED].bytes_list.value[:] = [encoded]
    record = example.SerializeToString(deterministic=True)
  return item._replace(record=record, contents=item.contents._replace(encoded=encoded))
