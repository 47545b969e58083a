"""Converting data sets: the same images and labels, whole or not at all, resumable, verified."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import __main__ as command_line
from hpm.pipelines import convert, detect, records, to_tfrecord
from tests.pipelines import data
from tests.pipelines.test_sources import write_cifar, write_folder


def pictures(count: int = 9) -> list[bytes]:
  return [data.image_bytes(30 + i, 40, mode='L' if i == 2 else 'RGB') for i in range(count)]


def seen(name: str, **options) -> list[tuple[int, bytes]]:
  pipeline = pipelines.create(
    name, batch_size=4, image_size=16, num_classes=10, training=False, **options
  )
  images, labels = data.collect(pipeline)
  return sorted((int(label), image.tobytes()) for label, image in zip(labels, images))


def test_a_folder_becomes_tfrecords_of_the_same_images(tmp_path, capsys):
  directory = write_folder(tmp_path / 'folder', pictures())
  out = str(tmp_path / 'out')
  assert command_line.main(['convert', directory, out, '--num_shards=2']) == 0
  assert f'{out}: 9 train images, ' in capsys.readouterr().out
  assert seen('imagenet', data_dir=out) == seen('folder', data_dir=directory)
  assert sorted(os.listdir(out)) == [
    'convert.json',
    'train-00000-of-00002',
    'train-00001-of-00002',
  ]
  assert os.listdir(tmp_path) == ['folder', 'out'] or os.listdir(tmp_path) == ['out', 'folder']
  features = [
    tf.train.Example.FromString(record).features.feature
    for path in records.shard_files(out, 'train')
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator()
  ]
  labels = [feature['image/class/label'].int64_list.value[0] for feature in features]
  assert sorted(labels) == [1, 1, 1, 2, 2, 2, 3, 3, 3] and labels != sorted(labels)
  spaces = {feature['image/colorspace'].bytes_list.value[0] for feature in features}
  assert spaces == {b'RGB', b'Grayscale'}
  assert {feature['image/class/text'].bytes_list.value[0] for feature in features} == {
    b'n0',
    b'n1',
    b'n2',
  }
  # Again: nothing to do.
  assert command_line.main(['convert', directory, out, '--num_shards=2']) == 0
  assert 'is already there' in capsys.readouterr().out
  assert command_line.main(['convert', directory, out, '--num_shards=3']) == 2
  assert 'exists and holds something else' in capsys.readouterr().err


def test_tfrecords_are_copied_with_all_their_features(sample_dir, tmp_path):
  done = convert.convert(
    'imagenet', str(tmp_path / 'out'), options={'data_dir': sample_dir}, num_shards=3
  )
  assert done.counts == {'train': 64, 'validation': 16}
  for split in ('train', 'validation'):
    before, after = (
      [
        record
        for path in records.shard_files(directory, split)
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator()
      ]
      for directory in (sample_dir, done.directory)
    )
    assert after == before


def test_cifar_becomes_png_without_loss(tmp_path):
  names = [*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin']
  directory = write_cifar(tmp_path / 'cifar', 1, names)
  done = convert.convert('cifar10', str(tmp_path / 'out'), options={'data_dir': directory})
  assert done.counts == {'train': 35, 'validation': 7}
  expected = seen('cifar10', data_dir=directory)
  assert seen('imagenet', data_dir=done.directory) == expected


def test_a_conversion_that_stops_goes_on_where_it_was(tmp_path, monkeypatch):
  directory = write_folder(tmp_path / 'folder', pictures())
  out = str(tmp_path / 'out')
  written, write = [], to_tfrecord.write

  def stop_at_third(path, items):
    if len(written) == 2:
      raise OSError(28, 'No space left on device')
    written.append(os.path.basename(path))
    return write(path, items)

  options = {'options': {'data_dir': directory}, 'num_shards': 4, 'num_workers': 1}
  with monkeypatch.context() as full:
    full.setattr(to_tfrecord, 'write', stop_at_third)
    with pytest.raises(OSError, match='No space left'):
      convert.convert('folder', out, **options)
  assert not os.path.exists(out)
  assert not [name for name in os.listdir(out + '.part') if '.tmp' in name]
  with pytest.raises(errors.UsageError, match='left from another conversion'):
    convert.convert('folder', out, **(options | {'num_shards': 5}))
  open(
    os.path.join(out + '.part', 'train-00002-of-00004.1234.tmp'), 'wb'
  ).close()  # of a killed one
  more = []
  monkeypatch.setattr(to_tfrecord, 'write', lambda p, i: more.append(p) or write(p, i))
  done = convert.convert('folder', out, **options)
  assert len(written) == 2 and len(more) == 2
  assert done.counts == {'train': 9} and not os.path.exists(out + '.part')
  shards = [f'train-{i:05d}-of-00004' for i in range(4)]
  assert sorted(os.listdir(out)) == ['convert.json', *shards]
  assert seen('imagenet', data_dir=out) == seen('folder', data_dir=directory)


def test_an_interrupted_command_says_one_line(tmp_path, monkeypatch, capsys):
  def interrupt(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(convert, 'convert', interrupt)
  directory = write_folder(tmp_path / 'folder', pictures(2))
  assert command_line.main(['convert', directory, str(tmp_path / 'out')]) == 130
  assert capsys.readouterr().err.count('\n') == 1


@pytest.mark.parametrize('form', convert.FORMATS)
def test_what_is_no_image_is_named_or_left_out(tmp_path, capsys, form):
  directory = write_folder(tmp_path / 'folder', [*pictures(2), b'a note'])
  arguments = ['convert', directory, str(tmp_path / 'out'), f'--format={form}']
  assert command_line.main(arguments) == 1
  place = f'{directory}/train/n2/002.JPEG: image 002.JPEG '
  assert f'python -m hpm.pipelines: {place}' in capsys.readouterr().err
  assert command_line.main([*arguments, '--bad_records=skip']) == 0
  printed = capsys.readouterr().out
  assert f'left out: {place}' in printed and '2 train images' in printed


@pytest.mark.parametrize('flag', ['--num_shards=0', '--num_workers=0', '--splits='])
def test_an_empty_choice_is_no_default(tmp_path, capsys, flag):
  directory = write_folder(tmp_path / 'folder', pictures(2))
  assert command_line.main(['convert', directory, str(tmp_path / 'out'), flag]) in (1, 2)
  assert capsys.readouterr().err.count('\n') == 1
  assert not os.path.exists(tmp_path / 'out')


def test_a_shard_that_reads_back_differently_is_never_published(tmp_path, monkeypatch):
  directory = write_folder(tmp_path / 'folder', pictures())
  out, write = str(tmp_path / 'out'), to_tfrecord.write

  def lose_one(path, items):
    count, digest = write(path, items)
    records.write_records(path, list(tf.data.TFRecordDataset(path).as_numpy_iterator())[1:])
    return count, digest

  with monkeypatch.context() as broken:
    broken.setattr(to_tfrecord, 'write', lose_one)
    with pytest.raises(errors.DataError, match=r'reads back differently \(8 records in place of 9'):
      convert.convert('folder', out, options={'data_dir': directory})
  assert not os.path.exists(out)
  assert convert.convert('folder', out, options={'data_dir': directory}).counts == {'train': 9}


def test_bad_records_are_named_or_left_out(tmp_path, capsys):
  contents = [[data.record(filename=f'{i}.JPEG') for i in range(6)]]
  contents[0][2] = data.record(b'', filename='odd.JPEG')
  directory = data.write_shards(tmp_path / 'in', contents)
  path = f'{directory}/train-00000-of-00001'
  data.flip_byte(path, int(records.record_offsets(path)[4]) + 300)
  out = str(tmp_path / 'out')
  assert command_line.main(['convert', directory, out]) == 1
  assert f'{path}: record 2: image odd.JPEG has 0 bytes' in capsys.readouterr().err
  other = out  # goes on with what is there
  assert command_line.main(['convert', directory, other, '--bad_records=skip']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[
    0
  ] == f'left out: {path}: record 2: image odd.JPEG has 0 bytes: write the record ' + (
    'again or leave it out'
  )
  assert 'record 4 (at byte ' in lines[1] and 'is damaged' in lines[1]
  assert '4 train images' in lines[2]
  with open(os.path.join(other, 'convert.json')) as file:
    (entry,) = json.load(file)['shards'].values()
  assert entry['count'] == 4 and len(entry['skipped']) == 2
  assert command_line.main(['convert', directory, f'{out}2', '--bad_records=limit:1']) == 1
  assert 'more than bad_records=limit:1' in capsys.readouterr().err


def test_what_a_directory_is_is_seen_from_its_names(sample_dir, tmp_path):
  assert detect.source(sample_dir) == 'imagenet'
  assert detect.source(write_folder(tmp_path / 'f', pictures(3))) == 'folder'
  assert detect.source(write_cifar(tmp_path / 'c', 2, ['train.bin'])) == 'cifar100'
  with pytest.raises(errors.DataError, match='holds no TFRecords'):
    (tmp_path / 'empty').mkdir()
    detect.source(str(tmp_path / 'empty'))
  with pytest.raises(errors.UsageError, match="unknown format 'tfrecords': did you mean tfrecord"):
    convert.convert('folder', str(tmp_path / 'o'), 'tfrecords', options={'data_dir': 'x'})
  with pytest.raises(errors.UsageError, match=r'num_shards=9, but split .train. has 3 records'):
    convert.convert(
      'folder', str(tmp_path / 'o'), options={'data_dir': str(tmp_path / 'f')}, num_shards=9
    )


def test_a_commands_files_get_their_directories(sample_dir, tmp_path, capsys):
  sheet = tmp_path / 'a' / 'sheet.png'
  assert command_line.main(['show', str(sample_dir), f'--out={sheet}', '--num_images=1']) == 0
  assert sheet.exists()


def test_labels_and_boxes_survive(tmp_path):
  boxes = {
    'image/object/bbox/ymin': np.array([0.25], np.float32),
    'image/object/bbox/xmin': np.array([0.5], np.float32),
    'image/object/bbox/ymax': np.array([0.75], np.float32),
    'image/object/bbox/xmax': np.array([1.0], np.float32),
  }
  features = {'image/encoded': pictures(1)[0], 'image/class/label': 1000, **boxes}
  source = data.write_shards(tmp_path / 'in', [[records.encode_example(features)]])
  done = convert.convert('imagenet', str(tmp_path / 'out'), options={'data_dir': source})
  contents = pipelines.source('imagenet', data_dir=done.directory).contents(0, 0)
  assert contents.label == 1000 and contents.boxes == [(0.25, 0.5, 0.75, 1.0)]
