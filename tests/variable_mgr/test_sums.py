"""Sums have one order, whatever memory TensorFlow may overwrite and however it rewrites a graph."""

import functools
import itertools
import operator

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.variable_mgr import sums
from tests.variable_mgr.test_allreduce import SPECS

NUM_VALUES = 4
VALUES = np.random.default_rng(0).normal(size=(NUM_VALUES, 501)).astype(np.float32)
# Which inputs of a sum are results that nothing else holds, and may be overwritten by it.
FRESH = list(itertools.product([False, True], repeat=NUM_VALUES))


def sums_of(add, devices):
  """The bits of add(VALUES), once for each of `FRESH`."""

  def run(fresh, zero, *held):
    values = []
    for own, value, device in zip(fresh, held, devices, strict=True):
      with tf.device(device):  # an addition that the optimizer can't see through
        values.append(value + zero if own else value)
    with tf.device(devices[0]):
      return add(values)

  zero, held = tf.constant(0.0), [tf.constant(value) for value in VALUES]
  return {
    tf.function(functools.partial(run, fresh), autograph=False)(zero, *held).numpy().tobytes()
    for fresh in FRESH
  }


def test_the_order_is_that_of_the_arguments(cpu_devices):
  expected = functools.reduce(operator.add, VALUES)
  assert sums_of(sums.in_order, cpu_devices[:NUM_VALUES]) == {expected.tobytes()}


def test_add_n_and_plain_additions_have_several_orders(cpu_devices):
  for add in (tf.add_n, lambda values: functools.reduce(operator.add, values)):
    assert len(sums_of(add, cpu_devices[:NUM_VALUES])) > 1


@pytest.mark.parametrize('spec', [spec for spec in SPECS if spec != 'collective'])
def test_no_all_reduce_leaves_an_order_to_the_optimizer(spec, cpu_devices):
  """In the graph as it runs: additions of two, none of which TensorFlow has put together."""
  devices = cpu_devices[:5]
  with tf.Graph().as_default():
    lists = []
    for device in devices:
      with tf.device(device):
        lists.append([tf.Variable(tf.ones(shape)).read_value() for shape in ((7, 5), (1,), (60,))])
    all_reduce = hpm.variable_mgr.all_reduce(spec, devices)
    results = all_reduce(lists)
    config = tf.compat.v1.ConfigProto(device_count={'CPU': 8}, allow_soft_placement=False)
    options = tf.compat.v1.RunOptions(
      output_partition_graphs=True,
      experimental=tf.compat.v1.RunOptions.Experimental(collective_graph_key=1),
    )
    record = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(config=config) as session:
      session.run(tf.compat.v1.global_variables_initializer())
      session.run([variable.initializer for variable in all_reduce.variables])
      session.run(results, options=options, run_metadata=record)
  ops = [node.op for graph in record.partition_graphs for node in graph.node]
  assert 'AddN' not in ops
  if 'collective' not in spec:
    assert ops.count('AddV2') >= 4 * 3  # of five devices, for each tensor


def test_scalars_of_many_devices_are_one_sum(cpu_devices):
  values = [np.float32(value) for value in VALUES[:, 0]]
  total = sums.of_scalars([tf.constant(value) for value in values])
  assert float(total) == pytest.approx(sum(values))
  (alone,) = tf.constant([3], tf.int64)
  assert sums.of_scalars([alone]) is alone
