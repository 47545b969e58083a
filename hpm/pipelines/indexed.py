"""Batches of indexed JPEGs: of each image only what its crop needs is decoded.

    pipelines.create('imagenet', data_dir='DIR', batch_size=64, pipeline='indexed')

Any source will do; files without an index are decoded as usual. Samples, crops, order, ids, seeds
and resuming are those of the `tfdata` pipeline, and so is every pixel.

Fastest is the compiled reader (`python -m hpm.pipelines compile`): one call makes a batch, of files
with an index or without, for training and evaluation. Where simplejpeg is installed, a training
batch is made by one Python function that decodes with it; otherwise TensorFlow's own ops cut and
decode, sample by sample.
"""

from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import UsageError
from hpm.pipelines import augment, batches, indexed_jpeg, jpeg_native, sources

__all__ = ['IndexedPipeline', 'assemble', 'decode_crop', 'has_index', 'image_shape']

DECODERS = ('auto', 'native', 'simplejpeg', 'tensorflow')

_NUM_FIELDS = len(indexed_jpeg.Layout._fields)


class IndexedPipeline(batches.BatchPipeline):
  """What `tfdata.TfDataPipeline` does, faster on indexed JPEGs.

  Args:
    source: where undecoded samples come from.
    decoder: 'native' is the compiled reader, 'simplejpeg' needs that package, 'tensorflow' nothing;
      'auto' takes the first of them that is there. The pixels are the same.
    resize: of training images, by name of `batches.RESIZES`; all but 'exact' need simplejpeg.
    **options: of `tfdata.TfDataPipeline`.

  Raises:
    UsageError: an option out of range.
    DataError: as `tfdata.TfDataPipeline` does; what is asked for is not installed, or not built.
  """

  def __init__(
    self, source: sources.Source, *, decoder: str = 'auto', resize: str = 'exact', **options: Any
  ):
    if decoder not in DECODERS:
      raise errors.unknown('decoder', decoder, DECODERS)
    if decoder == 'native':
      jpeg_native.require(f'decoder={decoder!r}')
    if decoder == 'simplejpeg':
      batches.require('simplejpeg', f'decoder={decoder!r}')
    if resize != 'exact' and resize in batches.RESIZES:
      if decoder == 'auto' and batches.installed('simplejpeg'):
        decoder = 'simplejpeg'
      if decoder != 'simplejpeg':
        raise UsageError(
          f"resize={resize!r} with decoder={decoder!r}, which resizes in TensorFlow's way: "
          "install simplejpeg (pip install simplejpeg), or give resize='exact'"
        )
    if not source.stores_files:  # its pixels are read by its own ops
      if decoder not in ('auto', 'tensorflow') or resize != 'exact':
        raise UsageError(
          f'decoder={decoder!r} with resize={resize!r} is for files such as JPEGs, and '
          f'{source.origin} holds pixels: leave both out'
        )
      decoder = 'tensorflow'
    if decoder == 'auto':
      by_python = 'simplejpeg' if batches.installed('simplejpeg') else 'tensorflow'
      decoder = 'native' if jpeg_native.is_built() else by_python
    if decoder == 'native':
      options |= {'make_training': _training_images, 'make_evaluation': _evaluation_images}
    cut = _window if decoder == 'simplejpeg' else None
    super().__init__(source, cut, resize=resize, **options)

  def _undecoded(self, ident: tf.Tensor, item: tf.Tensor) -> batches.Undecoded:
    sample = self.source.load(ident, item, self._use_bbox)
    encoded = self._checked_size(sample.encoded, ident)
    return batches.Undecoded(encoded, image_shape(encoded), sample.label, sample.boxes)

  def _crop(self, encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return decode_crop(encoded, choose, super()._crop)

  def _evaluation_image(self, encoded: tf.Tensor) -> tf.Tensor:
    whole = super()._evaluation_image

    def indexed() -> tf.Tensor:
      shape = image_shape(encoded)
      window = augment.central_source(shape, self.image_size)
      # In its place in the image: the same numbers give the same bits.
      padding = tf.concat([tf.stack([window[:2], [0, 0]], 1), [[0, 0]]], 0)
      image = tf.pad(_cut(encoded, window), padding)
      return augment.resize_central_crop(image, self.image_size, shape)

    return tf.cond(has_index(encoded), indexed, lambda: whole(encoded))


batches.take_options(IndexedPipeline)


def image_shape(encoded: tf.Tensor) -> tf.Tensor:
  """int32 [3]: height, width and channels (3), from the index, the header, or by decoding."""

  def indexed() -> tf.Tensor:
    return tf.concat([_fields(encoded)[3:5], [3]], 0)

  def other() -> tf.Tensor:
    return tf.cond(
      augment.is_jpeg(encoded),
      lambda: augment.jpeg_shape(encoded),
      lambda: tf.shape(augment.decode(encoded)),
    )

  return tf.ensure_shape(tf.cond(has_index(encoded), indexed, other), [3])


def decode_crop(
  encoded: tf.Tensor,
  choose: Callable[[tf.Tensor], tf.Tensor],
  otherwise: Callable[[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]], tf.Tensor],
) -> tf.Tensor:
  """A window of the image, uint8 [h, w, 3], by TensorFlow's ops alone.

  Args:
    encoded: string [].
    choose: (shape int32 [3]) -> window int32 [4].
    otherwise: (encoded, choose) -> the same of a file without an index.
  """

  def indexed() -> tf.Tensor:
    return _cut(encoded, choose(image_shape(encoded)))

  return tf.cond(has_index(encoded), indexed, lambda: otherwise(encoded, choose))


def has_index(encoded: tf.Tensor) -> tf.Tensor:
  """bool []: whether it is an indexed JPEG of this version, and nothing of it is missing."""
  # A shorter string, made as long with zeros: a file may be anything.
  start = tf.strings.substr(encoded, 0, indexed_jpeg.LENGTHS_OFFSET)
  start = tf.strings.join([start, bytes(indexed_jpeg.LENGTHS_OFFSET)])
  prefix = tf.strings.substr(start, indexed_jpeg.PREFIX_OFFSET, len(indexed_jpeg.PREFIX))
  size = tf.io.decode_raw(tf.strings.substr(start, indexed_jpeg.LAYOUT_OFFSET, 4), tf.int32)[0]
  is_whole = tf.equal(size, tf.strings.length(encoded))
  return tf.logical_and(tf.equal(prefix, indexed_jpeg.PREFIX), is_whole)


def _fields(encoded: tf.Tensor) -> tf.Tensor:
  """int32 [10]: the fields of `indexed_jpeg.Layout`."""
  fields = tf.strings.substr(encoded, indexed_jpeg.LAYOUT_OFFSET, 4 * _NUM_FIELDS)
  return tf.io.decode_raw(fields, tf.int32)


def _cut(encoded: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
  """A window of an indexed JPEG, decoded: uint8 [h, w, 3]."""
  jpeg, origin = assemble(encoded, window)
  image = tf.image.decode_jpeg(jpeg, channels=3, dct_method='INTEGER_ACCURATE')
  return augment.window_of(image, window - tf.concat([origin, [0, 0]], 0))


def assemble(encoded: tf.Tensor, window: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """`indexed_jpeg.assemble` by TensorFlow's ops.

  Args:
    encoded: string [], an indexed JPEG.
    window: int32 [4].

  Returns:
    (string [], the JPEG of what the window needs; int32 [2], where its top and left lie in the
    image).
  """
  _, frame, scan, height, width, down, across, rows, columns, reach = tf.unstack(
    _fields(encoded), _NUM_FIELDS
  )
  limits, sides = tf.stack([height, width]), tf.stack([down, across])
  margins = tf.stack([reach // 2, reach % 2])
  begin, size = window[:2], window[2:]
  first = tf.maximum(begin - margins, 0) // sides
  last = tf.minimum(begin + size - 1 + margins, limits - 1) // sides
  covered = tf.minimum((last + 1) * sides, limits) - first * sides
  narrow = tf.logical_and(reach % 2 == 1, covered[1] < indexed_jpeg.MIN_WIDTH)
  first -= tf.cast(tf.stack([False, tf.logical_and(narrow, first[1] > 0)]), tf.int32)
  origin = first * sides
  covered = tf.minimum((last + 1) * sides, limits) - origin

  table = tf.strings.substr(encoded, indexed_jpeg.LENGTHS_OFFSET, 2 * rows * columns)
  lengths = tf.reshape(tf.cast(tf.io.decode_raw(table, tf.uint16), tf.int32), [rows, columns])
  ends = tf.reshape(tf.cumsum(tf.reshape(lengths, [-1]) + 2), [rows, columns]) + (scan - 2)
  lengths = tf.reshape(lengths[first[0] : last[0] + 1, first[1] : last[1] + 1], [-1])
  ends = tf.reshape(ends[first[0] : last[0] + 1, first[1] : last[1] + 1], [-1])
  pieces = tf.strings.substr(encoded, ends - lengths, lengths)
  count = tf.size(lengths)
  markers = tf.gather(tf.constant(indexed_jpeg.RESTARTS), tf.range(count - 1) % 8)
  markers = tf.concat([markers, [indexed_jpeg.END]], 0)
  header = indexed_jpeg.LENGTHS_OFFSET + 2 * rows * columns
  both = tf.stack([covered // 256, covered % 256], 1)
  numbers = tf.gather(tf.constant([bytes([byte]) for byte in range(256)]), tf.reshape(both, [-1]))
  jpeg = tf.strings.join(
    [
      indexed_jpeg.START,
      tf.strings.substr(encoded, header, frame - header),
      tf.strings.reduce_join(numbers),
      tf.strings.substr(encoded, frame + 4, scan - frame - 4),
      tf.strings.reduce_join(tf.reshape(tf.stack([pieces, markers], 1), [-1])),
    ]
  )
  return jpeg, origin


def _window(encoded: bytes, window: Sequence[int]) -> np.ndarray:
  """A window of a file's pixels, uint8 [h, w, 3]."""
  import simplejpeg

  top, left, rows, columns = window
  if indexed_jpeg.has_index(encoded):
    encoded, top, left = indexed_jpeg.assemble(encoded, window)
    # Samplings that it doesn't know, and damaged data, are TensorFlow's to judge.
    with contextlib.suppress(ValueError):
      if simplejpeg.decode_jpeg_header(encoded)[2] in ('YCbCr', 'Gray', 'RGB'):
        image = simplejpeg.decode_jpeg(encoded)
        return image[top : top + rows, left : left + columns]
  elif encoded.startswith(b'\xff\xd8\xff') and encoded.endswith(indexed_jpeg.END):
    return _decode_window(encoded, window)
  image = augment.decode(tf.constant(encoded)).numpy()
  return image[top : top + rows, left : left + columns]


def _decode_window(jpeg: bytes, window: Sequence[int]) -> np.ndarray:
  """`augment.decode_window` in fewer steps."""
  import simplejpeg

  height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
  top, left, rows, columns = window
  above, beside = min(top, 1), min(left, 1)
  last_row, last_column = min(top + rows + 1, height), min(left + columns + 1, width)
  grown = (top - above, left - beside, last_row - top + above, last_column - left + beside)
  image = tf.raw_ops.DecodeAndCropJpeg(
    contents=jpeg, crop_window=grown, channels=3, dct_method='INTEGER_ACCURATE'
  )
  pixels = np.asarray(memoryview(image))
  return pixels[above : above + rows, beside : beside + columns]


def _training_images(
  size: int, items: Sequence[bytes], windows: np.ndarray, flips: np.ndarray
) -> np.ndarray:
  """uint8 [B, size, size, 3] by the compiled reader, and by TensorFlow what that declines."""
  images = batches.aligned((len(items), size, size, 3))
  for i in jpeg_native.training_images(items, windows, flips, images):
    one = slice(i, i + 1)
    images[one] = batches.by_cuts(
      _window_of_whole, batches.resize_exactly, size, items[one], windows[one], flips[one]
    )
  return images


def _evaluation_images(size: int, items: Sequence[bytes]) -> np.ndarray:
  """The same for evaluation."""
  images = batches.aligned((len(items), size, size, 3))
  for i in jpeg_native.evaluation_images(items, augment.short_side(size), images):
    with tf.device('/CPU:0'):
      whole = augment.decode(tf.constant(items[i]))
      images[i] = augment.resize_central_crop(whole, size).numpy()
  return images


def _window_of_whole(encoded: bytes, window: Sequence[int]) -> np.ndarray:
  top, left, rows, columns = window
  return augment.decode(tf.constant(encoded)).numpy()[top : top + rows, left : left + columns]
