"""Image operations: exact decoding, crops, resizing, flips; eagerly and inside tf.data."""

import io

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm.pipelines import augment
from tests.pipelines import data

JPEGS = {
  '4:2:0': {'subsampling': 2},
  '4:2:2': {'subsampling': 1},
  '4:4:4': {'subsampling': 0},
  'progressive': {'subsampling': 2, 'progressive': True},
  'grey': {'mode': 'L'},
  'CMYK': {'mode': 'CMYK'},
}


@pytest.mark.parametrize('options', JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize('size', [(157, 113), (64, 48)])
def test_decoding_a_window_equals_decoding_all_and_slicing(options, size):
  encoded = tf.constant(data.image_bytes(*size, quality=92, **options))
  whole = augment.decode(encoded).numpy()
  shape = augment.jpeg_shape(encoded)
  assert tuple(shape.numpy()[:2]) == whole.shape[:2] == size[::-1]
  window_of = tf.function(augment.decode_window, reduce_retracing=True)
  rng = np.random.default_rng(0)
  windows = [(0, 0, *whole.shape[:2]), (whole.shape[0] - 1, whole.shape[1] - 1, 1, 1), (0, 0, 1, 1)]
  for _ in range(60):
    height, width = rng.integers(1, whole.shape[0] + 1), rng.integers(1, whole.shape[1] + 1)
    top, left = rng.integers(whole.shape[0] - height + 1), rng.integers(whole.shape[1] - width + 1)
    windows.append((top, left, height, width))
  for top, left, height, width in windows:
    window = window_of(encoded, shape, tf.constant([top, left, height, width], tf.int32))
    np.testing.assert_array_equal(window, whole[top : top + height, left : left + width])


def test_without_the_margin_windows_would_differ():
  """Otherwise the test above proves nothing about the margin."""
  encoded = tf.constant(data.image_bytes(157, 113, quality=92, subsampling=2))
  whole = augment.decode(encoded).numpy()
  differences = 0
  for offset in range(0, 60, 7):
    window = [offset, offset, 33, 33]
    plain = tf.image.decode_and_crop_jpeg(
      encoded, window, channels=3, dct_method='INTEGER_ACCURATE'
    )
    sliced = whole[offset : offset + 33, offset : offset + 33]
    differences += np.any(plain.numpy() != sliced)
  assert differences


def test_decoding_equals_pil():
  encoded = data.image_bytes(200, 150, quality=90, subsampling=2)
  with Image.open(io.BytesIO(encoded)) as image:
    expected = np.asarray(image.convert('RGB'))
  np.testing.assert_array_equal(augment.decode(tf.constant(encoded)), expected)


def test_cmyk_looks_like_the_original():
  original = np.asarray(data.photograph().resize((200, 150)), np.float32)
  decoded = augment.decode(tf.constant(data.image_bytes(200, 150, mode='CMYK', quality=95)))
  assert np.abs(decoded.numpy() - original).mean() < 3


@pytest.mark.parametrize(
  ('form', 'mode'), [('PNG', 'RGB'), ('PNG', 'RGBA'), ('PNG', 'L'), ('GIF', 'RGB'), ('BMP', 'RGB')]
)
def test_other_formats_decode_to_three_channels(form, mode):
  encoded = data.image_bytes(50, 40, form=form, mode=mode)
  decoded = augment.decode(tf.constant(encoded))
  assert decoded.shape == (40, 50, 3)
  assert decoded.dtype == tf.uint8
  if form != 'GIF':  # which has a palette
    expected = data.photograph().resize((50, 40)).convert(mode).convert('RGB')
    np.testing.assert_array_equal(decoded, np.asarray(expected))


def test_random_windows_are_inside_and_of_the_recipes_shapes():
  shape = tf.constant([375, 500, 3])
  seeds = tf.stack([tf.fill([500], tf.constant(7, tf.int64)), tf.range(500, dtype=tf.int64)], 1)
  windows = np.array([augment.random_window(shape, seed).numpy() for seed in seeds])
  top, left, height, width = windows.T
  assert (top >= 0).all() and (left >= 0).all()
  assert (top + height <= 375).all() and (left + width <= 500).all()
  area = height * width / (375 * 500)
  # Sides are rounded to pixels, hence the slack.
  assert 0.079 < area.min() < 0.13 and 0.75 < area.max() <= 1.0
  assert (width / height).min() > 0.735 and (width / height).max() < 1.36
  assert len(np.unique(windows, axis=0)) > 490


def test_a_window_that_can_not_be_had_is_the_whole_image():
  seed = tf.constant([1, 2], tf.int64)
  window = augment.random_window(tf.constant([20, 4000, 3]), seed)
  np.testing.assert_array_equal(window, [0, 0, 20, 4000])


def test_windows_cover_a_tenth_of_the_given_box():
  shape, box = tf.constant([300, 400, 3]), tf.constant([[0.9, 0.9, 1.0, 1.0]])
  for number in range(100):
    seed = tf.constant([3, number], tf.int64)
    top, left, height, width = augment.random_window(shape, seed, box).numpy()
    covered = max(0, top + height - 270) * max(0, left + width - 360)
    assert covered >= 0.09 * 30 * 40  # a tenth, less the rounding to pixels


def test_resizing_is_bilinear_between_half_pixel_centres():
  image = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
  expected = tf.image.resize(image, [24, 24], antialias=False).numpy()
  resized = augment.resize(tf.constant(image), 24)
  assert resized.dtype == tf.uint8
  np.testing.assert_array_equal(resized, np.rint(expected))  # halves go to even levels


def test_flips_are_exact_and_about_half():
  image = tf.constant(np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8))
  flipped = 0
  for number in range(400):
    result = augment.flip(image, tf.constant([9, number], tf.int64)).numpy()
    is_same = np.array_equal(result, image)
    assert is_same or np.array_equal(result, image.numpy()[:, ::-1])
    flipped += not is_same
  assert 150 < flipped < 250


@pytest.mark.parametrize('shape', [(375, 500), (500, 333), (60, 61), (256, 256), (1, 1), (2, 90)])
@pytest.mark.parametrize('size', [224, 33])
def test_the_central_crop_equals_resizing_all_and_slicing(shape, size):
  image = tf.constant(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8))
  short = round(size * 256 / 224)
  scale = short / min(shape)
  sides = [int(np.round(np.float32(side) * np.float32(scale))) for side in shape]
  assert min(sides) == short
  whole = tf.image.resize(image, sides, antialias=True).numpy()
  top, left = (sides[0] - size) // 2, (sides[1] - size) // 2
  expected = whole[top : top + size, left : left + size]
  actual = augment.resize_central_crop(image, size)
  assert actual.dtype == tf.uint8
  assert actual.shape == (size, size, 3)
  # float32 sums in another order may fall on the other side of a rounding.
  assert np.abs(actual.numpy() - expected).max() <= 0.51


def test_evaluation_shrinks_as_pil_does():
  photograph = data.photograph()
  decoded = tf.constant(np.asarray(photograph))
  expected = photograph.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
  difference = augment.resize_central_crop(decoded, 224).numpy().astype(int) - np.asarray(expected)
  assert np.abs(difference).mean() < 0.35  # PIL rounds after each axis


def test_a_one_pixel_checkerboard_turns_grey():
  board = np.indices((512, 512)).sum(0) % 2 * 255
  image = tf.constant(np.repeat(board[..., None], 3, -1).astype(np.uint8))
  crop = augment.resize_central_crop(image, 56).numpy()
  assert crop.min() > 120 and crop.max() < 135  # without antialiasing: 0 or 255
