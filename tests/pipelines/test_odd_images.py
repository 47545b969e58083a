"""Images that other loaders read: PIL's pixels in training and evaluation, or a clear error."""

import io

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import augment, faults
from tests.pipelines import data

WIDTH, HEIGHT = 60, 40


def saved(form: str, mode: str = 'RGB', **options) -> bytes:
  return data.image_bytes(WIDTH, HEIGHT, form=form, mode=mode, **options)


def rotated() -> bytes:
  exif = Image.Exif()
  exif[0x0112] = 6  # turn by 90 degrees
  buffer = io.BytesIO()
  data.photograph().resize((WIDTH, HEIGHT)).save(buffer, 'JPEG', exif=exif)
  return buffer.getvalue()


def animated() -> bytes:
  image = data.photograph().resize((WIDTH, HEIGHT))
  buffer = io.BytesIO()
  image.save(buffer, 'GIF', save_all=True, append_images=[image.rotate(90), image.rotate(180)])
  return buffer.getvalue()


def odd() -> dict[str, bytes]:
  jpeg = saved('JPEG')
  scan = jpeg.index(b'\xff\xda')
  return {
    'no end marker': jpeg[:-2],
    'bytes behind the end': jpeg + b'\0' * 100 + b'junk',
    'a thumbnail behind the end': jpeg + saved('JPEG'),
    'bytes between segments': jpeg[:scan] + b'\x00\x01\x02' + jpeg[scan:],
    'a marker inside the scan': jpeg[: scan + 300] + b'\xff\xd5' + jpeg[scan + 302 :],
    'CMYK': saved('JPEG', 'CMYK'),
    'grey': saved('JPEG', 'L'),
    'progressive': saved('JPEG', progressive=True),
    'EXIF rotation': rotated(),
    '1x1': data.image_bytes(1, 1),
    'animated GIF': animated(),
    'WebP': saved('WEBP', lossless=True),
    'TIFF': saved('TIFF'),
    **{f'PNG {mode}': saved('PNG', mode) for mode in ('RGB', 'RGBA', 'L', 'LA', 'P', '1')},
    **{f'BMP {mode}': saved('BMP', mode) for mode in ('RGB', 'L', 'P', '1')},
    'GIF': saved('GIF'),
  }


def pillow(encoded: bytes) -> np.ndarray:
  with Image.open(io.BytesIO(encoded)) as image:
    return np.asarray(image.convert('RGB'))


@pytest.mark.parametrize('name', odd())
def test_odd_images_have_the_pixels_of_pillow(name):
  encoded = odd()[name]
  np.testing.assert_array_equal(augment.decode(tf.constant(encoded)), pillow(encoded))


@pytest.mark.parametrize('training', [True, False])
def test_all_of_them_pass_through_a_pipeline(training):
  pairs = [(encoded, i) for i, encoded in enumerate(odd().values())]
  pipeline = pipelines.create(
    'iterable',
    samples=pairs,
    batch_size=len(pairs),
    num_classes=len(pairs),
    image_size=32,
    num_epochs=1,
    training=training,
  )
  ((images, labels),) = pipeline.dataset()
  assert sorted(labels.numpy()) == list(range(len(pairs)))
  assert images.shape == (len(pairs), 32, 32, 3)


def test_grey_png_of_16_bits_keeps_its_upper_ones():
  grey = np.asarray(data.photograph().resize((WIDTH, HEIGHT)).convert('L'))
  buffer = io.BytesIO()
  Image.fromarray(grey.astype(np.uint16) * 257).save(buffer, 'PNG')
  decoded = augment.decode(tf.constant(buffer.getvalue())).numpy()
  np.testing.assert_array_equal(decoded, np.repeat(grey[..., None], 3, -1))


@pytest.mark.filterwarnings('ignore:Truncated File Read', 'ignore:Tag data larger')
@pytest.mark.parametrize(
  ('encoded', 'what'),
  [
    (b'text', 'Unknown image file format'),
    (b'BM', 'Unknown image file format'),
    (b'\xff\xd8\xff', 'Unknown image file format'),
    (saved('JPEG')[:700], 'image file is truncated'),
    (saved('JPEG', progressive=True)[:700], 'image file is truncated'),
    (saved('PNG')[:300], 'Invalid PNG'),
    (saved('GIF')[:300], 'cannot be decoded'),
    (saved('TIFF')[:300], 'cannot be decoded'),
  ],
)
def test_damaged_images_are_an_error_of_one_line(encoded, what):
  source = pipelines.source('iterable', samples=[(encoded, 0)])
  found = str(faults.examine(source, 0, 0, faults.Demands(1)))
  assert found.startswith(f'list: sample 0: image of {len(encoded)} bytes cannot be decoded (')
  assert what in found and '\n' not in found
  # And in the middle of a run, where TensorFlow names neither file nor record.
  good = saved('JPEG')
  pipeline = pipelines.create(
    'iterable', samples=[(good, 0), (encoded, 0)], batch_size=1, num_classes=1, image_size=8
  )
  with pytest.raises(faults.ERRORS) as caught:
    data.collect(pipeline, 9)
  assert str(pipeline.explain(caught.value)).startswith('list: sample 1: image of ')


def make(sample_dir, **options):
  defaults = {'data_dir': sample_dir, 'batch_size': 8, 'image_size': 24, 'num_classes': 7}
  return pipelines.create('imagenet', **(defaults | {'shuffle_buffer': 16} | options))


def test_antialiasing_equals_pillows_resize_and_keeps_the_windows(sample_dir):
  image = np.asarray(data.photograph().resize((173, 131)))
  ours = augment.resize_antialiased(tf.constant(image), 40).numpy().astype(int)
  theirs = Image.fromarray(image).resize((40, 40), Image.Resampling.BILINEAR)
  assert np.abs(ours - np.asarray(theirs)).max() <= 1
  plain, smooth = (data.collect(make(sample_dir, antialias=a), 4)[0] for a in (False, True))
  difference = np.abs(plain.astype(int) - smooth)
  assert 0.5 < difference.mean() < 12  # the same windows, fewer aliases


def test_colors_are_distorted_only_if_asked_for_and_repeatably(sample_dir):
  plain = data.collect(make(sample_dir), 4)[0].astype(int)
  first, second = (data.collect(make(sample_dir, distort_colors=True), 4)[0] for _ in range(2))
  np.testing.assert_array_equal(first, second)
  shifts = np.abs(first.mean((1, 2)) - plain.mean((1, 2))).mean(-1)
  assert (shifts > 2).mean() > 0.8 and shifts.max() < 160
  # The structure stays: brightness patterns of most images still agree.
  grey = [images.mean(-1).reshape(32, -1) for images in (plain, first)]
  agreement = [np.corrcoef(a, b)[0, 1] for a, b in zip(*grey)]
  assert np.median(agreement) > 0.8


def test_the_image_size_changes_with_the_epoch_between_batches(sample_dir):
  sizes = {0: 16, 1: 24, 3: 32}
  pipeline = make(sample_dir, image_size=sizes, batch_size=24)
  assert pipeline.dataset().element_spec[0].shape.as_list() == [24, None, None, 3]
  seen = [batch[0].shape[1] for batch in pipeline.dataset().take(12)]
  # 64 records: epochs begin at samples 0, 64, 128 and 192; batches at multiples of 24.
  expected = [sizes[max(e for e in sizes if e <= first // 64)] for first in range(0, 288, 24)]
  assert seen == expected == [16, 16, 16] + [24] * 5 + [32] * 4
  pipeline.restore(pipeline.state(72))
  resumed = [batch[0].shape[1] for batch in pipeline.dataset().take(9)]
  assert resumed == expected[3:]
  # Two devices that take from one pipeline get batches of one size.
  double = make(sample_dir, image_size=sizes, batch_size=24, size_step=48)
  seen = [batch[0].shape[1] for batch in double.dataset().take(12)]
  assert seen[0::2] == seen[1::2]


def test_image_sizes_by_epoch_are_checked(sample_dir):
  with pytest.raises(errors.UsageError, match='say which size epoch 0 has'):
    make(sample_dir, image_size={1: 32})
  with pytest.raises(errors.UsageError, match='would mix sizes in a batch'):
    make(sample_dir, image_size={0: 16, 1: 32}, bad_records='skip')
  assert make(sample_dir, image_size={0: 16, 5: 32}).image_size == 32
