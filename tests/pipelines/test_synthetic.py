"""Synthetic data: random, repeatable, in range, in both runtimes."""

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines


def make(**options):
  return pipelines.create(
    'synthetic', **({'batch_size': 16, 'image_size': 24, 'num_classes': 5} | options)
  )


def first(pipeline):
  return [part.numpy() for part in next(iter(pipeline.dataset()))]


def test_images_use_all_levels_and_labels_all_classes():
  images, labels = first(make())
  assert images.shape == (16, 24, 24, 3) and images.dtype == np.uint8
  counts = np.bincount(images.ravel(), minlength=256)
  assert counts.min() > 0.5 * counts.mean() and counts.max() < 1.5 * counts.mean()
  assert len(np.unique(images.reshape(16, -1), axis=0)) == 16
  assert labels.shape == (16,) and labels.dtype == np.int32
  assert set(labels) <= set(range(5)) and len(set(labels)) > 1


def test_shapes_are_static_and_the_stream_has_no_end():
  pipeline = make()
  assert pipeline.dataset().element_spec == (
    tf.TensorSpec([16, 24, 24, 3], tf.uint8),
    tf.TensorSpec([16], tf.int32),
  )
  assert pipeline.dataset().cardinality() == tf.data.INFINITE_CARDINALITY
  assert pipeline.epoch_size is None


def test_the_seed_decides():
  for one, other in zip(first(make(seed=2**70)), first(make(seed=2**70))):
    np.testing.assert_array_equal(one, other)
  assert not np.array_equal(first(make(seed=1))[0], first(make(seed=2))[0])


def test_a_graph_holds_no_pixels_and_sees_the_same():
  sizes = []
  for batch_size in (32, 16):
    with tf.Graph().as_default() as graph:
      dataset = make(batch_size=batch_size).dataset()
      batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
      sizes.append(len(graph.as_graph_def().SerializeToString()))
  assert sizes[0] == sizes[1]
  with graph.as_default(), tf.compat.v1.Session() as session:
    images, labels = session.run(batch)
  expected = first(make())
  np.testing.assert_array_equal(images, expected[0])
  np.testing.assert_array_equal(labels, expected[1])


def test_ids_come_on_request():
  assert first(make(with_ids=True))[2].tolist() == list(range(16))


def test_positions_can_be_saved_and_restored():
  pipeline = make(seed=4)
  assert pipeline.state(32) == {'seed': 4, 'samples': 32}
  pipeline.restore(pipeline.state(32))
  with pytest.raises(errors.UsageError, match='pass seed=4'):
    make(seed=5).restore(pipeline.state(32))
  with pytest.raises(errors.UsageError, match='pipeline of records'):
    make(seed=4).restore({'seed': 4, 'samples': 32, 'epoch_size': 10})


@pytest.mark.parametrize('option', ['batch_size', 'image_size', 'num_classes'])
def test_numbers_out_of_range_are_quoted(option):
  with pytest.raises(errors.UsageError, match=f'{option}=0 must be at least 1'):
    make(**{option: 0})


def test_failures_are_passed_on_in_one_line():
  error = make().explain(tf.errors.InternalError(None, None, 'first\nlast\n\t [[node]]'))
  assert isinstance(error, errors.DataError)
  assert str(error) == 'failed after 0 samples: last'
