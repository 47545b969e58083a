"""TFRecord files: checksums, offsets, listing, and the faults that are named."""

import os

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors
from hpm.pipelines import records
from tests.pipelines import data


def test_records_are_read_by_offset_as_they_were_written(tmp_path):
  contents = [b'', b'a', os.urandom(1000), os.urandom(100_000)]
  path = str(tmp_path / 'file')
  records.write_records(path, contents)
  assert list(tf.data.TFRecordDataset(path).as_numpy_iterator()) == contents
  offsets = records.record_offsets(path)
  assert offsets.tolist() == [0, 16, 33, 1049]
  assert [records.read_record(path, offset) for offset in offsets] == contents
  assert records.count_records([path, path]) == [4, 4]


def test_features_keep_their_kinds_and_the_bytes_repeat():
  features = {
    'bytes': b'\x00\xff' * 100,
    'negative': -3,
    'many': [1, 300, 2**40],
    'none': [],
    'floats': np.array([0.25, -1.5], np.float32),
    'no floats': np.array([], np.float32),
  }
  encoded = records.encode_example(features)
  assert records.encode_example(dict(reversed(features.items()))) == encoded
  parsed = tf.train.Example.FromString(encoded).features.feature
  assert parsed['bytes'].bytes_list.value[:] == [features['bytes']]
  assert parsed['negative'].int64_list.value[:] == [-3]
  assert parsed['many'].int64_list.value[:] == [1, 300, 2**40]
  assert parsed['none'].WhichOneof('kind') == 'int64_list'
  assert not parsed['none'].int64_list.value
  assert parsed['floats'].float_list.value[:] == [0.25, -1.5]
  assert parsed['no floats'].WhichOneof('kind') == 'float_list'
  assert not parsed['no floats'].float_list.value


def test_every_flipped_bit_of_a_record_is_noticed(tmp_path):
  path = str(tmp_path / 'file')
  records.write_records(path, [b'first', b'second', b'third'])
  with open(path, 'rb') as file:
    good = file.read()
  start, end = records.record_offsets(path)[1:3]
  for position in range(start, end):
    for bit in range(8):
      bad = bytearray(good)
      bad[position] ^= 1 << bit
      with open(path, 'wb') as file:
        file.write(bad)
      with pytest.raises(errors.DataError, match='record 1 .at byte 21. is damaged'):
        records.record_offsets(path)
        records.read_record(path, int(start), 1)
      # Tables that don't raise hold the damaged record, last if what follows can't be found.
      assert records.record_offsets(path, strict=False).tolist()[:2] == [0, 21]


def test_a_file_that_ends_early_is_named_with_its_last_record(tmp_path):
  directory = data.write_shards(tmp_path, [[b'x' * 100, b'y' * 100]])
  path = os.path.join(directory, 'train-00000-of-00001')
  for size in (229, 130, 118):
    os.truncate(path, size)
    with pytest.raises(errors.DataError, match=r'00000-of-00001: the file ends inside record 1'):
      records.record_offsets(path)


def test_shards_come_sorted_and_only_those_of_the_split(tmp_path):
  data.write_shards(tmp_path, [[b'a']] * 11)
  data.write_shards(tmp_path, [[b'a']] * 2, 'validation')
  (tmp_path / 'README').write_text('hello')
  paths = records.shard_files(str(tmp_path), 'train')
  assert [os.path.basename(path) for path in paths] == [
    f'train-{i:05d}-of-00011' for i in range(11)
  ]


def test_a_directory_without_shards_says_what_it_holds(tmp_path):
  with pytest.raises(errors.DataError, match=r'no files match .*/train-\*-of-\*.*is empty'):
    records.shard_files(str(tmp_path), 'train')
  for name in ('a.jpg', 'b.jpg', 'c.jpg', 'd.jpg'):
    (tmp_path / name).write_bytes(b'x')
  with pytest.raises(errors.DataError, match=r'found 4 files such as a.jpg, b.jpg, c.jpg'):
    records.shard_files(str(tmp_path), 'train')


def test_a_directory_that_is_none_is_named(tmp_path):
  with pytest.raises(errors.DataError, match=r'nowhere.* does not exist'):
    records.shard_files(str(tmp_path / 'nowhere'), 'train')
  (tmp_path / 'file').write_text('x')
  with pytest.raises(errors.DataError, match='is a file'):
    records.shard_files(str(tmp_path / 'file'), 'train')


def test_a_directory_that_may_not_be_read_is_named(tmp_path, monkeypatch):
  def refuse(path):
    raise PermissionError(13, 'Permission denied', path)

  # Root may read everything, so the refusal has to be staged.
  monkeypatch.setattr(os, 'listdir', refuse)
  with pytest.raises(errors.DataError, match='cannot be read: Permission denied'):
    records.shard_files(str(tmp_path), 'train')


def test_a_shard_that_is_a_directory_is_named(tmp_path):
  (tmp_path / 'train-00000-of-00001').mkdir()
  (path,) = records.shard_files(str(tmp_path), 'train')
  for read in (records.read_record, records.record_offsets):
    with pytest.raises(errors.DataError, match=f'{path} cannot be read: Is a directory'):
      read(path)


def test_missing_shards_are_named(tmp_path):
  data.write_shards(tmp_path, [[b'a']] * 6)
  for index in (1, 2, 3, 5):
    os.remove(tmp_path / f'train-{index:05d}-of-00006')
  with pytest.raises(errors.DataError, match=r'2 of 6 train .*: train-00001-of-00006, .* 1 more'):
    records.shard_files(str(tmp_path), 'train')


def test_two_sets_of_shards_in_one_directory_are_refused(tmp_path):
  data.write_shards(tmp_path, [[b'a']] * 2)
  data.write_shards(tmp_path, [[b'a']] * 3)
  with pytest.raises(errors.DataError, match='twice'):
    records.shard_files(str(tmp_path), 'train')
  os.remove(tmp_path / 'train-00000-of-00002')
  os.remove(tmp_path / 'train-00001-of-00003')
  with pytest.raises(errors.DataError, match='several sets'):
    records.shard_files(str(tmp_path), 'train')


def test_a_shard_without_a_byte_is_empty_and_a_missing_one_is_named(tmp_path):
  directory = data.write_shards(tmp_path, [[b'a'], []])
  assert [records.is_empty(path) for path in records.shard_files(directory, 'train')] == [0, 1]
  with pytest.raises(errors.DataError, match='none cannot be read: No such file'):
    records.is_empty(f'{directory}/none')


@pytest.mark.parametrize(
  ('contents', 'what'),
  [
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n', 'Git LFS'),
    (b'just some text, hello world\n', 'it is text that begins with'),
    (b'\x1f\x8b\x08\x00' + bytes(40), 'compressed with gzip'),
    (b'\xff\xd8\xff\xe0' + bytes(40), 'not a TFRecord'),
    (b'abc', 'not a TFRecord'),
  ],
)
def test_files_that_are_no_tfrecords_are_recognised(tmp_path, contents, what):
  path = tmp_path / 'train-00000-of-00001'
  path.write_bytes(contents)
  with pytest.raises(errors.DataError, match=what) as first:
    records.read_record(str(path))
  assert str(path) in str(first.value)
