"""The sample data set: layout, repeatability, disjoint photographs, refusals."""

import collections
import hashlib
import io
import os

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm import errors
from hpm.pipelines import __main__ as command_line
from hpm.pipelines import records, sample

SCHEMA = {
  'image/height': 'int64_list',
  'image/width': 'int64_list',
  'image/colorspace': 'bytes_list',
  'image/channels': 'int64_list',
  'image/class/label': 'int64_list',
  'image/class/synset': 'bytes_list',
  'image/class/text': 'bytes_list',
  'image/object/bbox/xmin': 'float_list',
  'image/object/bbox/ymin': 'float_list',
  'image/object/bbox/xmax': 'float_list',
  'image/object/bbox/ymax': 'float_list',
  'image/object/bbox/label': 'int64_list',
  'image/format': 'bytes_list',
  'image/filename': 'bytes_list',
  'image/encoded': 'bytes_list',
}


def examples(directory, split):
  for path in records.shard_files(directory, split):
    for data in tf.data.TFRecordDataset(path).as_numpy_iterator():
      yield tf.train.Example.FromString(data).features.feature


def value(feature, kind):
  return getattr(feature, kind).value[0]


def hashes(directory):
  found = {}
  for name in sorted(os.listdir(directory)):
    with open(os.path.join(directory, name), 'rb') as file:
      found[name] = hashlib.file_digest(file, 'sha256').hexdigest()
  return found


@pytest.fixture(scope='module')
def full(tmp_path_factory):
  """The data set as users get it, features of all records: split -> list."""
  directory = str(tmp_path_factory.mktemp('full') / 'sample')
  written = sample.write_sample(directory)
  assert (written.num_train, written.num_validation, written.num_classes) == (512, 128, 7)
  assert written.num_bytes == sum(entry.stat().st_size for entry in os.scandir(directory))
  return {split: list(examples(directory, split)) for split in ('train', 'validation')}


@pytest.fixture(scope='module')
def everything(full):
  return full['train'] + full['validation']


def test_there_are_enough_images_in_both_splits(full):
  assert len(full['train']) == 512
  assert len(full['validation']) == 128


def test_every_record_has_imagenets_features(everything):
  for features in everything:
    assert {name: feature.WhichOneof('kind') for name, feature in features.items()} == SCHEMA
    label = value(features['image/class/label'], 'int64_list')
    assert value(features['image/class/synset'], 'bytes_list') == b'n%08d' % (90_000_000 + label)
    name = value(features['image/filename'], 'bytes_list').decode()
    assert name.startswith(f'n{90_000_000 + label}_') and name.endswith('.JPEG')
    boxes = [features[name].float_list.value for name in records.BBOX]
    assert {len(side) for side in boxes} == {
      len(features['image/object/bbox/label'].int64_list.value)
    }
    for ymin, xmin, ymax, xmax in zip(*boxes):
      assert 0 <= ymin < ymax <= 1 and 0 <= xmin < xmax <= 1
  names = [value(features['image/filename'], 'bytes_list') for features in everything]
  assert len(set(names)) > 600  # the number of an image starts anew in each split


def test_images_are_jpegs_as_described_and_of_imagenets_sizes(everything):
  kinds, sizes, num_bytes = collections.Counter(), [], []
  for features in everything:
    encoded = value(features['image/encoded'], 'bytes_list')
    with Image.open(io.BytesIO(encoded)) as image:
      assert image.format == 'JPEG'
      width, height, mode = image.width, image.height, image.mode
      sampling = image.layer[0][1:3] if mode == 'RGB' else None
    assert value(features['image/width'], 'int64_list') == width
    assert value(features['image/height'], 'int64_list') == height
    assert value(features['image/channels'], 'int64_list') == {'RGB': 3, 'L': 1}[mode]
    space = value(features['image/colorspace'], 'bytes_list')
    assert space == {'RGB': b'RGB', 'L': b'Grayscale'}[mode]
    kinds[{None: 'grey', (1, 1): '4:4:4', (2, 2): '4:2:0'}[sampling]] += 1
    sizes.append((width, height))
    num_bytes.append(len(encoded))
  assert 5 <= kinds['grey'] <= 50
  assert kinds['4:2:0'] > 250 and kinds['4:4:4'] > 150
  # ImageNet's training set: 110 KB and about 470 x 400 on average, most often 500 x 375.
  assert collections.Counter(sizes).most_common(1)[0][0] == (500, 375)
  width, height = np.mean(sizes, axis=0)
  assert 430 < width < 520 and 350 < height < 430
  assert 60_000 < np.mean(num_bytes) < 130_000
  assert max(width for width, _ in sizes) > 1000 and min(width for width, _ in sizes) < 300


def test_no_photograph_is_in_both_splits(full):
  seen = {
    split: {
      value(features['image/filename'], 'bytes_list').decode().split('_', 2)[2] for features in part
    }
    for split, part in full.items()
  }
  assert not seen['train'] & seen['validation']
  # One scene, seen twice.
  assert {'motorcycle_left.JPEG', 'motorcycle_right.JPEG'} <= seen['train']
  assert len(seen['train']) + len(seen['validation']) == sum(
    len(kind.train) + len(kind.validation) for kind in sample.KINDS
  )


def test_every_class_is_in_both_splits(full):
  for part in full.values():
    labels = collections.Counter(value(f['image/class/label'], 'int64_list') for f in part)
    assert sorted(labels) == list(range(1, 8))
    assert max(labels.values()) - min(labels.values()) <= 1


def test_shards_hold_several_classes(sample_dir):
  for path in records.shard_files(sample_dir, 'train'):
    labels = {
      tf.train.Example.FromString(data).features.feature['image/class/label'].int64_list.value[0]
      for data in tf.data.TFRecordDataset(path).as_numpy_iterator()
    }
    assert len(labels) > 2


def test_the_same_options_give_the_same_bytes(sample_dir, tmp_path):
  out = str(tmp_path / 'again')
  assert command_line.main(['sample', '--out', out, '--num_images=80']) == 0
  assert hashes(out) == hashes(sample_dir)
  assert os.listdir(tmp_path) == ['again']
  assert command_line.main(['sample', '--out', out + '1', '--num_images=80', '--seed=1']) == 0
  assert not set(hashes(out + '1').values()) & set(hashes(sample_dir).values())


def test_writing_it_again_changes_nothing(tmp_path, capsys):
  out = str(tmp_path / 'sample')
  (tmp_path / 'sample').mkdir()  # an empty directory is fine
  assert command_line.main(['sample', '--out', out, '--num_images=40']) == 0
  assert 'sample: 32 training and 8 validation images, 7 classes, ' in capsys.readouterr().out
  before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(out)}
  assert command_line.main(['sample', '--out', out, '--num_images=40']) == 0
  assert 'is already there' in capsys.readouterr().out
  assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(out)} == before


def test_another_or_a_changed_sample_is_not_overwritten(tmp_path):
  out = str(tmp_path / 'sample')
  sample.write_sample(out, num_images=35)
  with pytest.raises(errors.UsageError, match=r'holds another sample .*num_images=35'):
    sample.write_sample(out, num_images=36)
  shard = os.path.join(out, 'train-00000-of-00008')
  os.truncate(shard, 10)
  with pytest.raises(errors.UsageError, match='train-00000-of-00008 is missing or was changed'):
    sample.write_sample(out, num_images=35)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
  def fail(path, contents):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(records, 'write_records', fail)
  with pytest.raises(OSError, match='No space left'):
    sample.write_sample(str(tmp_path / 'sample'), num_images=35)
  assert os.listdir(tmp_path) == []


def test_missing_packages_and_photographs_are_named_with_the_remedy(tmp_path, monkeypatch):
  with monkeypatch.context() as without:
    without.setattr(sample.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(errors.DataError, match='not installed: pip install scikit-image'):
      sample.write_sample(str(tmp_path / 'sample'), num_images=35)
  monkeypatch.setattr(sample, 'KINDS', (sample.Kind('x', ('none.png',), ('none.png',)),))
  with pytest.raises(errors.DataError, match=r'carry no none.png: pip install scikit-image=='):
    sample.write_sample(str(tmp_path / 'sample'), num_images=35)
