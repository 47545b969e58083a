"""Maps in the thread that asks for an element: same elements, no other thread."""

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

from hpm.pipelines import inline


def pairs(count=5):
  return tf.data.Dataset.zip(
    (tf.data.Dataset.range(count), tf.data.Dataset.range(count, 2 * count))
  )


def work(a, b):
  table = tf.constant(np.arange(100, dtype=np.float32))  # captured, as tables of sources are
  return a * b, tf.gather(table, a), tf.stack([a, b])


def test_it_gives_what_map_gives():
  mapped, expected = inline.map_inline(pairs(), work), pairs().map(work)
  assert mapped.element_spec == expected.element_spec
  assert mapped.cardinality() == 5
  gc.collect()  # nothing but the data set holds the traced function
  for ours, theirs in zip(mapped.batch(2), expected.batch(2), strict=True):
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_array_equal(a, b)


def test_it_works_in_a_session():
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    element = tf.compat.v1.data.make_one_shot_iterator(inline.map_inline(pairs(), work)).get_next()
    found = [session.run(element)[0] for _ in range(5)]
  assert found == [0, 6, 14, 24, 36]


def test_an_error_in_it_is_raised_and_the_next_element_follows():
  def checked(a, b):
    tf.raw_ops.Assert(condition=tf.not_equal(a, 2), data=['no two, please'])
    return a, b

  elements = iter(inline.map_inline(pairs(), checked))
  assert [int(next(elements)[0]) for _ in range(2)] == [0, 1]
  with pytest.raises(tf.errors.InvalidArgumentError, match='no two, please'):
    next(elements)
  assert int(next(elements)[0]) == 3


def test_all_calls_are_in_one_thread():
  def thread():
    return tf.numpy_function(threading.get_ident, [], tf.int64)

  inner = inline.map_inline(pairs(50), lambda *_: (thread(), thread()))
  outer = inline.map_inline(inner, lambda *found: (*found, thread()))
  assert len({int(found) for element in outer for found in element}) == 1
