"""Wrong options and damaged data: refused at the door, or named after the iterator failed."""

import os
import re
import time

import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import base, records
from tests.pipelines import data


def make(directory, **options):
  defaults = {'batch_size': 4, 'image_size': 32, 'num_classes': 10}
  return pipelines.create('imagenet', data_dir=str(directory), **(defaults | options))


def fail(pipeline) -> Exception:
  """What the iterator raises, sooner or later."""
  with pytest.raises(tf.errors.OpError) as caught:
    for _ in pipeline.dataset().take(100):
      pass
  return caught.value


@pytest.mark.parametrize(
  ('option', 'value'),
  [
    ('batch_size', 0),
    ('batch_size', -3),
    ('batch_size', 2.5),
    ('batch_size', True),
    ('image_size', 0),
    ('num_classes', -1),
    ('num_epochs', 0),
    ('num_parallel_calls', 0),
    ('shuffle_buffer', 0),
    ('seed', 'x'),
    ('label_offset', 0.5),
  ],
)
def test_options_out_of_range_are_quoted(sample_dir, option, value):
  with pytest.raises(errors.UsageError, match=re.escape(f'{option}={value!r}')):
    make(sample_dir, **{option: value})


def test_batch_size_0_is_told_what_it_meant_elsewhere(sample_dir):
  with pytest.raises(errors.UsageError, match='0 meant the default of the model in tf_cnn'):
    make(sample_dir, batch_size=0)


def test_splits_are_train_and_validation(sample_dir):
  with pytest.raises(errors.UsageError, match=r'did you mean validation.*train, validation'):
    make(sample_dir, split='validate')


def test_no_directory_is_a_wrong_usage():
  with pytest.raises(errors.UsageError, match="data_dir=''"):
    make('')


def test_missing_data_is_named_within_a_second(tmp_path):
  start = time.monotonic()
  with pytest.raises(errors.DataError, match=r'missing.* does not exist'):
    make(tmp_path / 'missing')
  with pytest.raises(errors.DataError, match=r'no files match .*/validation-\*-of-\*'):
    make(data.write_shards(tmp_path, [[data.record()]]), split='validation')
  with pytest.raises(errors.DataError, match='train-00000-of-00002'):
    os.remove(tmp_path / 'train-00000-of-00001')
    (tmp_path / 'train-00001-of-00002').write_bytes(b'x')
    make(tmp_path)
  assert time.monotonic() - start < 1


def test_a_zero_byte_shard_is_named(tmp_path):
  data.write_shards(tmp_path, [[data.record()], []])
  with pytest.raises(errors.DataError, match='train-00001-of-00002 is empty'):
    make(tmp_path)


def test_a_git_lfs_pointer_is_no_tfrecord(tmp_path):
  pointer = 'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n'
  (tmp_path / 'train-00000-of-00001').write_text(pointer)
  with pytest.raises(errors.DataError, match='is a Git LFS pointer, not a TFRecord'):
    make(tmp_path)


@pytest.mark.parametrize(
  ('bad', 'what'),
  [
    (data.record(label=None), r'no single value for image/class/label \(features found: image/enc'),
    (records.encode_example({'label': 3, 'image': b'x'}), 'image/encoded and image/class/label'),
    (records.encode_example({}), 'features found: none'),
    (b'\xff\xff\xff', r'not a tf.train.Example'),
    (data.record(label=0), r'label 0 of image n01440764_7.JPEG with label_offset=-1 .* 0\.\.9'),
    (data.record(label=11), 'label 11 .*raise num_classes'),
    (data.record(b''), 'image n01440764_7.JPEG has 0 bytes'),
    (data.record(b'text'), 'image n01440764_7.JPEG of 4 bytes cannot be decoded'),
    (data.record(data.image_bytes()[:900]), 'cannot be decoded'),
  ],
)
def test_a_bad_first_record_is_named_at_the_door(tmp_path, bad, what):
  directory = data.write_shards(tmp_path, [[data.record()], [bad, data.record()]])
  with pytest.raises(errors.DataError, match=what) as caught:
    make(directory)
  assert f'{directory}/train-00001-of-00002: record 0: ' in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_damaged_first_record_is_named_at_the_door(tmp_path):
  directory = data.write_shards(tmp_path, [[data.record(), data.record()]])
  path = f'{directory}/train-00000-of-00001'
  data.flip_byte(path, 100)
  with pytest.raises(errors.DataError, match=r'of-00001: record 0 .* its data is wrong'):
    make(directory)


def test_the_door_looks_at_16_shards_spread_evenly(tmp_path, monkeypatch):
  directory = data.write_shards(tmp_path, [[data.record()]] * 40)
  seen, read = [], records.read_record

  def count(path, *args):
    seen.append(int(os.path.basename(path)[6:11]))
    return read(path, *args)

  monkeypatch.setattr(records, 'read_record', count)
  make(directory)
  assert seen == [i * 40 // 16 for i in range(16)]


# In the middle of the data: record 5 of the second shard.


def damaged(tmp_path, bad: bytes | None = None) -> str:
  shards = [[data.record(filename=f'{i}_{j}.JPEG') for j in range(8)] for i in range(3)]
  if bad is not None:
    shards[1][5] = bad
  return data.write_shards(tmp_path, shards)


@pytest.mark.parametrize('training', [True, False])
def test_a_label_outside_the_head_names_file_and_record(tmp_path, training):
  directory = damaged(tmp_path, data.record(label=11, filename='odd.JPEG'))
  pipeline = make(directory, training=training)
  error = fail(pipeline)
  assert 'label outside 0..9 with label_offset=-1' in error.message
  assert f'[{directory}/train-00001-of-00003] [5] [11]' in error.message
  explained = pipeline.explain(error)
  assert isinstance(explained, errors.DataError)
  assert f'{directory}/train-00001-of-00003: record 5: label 11 of image odd.JPEG' in str(explained)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('kind', ['truncated', 'empty', 'text', 'PNG', 'features'])
def test_an_undecodable_image_is_found_afterwards(tmp_path, training, kind):
  bad, what = {
    'truncated': (data.record(data.image_bytes()[:700], filename='odd.JPEG'), 'odd.JPEG of 700'),
    'empty': (data.record(b'', filename='odd.JPEG'), 'image odd.JPEG has 0 bytes'),
    'text': (data.record(b'hello', filename='odd.JPEG'), 'odd.JPEG of 5 bytes cannot be decoded'),
    'PNG': (
      data.record(data.image_bytes(form='PNG')[:300], filename='odd.JPEG'),
      'odd.JPEG of 300',
    ),
    'features': (data.record(label=None), 'no single value for image/class/label'),
  }[kind]
  directory = damaged(tmp_path, bad)
  pipeline = make(directory, training=training)
  explained = pipeline.explain(fail(pipeline))
  assert isinstance(explained, errors.DataError)
  assert f'{directory}/train-00001-of-00003: record 5: ' in str(explained)
  assert what in str(explained)


def test_the_search_begins_where_the_consumer_stopped(tmp_path):
  """Two bad records: the one that comes later is found from a later position."""
  shards = [[data.record() for _ in range(12)]]
  shards[0][3] = data.record(b'one', filename='one.JPEG')
  shards[0][9] = data.record(b'two', filename='two.JPEG')
  pipeline = make(data.write_shards(tmp_path, shards), training=False)
  error = fail(pipeline)
  assert 'one.JPEG' in str(pipeline.explain(error))
  assert 'one.JPEG' in str(pipeline.explain(error, 3))
  assert 'two.JPEG' in str(pipeline.explain(error, 4))
  pipeline.restore(pipeline.state(5))
  assert 'two.JPEG' in str(pipeline.explain(error))


@pytest.mark.parametrize('place', ['length', 'data', 'checksum'])
def test_a_damaged_record_is_found_by_its_checksum(tmp_path, place):
  directory = damaged(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  start, end = records.record_offsets(path)[5:7]
  pipeline = make(directory)
  data.flip_byte(path, {'length': start + 2, 'data': start + 500, 'checksum': end - 1}[place])
  error = fail(pipeline)
  assert isinstance(error, tf.errors.DataLossError)
  assert path not in error.message  # which is why the search exists
  explained = str(pipeline.explain(error))
  assert f'{path}: record 5 (at byte {start}) is damaged' in explained


def test_a_shard_that_ends_early_is_found(tmp_path):
  directory = damaged(tmp_path)
  path = f'{directory}/train-00002-of-00003'
  pipeline = make(directory)
  os.truncate(path, os.path.getsize(path) - 100)
  error = fail(pipeline)
  assert f'{path}: the file ends inside record 7' in str(pipeline.explain(error))


def test_only_records_at_the_named_byte_are_read(tmp_path, monkeypatch):
  directory = damaged(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  start = int(records.record_offsets(path)[5])
  pipeline = make(directory)
  data.flip_byte(path, start + 500)
  error = fail(pipeline)
  seen, read = [], records.read_record

  def count(path, offset, index):
    seen.append(offset)
    return read(path, offset, index)

  monkeypatch.setattr(records, 'read_record', count)
  pipeline.explain(error)
  assert set(seen) == {start}


def test_finding_nothing_is_said(sample_dir):
  pipeline = make(sample_dir, split='validation')
  error = tf.errors.InvalidArgumentError(None, None, 'something else')
  explained = str(pipeline.explain(error))
  assert 'something else' in explained
  assert 'the next 16 samples can be decoded' in explained
  error = tf.errors.DataLossError(None, None, 'corrupted record at 77')
  assert 'all checksums of 2 files are right' in str(pipeline.explain(error))


def test_the_search_is_bounded(sample_dir, monkeypatch):
  from hpm.pipelines import faults

  monkeypatch.setattr(faults, '_MAX_SAMPLES', 20)
  explained = make(sample_dir).explain(tf.errors.InternalError(None, None, 'odd'))
  assert 'the next 20 samples can be decoded' in str(explained)
  monkeypatch.setattr(faults, '_TIMEOUT_S', 0.0)
  explained = make(sample_dir).explain(tf.errors.DataLossError(None, None, 'odd'))
  assert 'no damaged record found in 0 s' in str(explained)


def test_explaining_works_while_a_graph_is_built(tmp_path):
  directory = damaged(tmp_path, data.record(b'hello', filename='odd.JPEG'))
  with tf.Graph().as_default():
    pipeline = make(directory)
    batch = tf.compat.v1.data.make_one_shot_iterator(pipeline.dataset()).get_next()
    with tf.compat.v1.Session() as session:
      with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        for _ in range(20):
          session.run(batch)
      assert 'record 5: image odd.JPEG' in str(pipeline.explain(caught.value))


def test_errors_of_tensorflow_shrink_to_their_line():
  with pytest.raises(tf.errors.InvalidArgumentError) as eager:
    tf.io.decode_jpeg(b'text')
  with pytest.raises(tf.errors.InvalidArgumentError) as traced:
    tf.function(tf.io.decode_jpeg)(tf.constant(b'text'))
  for caught in (eager, traced):
    line = base.first_line(caught.value)
    assert line.startswith('Unknown image file format'), line
    assert '{{' not in line and 'Op:' not in line
  assert base.first_line(ValueError()) == 'ValueError'
