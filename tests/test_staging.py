"""Staging: every batch once and in order, a clean end, errors that arrive, nothing that blocks."""

import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.staging import StagedLoop
from tests.parity import harness

SIGNATURE = (tf.TensorSpec([None, 4, 4, 3], tf.uint8), tf.TensorSpec([None], tf.int64))


def counting(count, batch_size):
  """0, 1, 2 ... as int32, which travel as int64."""
  return tf.data.Dataset.range(count, output_type=tf.int32).batch(batch_size).map(lambda x: (x,))


def loop(devices):
  """A body that hands back what each device got, as text, with the sizes in it."""

  def body(batches):
    texts = []
    for device, (values,) in zip(devices, batches, strict=True):
      assert values.dtype == tf.int64
      with tf.device(device):
        texts.append(tf.strings.reduce_join(tf.strings.as_string(values), separator=','))
    return tf.stack(texts)

  return StagedLoop(body, devices, tf.TensorSpec([len(devices)], tf.string))


def delivered(results):
  return [[text.decode() for text in result.numpy()] for result in results]


def images(count):
  ((batch,),) = harness.random_steps([[count]])
  return batch


def training(devices):
  return harness.create_step(harness.create_manager('replicated_spread', devices))


def samples_of(step):
  return int(step.snapshot()['samples'])


def test_devices_take_batches_in_turn_and_the_last_one_is_delivered(cpu_devices):
  results = loop(cpu_devices[:2]).run(counting(9, 2))
  assert delivered(results) == [['0,1', '2,3'], ['4,5', '6,7'], ['8', '']]


def test_an_endless_data_set_goes_on_until_the_number_of_steps(cpu_devices):
  data = counting(3, 1).repeat()
  results = loop(cpu_devices[:2]).run(data, num_steps=4)
  assert delivered(results) == [['0', '1'], ['2', '0'], ['1', '2'], ['0', '1']]


@pytest.mark.parametrize('num_devices', [1, 3])
def test_less_data_than_is_staged_ahead(num_devices, cpu_devices):
  results = delivered(loop(cpu_devices[:num_devices]).run(counting(1, 4)))
  assert results == [['0'] + [''] * (num_devices - 1)]


@pytest.mark.parametrize('steps_per_call', [1, 2, 3, 10])
def test_several_steps_a_call_deliver_the_same(steps_per_call, cpu_devices):
  results = loop(cpu_devices[:2]).run(counting(9, 1), steps_per_call=steps_per_call)
  assert delivered(results) == [['0', '1'], ['2', '3'], ['4', '5'], ['6', '7'], ['8', '']]
  results = loop(cpu_devices[:2]).run(counting(9, 1), 3, steps_per_call=steps_per_call)
  assert delivered(results) == [['0', '1'], ['2', '3'], ['4', '5']]


def test_an_empty_data_set_is_refused(cpu_devices):
  with pytest.raises(hpm.errors.DataError, match='yields no batch at all'):
    next(loop(cpu_devices[:2]).run(counting(4, 2).take(0)))


def test_a_data_set_that_yields_no_tuples_is_refused(cpu_devices):
  with pytest.raises(hpm.errors.UsageError, match='tuples of tensors'):
    next(loop(cpu_devices[:2]).run(tf.data.Dataset.range(3)))


@pytest.mark.parametrize('steps_per_call', [1, 2])
def test_what_the_producer_raises_the_step_raises_at_once(steps_per_call, cpu_devices):
  def generate():
    for _ in range(5):
      yield images(2)
    raise ValueError('record 10 is damaged')

  data = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
  step = training(cpu_devices[:2])
  finished = []
  started = time.monotonic()
  with pytest.raises(tf.errors.OpError, match='record 10 is damaged'):
    for metrics in step.run(data, steps_per_call=steps_per_call):
      finished.append(int(metrics.step))
  assert time.monotonic() - started < 30
  # Batches 0 to 3 make two steps; the error comes with the fetch for the third, during the second.
  assert finished in ([], [1])
  # Another run of the same step is not harmed.
  fresh = tf.data.Dataset.from_tensor_slices(images(4)).batch(2)
  assert len(list(step.run(fresh))) == 1


def test_no_snapshot_is_taken_after_a_step_that_failed_until_one_is_restored(cpu_devices):
  """Some of its updates may have been made: a checkpoint of it would mix two steps."""

  def generate():
    for _ in range(5):
      yield images(2)
    raise ValueError('record 10 is damaged')

  data = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
  step = training(cpu_devices[:2])
  before = step.snapshot()
  with pytest.raises(tf.errors.OpError):
    list(step.run(data))
  with pytest.raises(RuntimeError, match='a step failed midway'):
    step.snapshot()
  step.restore(before)
  for name, value in step.snapshot().items():
    np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_an_error_in_the_first_batch_arrives_too(cpu_devices):
  def generate():
    raise ValueError('no such shard')
    yield

  data = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
  step = training(cpu_devices[:2])
  with pytest.raises(tf.errors.OpError, match='no such shard'):
    next(step.run(data))
  assert samples_of(step) == 0


def test_a_consumer_that_stops_early_goes_on_with_a_new_run(cpu_devices):
  step = training(cpu_devices[:2])
  data = tf.data.Dataset.from_tensor_slices(images(24)).batch(2)
  assert len(list(step.run(data, num_steps=2))) == 2
  assert samples_of(step) == 8
  for metrics in step.run(data):
    if metrics.step == 5:
      break
  assert (int(metrics.step), samples_of(step)) == (5, 20)
  assert [int(metrics.step) for metrics in step.run(data, num_steps=1)] == [6]
  assert step.num_traces == 1


def test_samples_count_finished_steps_and_never_what_is_staged(cpu_devices):
  fetched = []

  def generate():
    for i in range(100):
      fetched.append(i)
      yield images(2)

  data = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
  step = training(cpu_devices[:2])
  run = step.run(data)
  for finished in range(1, 4):
    next(run)
    assert samples_of(step) == 4 * finished
  assert len(fetched) >= 8  # the batches of the fourth step were there already
  run.close()
  assert samples_of(step) == 12


def test_every_sample_is_trained_on_the_last_ones_too(cpu_devices):
  step = training(cpu_devices[:2])
  data = tf.data.Dataset.from_tensor_slices(images(11)).batch(2)
  counts = [int(metrics.num_samples) for metrics in step.run(data)]
  assert counts == [4, 4, 3]
  assert samples_of(step) == 11


def test_staged_training_ends_with_the_bits_of_plain_training(cpu_devices):
  batch = images(16)
  data = tf.data.Dataset.from_tensor_slices(batch).batch(2, drop_remainder=True).repeat()
  staged = training(cpu_devices[:2])
  for _ in staged.run(data, num_steps=4):
    pass
  parts = [tuple(array[i : i + 2] for array in batch) for i in range(0, 16, 2)]
  plain = training(cpu_devices[:2])
  result = harness.train(plain, [parts[i : i + 2] for i in range(0, 8, 2)])
  for name, value in staged.snapshot().items():
    np.testing.assert_array_equal(value, result.values[name], err_msg=name)


def test_equal_data_sets_share_one_compiled_step(cpu_devices):
  staged = loop(cpu_devices[:2])
  for _ in range(3):
    list(staged.run(counting(5, 2)))
  assert len(staged._compiled) == 1
  ((_, step, _),) = staged._compiled.values()
  assert step.experimental_get_tracing_count() == 1


def test_forty_devices_take_a_batch_each():
  """More than the 32 that TensorFlow takes for a loop gone wrong; in a process of its own."""
  program = """
import tensorflow as tf
import hpm
devices = hpm.devices.cpu(40)
model = hpm.models.Model(
  lambda b, images: b.dense('logits', b.flatten(images), 2),
  name='own', image_shape=(2, 2, 3), num_classes=2)
manager = hpm.variable_mgr.create('replicated', devices)
step = hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', 0.1))
data = tf.data.Dataset.from_tensors((tf.zeros([2, 2, 2, 3], tf.uint8), tf.zeros([2], tf.int64)))
for take in (data.repeat(), data.repeat(80)):
  for metrics in step.run(take, 2):
    print(int(metrics.num_samples))
"""
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, timeout=100
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ['80'] * 4
