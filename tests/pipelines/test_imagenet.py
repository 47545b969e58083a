"""The ImageNet pipeline: order, epochs, resuming, evaluation, pixels, labels."""

import collections
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import augment, records
from tests.pipelines import data

SIZE = 32


def make(directory, split='train', **options):
  defaults = {
    'batch_size': 8,
    'image_size': SIZE,
    'num_classes': 7,
    'with_ids': True,
    'shuffle_buffer': 16,
  }
  return pipelines.create('imagenet', data_dir=directory, split=split, **(defaults | options))


@pytest.fixture(scope='module')
def unbroken(sample_dir):
  """Images, labels and ids of two epochs and a half, 160 samples."""
  return data.collect(make(sample_dir), 20)


def all_ids(directory, split='train'):
  counts = records.count_records(records.shard_files(directory, split))
  return [file << 32 | number for file, count in enumerate(counts) for number in range(count)]


def test_training_batches_are_full_and_static(sample_dir):
  images, labels, ids = make(sample_dir).dataset().element_spec
  assert images == tf.TensorSpec([8, SIZE, SIZE, 3], tf.uint8)
  assert labels == tf.TensorSpec([8], tf.int32)
  assert ids == tf.TensorSpec([8], tf.int64)
  assert len(make(sample_dir, with_ids=False).dataset().element_spec) == 2


@pytest.mark.parametrize(
  ('options', 'endless'),
  [({}, True), ({'num_epochs': 2}, False), ({'split': 'validation'}, False)],
)
def test_datasets_say_whether_they_end(sample_dir, options, endless):
  cardinality = make(sample_dir, **options).dataset().cardinality()
  assert (cardinality == tf.data.INFINITE_CARDINALITY) == endless


def test_every_sample_comes_once_an_epoch(sample_dir, unbroken):
  _, _, ids = unbroken
  assert sorted(ids[:64]) == sorted(ids[64:128]) == all_ids(sample_dir)


def test_each_epoch_has_another_order_and_other_crops(unbroken):
  images, _, ids = unbroken
  assert not np.array_equal(ids[:64], ids[64:128])
  assert not np.array_equal(ids[:64], np.sort(ids[:64]))
  first, second = np.argsort(ids[:64]), 64 + np.argsort(ids[64:128])
  assert all(not np.array_equal(images[i], images[j]) for i, j in zip(first, second))


def test_finite_epochs_end_with_a_partial_batch(sample_dir):
  pipeline = make(sample_dir, num_epochs=2, batch_size=24)
  assert pipeline.dataset().element_spec[1].shape.as_list() == [None]
  sizes = [len(batch[1]) for batch in pipeline.dataset()]
  assert sizes == [24] * 5 + [8]
  _, _, ids = data.collect(pipeline)
  assert sorted(ids) == sorted(2 * all_ids(sample_dir))


@pytest.mark.parametrize(('num_parallel_calls', 'prefetch'), [(1, 1), (8, 16)])
def test_the_order_does_not_depend_on_the_number_of_threads(
  sample_dir, unbroken, num_parallel_calls, prefetch
):
  pipeline = make(sample_dir, num_parallel_calls=num_parallel_calls, prefetch=prefetch)
  other = data.collect(pipeline, 20)
  for expected, actual in zip(unbroken, other):
    np.testing.assert_array_equal(actual, expected)


def test_the_order_does_not_depend_on_the_batch_size(sample_dir, unbroken):
  other = data.collect(make(sample_dir, batch_size=5), 32)
  for expected, actual in zip(unbroken, other):
    np.testing.assert_array_equal(actual, expected)


def test_another_process_with_another_global_seed_sees_the_same(sample_dir, unbroken, tmp_path):
  code = f"""
import numpy as np, tensorflow as tf
from tests.pipelines import data
from tests.pipelines.test_imagenet import make
tf.random.set_seed(1234)
images, labels, ids = data.collect(make({sample_dir!r}), 20)
np.savez({str(tmp_path / 'seen.npz')!r}, images=images, labels=labels, ids=ids)
"""
  root = os.path.dirname(os.path.dirname(pipelines.__path__[0]))
  subprocess.run([sys.executable, '-c', code], cwd=root, check=True, capture_output=True)
  with np.load(tmp_path / 'seen.npz') as seen:
    for name, expected in zip(('images', 'labels', 'ids'), unbroken):
      np.testing.assert_array_equal(seen[name], expected)


def test_another_seed_gives_another_order_and_other_crops(sample_dir, unbroken):
  images, _, ids = data.collect(make(sample_dir, seed=1), 8)
  assert not np.array_equal(ids, unbroken[2][:64])
  assert sorted(ids) == all_ids(sample_dir)
  here, there = np.argsort(ids), np.argsort(unbroken[2][:64])
  differing = [not np.array_equal(images[i], unbroken[0][j]) for i, j in zip(here, there)]
  assert sum(differing) > 60


@pytest.mark.parametrize('position', [1, 63, 64, 100, 128])
def test_resuming_goes_on_exactly_where_it_stopped(sample_dir, unbroken, position):
  state = make(sample_dir).state(position)
  assert all(type(value) is int for value in state.values())
  pipeline = make(sample_dir)
  pipeline.restore(state)
  resumed = data.collect(pipeline, 4)
  for expected, actual in zip(unbroken, resumed):
    np.testing.assert_array_equal(actual, expected[position : position + 32])


def test_a_second_resume_counts_from_the_start_of_the_training(sample_dir, unbroken):
  pipeline = make(sample_dir)
  for position in (16, 40):
    pipeline.restore(pipeline.state(position))
    _, _, ids = data.collect(pipeline, 1)
    np.testing.assert_array_equal(ids, unbroken[2][position : position + 8])


def test_resuming_finite_epochs_ends_where_they_end(sample_dir, unbroken):
  pipeline = make(sample_dir, num_epochs=2)
  pipeline.restore(pipeline.state(100))
  _, _, ids = data.collect(pipeline)
  np.testing.assert_array_equal(ids, unbroken[2][100:128])
  pipeline.restore(pipeline.state(128))
  assert list(pipeline.dataset()) == []


def test_resuming_decodes_nothing_that_it_skips(sample_dir, tmp_path):
  bad = data.record(b'\xff\xd8\xff no image', label=1)
  good = data.record(label=2)
  directory = data.write_shards(tmp_path, [[good] + [bad] * 5 + [good] * 4])
  pipeline = make(directory, 'train', training=False)
  pipeline.restore(pipeline.state(6))
  _, labels, ids = data.collect(pipeline)
  assert labels.tolist() == [1] * 4
  assert ids.tolist() == [6, 7, 8, 9]


def test_positions_of_other_data_or_another_order_are_refused(sample_dir, tmp_path):
  state = make(sample_dir).state(8)
  with pytest.raises(errors.UsageError, match=r'seed=5, .* saved with seed=0: pass seed=0'):
    make(sample_dir, seed=5).restore(state)
  with pytest.raises(errors.UsageError, match='shuffle_buffer=32'):
    make(sample_dir, shuffle_buffer=32).restore(state)
  with pytest.raises(errors.UsageError, match="no 'shuffle_buffer'"):
    make(sample_dir).restore(pipelines.create('synthetic', batch_size=2).state(0))
  other = make(data.write_shards(tmp_path, [[data.record()] * 3]))
  with pytest.raises(errors.DataError, match=r'holds 3 records, but .* saved with 64'):
    other.restore(state)
  with pytest.raises(errors.UsageError, match='num_samples=-1'):
    make(sample_dir).state(-1)


def test_few_records_are_repeated_to_fill_a_batch(tmp_path):
  directory = data.write_shards(tmp_path, [[data.record(label=1), data.record(label=2)]])
  _, labels, _ = data.collect(make(directory), 2)
  assert collections.Counter(labels.tolist()) == {0: 8, 1: 8}


def test_evaluation_counts_every_sample_once_in_a_fixed_order(sample_dir):
  pipeline = make(sample_dir, 'validation', batch_size=6)
  assert [len(batch[1]) for batch in pipeline.dataset()] == [6, 6, 4]
  first, second = data.collect(pipeline), data.collect(make(sample_dir, 'validation', seed=3))
  assert sorted(first[2]) == all_ids(sample_dir, 'validation')
  for one, other in zip(first, second):
    np.testing.assert_array_equal(one, other)
  assert pipeline.epoch_size == 16


def test_evaluation_of_training_data_drops_nothing_either(sample_dir):
  _, _, ids = data.collect(make(sample_dir, 'train', training=False, batch_size=7))
  assert sorted(ids) == all_ids(sample_dir)


def test_asking_beyond_the_end_says_so_each_time(sample_dir):
  iterator = iter(make(sample_dir, 'validation', batch_size=16).dataset())
  next(iterator)
  for _ in range(2):
    with pytest.raises(StopIteration):
      next(iterator)


def test_evaluation_pixels_are_those_of_the_operations(sample_dir):
  pipeline = make(sample_dir, 'validation')
  images, labels, ids = data.collect(pipeline)
  paths = records.shard_files(sample_dir, 'validation')
  for image, label, ident in zip(images, labels, ids):
    path = paths[ident >> 32]
    offset = records.record_offsets(path)[ident & 0xFFFFFFFF]
    features = tf.train.Example.FromString(records.read_record(path, offset)).features.feature
    assert label == features['image/class/label'].int64_list.value[0] - 1
    whole = augment.decode(tf.constant(features['image/encoded'].bytes_list.value[0]))
    # Fused or not, float32 sums may round to either side.
    expected = augment.resize_central_crop(whole, SIZE).numpy().astype(int)
    assert np.abs(image - expected).max() <= 1


def test_training_pixels_equal_full_decoding_and_slicing(tmp_path):
  """PNG bytes take the way of full decoding; so the same pixels as JPEG must give the same."""
  jpegs = [
    data.image_bytes(150, 110, quality=95, subsampling=i % 3, mode='L' if i == 5 else 'RGB')
    for i in range(6)
  ]
  pngs = [tf.io.encode_png(augment.decode(tf.constant(jpeg))).numpy() for jpeg in jpegs]
  seen = []
  for name, images in (('jpeg', jpegs), ('png', pngs)):
    directory = data.write_shards(tmp_path / name, [[data.record(image) for image in images]])
    seen.append(data.collect(make(directory), 8))
  for jpeg, png in zip(*seen):
    np.testing.assert_array_equal(jpeg, png)
  assert len(np.unique(seen[0][0].reshape(64, -1), axis=0)) == 64


@pytest.mark.parametrize('training', [True, False])
def test_unusual_images_pass(tmp_path, training):
  images = [
    data.image_bytes(form='PNG'),
    data.image_bytes(form='PNG', mode='RGBA'),
    data.image_bytes(form='GIF'),
    data.image_bytes(form='BMP'),
    data.image_bytes(mode='CMYK'),
    data.image_bytes(mode='L'),
    data.image_bytes(progressive=True),
    data.image_bytes(1, 1),
    data.image_bytes(3, 500),
  ]
  directory = data.write_shards(tmp_path, [[data.record(image) for image in images]])
  pipeline = make(directory, training=training, num_epochs=1)
  batch, _, ids = data.collect(pipeline)
  assert batch.shape == (9, SIZE, SIZE, 3)
  assert sorted(ids) == list(range(9))
  assert 50 < batch[np.argsort(ids)[:7]].mean() < 200


def test_boxes_steer_the_crop_only_if_asked_for(sample_dir):
  plain = data.collect(make(sample_dir), 8)
  with_boxes = data.collect(make(sample_dir, use_bbox=True), 8)
  np.testing.assert_array_equal(plain[2], with_boxes[2])
  same = [np.array_equal(one, other) for one, other in zip(plain[0], with_boxes[0])]
  assert 0 < sum(same) < 64  # images without boxes are cropped as before


@pytest.mark.parametrize(
  ('options', 'label'),
  [
    ({'num_classes': 1000}, 999),
    ({'num_classes': 1001}, 1000),
    ({'num_classes': 1005, 'label_offset': 4}, 1004),
  ],
)
def test_the_last_label_fits_both_kinds_of_heads(tmp_path, options, label):
  directory = data.write_shards(tmp_path, [[data.record(label=1000)]])
  _, labels, _ = data.collect(make(directory, batch_size=1, **options), 1)
  assert labels.tolist() == [label]


def test_a_graph_and_a_session_see_the_same(sample_dir, unbroken):
  with tf.Graph().as_default():
    dataset = make(sample_dir).dataset()
    batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    with tf.compat.v1.Session() as session:
      batches = [session.run(batch) for _ in range(4)]
  for expected, actual in zip(unbroken, zip(*batches)):
    np.testing.assert_array_equal(np.concatenate(actual), expected[:32])


def test_nothing_is_counted_until_it_is_needed(sample_dir, monkeypatch):
  def refuse(*_, **__):
    raise AssertionError('counted')

  monkeypatch.setattr(records, 'count_records', refuse)
  pipeline = make(sample_dir)
  data.collect(pipeline, 1)
  with pytest.raises(AssertionError, match='counted'):
    pipeline.state(8)


def test_positions_count_what_was_consumed_not_what_was_fetched(sample_dir):
  pipeline = make(sample_dir)
  iterator = iter(pipeline.dataset())
  for _ in range(3):
    next(iterator)
  state = pipeline.state(16)  # a step less than was fetched
  assert state == {'seed': 0, 'samples': 16, 'epoch_size': 64, 'shuffle_buffer': 16}
