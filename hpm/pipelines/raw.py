"""Decoded images in files (`raw_file`), as a source of any pipeline and as a faster one.

    python -m hpm.pipelines convert SRC OUT --format=raw      # short side 256; raw:320 for another
    pipelines.create('raw', data_dir='OUT', batch_size=64, pipeline='raw')

Images were shrunk, antialiased, when they were written, so training crops differ from those of the
originals; docs/raw_shards.md says by how much. Evaluation at the size that belongs to the short
side (224 to 256) is the same to the bit.
"""

from collections.abc import Callable, Sequence
import functools
import os
import re
import struct
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, batches, device_crop, jpeg_native, order, raw_file, sources

__all__ = ['RawPipeline', 'RawSource']

SPLITS = ('train', 'validation')
RESIZES = (*batches.RESIZES, 'native', 'tensorflow', 'device')
_SIZES = struct.Struct('<ii')


class RawSource(sources.RandomAccess):
  """The images of `DIR/train-*-of-*.raw` and `DIR/validation-*-of-*.raw`.

  Pixels' checksums are verified where one image is looked at, by the converter and the doctor
  above all, but not in training.

  Args:
    data_dir: the directory of the files.
    split: 'train' or 'validation'.

  Raises:
    UsageError: no directory given, an unknown split.
    DataError: no such directory, no such files, one that is missing, cut off or damaged.
  """

  remedy = 'convert the data set again'
  label_hint = ' (labels are taken to run from 1; num_classes=1001 keeps a background class 0)'
  stores_files = False

  def __init__(self, data_dir: str, split: str = 'train'):
    if split not in SPLITS:
      raise errors.unknown('split', split, SPLITS)
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give the directory of the {split}-*.raw files')
    self.origin, self.split = os.fspath(data_dir), split
    self._paths = _paths(self.origin, split)
    self._opened: dict[int, raw_file.RawFile] = {}

  @property
  def files(self) -> Sequence[str]:
    return self._paths

  def opened(self, file: int) -> raw_file.RawFile:
    """A file, mapped into memory; DataError: it is damaged."""
    if file not in self._opened:
      self._opened[file] = raw_file.RawFile(self._paths[file])
    return self._opened[file]

  def __getstate__(self) -> dict[str, Any]:
    # A mapping can't go to another process, but its file can be opened there.
    return self.__dict__ | {'_opened': {}}

  def count(self, strict: bool) -> list[int]:
    def count(file: int) -> int:
      try:
        return len(self.opened(file))
      except DataError:
        if strict:
          raise
        return 1  # it can't be read in part: its table is at its end

    return [count(file) for file in range(len(self._paths))]

  def label_offset(self, num_classes: int) -> int:
    return 0 if num_classes == 1001 else -1

  def rows(self) -> tuple[np.ndarray, np.ndarray]:
    """Of all images: int32 [N, 3], label, height and width; and int64, each file's first index."""
    tables = [self.opened(file).table for file in range(len(self._paths))]
    columns = [
      np.stack([table['label'], table['height'], table['width']], 1).astype(np.int32)
      for table in tables
    ]
    starts = np.cumsum([0, *map(len, tables[:-1])], dtype=np.int64)
    return np.concatenate(columns), starts

  def load(self, ident: tf.Tensor, item: tf.Tensor, with_boxes: bool) -> sources.Sample:
    def read(ident: np.int64) -> tuple[bytes, np.int64]:
      file, record = int(ident) >> 32, int(ident) & 0xFFFFFFFF
      return self._encoded(file, record), np.int64(self.opened(file).table['label'][record])

    encoded, label = tf.numpy_function(read, [ident], [tf.string, tf.int64], stateful=False)
    return sources.Sample(tf.ensure_shape(encoded, []), tf.ensure_shape(label, []))

  def _encoded(self, file: int, record: int) -> bytes:
    """Height and width, int32, and the pixels."""
    image = self.opened(file).image(record)
    return _SIZES.pack(*image.shape[:2]) + image.tobytes()

  def contents(self, file: int, record: int, item: bytes | None = None) -> sources.Contents:
    opened = self.opened(file)
    if record >= len(opened):
      raise DataError(f'{self._paths[file]} has {len(opened)} records, so no record {record}')
    opened.check(record)
    label, key = int(opened.table['label'][record]), opened.keys[record]
    return sources.Contents(self._encoded(file, record), label, key)

  def sides(self, encoded: bytes) -> tuple[int, int]:
    height, width = _SIZES.unpack_from(encoded)
    return width, height

  def decode(self, encoded: tf.Tensor) -> tf.Tensor:
    pixels = tf.io.decode_raw(tf.strings.substr(encoded, _SIZES.size, -1), tf.uint8)
    return tf.reshape(pixels, tf.concat([_sides(encoded), [3]], 0))

  def decode_crop(self, encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    image = self.decode(encoded)
    return augment.window_of(image, choose(tf.shape(image)))

  def num_pixels(self, encoded: tf.Tensor) -> tf.Tensor:
    return tf.reduce_prod(tf.cast(_sides(encoded), tf.int64))


def _sides(encoded: tf.Tensor) -> tf.Tensor:
  return tf.io.decode_raw(tf.strings.substr(encoded, 0, _SIZES.size), tf.int32)


def _paths(directory: str, split: str) -> list[str]:
  try:
    names = os.listdir(directory)
  except OSError as error:
    raise DataError(f'data_dir {directory!r} cannot be read: {error.strerror}') from None
  pattern = re.compile(rf'{split}-(\d+)-of-(\d+)\.raw')
  found = sorted((match for match in map(pattern.fullmatch, names) if match), key=lambda m: m[0])
  if not found:
    raise DataError(
      f'{directory} holds no {split}-*-of-*.raw: '
      'write them with python -m hpm.pipelines convert SRC OUT --format=raw'
    )
  if [(int(m[1]), int(m[2])) for m in found] != [(i, len(found)) for i in range(len(found))]:
    raise DataError(
      f'{directory} holds {len(found)} files {split}-*.raw which are no complete set, such as '
      f'{found[-1][0]}: copy the missing ones, or convert the data set again'
    )
  return [os.path.join(directory, match[0]) for match in found]


class RawPipeline(batches.BatchPipeline):
  """What `tfdata.TfDataPipeline` does, with windows cut out of mapped files.

  The order is a full permutation of all images each epoch. The compiled reader (`python -m
  hpm.pipelines compile`), where it is built, resizes to the same bits in a third of the time.

  Args:
    source: raw images.
    resize: of training images, by name of `batches.RESIZES`, where 'exact' takes the compiled
      reader if it is there; 'native' and 'tensorflow' resize exactly with it and without it;
      'device': batches hold windows as they are, for `crop_on_device` to resize.
    **options: of `tfdata.TfDataPipeline`.

  Raises:
    UsageError: an option out of range, another source.
    DataError: as `tfdata.TfDataPipeline` does; OpenCV is asked for and not installed, or the
      compiled reader and not built.
  """

  def __init__(self, source: sources.Source, *, resize: str = 'exact', **options: Any):
    if not isinstance(source, RawSource):
      raise UsageError(
        "pipeline='raw' is for raw images: give the data set 'raw', or pipeline='tfdata'"
      )
    if resize not in RESIZES:
      raise errors.unknown('resize', resize, RESIZES)
    if resize == 'native':
      jpeg_native.require(f'resize={resize!r}')
    on_device = resize == 'device'
    if on_device:
      options['make_training'] = functools.partial(_training_windows, source)
    elif resize == 'native' or (resize == 'exact' and jpeg_native.is_built()):
      options['make_training'] = functools.partial(_training_images, source)
    if resize not in batches.RESIZES:
      resize = 'exact'
    super().__init__(source, functools.partial(_window, source), resize=resize, **options)
    if on_device and (self._decode_images is None or not self._training):
      raise UsageError(
        "resize='device' is for training at one size, without antialias, distort_colors and "
        "bad_records='skip': leave these out, or give resize='exact'"
      )
    if self._decode_images is not None:  # otherwise a damaged file may be among them
      self._rows, self._starts = source.rows()
    if on_device:
      self._pack_windows()

  def _pack_windows(self) -> None:
    """Makes batches of windows in place of resized images."""
    assert self._decode_images is not None
    height, width = self._rows[:, 1:].max(axis=0).tolist()
    self._image_shape = (1 + height, max(width, device_crop.HEADER // 3), 3)
    self._decode_images = functools.partial(self._decode_images, self._image_shape)

  _undecoded_inline = True

  def _undecoded(self, ident: tf.Tensor, item: tf.Tensor) -> batches.Undecoded:
    file, record = order.split_id(ident)
    index = tf.gather(tf.constant(self._starts), file) + record
    row = tf.gather(tf.constant(self._rows), index)
    shape = tf.concat([row[1:], [3]], 0)
    return batches.Undecoded(ident, shape, tf.cast(row[0], tf.int64), None)


def _window(source: RawSource, ident: int, window: Sequence[int]) -> np.ndarray:
  ident = int(ident)
  top, left, height, width = window
  image = source.opened(ident >> 32).image(ident & 0xFFFFFFFF)
  return image[top : top + height, left : left + width]


def _training_images(
  source: RawSource, size: int, idents: np.ndarray, windows: np.ndarray, flips: np.ndarray
) -> np.ndarray:
  """uint8 [B, size, size, 3] by the compiled reader."""
  images = batches.aligned((len(idents), size, size, 3))
  views = [_window(source, *of_sample) for of_sample in zip(idents, windows.tolist(), strict=True)]
  jpeg_native.resized_windows(views, flips, images)  # a file goes on behind its last pixel
  return images


def _training_windows(
  source: RawSource,
  size: int,
  shape: tuple[int, int, int],
  idents: np.ndarray,
  windows: np.ndarray,
  flips: np.ndarray,
) -> np.ndarray:
  """uint8 [B, *shape], as `device_crop` wants it."""
  del size
  images = batches.aligned((len(idents), *shape))
  views = [_window(source, *of_sample) for of_sample in zip(idents, windows.tolist(), strict=True)]
  device_crop.pack(views, flips, images)
  return images


batches.take_options(RawPipeline)
