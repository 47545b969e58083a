"""A step line by line, for debugging: the graph's numbers, but for roundings."""

import numpy as np
import pytest
import tensorflow as tf

import hpm

MODES = {
  'replicated': ('replicated', {}),
  'ring': ('replicated', {'all_reduce_spec': 'xring', 'batch_norm_statistics': 'mean'}),
  'sharded': ('replicated', {'all_reduce_spec': 'pscpu'}),
  'packed': ('replicated', {'gradient_repacking': 3, 'transfer_dtype': 'float16'}),
  'parameter_server': ('parameter_server', {}),
  'independent': ('independent', {}),
}
DYNAMIC = {'loss_scale': hpm.precision.DynamicLossScale(), 'accumulate': 2, 'clip_norm': 1.0}
NUM_STEPS = 2


@pytest.fixture
def eagerly():
  yield lambda: tf.config.run_functions_eagerly(True)
  tf.config.run_functions_eagerly(False)


def network(b, images):
  x = b.conv('conv', images, 4, 3)
  if tf.executing_eagerly():
    SEEN.append(x.numpy().shape)
  x = tf.nn.relu(b.batch_norm('norm', x))
  return b.dense('logits', b.flatten(b.dropout('drop', x, 0.5)), 3)


SEEN = []


def trained(devices, mode, options, step_options):
  model = hpm.models.Model(network, name='own', image_shape=(6, 6, 3), num_classes=3)
  manager = hpm.variable_mgr.create(mode, devices, **options)
  optimizer = hpm.optimizers.create('momentum', 0.1)
  step = hpm.TrainStep(model, manager, optimizer, count_hits=True, **step_options)
  shape = [NUM_STEPS, len(devices), 4, 6, 6, 3]
  images = tf.cast(tf.random.stateless_uniform(shape, [0, 1], 0, 256, tf.int32), tf.uint8)
  labels = tf.constant([0, 1, 2, 1], tf.int64)
  for batches in images:
    metrics = step([(batch, labels) for batch in batches])
  evaluated = hpm.EvalStep(model, manager).build([(batch, labels) for batch in images[0]])
  found = {name: value.numpy() for name, value in step.snapshot().items()}
  of_step = {name: value.numpy() for name, value in metrics._asdict().items()}
  return found | of_step, [value.numpy() for value in evaluated]


@pytest.mark.parametrize('step_options', [{}, DYNAMIC], ids=['plain', 'dynamic'])
@pytest.mark.parametrize('mode', MODES)
def test_eager_steps_end_with_the_graph_s_numbers(mode, step_options, cpu_devices, eagerly):
  arguments = (cpu_devices[:3], *MODES[mode], step_options)
  expected, _ = trained(*arguments)
  SEEN.clear()
  eagerly()
  found, evaluated = trained(*arguments)
  # Training, in two parts where it accumulates, which a loop runs; and evaluation.
  assert len(SEEN) == 3 * (NUM_STEPS * step_options.get('accumulate', 1) + 1)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-7, err_msg=name)
  assert evaluated[3] == 12


def test_evaluation_sees_what_training_has_changed(cpu_devices, eagerly):
  eagerly()
  model = hpm.models.Model(network, name='own', image_shape=(6, 6, 3), num_classes=3)
  manager = hpm.variable_mgr.create('replicated', cpu_devices[:2])
  step = hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', 0.5))
  evaluation = hpm.EvalStep(model, manager)
  batch = (tf.fill([4, 6, 6, 3], tf.constant(9, tf.uint8)), tf.zeros([4], tf.int64))
  before = evaluation.build([batch] * 2).loss.numpy()
  step([batch] * 2)
  assert evaluation.build([batch] * 2).loss.numpy() != before


@pytest.mark.parametrize(
  'options', [{'all_reduce_spec': 'collective'}, {'batch_norm_statistics': 'cross_replica'}]
)
def test_collectives_are_refused_rather_than_waited_for(options, cpu_devices, eagerly):
  eagerly()
  with pytest.raises(hpm.errors.UsageError, match='eager mode'):
    trained(cpu_devices[:2], 'replicated', options, {})
