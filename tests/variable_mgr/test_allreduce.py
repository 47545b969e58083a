"""All-reduces: exact sums, the same bits on every device, results where they belong.

Values are small integers, whose sums every dtype here holds exactly, whatever the order of the
additions; what is left to differ is a fault.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.variable_mgr.allreduce import Copy, HalfTransfer
from hpm.variable_mgr.collective import Collective

ALL_REDUCES = {
  'copy_spread': lambda devices: Copy(devices, sum_on='spread'),
  'copy_cpu': lambda devices: Copy(devices, sum_on='cpu'),
  'collective': Collective,
  **{
    f'{name}_as_{dtype}': lambda devices, inner=inner, dtype=dtype: HalfTransfer(
      inner(devices), devices, dtype
    )
    for name, inner in (('copy', Copy), ('collective', Collective))
    for dtype in ('float16', 'bfloat16')
  },
}
SHAPES = [(), (1,), (3, 5, 7), (2,), (0,), (4, 0, 3), (17, 1)]


def integers(shape, device_index, tensor_index):
  """float64 of integers between -8 and 8: eight of them add up to at most 64."""
  values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
  return (values * (device_index + 2) + 3 * tensor_index + device_index) % 17 - 8.0


def expected_sums(shapes, num_devices):
  return [
    sum(integers(shape, device, index) for device in range(num_devices))
    for index, shape in enumerate(shapes)
  ]


def build(all_reduce, devices, shapes, dtype):
  """The all-reduce of `integers`, one list a device; for a graph or a tf.function."""
  lists = []
  for i, device in enumerate(devices):
    with tf.device(device):
      lists.append([tf.constant(integers(s, i, k), dtype) for k, s in enumerate(shapes)])
  return all_reduce(lists)


def assert_exact(results, shapes, dtype):
  expected = expected_sums(shapes, len(results))
  for values in results:
    assert len(values) == len(shapes)
    for value, exact in zip(values, expected):
      assert value.dtype == tf.as_dtype(dtype).as_numpy_dtype
      np.testing.assert_array_equal(value.astype(np.float64), exact)


def run_in_session(build_results, variables, num_devices):
  config = tf.compat.v1.ConfigProto(device_count={'CPU': num_devices}, allow_soft_placement=False)
  options = tf.compat.v1.RunOptions(
    experimental=tf.compat.v1.RunOptions.Experimental(collective_graph_key=1)
  )
  results = build_results()
  with tf.compat.v1.Session(config=config) as session:
    session.run([variable.initializer for variable in variables()])
    return session.run(results, options=options)


@pytest.mark.parametrize('name', ALL_REDUCES)
@pytest.mark.parametrize('num_devices', [1, 2, 3, 4, 8])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_sums_are_exact_and_lie_on_every_device(name, num_devices, dtype, cpu_devices):
  devices = cpu_devices[:num_devices]
  all_reduce = ALL_REDUCES[name](devices)
  results = tf.function(lambda: build(all_reduce, devices, SHAPES, dtype), autograph=False)()
  assert_exact([[v.numpy() for v in values] for values in results], SHAPES, dtype)
  for device, values in zip(devices, results, strict=True):
    assert all(v.backing_device.endswith(device.removeprefix('/')) for v in values)


@pytest.mark.parametrize('name', ALL_REDUCES)
@pytest.mark.parametrize('num_devices', [1, 3, 4])
def test_sums_are_exact_in_a_session(name, num_devices, cpu_devices):
  devices = cpu_devices[:num_devices]
  with tf.Graph().as_default():
    all_reduce = ALL_REDUCES[name](devices)

    def results():
      tensors = build(all_reduce, devices, SHAPES, 'float32')
      for device, values in zip(devices, tensors, strict=True):
        assert all(v.device.endswith(device.removeprefix('/')) for v in values)
      return tensors

    values = run_in_session(results, lambda: all_reduce.variables, num_devices)
  assert_exact(values, SHAPES, 'float32')


@pytest.mark.parametrize('name', ALL_REDUCES)
def test_a_million_and_three_values(name, cpu_devices):
  devices, size = cpu_devices[:3], 1_000_003
  all_reduce = ALL_REDUCES[name](devices)

  @tf.function(autograph=False)
  def run():
    lists = []
    for i, device in enumerate(devices):
      with tf.device(device):
        lists.append([tf.cast(tf.range(size) % (5 + i), tf.float32)])
    return all_reduce(lists)

  expected = sum(np.arange(size) % (5 + i) for i in range(3))
  for (value,) in run():
    np.testing.assert_array_equal(value.numpy(), expected)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
  name=st.sampled_from(sorted(ALL_REDUCES)),
  num_devices=st.integers(1, 5),
  shapes=st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=5),
)
def test_any_list_of_shapes(name, num_devices, shapes):
  devices = hpm.devices.cpu(8)[:num_devices]
  all_reduce = ALL_REDUCES[name](devices)
  results = tf.function(lambda: build(all_reduce, devices, shapes, 'float32'), autograph=False)()
  assert_exact([[v.numpy() for v in values] for values in results], shapes, 'float32')


@pytest.mark.parametrize('name', ALL_REDUCES)
@pytest.mark.parametrize('num_devices', [2, 3, 8])
def test_what_does_not_add_up_exactly_is_still_the_same_bits_on_every_device(
  name, num_devices, cpu_devices
):
  devices = cpu_devices[:num_devices]
  all_reduce = ALL_REDUCES[name](devices)
  inputs = np.random.default_rng(0).normal(size=(num_devices, 1001)).astype(np.float32)

  @tf.function(autograph=False)
  def run():
    lists = []
    for i, device in enumerate(devices):
      with tf.device(device):
        lists.append([tf.constant(inputs[i])])
    return all_reduce(lists)

  first, *others = [value.numpy() for (value,) in run()]
  for other in others:
    np.testing.assert_array_equal(other, first)
  # Each input is rounded once, each addition once more: n units of the sum of absolute values.
  unit = {'float16': 2.0**-11, 'bfloat16': 2.0**-8}.get(name.rpartition('_')[2], 2.0**-24)
  bound = num_devices * unit * np.abs(inputs.astype(np.float64)).sum(0)
  assert np.all(np.abs(first - inputs.astype(np.float64).sum(0)) <= bound)


def test_collectives_do_not_deadlock_in_fifty_steps_of_two_calls_each(cpu_devices):
  devices = cpu_devices[:4]
  all_reduce = Collective(devices, timeout_s=60.0)

  @tf.function(autograph=False)
  def step(count):
    lists = []
    for i, device in enumerate(devices):
      with tf.device(device):
        lists.append([tf.fill([size], count + i) for size in (1, 1000, 3, 50)])
    first = all_reduce(lists)
    return all_reduce([values[1:] for values in first])

  for count in range(50):
    for values in step(tf.constant(float(count))):
      for value in values:
        assert np.all(value.numpy() == 4 * (4 * count + 6))


def test_collectives_do_not_deadlock_in_a_session_either(cpu_devices):
  devices = cpu_devices[:4]
  with tf.Graph().as_default():
    all_reduce = Collective(devices, timeout_s=60.0)
    first = build(all_reduce, devices, SHAPES, 'float32')
    second = all_reduce(first)
    config = tf.compat.v1.ConfigProto(device_count={'CPU': 4}, allow_soft_placement=False)
    options = tf.compat.v1.RunOptions(
      experimental=tf.compat.v1.RunOptions.Experimental(collective_graph_key=1)
    )
    with tf.compat.v1.Session(config=config) as session:
      session.run([variable.initializer for variable in all_reduce.variables])
      for _ in range(50):
        values = session.run(second, options=options)
  for of_device in values:
    for value, once in zip(of_device, expected_sums(SHAPES, 4), strict=True):
      np.testing.assert_array_equal(value, 4 * once)


def test_nccl_on_cpu_devices_is_refused(cpu_devices):
  with pytest.raises(hpm.errors.UsageError, match="'nccl' needs GPUs.*'copy' or 'collective'"):
    hpm.variable_mgr.all_reduce('nccl', cpu_devices[:2])
  with pytest.raises(hpm.errors.UsageError, match="'nccl' needs GPUs"):
    hpm.variable_mgr.create('replicated', ['/GPU:0', '/CPU:0'], all_reduce_spec='nccl')


def test_wrong_options_are_refused(cpu_devices):
  devices = cpu_devices[:2]
  with pytest.raises(hpm.errors.UsageError, match="'gpu': use cpu or spread"):
    Copy(devices, sum_on='gpu')
  with pytest.raises(hpm.errors.UsageError, match="'float64': use float16 or bfloat16"):
    HalfTransfer(Copy(devices), devices, 'float64')
  with pytest.raises(hpm.errors.UsageError, match="'colective': did you mean collective"):
    hpm.variable_mgr.all_reduce('colective', devices)
