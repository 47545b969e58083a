"""Whatever bytes a file holds: an error that says so, no crash, no hang, no memory without a bound.

Each test is run quickly with fixed examples, and for long under `long`. Files are made of real
ones, cut, spliced and overwritten, since noise gets no further than the first bytes.
"""

import os
from pathlib import Path
import resource
import struct
import subprocess
import sys

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from hpm import pipelines
from hpm.errors import DataError, UsageError
from hpm.pipelines import doctor, index, indexed_jpeg, jpeg_recoder, raw_file, records
from tests.pipelines import data

QUICK = {'deadline': None, 'derandomize': True, 'suppress_health_check': list(HealthCheck)}
AMOUNTS = [25, pytest.param(2500, marks=pytest.mark.long)]
MOST_MIB = 1024  # that a test may add to the process


@st.composite
def damaged(draw, whole: bytes):
  """A file with some of its bytes overwritten, and perhaps cut or made longer."""
  made = bytearray(whole)
  for _ in range(draw(st.integers(1, 4))):
    at = draw(st.integers(0, max(0, len(made) - 1)))
    some = draw(
      st.binary(max_size=8)
      | st.sampled_from([b'\xff' * 8, b'\0' * 8, b'\xff\xd9', struct.pack('<Q', 1 << 40)])
    )
    kind = draw(st.sampled_from(['over', 'insert', 'cut', 'repeat']))
    if kind == 'over':
      made[at : at + len(some)] = some
    elif kind == 'insert':
      made[at:at] = some
    elif kind == 'cut':
      del made[at:]
    else:
      made += made[at : at + 200]
  return bytes(made)


def fuzz(strategy, amount, check):
  """Runs `check` over so many examples; what it raises beside the two errors is a fault."""

  @settings(max_examples=amount, **QUICK)
  @given(strategy)
  def run(example):
    try:
      check(example)
    except (DataError, UsageError) as error:
      assert '\n' not in str(error)

  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  run()
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MIB * 1024


def forged(length: int) -> bytes:
  """The beginning of a record that claims to be so long, with a right checksum."""
  head = struct.pack('<Q', length)
  return head + struct.pack('<I', records._checksum(head)) + bytes(40)


@pytest.fixture(scope='module')
def shard(tmp_path_factory):
  directory = data.write_shards(
    tmp_path_factory.mktemp('shard'), [[data.record(label=i) for i in (1, 2, 3)]]
  )
  with open(os.path.join(directory, 'train-00000-of-00001'), 'rb') as file:
    return file.read()


@pytest.mark.parametrize('length', [1 << 33, 1 << 40, 1 << 62, (1 << 64) - 1, (1 << 64) - 16])
def test_a_record_that_claims_terabytes_is_damaged(length, shard, tmp_path):
  for before in (b'', shard):
    path = str(tmp_path / 'train-00000-of-00001')
    with open(path, 'wb') as file:
      file.write(before + forged(length))
    with pytest.raises(DataError):
      records.read_record(path, len(before))
    with pytest.raises(DataError):
      records.record_offsets(path)
    found = list(records.scan(path))
    assert [isinstance(one, bytes) for one in found] == [True] * (3 if before else 0) + [False]
    read = tf.data.Dataset.from_tensors(path).flat_map(records.tolerant_dataset)
    kept = [one for one in read.as_numpy_iterator() if one]
    assert len(kept) == (3 if before else 0)
    with pytest.raises(DataError):
      records.count_records([path])


def test_checksums_are_those_of_tensorflow(shard):
  assert records._checksum(shard[:8]) == int.from_bytes(shard[8:12], 'little')


@pytest.mark.parametrize('amount', AMOUNTS)
def test_records(amount, shard, tmp_path):
  path = str(tmp_path / 'train-00000-of-00001')

  def check(content):
    with open(path, 'wb') as file:
      file.write(content)
    found = list(records.scan(path))
    assert len(found) <= len(content) / 12 + 1
    records.record_offsets(path, strict=False)
    records.count_records([path])

  fuzz(damaged(shard) | st.binary(max_size=100), amount, check)


@pytest.mark.parametrize('amount', AMOUNTS)
def test_the_doctor(amount, shard, tmp_path):
  def check(content):
    with open(tmp_path / 'train-00000-of-00001', 'wb') as file:
      file.write(content)
    doctor.examine('imagenet', options={'data_dir': str(tmp_path)}, decode=True)

  fuzz(damaged(shard), amount, check)


@pytest.mark.parametrize('amount', AMOUNTS)
def test_indices(amount, shard, tmp_path):
  path, own = str(tmp_path / 'train-00000-of-00001'), str(tmp_path / 'own.idx')
  with open(path, 'wb') as file:
    file.write(shard)
  index.write(path, own)
  with open(own, 'rb') as file:
    right = file.read()

  def check(content):
    with open(own, 'wb') as file:
      file.write(content)
    index.read(path, own)

  fuzz(damaged(right) | st.binary(max_size=60), amount, check)


@pytest.mark.parametrize('amount', AMOUNTS)
def test_raw_files(amount, tmp_path):
  path = str(tmp_path / 'x.raw')
  pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
  raw_file.write(path, [raw_file.RawImage(pixels, 1, 'a'), raw_file.RawImage(pixels, 2, 'b')])
  with open(path, 'rb') as file:
    right = file.read()

  def check(content):
    with open(path, 'wb') as file:
      file.write(content)
    opened = raw_file.RawFile(path)
    for i in range(len(opened)):
      opened.image(i)
      opened.check(i)
    assert isinstance(opened.keys, list)

  fuzz(damaged(right) | st.binary(max_size=100), amount, check)


@pytest.mark.parametrize('row', [(2**63, 1, 1), (0, 2**31, 2**31), (2**64 - 1, 9, 9)])
def test_a_table_with_a_right_checksum_may_lie(row, tmp_path):
  path = str(tmp_path / 'x.raw')
  pixels = np.zeros((4, 5, 3), np.uint8)
  raw_file.write(path, [raw_file.RawImage(pixels, 1)])
  with open(path, 'rb') as file:
    content = bytearray(file.read())
  at = pixels.nbytes
  content[at : at + raw_file.ROW.itemsize] = np.array([(*row, 1, 0)], raw_file.ROW).tobytes()
  tail = bytes(content[at : -raw_file.FOOTER.size])
  footer = raw_file.FOOTER.pack(
    1, at, 0, raw_file.zlib.crc32(tail), raw_file.VERSION, raw_file.MAGIC
  )
  with open(path, 'wb') as file:
    file.write(content[: -raw_file.FOOTER.size] + footer)
  with pytest.raises(DataError, match='leads out of the pixels'):
    raw_file.RawFile(path)


@pytest.fixture(scope='module')
def indexed():
  with jpeg_recoder.Recoder() as recoder:
    made, reason = recoder.recode(data.image_bytes(160, 120))
  assert made, reason
  return made


@pytest.mark.parametrize('amount', AMOUNTS)
def test_segments(amount, indexed):
  def check(content):
    indexed_jpeg.add_index(content)
    if indexed_jpeg.has_index(content):
      where = indexed_jpeg.layout(content)
      small, _, _ = indexed_jpeg.assemble(content, (0, 0, where.height, where.width))
      assert len(small) <= 3 * len(content) + 100
      indexed_jpeg.without_index(content)

  plain = indexed_jpeg.without_index(indexed)
  fuzz(damaged(indexed) | damaged(plain) | st.binary(max_size=80), amount, check)


@pytest.mark.parametrize('amount', AMOUNTS)
def test_an_index_may_say_anything(amount, indexed):
  """Its ten fields are overwritten, all but the size, which has to fit."""
  numbers = st.sampled_from([0, 1, 2, -1, 64, 2**31 - 1, -(2**31), 65535]) | st.integers(-9, 999)

  def check(fields):
    where = indexed_jpeg.layout(indexed)
    changed = [own if new is None else new for own, new in zip(where[1:], fields)]
    head = indexed[: indexed_jpeg.LAYOUT_OFFSET]
    content = head + struct.pack('<10i', where.size, *changed) + indexed[len(head) + 40 :]
    if indexed_jpeg.has_index(content):
      where = indexed_jpeg.layout(content)
      indexed_jpeg.assemble(content, (0, 0, where.height, where.width))

  fuzz(st.lists(st.none() | numbers, min_size=9, max_size=9), amount, check)


@pytest.mark.parametrize('amount', [4, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize('bad_records', ['fail', 'skip'])
def test_the_converter(amount, bad_records, shard, tmp_path):
  (tmp_path / 'in').mkdir()
  number = iter(range(10**9))

  def check(content):
    with open(tmp_path / 'in' / 'train-00000-of-00001', 'wb') as file:
      file.write(content)
    out = str(tmp_path / f'out{next(number)}')
    from hpm.pipelines import convert

    convert.convert(
      'imagenet',
      out,
      'indexed',
      options={'data_dir': str(tmp_path / 'in')},
      bad_records=bad_records,
    )

  fuzz(damaged(shard), amount, check)


@pytest.mark.parametrize('side', [20_000, 65_500])
@pytest.mark.parametrize('bad_records', ['fail', 'skip'])
def test_an_image_that_claims_gigapixels_is_not_decoded(side, bad_records, tmp_path):
  jpeg = bytearray(data.image_bytes(16, 16))
  frame = jpeg.index(b'\xff\xc0') + 5
  jpeg[frame : frame + 4] = struct.pack('>HH', side, side)
  png = bytearray(data.image_bytes(16, 16, form='PNG'))
  png[16:24] = struct.pack('>II', side, side)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for bomb in (bytes(jpeg), bytes(png)):
    data.write_shards(tmp_path, [[data.record(), data.record(bomb), data.record()]])
    made = pipelines.create(
      'imagenet',
      data_dir=str(tmp_path),
      training=False,
      image_size=32,
      batch_size=1,
      num_classes=10,
      bad_records=bad_records,
    )
    if bad_records == 'skip':
      assert len(data.collect(made)[0]) == 2
    else:
      with pytest.raises((DataError, tf.errors.OpError)) as raised:
        list(made.dataset())
      assert 'max_pixels' in str(made.explain(raised.value)) or 'max_pixels' in str(raised.value)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MIB * 1024


@pytest.mark.long
@pytest.mark.parametrize('target', ['segments', 'raw'])
def test_fuzzing_that_follows_coverage(target, indexed, tmp_path):
  pytest.importorskip('atheris')
  (tmp_path / 'corpus').mkdir()
  raw_file.write(
    str(tmp_path / 'corpus' / 'raw'), [raw_file.RawImage(np.zeros((2, 2, 3), np.uint8), 1, 'a')]
  )
  (tmp_path / 'corpus' / 'indexed').write_bytes(indexed)
  (tmp_path / 'corpus' / 'plain').write_bytes(indexed_jpeg.without_index(indexed))
  root = Path(__file__).parents[2]
  done = subprocess.run(
    [
      *(sys.executable, str(root / 'tests' / 'pipelines' / 'guided.py'), target),
      *('-max_total_time=30', '-rss_limit_mb=2048', '-timeout=5', '-seed=1'),
      str(tmp_path / 'corpus'),
    ],
    env={**os.environ, 'PYTHONPATH': str(root)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'DONE' in done.stderr
