"""The format of ImageNet's TFRecords, for `convert`: one tf.train.Example an image.

Records that are ImageNet's already are copied byte for byte.
"""

from collections.abc import Iterator
import hashlib
import io

import numpy as np

from hpm.errors import DataError
from hpm.pipelines import convert, records

__all__ = ['PROCESSES', 'check', 'file_name', 'prepare', 'write']

PROCESSES = False  # reading, hashing and writing let go of the interpreter's lock


def file_name(split: str, shard: int, num_shards: int) -> str:
  """The name of a shard, as in `train-00003-of-00008`."""
  return f'{split}-{shard:05d}-of-{num_shards:05d}'


def prepare(item: convert.Item) -> bytes:
  """See `convert.Format`; the record."""
  return _example(item) if item.record is None else item.record


def write(path: str, items: Iterator[bytes]) -> tuple[int, str]:
  """See `convert.Format`; the digest is SHA-256 of all records."""
  count, digest = 0, hashlib.sha256()

  def seen() -> Iterator[bytes]:
    nonlocal count
    for record in items:
      digest.update(record)
      count += 1
      yield record

  records.write_records(path, seen())
  return count, digest.hexdigest()


def check(path: str) -> tuple[int, str]:
  """See `convert.Format`."""
  digest = hashlib.sha256()
  offsets = records.record_offsets(path)
  for index, offset in enumerate(offsets):
    digest.update(records.read_record(path, int(offset), index))
  return len(offsets), digest.hexdigest()


def _example(item: convert.Item) -> bytes:
  """A record with ImageNet's features.

  Raises:
    DataError: the image's header can't be read, or Pillow isn't there.
  """
  try:
    from PIL import Image, UnidentifiedImageError
  except ImportError:
    raise DataError('converting images needs Pillow: pip install pillow') from None
  contents = item.contents
  try:
    with Image.open(io.BytesIO(contents.encoded)) as image:  # reads the header alone
      width, height, mode, form = image.width, image.height, image.mode, image.format
  except UnidentifiedImageError:
    raise DataError(f'image {contents.key} is no image that Pillow knows') from None
  except (OSError, ValueError, SyntaxError) as error:
    raise DataError(f'image {contents.key}: its header cannot be read ({error})') from None
  grey = mode in ('1', 'L', 'LA', 'I;16')
  boxes = np.asarray(contents.boxes, np.float32).reshape(-1, 4)
  sides = {name: boxes[:, i] for i, name in enumerate(records.BBOX)}
  return records.encode_example(
    {
      'image/height': height,
      'image/width': width,
      'image/colorspace': b'Grayscale' if grey else b'RGB',
      'image/channels': 1 if grey else 3,
      records.LABEL: item.label,
      'image/class/synset': item.class_name.encode(),
      'image/class/text': item.class_name.encode(),
      **sides,
      'image/object/bbox/label': [item.label] * len(boxes),
      'image/format': (form or '').encode(),
      records.FILENAME: contents.key.encode(),
      records.ENCODED: contents.encoded,
    }
  )
