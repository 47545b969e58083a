"""Graph that is traced once and called on every device."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from hpm import calls, placement


def add_twice(variable, value):
  """Adds and reads, as an update does: the read waits for the addition by a control edge."""
  add = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)
  with tf.control_dependencies([add]):
    return [tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)]


def test_each_call_uses_the_tensors_that_it_is_given(cpu_devices):
  variables = [tf.Variable([float(i)]) for i in range(3)]

  @tf.function(autograph=False, experimental_attributes=calls.NO_CONTROL_DEPENDENCIES)
  def step(values):
    first, value = variables[0], values[0]
    shared = calls.Shared(lambda: add_twice(first, value), [first.handle, value])
    results = []
    for device, variable, own in zip(cpu_devices, variables, values):
      with tf.device(device):
        results.append(shared([variable.handle, own]).outputs[0])
    return results

  results = step([tf.constant([10.0 * (i + 1)]) for i in range(3)])
  np.testing.assert_array_equal(np.squeeze(results), [10.0, 21.0, 32.0])
  np.testing.assert_array_equal(np.squeeze(variables), [10.0, 21.0, 32.0])


def test_what_waits_for_a_call_without_results_waits_for_its_operations(cpu_devices):
  variable = tf.Variable(0.0)

  @tf.function(autograph=False, experimental_attributes=calls.NO_CONTROL_DEPENDENCIES)
  def step(value):
    def build():
      return [tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)]

    call = calls.Shared(build, [variable.handle, value])([variable.handle, value])
    with tf.control_dependencies([call]):
      return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)

  for i in range(1, 21):
    assert step(tf.constant(2.0)) == 2.0 * i


def test_calls_stand_on_their_device_and_tell_what_they_do_to_variables():
  with tf.Graph().as_default() as graph:
    variables = []
    for i in range(2):
      with tf.device(f'/GPU:{i}'):
        variables.append(tf.Variable(tf.zeros([2]), name=f'v{i}'))
    with tf.device('/CPU:0'):
      value = tf.ones([2])
    shared = calls.Shared(lambda: add_twice(variables[0], value), [variables[0].handle])
    for i, variable in enumerate(variables):
      with tf.device(f'/GPU:{i}'):
        call = shared([variable.handle])
      assert call.outputs[0].shape == [2]
    done = [op for op in placement.accesses(graph) if op.outer != op.variable]
  inside = {(a.type, a.variable, a.device) for a in done if 'PartitionedCall' in a.outer}
  assert inside == {
    (kind, f'v{i}', f'/device:GPU:{i}')
    for kind in ('AssignAddVariableOp', 'ReadVariableOp')
    for i in range(2)
  }


@pytest.mark.parametrize('enabled', [True, False])
def test_the_collector_is_as_before_afterwards(enabled):
  before = gc.isenabled()
  try:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ValueError), calls.uncollected():
      assert not gc.isenabled()
      raise ValueError
    assert gc.isenabled() == enabled
  finally:
    (gc.enable if before else gc.disable)()
