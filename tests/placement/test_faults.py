"""Faults planted in a step are found, each by the check that is there for it."""

import pytest
import tensorflow as tf

import hpm
from hpm import placement
from hpm.optimizers.rules import Momentum
from hpm.variable_mgr.allreduce import Copy
from hpm.variable_mgr.parameter_server import ParameterServer
from hpm.variable_mgr.replicated import Replicated
from tests.placement import steps
from tests.placement.test_copies import EIGHT
from tests.placement.test_placement import HOST, SUMS, VARIABLES, canonical


def faults(mode, manager=None, optimizer=None, corrupt=lambda step: None):
  """What is found in a step of `mode` with a fault in its manager, its optimizer or itself."""
  manager = manager or steps.create_manager(mode, 8)
  built = steps.build(steps.three_variables(), manager, optimizer, corrupt=corrupt)
  places = canonical({**HOST, **VARIABLES[mode]})
  return steps.faults(built, places, EIGHT[mode], canonical(SUMS[mode]))


def around_towers(scope):
  """Calls each tower in `scope(i)`, whatever the step wanted."""

  def corrupt(step):
    tower, count = step._call, iter(range(8))

    def call(*args):
      with scope(next(count)):
        return tower(*args)

    step._call = call

  return corrupt


@pytest.mark.parametrize('mode', steps.MODES)
def test_no_fault_planted_and_none_found(mode):
  assert faults(mode) == []


@pytest.mark.parametrize('mode', steps.MODES)
def test_every_tower_on_the_first_gpu(mode):
  found = faults(mode, corrupt=around_towers(lambda i: tf.device('/GPU:0')))
  assert f'tower calls on {["/device:GPU:0"] * 8}' in found


@pytest.mark.parametrize('mode', ['parameter_server_cpu', 'parameter_server_spread'])
def test_variable_read_per_use(mode):
  class ReadsPerUse(ParameterServer):
    def read(self, tower):
      self._reads.clear()
      return super().read(tower)

  found = faults(mode, ReadsPerUse(steps.gpus(8), **steps.MODES[mode][1]))
  assert 'fc/kernel is read 8 times' in found


def test_handles_handed_to_towers_in_place_of_values():
  """One read in each tower: nothing is copied, but the variable's handle leaves its device."""

  class HandsOver(ParameterServer):
    def _read(self, variable, place, device):
      super()._read(variable, place, device)
      return variable

  found = faults('parameter_server_cpu', HandsOver(steps.gpus(8)))
  assert "handle 'fc/kernel:0' of /device:CPU:0 used on /device:GPU:7" in found


def test_all_sums_on_one_gpu():
  devices = steps.gpus(8)
  all_reduce = Copy(devices)
  all_reduce._places = devices[:1]
  found = faults('replicated_spread', Replicated(devices, all_reduce))
  assert found == [f'sums on {dict.fromkeys((20, 240, 48), "/device:GPU:0")}']


def test_sum_on_the_wrong_device():
  """The CPU's sums on a GPU: the same number of adds, other routes."""
  devices = steps.gpus(8)
  all_reduce = Copy(devices, 'cpu')
  all_reduce._places = devices[3:4]
  found = ' '.join(faults('replicated_cpu', Replicated(devices, all_reduce, 'cpu')))
  assert 'copies' in found
  assert "sums on {20: '/device:GPU:3'" in found


def test_device_function_between_the_step_and_its_towers():
  """It is baked into the one trace that all towers share."""
  devices = steps.gpus(8)

  def scope(i):
    return tf.compat.v1.device(lambda op: devices[i])

  found = faults('replicated_spread', corrupt=around_towers(scope))
  assert any('on /device:GPU:0, but called on /device:GPU:7' in line for line in found)


def test_device_function_shared_by_all_towers():
  """Its first answer is baked into the trace; the calls alone look right."""
  current = [0]

  def choose(op):
    return f'/GPU:{current[0]}'

  tower = tf.function(tf.square, autograph=False)
  with tf.Graph().as_default() as graph:
    with tf.device('/CPU:0'):
      x = tf.constant(3.0)
    for current[0] in range(8):
      with tf.compat.v1.device(choose):
        tower(x)
  assert sorted(c.device for c in placement.calls(graph)) == [f'/device:GPU:{i}' for i in range(8)]
  foreign = [op for op in placement.foreign_ops(graph) if op.name == 'Square']
  assert {op.device for op in foreign} == {'/device:GPU:0'}
  assert sorted(op.caller_device for op in foreign) == [f'/device:GPU:{i}' for i in range(1, 8)]
  assert len(placement.check(graph)) >= 7


def test_device_named_inside_the_tower():
  def corrupt(step):
    def preprocess(images, dtype, data_format):
      with tf.device('/GPU:0'):
        return hpm.pipelines.normalize(images, dtype, data_format)

    step._preprocess = preprocess

  found = ' '.join(faults('replicated_spread', corrupt=corrupt))
  assert 'on /device:GPU:0, but called on /device:GPU:7' in found


def test_op_without_a_device():
  class Stray(Momentum):
    def scalars(self, step):
      with tf.device(None):
        rate = tf.constant(0.1, name='stray')
      return {**super().scalars(step), 'learning_rate': rate * 2.0}

  found = faults('independent', optimizer=Stray(0.1))
  assert "Const 'stray': no device" in found


def test_update_on_another_device_than_its_variable():
  class UpdatesOnTheFirst(Momentum):
    def apply(self, variable, slots, gradient, scalars):
      with tf.device('/GPU:0'):
        return super().apply(variable, slots, gradient, scalars)

  found = faults('replicated_spread', optimizer=UpdatesOnTheFirst(0.1))
  assert any('on /device:GPU:0, but called on /device:GPU:5' in line for line in found)
  assert 'ResourceApplyMomentum of replica_5/scale on /device:GPU:0' in found


def test_colocation():
  class Colocated(Momentum):
    def scalars(self, step):
      with tf.compat.v1.colocate_with(step.op):
        rate = tf.identity(tf.constant(0.1), name='tied')
      return {**super().scalars(step), 'learning_rate': rate}

  found = ' '.join(faults('parameter_server_cpu', optimizer=Colocated(0.1)))
  assert "Identity 'tied': colocated" in found


def test_counters_and_scalars_on_a_gpu():
  """What exists once belongs on the CPU; from a GPU it would be sent to all others."""
  manager = steps.create_manager('replicated_spread', 8)
  manager.home = '/GPU:0'
  found = ' '.join(faults('replicated_spread', manager))
  assert "'step': '/device:GPU:0'" in found
  assert 'copies' in found


def test_tower_traced_per_device():
  def corrupt(step):
    def call(*args):
      return tf.function(step._build_tower, autograph=False)(*args)

    step._call = call

  found = faults('independent', corrupt=corrupt)
  assert 'the tower was traced 8 times' in found
  assert 'towers of several functions' in found


def test_a_model_with_a_cpu_only_op_on_the_gpu():
  def network(b, images):
    text = tf.strings.as_string(tf.reduce_sum(images))
    number = tf.strings.to_number(text)
    return b.dense('fc', b.flatten(images) + tf.stop_gradient(number), 5)

  model = hpm.models.Model(network, name='m', image_shape=(2, 2, 3), num_classes=5)
  built = steps.build(model, steps.create_manager('replicated_spread', 8))
  found = placement.check(built.graph, built.metrics)
  assert any('AsString' in line and 'GPU:7: no GPU kernel for T=float32' in line for line in found)
  assert any('StringToNumber' in line for line in found)
