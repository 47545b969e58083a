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
from hpm.variable_mgr import packing
from hpm.variable_mgr.allreduce import Copy, HalfTransfer
from hpm.variable_mgr.collective import Collective

SPECS = [
  'copy', 'psgpu', 'psgpu#3', 'pscpu', 'pscpu#2', 'xring', 'xring#3', 'rechd', 'hierarchical_copy',
  'collective', 'copy/xring', 'psgpu/rechd', 'collective/collective', 'xring/pscpu',
  'pscpu:16:xring:300:collective',
]  # fmt: skip
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


def reduce(spec, devices, **options):
  return hpm.variable_mgr.all_reduce(spec, devices, **options)


@pytest.mark.parametrize('spec', SPECS)
def test_sums_are_exact_and_lie_on_every_device(spec, cpu_devices):
  devices = cpu_devices[:3]
  all_reduce = reduce(spec, devices)
  results = tf.function(lambda: build(all_reduce, devices, SHAPES, 'float32'), autograph=False)()
  assert_exact([[v.numpy() for v in values] for values in results], SHAPES, 'float32')
  for device, values in zip(devices, results, strict=True):
    assert all(v.backing_device.endswith(device.removeprefix('/')) for v in values)


def exact_sums_in_a_session(spec, num_devices, shapes, dtype, transfer, packing_, buckets):
  """Builds and runs one combination; `packing_` is None, or one of `PACKINGS`."""
  devices = hpm.devices.cpu(8)[:num_devices]
  with tf.Graph().as_default():
    options = {} if transfer is None else {'transfer_dtype': transfer}
    all_reduce = reduce(spec, devices, **options)
    if packing_ == 'repacked':
      all_reduce = packing.Repacked(all_reduce, devices, buckets)
    elif packing_ == 'buckets':
      all_reduce = packing.Buckets(all_reduce, devices, buckets)
    elif packing_ == 'aggregated':
      all_reduce = packing.Aggregated(all_reduce, devices, 16 * buckets, 2 + buckets)

    def results():
      tensors = build(all_reduce, devices, shapes, dtype)
      for device, values in zip(devices, tensors, strict=True):
        assert all(v.device.endswith(device.removeprefix('/')) for v in values)
        assert [v.shape for v in values] == list(shapes)
      return tensors

    values = run_in_session(results, lambda: all_reduce.variables, num_devices)
  assert_exact(values, shapes, dtype)


PACKINGS = (None, 'repacked', 'buckets', 'aggregated')
SIZES = st.one_of(st.integers(0, 4), st.sampled_from([1, 7, 31, 257]))
COMBINATIONS = {
  'spec': st.sampled_from(SPECS),
  'num_devices': st.integers(1, 8),
  'shapes': st.lists(st.lists(SIZES, max_size=3).map(tuple), min_size=1, max_size=6).filter(
    lambda shapes: sum(np.prod(shape, dtype=int) for shape in shapes) < 2_000_000
  ),
  'dtype': st.sampled_from(['float32', 'float16', 'bfloat16', 'float64', 'int32']),
  'transfer': st.sampled_from([None, 'float16', 'bfloat16']),
  'packing_': st.sampled_from(PACKINGS),
  'buckets': st.integers(1, 9),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**COMBINATIONS)
def test_any_combination_sums_exactly(**combination):
  exact_sums_in_a_session(**combination)


@pytest.mark.long
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(**COMBINATIONS)
def test_very_many_combinations_sum_exactly(**combination):
  exact_sums_in_a_session(**combination)


def random_sums(all_reduce, inputs, devices):
  @tf.function(autograph=False)
  def run():
    lists = []
    for i, device in enumerate(devices):
      with tf.device(device):
        lists.append([tf.constant(inputs[i])])
    return all_reduce(lists)

  return [value.numpy() for (value,) in run()]


@pytest.mark.parametrize('spec', ['copy', 'psgpu', 'xring#2', 'rechd', 'collective'])
def test_a_million_and_three_values(spec, cpu_devices):
  devices, size = cpu_devices[:3], 1_000_003
  inputs = [(np.arange(size) % (5 + i)).astype(np.float32) for i in range(3)]
  for value in random_sums(reduce(spec, devices), inputs, devices):
    np.testing.assert_array_equal(value, sum(inputs))


UNITS = {None: 2.0**-24, 'float16': 2.0**-11, 'bfloat16': 2.0**-8}
# Roundings of a value to what is transferred, at most, on 5 devices: of each addend once and of the
# sum once, where sums are float32; where partial sums are handed on, once for each hand.
ROUNDINGS = {'xring': 5, 'rechd': 5, 'collective': 5, 'psgpu/rechd': 4, 'copy/xring': 5}


@pytest.mark.parametrize('transfer', UNITS)
@pytest.mark.parametrize(
  'spec', ['copy', 'psgpu', 'pscpu#2', 'hierarchical_copy', *ROUNDINGS], ids=str
)
def test_what_does_not_add_up_exactly_is_still_the_same_bits_on_every_device(
  spec, transfer, cpu_devices
):
  devices = cpu_devices[:5]
  options = {} if transfer is None else {'transfer_dtype': transfer}
  inputs = np.random.default_rng(0).normal(size=(5, 1001)).astype(np.float32)
  first, *others = random_sums(reduce(spec, devices, **options), inputs, devices)
  for other in others:
    np.testing.assert_array_equal(other, first)
  roundings = 5 if transfer is None else ROUNDINGS.get(spec, 3)
  bound = roundings * UNITS[transfer] * np.abs(inputs.astype(np.float64)).sum(0)
  errors = np.abs(first - inputs.astype(np.float64).sum(0))
  assert np.all(errors <= bound)
  if transfer is not None:
    assert np.max(errors / bound) > 1 / 64  # it was used


@pytest.mark.parametrize('spec', ['copy', 'psgpu', 'pscpu', 'hierarchical_copy'])
def test_half_precision_transfer_sums_in_float32(spec, cpu_devices):
  # 2048 + 1 is 2048 in float16: summed there, eight of them would still be 2048 + 0.
  devices = cpu_devices[:8]
  inputs = [np.full(9, 2048.0 if i == 0 else 0.5, np.float32) for i in range(8)]
  all_reduce = reduce(spec, devices, transfer_dtype='float16')
  for value in random_sums(all_reduce, inputs, devices):
    # 2051.5, which float16 has as 2052.
    np.testing.assert_array_equal(value, np.full(9, 2052.0))
  wrapped = HalfTransfer(Copy(devices), devices, 'float16')
  for value in random_sums(wrapped, inputs, devices):
    np.testing.assert_array_equal(value, np.full(9, 2048.0))


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
  for spec in ('nccl', 'nccl_all_reduce', 'nccl_all_reduce/xring'):
    with pytest.raises(hpm.errors.UsageError, match=f"'{spec}' needs GPUs.*'copy' or 'collective'"):
      hpm.variable_mgr.all_reduce(spec, cpu_devices[:2])
  with pytest.raises(hpm.errors.UsageError, match="'nccl' needs GPUs"):
    hpm.variable_mgr.create('replicated', ['/GPU:0', '/CPU:0'], all_reduce_spec='nccl')


def test_wrong_options_are_refused(cpu_devices):
  devices = cpu_devices[:2]
  with pytest.raises(hpm.errors.UsageError, match="'gpu': use cpu or spread"):
    Copy(devices, sum_on='gpu')
  with pytest.raises(hpm.errors.UsageError, match="sum_on has no effect on the all-reduce 'xring'"):
    hpm.variable_mgr.all_reduce('xring', devices, sum_on='cpu')
  with pytest.raises(hpm.errors.UsageError, match="'float64': use float16 or bfloat16"):
    HalfTransfer(Copy(devices), devices, 'float64')
  with pytest.raises(hpm.errors.UsageError, match="'colective': did you mean collective"):
    hpm.variable_mgr.all_reduce('colective', devices)
