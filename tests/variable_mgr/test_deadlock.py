"""Nothing waits for ever: thousands of collectives on few threads, and errors inside a tower."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import harness

TIMEOUT_S = 120


def endless(batch=2):
  ((images, labels),) = harness.random_steps([[16]])[0]
  data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
  return data.batch(batch, drop_remainder=True)


@pytest.mark.parametrize(
  ('options', 'num_steps'),
  [
    ({'all_reduce_spec': 'collective'}, 200),
    *(
      pytest.param(options, 2000, marks=pytest.mark.long)
      for options in (
        {'all_reduce_spec': 'collective'},
        {'all_reduce_spec': 'collective/collective', 'gradient_repacking': 2},
        {'all_reduce_spec': 'copy:64:collective', 'variable_consistency': 'relaxed'},
        {'all_reduce_spec': 'collective', 'batch_norm_statistics': 'cross_replica'},
      )
    ),
  ],
  ids=str,
)
def test_eight_devices_reduce_in_loops(options, num_steps, cpu_devices):
  """Of 1,000 steps, twice, in the long run."""
  manager = hpm.variable_mgr.create('replicated', cpu_devices, **options)
  model = harness.normalized() if manager.cross_replica else harness.two_layers()
  step = harness.create_step(manager, 'sgd', model)
  metrics = list(step.run(endless(), num_steps=num_steps, steps_per_call=num_steps // 2))
  assert len(metrics) == num_steps
  assert int(metrics[-1].step) == num_steps
  assert np.isfinite(float(metrics[-1].loss))
  harness.assert_replicas_equal(
    [{name: v.numpy() for name, v in copy.items()} for copy in manager.copies]
  )


PROGRAM = """
import numpy as np, tensorflow as tf, hpm
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
devices = hpm.devices.cpu(8)
from tests.parity import harness
from tests.variable_mgr.test_deadlock import endless

for spec, statistics in [
  ('collective', 'mean'), ('collective', 'cross_replica'), ('xring', 'mean')
]:
  manager = hpm.variable_mgr.create(
    'replicated', devices, all_reduce_spec=spec, batch_norm_statistics=statistics
  )
  step = harness.create_step(manager, 'sgd', harness.normalized())
  assert len(list(step.run(endless(), num_steps=20, steps_per_call=10))) == 20
print('finished')
"""


@pytest.mark.long
@pytest.mark.parametrize('threads', [1, 2])
def test_one_thread_is_enough_for_eight_devices(threads):
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM.replace('threads(1)', f'threads({threads})')],
    capture_output=True,
    text=True,
    timeout=TIMEOUT_S,
    env={**os.environ, 'PYTHONPATH': os.getcwd()},
  )
  assert done.stdout.strip().endswith('finished'), done.stderr[-2000:]


FAULT = """
import sys
import numpy as np, tensorflow as tf, hpm
devices = hpm.devices.cpu(8)
from tests.parity import harness
from tests.variable_mgr.test_deadlock import endless

def loss(labels, logits):
  with tf.control_dependencies([tf.debugging.assert_less(labels, tf.constant(3, tf.int64),
                                                         message='label out of range')]):
    return hpm.losses.softmax_cross_entropy()(labels, logits)

manager = hpm.variable_mgr.create('replicated', devices[:4], all_reduce_spec=sys.argv[1],
                                  batch_norm_statistics=sys.argv[2])
step = harness.create_step(manager, 'sgd', harness.normalized(), loss=loss)
try:
  list(step.run(endless(), num_steps=10, steps_per_call=int(sys.argv[3])))
except tf.errors.InvalidArgumentError as error:
  print('ended with', 'label out of range' in str(error))
"""


@pytest.mark.parametrize(
  ('spec', 'statistics', 'steps_per_call'),
  [
    ('collective', 'cross_replica', 1),
    pytest.param('collective', 'mean', 1, marks=pytest.mark.long),
    pytest.param('xring', 'mean', 5, marks=pytest.mark.long),
    pytest.param('collective', 'cross_replica', 5, marks=pytest.mark.long),
  ],
)
def test_an_error_inside_a_tower_ends_the_run_with_that_error(spec, statistics, steps_per_call):
  """In a process of its own: after an aborted collective TensorFlow wants to be started anew."""
  done = subprocess.run(
    [sys.executable, '-c', FAULT, spec, statistics, str(steps_per_call)],
    capture_output=True,
    text=True,
    timeout=TIMEOUT_S,
    env={**os.environ, 'PYTHONPATH': os.getcwd()},
  )
  assert done.stdout.strip() == 'ended with True', done.stderr[-2000:]
