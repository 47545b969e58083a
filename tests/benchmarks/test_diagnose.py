"""Planted limits are found, and what is predicted without them comes true."""

import statistics
import time

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from benchmarks import diagnose, diagnosis, flags, results, run
import hpm
from hpm.pipelines import sources
from hpm.pipelines.sample import write_sample
from hpm.variable_mgr import allreduce

SMALL = ('--device=cpu', '--num_gpus=2', '--model=lenet', '--batch_size=8')


def examined(devices, *arguments, rounds=2):
  """(verdict, times, seconds a step of the whole run) on these devices."""
  options = flags.parse([*arguments, '--diagnose'])
  flags.complete(options, devices)
  found, facts = diagnose.measure(options, devices, rounds)
  times = diagnose.times_of(found, facts)
  return diagnosis.verdict(times), times, statistics.median(found.get('run', found['step']))


@pytest.fixture
def quick(monkeypatch):
  monkeypatch.setattr(diagnose, 'ROUND_S', 0.3)
  monkeypatch.setattr(diagnose, 'MATRIX', 512)


@pytest.fixture(scope='module')
def sample(tmp_path_factory):
  return write_sample(str(tmp_path_factory.mktemp('data') / 'sample'), num_images=64).directory


class SlowSums(allreduce.Copy):
  """Sums that come 0.2 s late."""

  def __call__(self, tensors):
    if not tensors[0]:
      return super().__call__(tensors)
    late = []
    for values, device in zip(tensors, self._devices, strict=True):
      with tf.device(device):
        (first,) = tf.numpy_function(_sleep, [values[0]], [values[0].dtype])
        first.set_shape(values[0].shape)
        late.append([first, *values[1:]])
    return super().__call__(late)


def _sleep(value):
  time.sleep(0.2)
  return value


def slow_reads(monkeypatch, milliseconds):
  """Each record comes so much later; nobody computes meanwhile."""
  read = sources.RecordFiles.read

  def late(self, file, strict=True):
    return read(self, file, strict).apply(testing.sleep(int(1000 * milliseconds)))

  monkeypatch.setattr(sources.RecordFiles, 'read', late)


def slow_host(monkeypatch, seconds):
  steps = hpm.TrainStep.run

  def late(self, dataset, num_steps=None, steps_per_call=1):
    for metrics in steps(self, dataset, num_steps, steps_per_call):
      if steps_per_call == 1:
        time.sleep(seconds)
      yield metrics

  monkeypatch.setattr(hpm.TrainStep, 'run', late)


def test_nothing_planted_is_computing(cpu_devices, quick):
  verdict, times, whole = examined(cpu_devices[:2], *SMALL[:3], '--batch_size=64')
  assert verdict.limit == 'compute'
  assert times.parts['transfer'] < 0.1 * times.parts['compute']
  assert whole > 0


def test_a_slow_reader_is_storage(cpu_devices, quick, sample, monkeypatch):
  slow_reads(monkeypatch, 20)  # four files at a time, 16 images a step: 0.08 s
  verdict, times, whole = examined(cpu_devices[:2], *SMALL, f'--data_dir={sample}')
  assert verdict.limit == 'storage'
  assert times.parts['storage'] > 0.4 * whole  # what is read ahead comes sooner in short rounds


def test_late_sums_are_communication(cpu_devices, quick):
  verdict, times, _ = examined(cpu_devices[:2], *SMALL, f'--all_reduce_spec={__name__}:SlowSums')
  assert verdict.limit == 'communication'
  assert 0.18 < times.parts['communication'] < 0.6


def test_a_slow_loop_is_the_host(cpu_devices, quick, monkeypatch):
  slow_host(monkeypatch, 0.2)
  verdict, times, _ = examined(cpu_devices[:2], *SMALL)
  assert verdict.limit == 'host'
  assert times.parts['host'] == pytest.approx(0.2, rel=0.2)


def test_a_tiny_model_on_large_images_is_decoding(cpu_devices, quick, sample):
  verdict, _, _ = examined(
    *(cpu_devices[:2], *SMALL[:2], '--model=trivial', '--image_size=32', '--num_classes=10'),
    *('--batch_size=16', f'--data_dir={sample}'),
  )
  assert verdict.limit == 'decode'
  assert '--pipeline=indexed' in verdict.sentence


def test_the_command_says_what_limits(cpu_devices, quick, capsys, tmp_path):
  file = tmp_path / 'verdict.json'
  assert run.main([*SMALL, '--diagnose', f'--result_json={file}']) == 0
  found = results.read(str(file))
  assert (found['status'], found['mode'], found['model']) == ('ok', 'diagnosis', 'lenet')
  assert found['diagnosis']['limit'] == 'compute'
  assert found['diagnosis']['parts']['compute'] > 0 and len(found['devices']) == 2
  out = capsys.readouterr().out
  assert 'Compute limits this run' in out and 'a step, predicted' in out
  assert run.main([*SMALL, '--diagnose', '--num_batches=3']) == 2
  assert '--num_batches=3 does not go with --diagnose' in capsys.readouterr().err
