"""Windows of raw images that are resized on the device: the host copies bytes, and nothing else.

    pipelines.create('raw', data_dir='DIR', batch_size=64, pipeline='raw', resize='device')
    hpm.TrainStep(..., preprocess=pipelines.crop_on_device(image_size=224))

A batch is uint8 [B, 1 + H, W, 3], H and W those of the largest image: a sample's first row says in
its first 12 bytes the window's height and width and whether it is mirrored (int32, little-endian),
and the window stands below, at the left. More bytes cross to the device than of resized images,
about 1.7 times for a short side of 256 and 224 pixels.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hpm.pipelines import base
from hpm.pipelines.normalization import normalize

__all__ = ['HEADER', 'crop_on_device', 'pack', 'resized']

HEADER = 12  # bytes


def pack(views: Sequence[np.ndarray], flips: np.ndarray, out: np.ndarray) -> None:
  """Fills a batch.

  Args:
    views: [B], windows of images, uint8 [h, w, 3].
    flips: int32, B of them.
    out: uint8 [B, 1 + H, W, 3].
  """
  for image, view, flip in zip(out, views, flips.ravel().tolist(), strict=True):
    height, width, _ = view.shape
    image[0].reshape(-1)[:HEADER] = np.array([height, width, flip], '<i4').view(np.uint8)
    image[1 : 1 + height, :width] = view


def crop_on_device(image_size: int) -> Callable[[tf.Tensor, 'str | tf.DType', str], tf.Tensor]:
  """What a step's `preprocess` takes in place of `normalize`: it resizes first.

  Args:
    image_size: pixels, height and width.

  Returns:
    (images uint8 [B, 1 + H, W, 3], dtype, data_format) -> what `normalize` makes of the resized
    images.
  """
  size = base.positive('image_size', image_size, 'give height and width in pixels')

  def preprocess(images: tf.Tensor, dtype: 'str | tf.DType', data_format: str) -> tf.Tensor:
    return normalize(resized(images, size), dtype, data_format)

  return preprocess


def resized(images: tf.Tensor, size: int) -> tf.Tensor:
  """uint8 [B, size, size, 3]: as `augment.resize` and `augment.flip` make it, to the same bits.

  Args:
    images: uint8 [B, 1 + H, W, 3], see the module.
    size: pixels.
  """
  # Numbers are floats and int64: TensorFlow keeps int32 in host memory, and GPUs would wait for it.
  header = tf.reshape(images[:, 0], [tf.shape(images)[0], -1])[:, :HEADER]
  header = tf.reshape(tf.cast(header, tf.float32), [-1, 3, 4])
  height, width, flip = tf.unstack(tf.linalg.matvec(header, [1.0, 256.0, 65536.0, 0.0]), axis=1)
  upright = np.arange(size, dtype=np.float32)
  top, bottom, down = _places(height, size, upright)
  mirrored = tf.where(flip[:, tf.newaxis] > 0, upright[::-1], upright)
  left, right, across = _places(width, size, mirrored)
  # GPUs gather no bytes; half precision holds 0 to 255 exactly.
  pixels = tf.cast(images, tf.float16)
  rows = [tf.gather(pixels, 1 + y, axis=1, batch_dims=1) for y in (top, bottom)]
  down, across = down[:, :, tf.newaxis, tf.newaxis], across[:, tf.newaxis, :, tf.newaxis]

  def between(row: tf.Tensor) -> tf.Tensor:
    a, b = (tf.cast(tf.gather(row, x, axis=2, batch_dims=1), tf.float32) for x in (left, right))
    return a + (b - a) * across

  upper, lower = map(between, rows)
  return tf.cast(tf.round(upper + (lower - upper) * down), tf.uint8)


def _places(
  length: tf.Tensor, size: int, pixels: 'np.ndarray | tf.Tensor'
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Between which two of `length` each of `size` pixels lies, and where: [B, size] each.

  As TensorFlow's ResizeBilinear with half-pixel centres.
  """
  at = (pixels + 0.5) * (length[:, tf.newaxis] / float(size)) - 0.5
  floor = tf.floor(at)
  low = tf.maximum(floor, 0.0)
  high = tf.maximum(tf.minimum(tf.math.ceil(at), length[:, tf.newaxis] - 1.0), 0.0)
  return tf.cast(low, tf.int64), tf.cast(high, tf.int64), at - floor
