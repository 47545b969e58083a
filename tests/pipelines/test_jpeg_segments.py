"""Indexed JPEG: every crop equals that of the original, nothing but the coding changes."""

import concurrent.futures
import ctypes
import dataclasses
import io
from pathlib import Path
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm.errors import DataError
from hpm.pipelines import jpeg_recoder, jpeg_segments, jpeg_transcode, records
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


def crop(segments, window) -> np.ndarray:
  jpeg, top, left = jpeg_segments.assemble(
    segments.header, segments.layout, segments.lengths, segments.scan, window
  )
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
  access = t._ACCESS(t._Memory.from_address(source.mem).access_virt_barray)
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
  segments = recoder.recode(original)
  assert isinstance(segments, jpeg_segments.Segments), segments
  pixels = whole_pixels(original)
  rng = np.random.default_rng(width)
  for window in [(0, 0, height, width), *(random_window(rng, height, width) for _ in range(12))]:
    np.testing.assert_array_equal(crop(segments, window), expected(pixels, window), str(window))


@pytest.mark.parametrize('subsampling', [0, 1, 2])
@pytest.mark.parametrize('width', [*range(1, 36), 65, 81, 97, 99, 129, 131, 177, 209])
def test_every_narrow_window_is_exact(recoder, width, subsampling):
  # Decoders treat images of few columns of chroma, and those at an edge, in another way.
  original = data.image_bytes(width, 20, subsampling=subsampling)
  segments, pixels = recoder.recode(original), whole_pixels(original)
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
  segments, pixels = recoder.recode(original), whole_pixels(original)
  rng = np.random.default_rng(seed)
  for window in (random_window(rng, height, width) for _ in range(8)):
    np.testing.assert_array_equal(crop(segments, window), expected(pixels, window), str(window))


@pytest.mark.parametrize('kind', KINDS)
def test_the_coefficients_are_those_of_the_original(recoder, kind):
  # 376 pixels of 4:4:4 are 47 MCUs, where blank ones are added.
  original = data.image_bytes(376, 50, **KINDS[kind])
  segments = recoder.recode(original)
  restored = recoder.restore(segments)
  assert Image.open(io.BytesIO(restored)).size == (376, 50)
  wanted = coefficients(original)
  for found, value in zip(coefficients(restored), wanted, strict=True):
    np.testing.assert_array_equal(found, value)
  for found, value in zip(coefficients(jpeg_segments.whole(segments)), wanted, strict=True):
    if value.ndim == 3:
      found = found[:, : value.shape[1]]
    np.testing.assert_array_equal(found, value)


def test_a_prime_row_gets_blank_mcus_where_no_pixel_can_tell(recoder):
  def layout(width, **options):
    return recoder.recode(data.image_bytes(width, 20, **options)).layout

  assert layout(376, subsampling=0)[3:7] == (376, 384, 8, 64)  # 47 MCUs
  assert layout(463, subsampling=2)[3:7] == (463, 480, 16, 80)  # 29 MCUs, odd width
  assert layout(464, subsampling=2)[3:7] == (464, 464, 16, 16)  # even: the last column could tell
  assert layout(500, subsampling=2)[3:7] == (500, 500, 16, 64)


def test_segments_cost_few_bytes(recoder):
  # At ImageNet's usual size and quality; the features' names come on top, once an image.
  for subsampling in (0, 2):
    original = data.image_bytes(500, 375, subsampling=subsampling, quality=92)
    segments = recoder.recode(original)
    size = len(segments.header) + len(segments.scan) + 2 * len(segments.lengths)
    assert size < 1.02 * len(original)


@pytest.mark.parametrize('kind', [*KINDS, 'PNG'])
def test_the_reader_of_the_document_agrees(recoder, reader, tmp_path, kind):
  options = {'form': 'PNG'} if kind == 'PNG' else KINDS[kind]
  original = data.image_bytes(163, 70, **options)
  segments = recoder.recode(original)
  features = {'image/encoded': original} if kind == 'PNG' else segments.features()
  path = str(tmp_path / 'shard')
  records.write_records(path, [records.encode_example(features | {'image/class/label': 7})])
  (found,) = reader['read'](path)
  assert found['image/class/label'] == [7]
  pixels = reader['pixels'](original)
  rng = np.random.default_rng(3)
  for window in (random_window(rng, 70, 163) for _ in range(10)):
    np.testing.assert_array_equal(reader['decode'](found, *window), expected(pixels, window))
    if kind != 'PNG':
      jpeg, top, left = jpeg_segments.assemble(
        segments.header, segments.layout, segments.lengths, segments.scan, window
      )
      moved = (top, left, *window[2:])
      np.testing.assert_array_equal(
        expected(reader['pixels'](jpeg), moved), expected(pixels, window)
      )


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
  reason = recoder.recode(broken_files()[name])
  assert isinstance(reason, str) and reason and '\n' not in reason
  # and the recoder goes on
  assert isinstance(recoder.recode(data.image_bytes()), jpeg_segments.Segments)


def test_a_death_of_libjpeg_ends_neither_recoder_nor_process(recoder):
  # Sampling factors of more blocks than a scan may interleave: libjpeg's error exit.
  good = data.image_bytes(200, 150, subsampling=0)
  frame = good.index(b'\xff\xc0')
  factors = bytearray(good)
  for component in range(3):
    factors[frame + 11 + 3 * component] = 0x22
  reason = recoder.recode(bytes(factors))
  assert isinstance(reason, str), reason
  assert isinstance(recoder.recode(good), jpeg_segments.Segments)
  recoder._child.kill()
  recoder._child.wait()
  assert isinstance(recoder.recode(good), jpeg_segments.Segments)


def test_threads_have_recoders_of_their_own():
  originals = [data.image_bytes(100 + i, 80) for i in range(8)]

  def work(part):
    with jpeg_recoder.Recoder(optimize=False) as child:
      return [child.recode(original) for original in part]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(work, [originals[::2], originals[1::2]])
  assert [s.layout[3] for pair in zip(first, second) for s in pair] == list(range(100, 108))


def test_damaged_segments_are_noticed_when_restored(recoder):
  segments = recoder.recode(data.image_bytes(200, 150, quality=95))
  for damage in ({'header': segments.header[:100]}, {'scan': segments.scan[:500]}):
    with pytest.raises(DataError, match='cannot be restored'):
      recoder.restore(dataclasses.replace(segments, **damage))


def test_pillow_is_asked_for(monkeypatch):
  monkeypatch.setattr(jpeg_recoder.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(DataError, match='pip install pillow'):
    jpeg_recoder.Recoder()


@pytest.mark.parametrize('damage', ['no markers', 'two scans', 'uneven'])
def test_split_takes_nothing_but_even_segments(damage):
  jpeg = {
    'no markers': data.image_bytes(),
    'two scans': data.image_bytes(progressive=True),
    'uneven': data.image_bytes(120, 90, restart_marker_blocks=3),
  }[damage]
  with pytest.raises(DataError):
    jpeg_segments.split(jpeg)


@pytest.mark.parametrize(
  ('num_mcus', 'mcu', 'may_pad', 'result'),
  [
    (32, 16, False, (4, 0)),
    (21, 16, False, (3, 0)),
    (6, 16, False, (6, 0)),
    (29, 16, False, (1, 0)),
    (29, 16, True, (5, 1)),
    (47, 8, True, (8, 1)),
    (63, 8, True, (9, 0)),
    (12, 8, True, (12, 0)),
    (1, 32, True, (1, 0)),
  ],
)
def test_rows_are_cut_near_64_pixels(num_mcus, mcu, may_pad, result):
  assert jpeg_transcode.padding(num_mcus, mcu, may_pad) == result
