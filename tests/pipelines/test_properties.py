"""Properties that hold for all sizes, counts, seeds and workers."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import tensorflow as tf

from hpm.pipelines import augment, order, sources

SEEDS = st.integers(0, 2**40)
FEW = settings(max_examples=8, deadline=None)
MANY = settings(max_examples=60, deadline=None)


class Numbers(sources.Stream):
  """A stream of files with so many records, which hold nothing."""

  origin = 'numbers'
  split = 'train'

  def __init__(self, counts: list[int]):
    self._counts = counts

  @property
  def files(self):
    return [f'file {i}' for i in range(len(self._counts))]

  def count(self, strict):
    return self._counts

  def read(self, file, strict=True):
    count = tf.gather(tf.constant(self._counts, tf.int64), file)
    return tf.data.Dataset.range(count).map(tf.strings.as_string)

  def load(self, ident, item, with_boxes):
    return sources.Sample(item, ident)

  def contents(self, file, record, item=None):
    return sources.Contents(b'', 0)


class Table(sources.RandomAccess):
  """The same with random access."""

  origin = 'numbers'
  split = 'train'
  __init__ = Numbers.__init__
  files = Numbers.files
  count = Numbers.count
  load = Numbers.load
  contents = Numbers.contents


def ids(source, order_, **options) -> list[int]:
  return [int(i) for _, i, _ in order.samples(source, order_, **options).as_numpy_iterator()]


def all_ids(counts: list[int]) -> list[int]:
  return [file << 32 | record for file, count in enumerate(counts) for record in range(count)]


COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
KINDS = st.sampled_from([Numbers, Table])


@FEW
@given(COUNTS, SEEDS, st.integers(1, 12), KINDS)
def test_an_epoch_is_a_permutation(counts, seed, buffer, kind):
  seen = ids(kind(counts), order.Order(seed, buffer), num_epochs=2)
  total = sum(counts)
  assert sorted(seen[:total]) == sorted(seen[total:]) == all_ids(counts)


@FEW
@given(COUNTS, st.one_of(st.none(), SEEDS), st.integers(1, 4), st.data(), KINDS)
def test_shards_partition_the_records(counts, seed, num_shards, draw, kind):
  by = draw.draw(st.sampled_from(['record', 'file'] if len(counts) >= num_shards else ['record']))
  seen = []
  for index in range(num_shards):
    one = order.Order(seed, 5, num_shards, index, by)
    part = ids(kind(counts), one)
    assert len(part) == one.epoch_size(counts)
    seen += part
  assert sorted(seen) == all_ids(counts)


@FEW
@given(COUNTS, SEEDS, st.integers(1, 12), st.integers(1, 3), st.data(), KINDS)
def test_resuming_equals_an_unbroken_run(counts, seed, buffer, num_shards, draw, kind):
  one = order.Order(seed, buffer, num_shards, draw.draw(st.integers(0, num_shards - 1)))
  if not one.epoch_size(counts):
    return
  whole = ids(kind(counts), one, num_epochs=3)
  position = draw.draw(st.integers(0, len(whole)))
  assert ids(kind(counts), one, skip=position, num_epochs=3) == whole[position:]
  assert len(whole) == 3 * one.epoch_size(counts)


@MANY
@given(st.integers(1, 3000), st.integers(1, 3000), SEEDS, SEEDS)
def test_crops_lie_inside_the_image(height, width, seed, position):
  window = augment.random_window(tf.constant([height, width, 3]), tf.constant([seed, position]))
  top, left, h, w = window.numpy()
  assert top >= 0 and left >= 0 and h >= 1 and w >= 1
  assert top + h <= height and left + w <= width


@MANY
@given(
  st.integers(40, 800),
  st.integers(40, 800),
  SEEDS,
  *[st.integers(0, 60)] * 2,
  *[st.integers(30, 40)] * 2,
)
def test_crops_cover_a_tenth_of_a_box_or_are_the_whole_image(
  height, width, seed, ymin, xmin, tall, wide
):
  box = np.array([ymin, xmin, ymin + tall, xmin + wide], np.float32) / 100
  window = augment.random_window(
    tf.constant([height, width, 3]), tf.constant([seed, 0]), tf.constant(box[None])
  )
  top, left, h, w = (int(value) for value in window.numpy())
  if (top, left, h, w) == (0, 0, height, width):
    return
  # TensorFlow measures in whole pixels.
  y0, x0, y1, x1 = (int(v) for v in box * [height, width, height, width])
  common = max(0, min(top + h, y1) - max(top, y0)) * max(0, min(left + w, x1) - max(left, x0))
  assert common >= 0.1 * (y1 - y0) * (x1 - x0) * 0.9
  assert 0.07 * height * width <= h * w
