"""Indexed JPEG: every crop equals that of the original, nothing but the coding changes."""

import concurrent.futures
import ctypes
import io
from pathlib import Path
import re
import struct
import subprocess
import sys

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm.errors import DataError
from hpm.pipelines import indexed_jpeg, jpeg_recoder, jpeg_transcode
from tests.pipelines import data

DOCUMENT = Path(__file__).parents[2] / 'docs' / 'indexed_jpeg.md'

# Kinds that Pillow writes: name -> options of `data.image_bytes`.
KINDS = {
  '4:2:0': {'subsampling': 2},
  '4:2:2': {'subsampling': 1},
  '4:4:4': {'subsampling': 0},
  'grey': {'mode': 'L'},
  'CMYK': {'mode': 'CMYK'},
  'progressive': {'progressive': True},
  'progressive 4:4:4': {'progressive': True, 'subsampling': 0},
  'coded as RGB': {'keep_rgb': True},
  'optimised': {'optimize': True},
  'restart markers': {'restart_marker_blocks': 3},
  'restart rows': {'restart_marker_rows': 1, 'subsampling': 0},
  'quality 1': {'quality': 1},
  'quality 100': {'quality': 100},
  'EXIF rotation': {
    'exif': b'Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0'
  },
}


@pytest.fixture(scope='module')
def recoder():
  with jpeg_recoder.Recoder() as child:
    yield child


@pytest.fixture(scope='module')
def reader() -> dict:
  """The functions of the reader in the document."""
  (code,) = re.findall(r'```python\n(.*?)```', DOCUMENT.read_text(encoding='utf-8'), re.S)
  names: dict = {}
  exec(compile(code, str(DOCUMENT), 'exec'), names)
  return names


def whole_pixels(jpeg: bytes) -> np.ndarray:
  return tf.image.decode_jpeg(jpeg, channels=3, dct_method='INTEGER_ACCURATE').numpy()


def recode(recoder, original: bytes) -> bytes:
  indexed, reason = recoder.recode(original)
  assert indexed is not None and not reason, reason
  return indexed


def crop(indexed: bytes, window) -> np.ndarray:
  jpeg, top, left = indexed_jpeg.assemble(indexed, window)
  return whole_pixels(jpeg)[top : top + window[2], left : left + window[3]]


def expected(pixels: np.ndarray, window) -> np.ndarray:
  top, left, rows, columns = window
  return pixels[top : top + rows, left : left + columns]


def random_window(rng, height: int, width: int) -> tuple[int, int, int, int]:
  rows, columns = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
  return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns


def coefficients(jpeg: bytes) -> list[np.ndarray]:
  """The quantised coefficients, int16 [rows, columns, 64] a component, and their divisors."""
  t = jpeg_transcode
  library, error, source = t.load(), t._Error(), t._Decompress()
  library.jpeg_std_error(ctypes.byref(error))
  source.err = ctypes.addressof(error)
  library.jpeg_CreateDecompress(ctypes.byref(source), 62, ctypes.sizeof(source))
  library.jpeg_mem_src(ctypes.byref(source), jpeg, ctypes.c_ulong(len(jpeg)))
  library.jpeg_read_header(ctypes.byref(source), 1)
  arrays = library.jpeg_read_coefficients(ctypes.byref(source))
  # access_virt_barray is the ninth function of the memory manager.
  kind = ctypes.CFUNCTYPE(
    ctypes.POINTER(ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int),
  )
  access = kind(ctypes.c_void_p.from_address(source.mem + 8 * 8).value)
  result = []
  for part, array in zip(t._components(source), arrays):
    rows = [
      ctypes.string_at(
        access(ctypes.addressof(source), array, row, 1, 0)[0], part.width_in_blocks * 128
      )
      for row in range(part.height_in_blocks)
    ]
    result.append(np.frombuffer(b''.join(rows), np.int16).reshape(len(rows), -1, 64))
    result.append(np.frombuffer(ctypes.string_at(part.quant_table, 128), np.uint16))
  library.jpeg_destroy_decompress(ctypes.byref(source))
  return result


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('size', [(1, 1), (3, 2), (163, 40), (176, 33), (301, 60), (376, 25)])
def test_crops_equal_those_of_the_original(recoder, kind, size):
  width, height = size
  original = data.image_bytes(width, height, **KINDS[kind])
  segments, pixels = recode(recoder, original), whole_pixels(original)
  rng = np.random.default_rng(width)
  for window in [(0, 0, height, width), *(random_window(rng, height, width) for _ in range(12))]:
    np.testing.assert_array_equal(crop(segments, window), expected(pixels, window), str(window))


@pytest.mark.parametrize('subsampling', [0, 1, 2])
@pytest.mark.parametrize('width', [*range(1, 36), 65, 81, 97, 99, 129, 131, 177, 209])
def test_every_narrow_window_is_exact(recoder, width, subsampling):
  # Decoders treat images of few columns of chroma, and those at an edge, in another way.
  original = data.image_bytes(width, 20, subsampling=subsampling)
  segments, pixels = recode(recoder, original), whole_pixels(original)
  for left in range(width):
    for columns in {1, 2, 3, width - left} & set(range(1, width - left + 1)):
      window = (3, left, 5, columns)
      np.testing.assert_array_equal(crop(segments, window), expected(pixels, window), str(window))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  width=st.integers(1, 420),
  height=st.integers(1, 60),
  subsampling=st.integers(0, 2),
  mode=st.sampled_from(['RGB', 'L', 'CMYK']),
  progressive=st.booleans(),
  quality=st.integers(1, 100),
  seed=st.integers(0, 2**32),
)
def test_any_size_and_any_window(
  recoder, width, height, subsampling, mode, progressive, quality, seed
):
  original = data.image_bytes(
    width, height, subsampling=subsampling, mode=mode, progressive=progressive, quality=quality
  )
  segments, pixels = recode(recoder, original), whole_pixels(original)
  rng = np.random.default_rng(seed)
  for window in (random_window(rng, height, width) for _ in range(8)):
    np.testing.assert_array_equal(crop(segments, window), expected(pixels, window), str(window))


@pytest.mark.parametrize('kind', KINDS)
def test_the_coefficients_are_those_of_the_original(recoder, kind):
  original = data.image_bytes(376, 50, **KINDS[kind])
  indexed = recode(recoder, original)
  for jpeg in (indexed, indexed_jpeg.without_index(indexed)):
    for found, wanted in zip(coefficients(jpeg), coefficients(original), strict=True):
      np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize('kind', KINDS)
def test_to_others_it_is_the_same_jpeg(recoder, kind):
  original = data.image_bytes(163, 70, **KINDS[kind])
  indexed = recode(recoder, original)
  np.testing.assert_array_equal(whole_pixels(indexed), whole_pixels(original))
  np.testing.assert_array_equal(
    whole_pixels(indexed_jpeg.without_index(indexed)), whole_pixels(original)
  )
  np.testing.assert_array_equal(Image.open(io.BytesIO(indexed)), Image.open(io.BytesIO(original)))
  assert tf.image.extract_jpeg_shape(indexed).numpy()[:2].tolist() == [70, 163]


def test_segments_are_near_64_pixels_wide(recoder):
  def across(width, **options):
    return indexed_jpeg.layout(recode(recoder, data.image_bytes(width, 20, **options))).across

  assert across(500, subsampling=2) == 64
  assert across(500, subsampling=0) == 72  # 63 MCUs
  assert across(464, subsampling=2) == 16  # 29 MCUs
  assert across(376, subsampling=0) == 376  # 47 MCUs, and 8 pixels would cost too many bytes
  assert across(90, subsampling=2) == 96


def test_an_index_costs_few_bytes(recoder):
  # At ImageNet's usual size and quality, where tables made for the image pay for it.
  for subsampling in (0, 2):
    original = data.image_bytes(500, 375, subsampling=subsampling, quality=92)
    assert len(recode(recoder, original)) < 1.02 * len(original)


@pytest.mark.parametrize('kind', [*KINDS, 'PNG'])
def test_the_reader_of_the_document_agrees(recoder, reader, kind):
  options = {'form': 'PNG'} if kind == 'PNG' else KINDS[kind]
  original = data.image_bytes(163, 70, **options)
  encoded = original if kind == 'PNG' else recode(recoder, original)
  pixels = reader['pixels'](original)
  rng = np.random.default_rng(3)
  for window in (random_window(rng, 70, 163) for _ in range(10)):
    np.testing.assert_array_equal(reader['decode'](encoded, *window), expected(pixels, window))
    if kind != 'PNG':
      jpeg, top, left = indexed_jpeg.assemble(encoded, window)
      assert (jpeg, top, left) == reader['cut'](encoded, *window)


def broken_files() -> dict[str, bytes]:
  good = data.image_bytes(200, 150, quality=95)
  return {
    'empty': b'',
    'text': b'hello, world',
    'start only': b'\xff\xd8\xff',
    'PNG': data.image_bytes(form='PNG'),
    'cut in the header': good[:300],
    'cut in the scan': good[: len(good) // 2],
    'without its end': good[:-2],
    'bytes missing': good[:1000] + good[1500:],
    'a marker too many': good[:2000] + b'\xff\xd3' + good[2000:],
    '12 bits': good.replace(b'\xff\xc0\0\x11\x08', b'\xff\xc1\0\x11\x0c'),
    'lossless': good.replace(b'\xff\xc0\0\x11', b'\xff\xc3\0\x11'),
    'no such table': good.replace(b'\xff\xda\0\x0c\x03\x01\0', b'\xff\xda\0\x0c\x03\x01\x33'),
    'of no size': re.sub(b'(\xff\xc0\0\x11\x08)....', b'\\1\0\0\0\0', good, flags=re.S),
  }


@pytest.mark.parametrize('name', broken_files())
def test_what_cannot_be_recoded_is_refused_in_a_line(recoder, name):
  indexed, reason = recoder.recode(broken_files()[name])
  assert indexed is None and reason and '\n' not in reason
  recode(recoder, data.image_bytes())  # the recoder goes on


def test_a_death_of_libjpeg_ends_neither_recoder_nor_process(recoder):
  # Sampling factors of more blocks than a scan may interleave: libjpeg's error exit.
  good = data.image_bytes(200, 150, subsampling=0)
  factors, frame = bytearray(good), good.index(b'\xff\xc0')
  for component in range(3):
    factors[frame + 11 + 3 * component] = 0x22
  assert recoder.recode(bytes(factors))[0] is None
  recode(recoder, good)
  recoder._child.kill()
  recoder._child.wait()
  recode(recoder, good)


def test_a_recoder_whose_asker_was_ended_says_nothing():
  program = 'from hpm.pipelines import jpeg_recoder; jpeg_recoder.serve()'
  child = subprocess.Popen(
    [sys.executable, '-c', program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  child.stdout.close()
  image = data.image_bytes()
  _, printed = child.communicate(struct.pack('<?Q', True, len(image)) + image)
  assert not printed


def test_threads_have_recoders_of_their_own():
  originals = [data.image_bytes(100 + i, 80) for i in range(8)]

  def work(part):
    with jpeg_recoder.Recoder(optimize=False) as child:
      return [recode(child, original) for original in part]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(work, [originals[::2], originals[1::2]])
  widths = [indexed_jpeg.layout(indexed).width for pair in zip(first, second) for indexed in pair]
  assert widths == list(range(100, 108))


def test_an_indexed_jpeg_may_be_indexed_again(recoder):
  once = recode(recoder, data.image_bytes(200, 150))
  assert recode(recoder, once) == once


def test_pillow_is_asked_for(monkeypatch):
  monkeypatch.setattr(jpeg_recoder.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(DataError, match='pip install pillow'):
    jpeg_recoder.Recoder()


@pytest.mark.parametrize('damage', ['no markers', 'two scans', 'uneven'])
def test_an_index_needs_even_segments(damage):
  jpeg = {
    'no markers': data.image_bytes(),
    'two scans': data.image_bytes(progressive=True),
    'uneven': data.image_bytes(120, 90, restart_marker_blocks=3),
  }[damage]
  with pytest.raises(DataError):
    indexed_jpeg.add_index(jpeg)


@pytest.mark.parametrize(
  ('num_mcus', 'mcu_width', 'result'),
  [
    (32, 16, 4),
    (21, 16, 3),
    (6, 16, 6),
    (29, 16, 1),
    (47, 8, 47),
    (63, 8, 9),
    (12, 8, 12),
    (3, 32, 3),
  ],
)
def test_rows_are_cut_near_64_pixels(num_mcus, mcu_width, result):
  assert jpeg_transcode.interval(num_mcus, mcu_width, 10, 32000) == result


def test_large_images_get_longer_segments():
  assert jpeg_transcode.interval(960, 8, 540, 1_000_000) == 8
  assert jpeg_transcode.interval(960, 8, 540, indexed_jpeg.MAX_SEGMENTS) == 960
  assert jpeg_transcode.interval(500, 8, 600, indexed_jpeg.MAX_SEGMENTS) == 10
