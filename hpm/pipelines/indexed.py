"""Batches of indexed JPEGs: of each image only what its crop needs is decoded.

    pipelines.create('imagenet', data_dir='DIR', batch_size=64, pipeline='indexed')

Any source will do; files without an index are decoded as usual. Samples, crops, order, ids, seeds
and resuming are those of the `tfdata` pipeline, and so is every pixel.

Where simplejpeg is installed, a training batch is made by one Python function that decodes with it;
otherwise TensorFlow's own ops cut and decode, sample by sample.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import importlib.util
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, indexed_jpeg, sources, tfdata

__all__ = ['IndexedPipeline', 'assemble', 'decode_crop', 'has_index', 'image_shape']

DECODERS = ('auto', 'simplejpeg', 'tensorflow')
RESIZES = ('exact', 'opencv')
_INSTALL = {'simplejpeg': 'simplejpeg', 'cv2': 'opencv-python-headless'}
_ALIGNMENT = 64  # bytes: an array that begins so becomes a tensor without a copy

_NUM_FIELDS = len(indexed_jpeg.Layout._fields)


class IndexedPipeline(tfdata.TfDataPipeline):
  """What `tfdata.TfDataPipeline` does, faster on indexed JPEGs.

  Args:
    source: where undecoded samples come from.
    decoder: 'simplejpeg', 'tensorflow', or 'auto' for the first if it is installed. The pixels are
      the same.
    resize: of training images; 'exact' gives the pixels of `augment.resize`, 'opencv' those of
      cv2.resize on float32, which differ by one level in about 0.03 % of the values and take
      0.1 ms less an image. It needs simplejpeg.
    **options: of `tfdata.TfDataPipeline`.

  Raises:
    UsageError: an option out of range.
    DataError: as `tfdata.TfDataPipeline` does; a package that is asked for and not installed.
  """

  def __init__(
    self, source: sources.Source, *, decoder: str = 'auto', resize: str = 'exact', **options: Any
  ):
    if decoder not in DECODERS:
      raise errors.unknown('decoder', decoder, DECODERS)
    if resize not in RESIZES:
      raise errors.unknown('resize', resize, RESIZES)
    super().__init__(source, **options)
    if decoder == 'auto':
      decoder = 'simplejpeg' if _installed('simplejpeg') else 'tensorflow'
    elif decoder == 'simplejpeg':
      _require('simplejpeg', f'decoder={decoder!r}')
    if resize == 'opencv':
      _require('cv2', f'resize={resize!r}')
      if decoder != 'simplejpeg':
        raise UsageError(
          f"resize='opencv' with decoder={decoder!r}: TensorFlow's ops resize in their own way; "
          "give decoder='simplejpeg' (pip install simplejpeg) or resize='exact'"
        )
    # The rest goes sample by sample, through TensorFlow's ops: it is rare, or the time goes into
    # antialiasing.
    plain = self._training and self._strict and len(self._sizes) == 1
    plain = plain and not self._antialias and not self._distort_colors
    self._decode_images: Callable[..., np.ndarray] | None = None
    if decoder == 'simplejpeg' and plain:
      resizer = _resize_exactly if resize == 'exact' else _resize_by_opencv
      self._decode_images = functools.partial(_training_images, self.image_size, resizer)

  def _batches(self, first: int) -> tf.data.Dataset:
    if self._decode_images is None:
      return super()._batches(first)
    chosen = self._samples(first).map(self._choose)
    return chosen.batch(self.batch_size, drop_remainder=self._num_epochs is None).map(
      self._decode_batch, num_parallel_calls=self._num_parallel_calls, deterministic=True
    )

  def _choose(self, position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> tuple:
    """(encoded string, window int32 [4], flip int32 [1], label int32 [], id int64 [])."""
    sample = self.source.load(ident, item, self._use_bbox)
    label = self._checked_label(sample.label, ident)
    encoded = self._checked_size(sample.encoded, ident)
    crop_seed = self._sample_seed('crop', position)
    window = augment.random_window(image_shape(encoded), crop_seed, sample.boxes)
    flip = augment.flips(self._sample_seed('flip', position))
    return encoded, window, flip, label, ident

  def _decode_batch(
    self,
    encoded: tf.Tensor,
    windows: tf.Tensor,
    flips: tf.Tensor,
    labels: tf.Tensor,
    idents: tf.Tensor,
  ) -> tuple:
    images = tf.numpy_function(
      self._decode_images, [encoded, windows, flips], tf.uint8, stateful=False
    )
    images.set_shape([encoded.shape[0], self.image_size, self.image_size, 3])
    return (images, labels, idents) if self._with_ids else (images, labels)

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


def _with_options_of(parent: type) -> inspect.Signature:
  """The constructor's own parameters, and those that it passes on."""
  own = inspect.signature(IndexedPipeline).parameters
  inherited = inspect.signature(parent).parameters
  names = {name: value for name, value in own.items() if name != 'options'}
  return inspect.Signature([*names.values(), *(inherited[n] for n in inherited if n not in names)])


IndexedPipeline.__signature__ = _with_options_of(tfdata.TfDataPipeline)  # type: ignore[attr-defined]


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


@functools.cache
def _installed(module: str) -> bool:
  return importlib.util.find_spec(module) is not None


def _require(module: str, option: str) -> None:
  if not _installed(module):
    raise DataError(
      f'{option} needs a package that is not installed: pip install {_INSTALL[module]}'
    )


# What follows runs in Python, a batch at a time. simplejpeg, TensorFlow's eager ops and OpenCV let
# go of the interpreter's lock, so that several batches are worked on at once.


def _training_images(
  size: int,
  resize: Callable[[np.ndarray, int], np.ndarray],
  encoded: Sequence[bytes],
  windows: np.ndarray,
  flips: np.ndarray,
) -> np.ndarray:
  """uint8 [B, size, size, 3].

  Args:
    size: pixels.
    resize: (image uint8 [h, w, 3], size) -> float32 [size, size, 3], 0 to 255.
    encoded: [B] files.
    windows: int32 [B, 4].
    flips: int32 [B, 1].
  """
  images = _aligned((len(encoded), size, size, 3))
  upright = np.empty((size, size, 3), np.uint8)
  with tf.device('/CPU:0'):
    for image, jpeg, window, flip in zip(images, encoded, windows.tolist(), flips.ravel().tolist()):
      resized = resize(_window(jpeg, window), size)
      np.rint(resized, out=upright if flip else image, casting='unsafe')
      if flip:
        _mirror(upright, image)
  return images


def _mirror(image: np.ndarray, out: np.ndarray) -> None:
  """Exchanges left and right of uint8 [h, w, 3]."""
  if _installed('cv2'):
    import cv2

    cv2.flip(image, 1, out)
  else:
    out.view('V3')[:] = image.view('V3')[:, ::-1]  # whole pixels, not bytes


def _window(encoded: bytes, window: Sequence[int]) -> np.ndarray:
  """A window of a file's pixels, uint8 [h, w, 3]."""
  import simplejpeg

  top, left, rows, columns = window
  if indexed_jpeg.has_index(encoded):
    encoded, top, left = indexed_jpeg.assemble(encoded, window)
  image = None
  if encoded.startswith(b'\xff\xd8\xff') and encoded.endswith(indexed_jpeg.END):
    # Samplings that it doesn't know, and files that it finds damaged, are `augment`'s to judge.
    with contextlib.suppress(ValueError):
      if simplejpeg.decode_jpeg_header(encoded)[2] in ('YCbCr', 'Gray', 'RGB'):
        image = simplejpeg.decode_jpeg(encoded)
  if image is None:
    image = augment.decode(tf.constant(encoded)).numpy()
  return image[top : top + rows, left : left + columns]


def _resize_exactly(image: np.ndarray, size: int) -> np.ndarray:
  """uint8 [h, w, 3] to float32 [size, size, 3], as `augment.resize` does before it rounds."""
  resized = tf.raw_ops.ResizeBilinear(
    images=image[np.newaxis], size=(size, size), half_pixel_centers=True
  )
  return np.asarray(memoryview(resized))[0]  # numpy() would copy it


def _resize_by_opencv(image: np.ndarray, size: int) -> np.ndarray:
  import cv2

  return cv2.resize(image.astype(np.float32), (size, size))


def _aligned(shape: Sequence[int]) -> np.ndarray:
  """An uninitialised uint8 array that TensorFlow can take over without a copy."""
  size = int(np.prod(shape))
  room = np.empty(size + _ALIGNMENT, np.uint8)
  start = -room.ctypes.data % _ALIGNMENT
  return room[start : start + size].reshape(shape)
