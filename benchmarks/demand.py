"""How much input a rate takes: images and megabytes a second for each device.

Pixels are what goes to the device: uint8, height x width x 3. Encoded is what comes from storage:
the mean size of the first records of the run's data.
"""

from collections.abc import Mapping
import itertools
import statistics
from typing import Any

__all__ = ['IMAGENET_BYTES', 'image_bytes', 'of']

# A JPEG of ImageNet's training set: bytes of ILSVRC2012_img_train.tar, over its images.
IMAGENET_BYTES = 147_897_477_120 / 1_281_167
_RECORDS = 64


def image_bytes(image_size: int, pipeline: Any) -> dict[str, float | None]:
  """Bytes of an image of a run: `pixels`, and `encoded`, None where its data has no such thing.

  Args:
    image_size: height and width, as the model takes it.
    pipeline: that the run reads from.
  """
  return {'pixels': 3.0 * image_size**2, 'encoded': _encoded(getattr(pipeline, 'source', None))}


def of(rate: float, num_devices: int, sizes: Mapping[str, float | None]) -> dict[str, float | None]:
  """What each device takes: images a second, and MB (10^6 bytes) a second of both kinds.

  Args:
    rate: images a second on all of them.
    num_devices: how many.
    sizes: from `image_bytes`.
  """
  each = rate / num_devices
  found: dict[str, float | None] = {'images_per_second': each}
  for name, size in sizes.items():
    found[f'{name}_mb_per_second'] = None if size is None else each * size / 1e6
  return found


def _encoded(source: Any) -> float | None:
  from hpm.pipelines import sources

  if not isinstance(source, sources.Stream):
    return None
  import tensorflow as tf

  items = source.read(tf.constant(0, tf.int64)).take(_RECORDS)
  sizes = [len(item.numpy()) for item in itertools.islice(items, _RECORDS)]
  return statistics.fmean(sizes) if sizes else None
