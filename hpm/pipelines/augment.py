"""The image operations of the pipelines, one small graph function each.

Windows are int32 [4]: top, left, height, width in pixels of the whole image. Everything random is
a stateless op, so that a sample's crop and flip depend on its seed alone.
"""

import io

import numpy as np
import tensorflow as tf

__all__ = [
  'central_source',
  'central_window',
  'decode',
  'decode_window',
  'distort_colors',
  'flip',
  'flips',
  'is_jpeg',
  'jpeg_shape',
  'num_pixels',
  'random_window',
  'resize',
  'resize_antialiased',
  'resize_central_crop',
  'resize_short_side',
  'short_side',
  'window_of',
]


def is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
  """Whether the bytes begin and end as a JPEG does: bool [].

  ImageNet has a PNG under a JPEG's name. And TensorFlow takes a JPEG that lacks no more than its
  end marker for one that lacks half of the image, which Pillow can tell apart.
  """
  last = tf.strings.substr(encoded, tf.maximum(tf.strings.length(encoded) - 2, 0), 2)
  first = tf.strings.substr(encoded, 0, 3)
  return tf.logical_and(tf.equal(first, b'\xff\xd8\xff'), tf.equal(last, b'\xff\xd9'))


def jpeg_shape(encoded: tf.Tensor) -> tf.Tensor:
  """int32 [3]: height, width, channels from the header, without decoding."""
  return tf.raw_ops.ExtractJpegShape(contents=encoded)


def num_pixels(encoded: tf.Tensor) -> tf.Tensor:
  """int64 []: height x width as the header of a JPEG, PNG, GIF or BMP says; 0 for other bytes.

  Nothing is decoded, so that an image of absurd size can be refused before it fills the memory.
  """

  def jpeg() -> tf.Tensor:
    shape = tf.cast(jpeg_shape(encoded), tf.int64)
    return shape[0] * shape[1]

  def other() -> tf.Tensor:
    def product(offset: int, dtype: tf.DType, little_endian: bool) -> tf.Tensor:
      sides = tf.io.decode_raw(
        tf.strings.substr(encoded, offset, 2 * dtype.size), dtype, little_endian
      )
      return tf.reduce_prod(tf.abs(tf.cast(sides, tf.int64)))

    def starts(magic: bytes, size: int) -> tf.Tensor:
      start = tf.equal(tf.strings.substr(encoded, 0, len(magic)), magic)
      return tf.logical_and(start, tf.strings.length(encoded) >= size)

    return tf.case(
      [
        (starts(b'\x89PNG', 24), lambda: product(16, tf.int32, False)),
        (starts(b'GIF8', 10), lambda: product(6, tf.uint16, True)),
        (starts(b'BM', 26), lambda: product(18, tf.int32, True)),
      ],
      default=lambda: tf.constant(0, tf.int64),
    )

  return tf.cond(is_jpeg(encoded), jpeg, other)


def window_of(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
  """A window (int32 [4]) of a decoded image, uint8 [h, w, 3]."""
  begin, size = tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0)
  return tf.slice(image, begin, size)


def decode(encoded: tf.Tensor) -> tf.Tensor:
  """The whole image, uint8 [H, W, 3]: JPEG with the accurate DCT, PNG, GIF (frame 1) or BMP.

  TensorFlow's default DCT is a faster one, 0.8 grey levels darker than PIL's and up to 18 off;
  this one equals PIL bit for bit. EXIF rotation is ignored, as it is in every ImageNet recipe.
  What TensorFlow can't read, or reads wrongly, is left to Pillow: a JPEG without its end marker or
  with bytes behind it, a BMP with a palette, and other kinds of files.
  """

  def jpeg() -> tf.Tensor:
    return tf.image.decode_jpeg(encoded, channels=3, dct_method='INTEGER_ACCURATE')

  def other() -> tf.Tensor:
    return tf.cond(_is_native(encoded), native, by_pillow)

  def native() -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)

  def by_pillow() -> tf.Tensor:
    return tf.ensure_shape(tf.numpy_function(_pillow, [encoded], tf.uint8), [None, None, 3])

  return tf.ensure_shape(tf.cond(is_jpeg(encoded), jpeg, other), [None, None, 3])


def _is_native(encoded: tf.Tensor) -> tf.Tensor:
  """Whether TensorFlow decodes these bytes, which are no JPEG, as Pillow does: bool []."""

  def starts(magic: bytes) -> tf.Tensor:
    return tf.equal(tf.strings.substr(encoded, 0, len(magic)), magic)

  def has_no_palette() -> tf.Tensor:  # 24 or 32 bits a pixel, in the header's byte 28
    bits = tf.io.decode_raw(tf.strings.substr(encoded, 28, 1), tf.uint8)[0]
    return bits >= 24

  bmp = tf.logical_and(starts(b'BM'), tf.strings.length(encoded) > 28)
  return tf.logical_or(
    tf.logical_or(starts(b'\x89PNG'), starts(b'GIF8')), tf.cond(bmp, has_no_palette, lambda: False)
  )


def _pillow(encoded: bytes | np.ndarray) -> np.ndarray:
  if isinstance(encoded, np.ndarray):  # as eager mode hands over a string
    encoded = encoded.item()
  try:
    from PIL import Image, UnidentifiedImageError
  except ImportError:
    raise ValueError('neither JPEG, PNG, GIF nor BMP, and Pillow is not installed') from None
  try:
    with Image.open(io.BytesIO(bytes(encoded))) as image:
      return np.asarray(image.convert('RGB'))
  except UnidentifiedImageError:
    raise ValueError('Unknown image file format') from None
  except Exception as error:  # whatever Pillow makes of damaged bytes
    raise ValueError(f'Pillow: {error}') from None


def random_window(shape: tf.Tensor, seed: tf.Tensor, boxes: tf.Tensor | None = None) -> tf.Tensor:
  """A window as ImageNet networks are trained on (Szegedy et al. 2014, arXiv:1409.4842).

  8 to 100 % of the area, aspect 3/4 to 4/3; the whole image if 100 draws fail.

  Args:
    shape: int32 [3], the image's height, width and channels.
    seed: int64 [2].
    boxes: float32 [N, 4] (ymin, xmin, ymax, xmax in 0 .. 1), of one of which the window covers at
      least a tenth; None for the whole image.
  """
  if boxes is None:
    boxes = tf.constant([[0.0, 0.0, 1.0, 1.0]])
  begin, size, _ = tf.raw_ops.StatelessSampleDistortedBoundingBox(
    image_size=shape,
    bounding_boxes=boxes[tf.newaxis],
    min_object_covered=0.1,
    seed=seed,
    aspect_ratio_range=[3 / 4, 4 / 3],
    area_range=[0.08, 1.0],
    max_attempts=100,
    use_image_if_no_bounding_boxes=True,
  )
  return tf.concat([begin[:2], size[:2]], 0)


def decode_window(encoded: tf.Tensor, shape: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
  """A window of a JPEG, uint8 [h, w, 3], equal bit for bit to decoding it all and slicing.

  The cropping decoder saves the rest's inverse DCT, but at its window's border it has no
  neighbour to interpolate chroma from; so it gets one pixel more a side, which is cut off.

  Args:
    encoded: string [], a JPEG.
    shape: int32 [3], of the whole image.
    window: int32 [4], inside the image.
  """
  begin, size = window[:2], window[2:]
  first = tf.maximum(begin - 1, 0)
  last = tf.minimum(begin + size + 1, shape[:2])
  grown = tf.image.decode_and_crop_jpeg(
    encoded, tf.concat([first, last - first], 0), channels=3, dct_method='INTEGER_ACCURATE'
  )
  return tf.slice(grown, tf.concat([begin - first, [0]], 0), tf.concat([size, [3]], 0))


def resize(image: tf.Tensor, size: 'int | tf.Tensor') -> tf.Tensor:
  """Bilinear to uint8 [size, size, 3] from uint8 [h, w, 3], rounded to the nearest level.

  Not antialiased: where it shrinks it drops pixels, as most ImageNet recipes of TensorFlow do.
  """
  resized = tf.raw_ops.ResizeBilinear(
    images=image[tf.newaxis], size=[size, size], half_pixel_centers=True
  )
  # Halves go to the even level, as in DALI: halves are common where a window shrinks to a half.
  return tf.cast(tf.round(resized[0]), tf.uint8)


def resize_antialiased(image: tf.Tensor, size: 'int | tf.Tensor') -> tf.Tensor:
  """The same, but where it shrinks each pixel is an average over all that it stands for.

  It equals PIL's bilinear to within rounding; what that costs and changes is in
  docs/pipelines.md.
  """
  sides = tf.cast(tf.shape(image)[:2], tf.float32)
  scaled = tf.raw_ops.ScaleAndTranslate(
    images=image[tf.newaxis],
    size=tf.stack([size, size]),
    scale=tf.cast(size, tf.float32) / sides,
    translation=[0.0, 0.0],
    kernel_type='triangle',
    antialias=True,
  )
  return _to_uint8(scaled[0])


def distort_colors(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Random brightness, saturation, hue and contrast, uint8 [h, w, 3].

  As far as in Inception's training (brightness by 32 levels, saturation and contrast by factors
  of 0.5 to 1.5, hue by 0.2 of the circle), but always in this order.

  Args:
    image: uint8 [h, w, 3].
    seed: int64 [2].
  """
  seeds = tf.stack([seed, seed + [1, 0], seed + [2, 0], seed + [3, 0]])
  image = tf.cast(image, tf.float32) / 255.0
  image = tf.image.stateless_random_brightness(image, 32 / 255, seeds[0])
  image = tf.image.stateless_random_saturation(image, 0.5, 1.5, seeds[1])
  image = tf.image.stateless_random_hue(image, 0.2, seeds[2])
  image = tf.image.stateless_random_contrast(image, 0.5, 1.5, seeds[3])
  return _to_uint8(image * 255.0)


def _to_uint8(image: tf.Tensor) -> tf.Tensor:
  # float32 sums may pass 255 by a hair, and a cast would wrap it.
  return tf.cast(tf.clip_by_value(image + 0.5, 0.0, 255.0), tf.uint8)


def flips(seed: tf.Tensor) -> tf.Tensor:
  """int32 [1]: 1 where `flip` exchanges left and right, 0 where it doesn't."""
  return tf.random.stateless_uniform([1], seed, 0, 2, tf.int32, alg='philox')


def flip(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Left and right exchanged in half of all cases, as int64 [2] `seed` says."""
  times = flips(seed)
  # A list of no axes or of one costs less than a branch.
  return tf.reverse(image, tf.fill(times, 1))


def short_side(size: int) -> int:
  """To what evaluation resizes the short side of an image, of which it crops `size` pixels."""
  return round(size * 256 / 224)


def central_window(shape: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
  """How evaluation sees an image: (resized int32 [2], offset int32 [2]), both height and width.

  The short side becomes 256/224 of `size`, the long side is rounded, and `size` x `size` pixels
  are cut from the middle (an odd margin is smaller on the top or left).
  """
  sides = tf.cast(shape[:2], tf.float32)
  resized = tf.cast(tf.round(sides * (short_side(size) / tf.reduce_min(sides))), tf.int32)
  return resized, (resized - size) // 2


def resize_short_side(image: tf.Tensor, short: int) -> tf.Tensor:
  """Antialiased bilinear: uint8 [h, w, 3] whose shorter side has `short` pixels.

  Args:
    image: uint8 [H, W, 3].
    short: pixels; the long side is rounded.
  """
  sides = tf.cast(tf.shape(image)[:2], tf.float32)
  resized = tf.round(sides * (short / tf.reduce_min(sides)))
  scaled = tf.raw_ops.ScaleAndTranslate(
    images=image[tf.newaxis],
    size=tf.cast(resized, tf.int32),
    scale=resized / sides,
    translation=[0.0, 0.0],
    kernel_type='triangle',
    antialias=True,
  )
  return _to_uint8(scaled[0])


def central_source(shape: tf.Tensor, size: int) -> tf.Tensor:
  """The window (int32 [4]) of an image that `resize_central_crop` reads, or somewhat more.

  Args:
    shape: int32 [3], of the image.
    size: pixels.
  """
  resized, offset = central_window(shape, size)
  step = tf.cast(shape[:2], tf.float32) / tf.cast(resized, tf.float32)
  # A pixel is the middle of its kernel, which reaches one step to each side, at least one pixel.
  reach = tf.maximum(step, 1.0) + 1.0
  begin = tf.floor((tf.cast(offset, tf.float32) + 0.5) * step - reach)
  end = tf.math.ceil((tf.cast(offset + size, tf.float32) - 0.5) * step + reach)
  first = tf.maximum(tf.cast(begin, tf.int32), 0)
  last = tf.minimum(tf.cast(end, tf.int32), shape[:2])
  return tf.concat([first, last - first], 0)


def resize_central_crop(image: tf.Tensor, size: int, shape: tf.Tensor | None = None) -> tf.Tensor:
  """Antialiased bilinear, short side to 256/224 of `size`, central crop: uint8 [size, size, 3].

  Equal to resizing the whole image and slicing, but computes only the pixels that are kept.

  Args:
    image: uint8 [h, w, 3], which may lack what lies below and to the right of `central_source`.
    size: pixels.
    shape: int32 [3], of the whole image, if `image` lacks something.
  """
  if shape is None:
    shape = tf.shape(image)
  resized, offset = central_window(shape, size)
  scaled = tf.raw_ops.ScaleAndTranslate(
    images=image[tf.newaxis],
    size=[size, size],
    scale=tf.cast(resized, tf.float32) / tf.cast(shape[:2], tf.float32),
    translation=-tf.cast(offset, tf.float32),
    kernel_type='triangle',
    antialias=True,
  )
  return _to_uint8(scaled[0])
