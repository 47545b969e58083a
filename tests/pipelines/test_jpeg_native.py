"""The compiled reader by itself: building it, and what it makes of hostile bytes."""

import os
import subprocess
import sys

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from hpm import errors
from hpm.pipelines import indexed_jpeg, jpeg_native, jpeg_recoder
from tests.pipelines import data

SIZE = 32


def compile_(cache, **environment):
  return subprocess.run(
    [sys.executable, '-m', 'hpm.pipelines', 'compile'],
    env={**os.environ, 'XDG_CACHE_HOME': str(cache), **environment},
    capture_output=True,
    text=True,
  )


def test_it_is_built_once_where_the_cache_is(native, tmp_path):
  first = compile_(tmp_path)
  assert first.returncode == 0, first.stderr
  [path] = (tmp_path / 'hpm').iterdir()
  assert first.stdout == f'{path} built\n'
  assert compile_(tmp_path).stdout == f'{path} is there already\n'


def test_without_a_compiler_a_line_says_what_to_install(tmp_path):
  done = compile_(tmp_path / 'cache', PATH=str(tmp_path))
  assert done.returncode == 1
  assert 'no C compiler: apt install gcc' in done.stderr and done.stderr.count('\n') == 1


def test_another_source_gets_another_library(native, tmp_path, monkeypatch):
  before = jpeg_native.library_path()
  source = tmp_path / 'jpeg_native.c'
  source.write_text('#error "not this one"\n')
  monkeypatch.setattr(jpeg_native, '_SOURCE', source)
  assert jpeg_native.library_path() != before
  with pytest.raises(errors.DataError, match='not this one'):
    jpeg_native.build()
  assert not jpeg_native.is_built()


def training(image: bytes, window) -> list[int]:
  out = np.zeros((1, SIZE, SIZE, 3), np.uint8)
  return jpeg_native.training_images(
    [image], np.array([window], np.int32), np.zeros(1, np.int32), out
  )


def evaluation(image: bytes) -> list[int]:
  return jpeg_native.evaluation_images([image], 36, np.zeros((1, SIZE, SIZE, 3), np.uint8))


@pytest.fixture(scope='module')
def indexed() -> bytes:
  with jpeg_recoder.Recoder() as recoder:
    made, why = recoder.recode(data.image_bytes(301, 160, subsampling=2))
  assert made, why
  return made


def test_windows_outside_the_image_are_declined(native, indexed):
  for image in (indexed, data.image_bytes(301, 160)):
    where = indexed_jpeg.layout(indexed)
    height, width = where.height, where.width
    assert training(image, [0, 0, height, width]) == []
    for window in (
      [0, 0, height + 1, width],
      [0, 0, height, width + 1],
      [-1, 0, 5, 5],
      [0, -1, 5, 5],
      [0, 0, 0, 5],
      [2**31 - 1, 0, 2**31 - 1, 5],
    ):
      assert training(image, window) == [0]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
  in_index=st.lists(st.tuples(st.integers(18, 80), st.integers(0, 255)), max_size=4),
  keep=st.floats(0, 1) | st.just(1.0),
)
def test_no_bytes_break_it(native, indexed, changes, in_index, keep):
  image = bytearray(indexed)
  for place, value in in_index:
    image[place] = value
  for place, value in changes:
    image[int(place * (len(image) - 1))] = value
  image = image[: max(int(keep * len(image)), 0)]
  for bytes_ in (bytes(image), bytes(image) + b'\xff\xd9'):
    assert training(bytes_, [10, 20, 90, 120]) in ([], [0])
    assert evaluation(bytes_) in ([], [0])


def test_what_is_no_jpeg_is_declined(native):
  for image in (
    b'',
    b'\xff',
    b'\xff\xd8\xff\xd9',
    data.image_bytes(form='PNG'),
    data.image_bytes(mode='CMYK'),
  ):
    assert training(image, [0, 0, 5, 5]) == [0]
    assert evaluation(image) == [0]
