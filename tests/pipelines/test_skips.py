"""Bad records left out: named, counted, listed, resumed past; and data that yields nothing."""

import os

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import faults, records, skips
from tests.pipelines import data

COUNT = 10  # records in each of 3 shards
BAD = (1 << 32) | 5


def make(directory, **options):
  defaults = {
    'batch_size': 4,
    'image_size': 16,
    'num_classes': 10,
    'num_epochs': 1,
    'with_ids': True,
    'shuffle_buffer': 4,
    'bad_records': 'skip',
  }
  return pipelines.create('imagenet', data_dir=str(directory), **(defaults | options))


def shards(tmp_path, bad: bytes | None = None, file: int = 1, record: int = 5) -> str:
  contents = [[data.record(filename=f'{i}_{j}.JPEG') for j in range(COUNT)] for i in range(3)]
  if bad is not None:
    contents[file][record] = bad
  return data.write_shards(tmp_path, contents)


def everything(*without: int) -> list[int]:
  return [i << 32 | j for i in range(3) for j in range(COUNT) if i << 32 | j not in without]


@pytest.mark.parametrize(
  ('training', 'kind', 'what'),
  [
    (True, 'truncated', 'image odd.JPEG of 700 bytes cannot be decoded'),
    (False, 'empty', 'image odd.JPEG has 0 bytes'),
    (True, 'text', 'image odd.JPEG of 5 bytes cannot be decoded'),
    (True, 'no label', 'no single value for image/class/label'),
    (False, 'no example', 'not a tf.train.Example'),
    (False, 'label', 'label 77 of image odd.JPEG with label_offset=-1 is outside 0..9'),
    (True, 'bomb', 'claims 3600000000 pixels, more than max_pixels=100000000'),
  ],
)
def test_a_record_that_cannot_be_used_is_left_out_and_listed(tmp_path, training, kind, what):
  bomb = bytearray(data.image_bytes(form='PNG'))
  bomb[16:24] = (60_000).to_bytes(4, 'big') * 2
  bad = {
    'truncated': data.record(data.image_bytes()[:700], filename='odd.JPEG'),
    'empty': data.record(b'', filename='odd.JPEG'),
    'text': data.record(b'hello', filename='odd.JPEG'),
    'no label': data.record(label=None),
    'no example': b'\xff\xff',
    'label': data.record(label=77, filename='odd.JPEG'),
    'bomb': data.record(bytes(bomb), filename='odd.JPEG'),
  }[kind]
  directory = shards(tmp_path, bad)
  pipeline = make(directory, training=training)
  ids = data.collect(pipeline)[2]
  assert sorted(ids) == everything(BAD)
  (skipped,) = pipeline.skipped()
  assert skipped.id == BAD and skipped.times == 1
  assert skipped.what.startswith(f'{directory}/train-00001-of-00003: record 5: ')
  assert what in skipped.what and '\n' not in skipped.what
  # What isn't left out is an error that says the same.
  strict = make(directory, training=training, bad_records='fail')
  with pytest.raises(faults.ERRORS) as caught:
    data.collect(strict)
  assert str(strict.explain(caught.value)) == skipped.what


@pytest.mark.parametrize('place', ['data', 'label', 'length', 'checksum'])
def test_just_the_damaged_record_of_a_shard_is_lost_if_the_next_can_be_found(tmp_path, place):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  start, end = records.record_offsets(path)[5:7]
  with open(path, 'rb') as file:
    label = file.read().index(b'image/class/label', start) + 17
  data.flip_byte(
    path, {'data': start + 500, 'label': label + 7, 'length': start + 1, 'checksum': end - 1}[place]
  )
  pipeline = make(directory)
  ids = data.collect(pipeline)[2]
  (skipped,) = pipeline.skipped()
  assert skipped.id == BAD
  assert f'{path}: record 5 (at byte {start}) is damaged' in skipped.what
  if place == 'length':  # where record 6 begins is then unknown
    assert 'the rest of the file' in skipped.what and 'bytes' in skipped.what
    assert sorted(ids) == everything(*((1 << 32) | i for i in range(5, COUNT)))
  else:
    assert sorted(ids) == everything(BAD)


@pytest.mark.parametrize('cut', ['in the data', 'in the header'])
def test_a_shard_that_ends_early_loses_its_last_record(tmp_path, cut):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  start = int(records.record_offsets(path)[5])
  os.truncate(path, start + {'in the data': 300, 'in the header': 7}[cut])
  pipeline = make(directory)
  ids = data.collect(pipeline)[2]
  assert sorted(ids) == everything(*((1 << 32) | i for i in range(5, COUNT)))
  (skipped,) = pipeline.skipped()
  assert f'{path}: the file ends inside record 5 (at byte {start})' in skipped.what


def test_bytes_behind_the_last_record_are_a_bad_record(tmp_path):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  with open(path, 'ab') as file:
    file.write(bytes(100))
  pipeline = make(directory)
  assert sorted(data.collect(pipeline)[2]) == everything()
  (skipped,) = pipeline.skipped()
  assert f'{path}: record 10 ' in skipped.what


def test_empty_files_and_files_that_are_no_tfrecords_are_listed(tmp_path):
  directory = shards(tmp_path)
  open(f'{directory}/train-00000-of-00003', 'wb').close()
  with open(f'{directory}/train-00002-of-00003', 'w') as file:
    file.write('version https://git-lfs.github.com/spec/v1\n')
  pipeline = make(directory)
  assert sorted(data.collect(pipeline)[2]) == [(1 << 32) | i for i in range(COUNT)]
  empty, pointer = pipeline.skipped()
  assert empty.what == f'{directory}/train-00000-of-00003 is empty (0 bytes)'
  assert f'{directory}/train-00002-of-00003 is a Git LFS pointer' in pointer.what
  with pytest.raises(errors.DataError, match='is empty'):
    make(directory, bad_records='fail')


def test_a_limit_ends_the_run_with_the_record_that_passed_it(tmp_path):
  contents = [[data.record() for _ in range(COUNT)] for _ in range(3)]
  for record in (2, 5, 8):
    contents[1][record] = data.record(b'no', filename=f'{record}.JPEG')
  directory = data.write_shards(tmp_path, contents)
  assert len(data.collect(make(directory, bad_records='limit:3'))[2]) == 27
  pipeline = make(directory, bad_records='limit:2')
  with pytest.raises(tf.errors.OpError) as caught:
    data.collect(pipeline)
  explained = str(pipeline.explain(caught.value))
  assert explained.startswith('more than bad_records=limit:2 bad records, the last one being ')
  assert 'record ' in explained and '.JPEG of 2 bytes' in explained
  # The same record in another epoch doesn't count again.
  again = make(directory, bad_records='limit:3', num_epochs=3)
  data.collect(again)
  assert [skipped.times for skipped in again.skipped()] == [3, 3, 3]


@pytest.mark.parametrize('num_epochs', [1, None])
def test_data_that_yields_nothing_is_an_error(tmp_path, num_epochs):
  directory = data.write_shards(tmp_path, [[data.record(b'no')] * 4, [data.record(b'no')] * 3])
  pipeline = make(directory, num_epochs=num_epochs)
  with pytest.raises(tf.errors.OpError) as caught:
    data.collect(pipeline, 3)
  assert f'{directory}: all 7 records of an epoch are bad' in str(pipeline.explain(caught.value))
  for name in os.listdir(directory):
    open(os.path.join(directory, name), 'wb').close()
  with pytest.raises(errors.DataError, match='holds no records in 2 files'):
    make(directory)


def test_resuming_behind_skipped_records_is_exact(tmp_path):
  contents = [[data.record() for _ in range(COUNT)] for _ in range(3)]
  for file, record in ((0, 0), (1, 5), (1, 6), (2, 9)):
    contents[file][record] = data.record(b'no')
  directory = data.write_shards(tmp_path, contents)
  whole = data.collect(make(directory, num_epochs=2))
  assert len(whole[2]) == 52
  first = make(directory, num_epochs=2)
  data.collect(first)  # far ahead of the consumer
  for position in (1, 40):
    state = first.state(position)
    assert state['samples'] == position
    second = make(directory, num_epochs=2)
    second.restore(state)
    for expected, actual in zip(whole, data.collect(second)):
      np.testing.assert_array_equal(actual, expected[position:])
    # And once more, counted from the start of the training.
    third = make(directory, num_epochs=2)
    third.restore(second.state(position))
    assert third.state(position) == state


def test_good_data_is_the_same_with_and_without_skipping(sample_dir):
  options = {'data_dir': sample_dir, 'batch_size': 8, 'image_size': 16, 'num_classes': 7}
  options |= {'with_ids': True, 'shuffle_buffer': 16}
  fail = pipelines.create('imagenet', **options)
  skip = pipelines.create('imagenet', bad_records='skip', **options)
  for expected, actual in zip(data.collect(fail, 10), data.collect(skip, 10)):
    np.testing.assert_array_equal(actual, expected)
  assert skip.skipped() == [] and skip.state(8) == fail.state(8)


def test_skipping_works_for_sources_of_other_kinds(tmp_path):
  pairs = [(data.image_bytes(30, 20), i % 2) for i in range(9)]
  pairs[3] = (b'x', 0)
  pipeline = pipelines.create(
    'iterable',
    samples=pairs,
    batch_size=4,
    num_classes=2,
    image_size=8,
    bad_records='skip',
    num_epochs=1,
  )
  assert len(data.collect(pipeline)[1]) == 8
  (skipped,) = pipeline.skipped()
  assert skipped.what.startswith('list: sample 3: image of 1 bytes cannot be decoded')


def test_skipping_works_in_a_session(tmp_path):
  directory = shards(tmp_path, data.record(b'no'))
  with tf.Graph().as_default():
    pipeline = make(directory, batch_size=29)
    batch = tf.compat.v1.data.make_one_shot_iterator(pipeline.dataset()).get_next()
    with tf.compat.v1.Session() as session:
      assert sorted(session.run(batch)[2]) == everything(BAD)
  assert [skipped.id for skipped in pipeline.skipped()] == [BAD]


@pytest.mark.parametrize('text', ['none', 'limit', 'limit:', 'limit:-1', 'limit:x', 3])
def test_other_policies_are_refused(text):
  with pytest.raises(errors.UsageError, match=f'bad_records={text!r}: give fail, skip or limit:N'):
    skips.Policy.parse(text)
  assert skips.Policy.parse('limit:0') == skips.Policy(True, 0)


def test_an_image_that_claims_too_much_is_named_before_it_is_decoded(tmp_path):
  directory = data.write_shards(tmp_path, [[data.record()] * 2 + [data.record(filename='b.JPEG')]])
  pipeline = make(directory, bad_records='fail', max_pixels=120 * 90)
  assert len(data.collect(pipeline)[2]) == 3
  with pytest.raises(errors.DataError, match=r'record 0: .* claims 10800 pixels, more than max_p'):
    make(directory, bad_records='fail', max_pixels=120 * 90 - 1)
