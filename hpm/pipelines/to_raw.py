"""The format of decoded images (`raw_file`), for `convert`: `raw`, or `raw:320` for another size.

Images are resized, antialiased, to a short side of 256 pixels, the long side rounded, as evaluation
does it.
"""

from collections.abc import Iterator
import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, base, convert, raw_file

__all__ = ['PROCESSES', 'check', 'configure', 'file_name', 'prepare', 'write']

PROCESSES = False  # decoding and resizing let go of the interpreter's lock
SHORT_SIDE = 256


def file_name(split: str, shard: int, num_shards: int) -> str:
  """The name of a shard, as in `train-00003-of-00008.raw`."""
  return f'{split}-{shard:05d}-of-{num_shards:05d}.raw'


def prepare(item: convert.Item, short_side: int = SHORT_SIDE) -> raw_file.RawImage:
  """See `convert.Format`.

  Raises:
    DataError: the image can not be decoded.
  """
  try:
    with tf.device('/CPU:0'):
      image = augment.decode(tf.constant(item.contents.encoded))
      pixels = augment.resize_short_side(image, short_side).numpy()
  except (tf.errors.OpError, ValueError) as error:  # the latter from Pillow, in eager mode
    raise DataError(
      f'image {item.contents.key} cannot be decoded ({base.first_line(error)})'
    ) from None
  return raw_file.RawImage(pixels, item.label, item.contents.key)


def write(path: str, images: Iterator[raw_file.RawImage]) -> tuple[int, str]:
  """See `convert.Format`; the digest is SHA-256 of sizes, labels, names and pixels."""
  digest = hashlib.sha256()

  def seen() -> Iterator[raw_file.RawImage]:
    for image in images:
      _update(digest, image)
      yield image

  count = raw_file.write(path, seen())
  return count, digest.hexdigest()


def check(path: str) -> tuple[int, str]:
  """See `convert.Format`."""
  digest, file = hashlib.sha256(), raw_file.RawFile(path)
  for index, (label, key) in enumerate(zip(file.table['label'].tolist(), file.keys)):
    file.check(index)
    _update(digest, raw_file.RawImage(file.image(index), label, key))
  return len(file), digest.hexdigest()


def configure(detail: str) -> Any:
  """This format with another size, as in raw:320.

  Raises:
    UsageError: it is no size.
  """
  fix = 'give the short side in pixels, as in raw:256'
  if not detail.isdecimal():
    raise UsageError(f'format raw:{detail}: {fix}')
  short_side = base.positive('short_side', int(detail), fix)
  return SimpleNamespace(
    PROCESSES=PROCESSES,
    file_name=file_name,
    prepare=functools.partial(prepare, short_side=short_side),
    write=write,
    check=check,
  )


def _update(digest: Any, image: raw_file.RawImage) -> None:
  key = image.key.replace('\n', ' ')
  digest.update(f'{image.pixels.shape} {image.label} {key}\n'.encode())
  digest.update(np.ascontiguousarray(image.pixels))
