"""Each named limit is taken away, and the run becomes as fast as was said, within 15 %."""

from glob import glob
import statistics
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import diagnose, diagnosis, flags
import hpm
from hpm.pipelines import sources
from hpm.pipelines.sample import write_sample
from hpm.variable_mgr import allreduce

pytestmark = pytest.mark.long
WITHIN = 0.15
ROUNDS = 3
TRIVIAL = ('--model=trivial', '--image_size=32', '--num_classes=1000', '--batch_size=16')
MIB = 2**20


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
  return write_sample(str(tmp_path_factory.mktemp('data') / 'sample'), num_images=512).directory


@pytest.fixture(autouse=True)
def little_shuffled(monkeypatch):
  """Or a buffer is filled while nothing is decoded, and decoded while nothing is read, at each end
  of so little data."""
  given = flags.data.pipeline_options

  def options(*arguments):
    found = given(*arguments)
    return {**found, 'shuffle_buffer': 32} if 'data_dir' in found else found

  monkeypatch.setattr(flags.data, 'pipeline_options', options)


def record_bytes(directory):
  records = tf.data.TFRecordDataset(sorted(glob(f'{directory}/train-*')))
  return np.mean([len(record.numpy()) for record in records])


def examined(devices, *arguments):
  """(verdict, times, seconds a step of the whole run)."""
  options = flags.parse([*arguments, '--device=cpu', f'--num_gpus={len(devices)}', '--diagnose'])
  flags.complete(options, devices)
  found, facts = diagnose.measure(options, devices, ROUNDS)
  times = diagnose.times_of(found, facts)
  return diagnosis.verdict(times), times, statistics.median(found.get('run', found['step']))


class Disk:
  """Lets so many bytes a second through, whoever reads them."""

  def __init__(self, bytes_per_second):
    self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0

  def __call__(self, record):
    with self._lock:
      now = time.perf_counter()
      self._free_at = max(self._free_at, now - 0.02) + len(record) / self._rate
      wait = self._free_at - now
    if wait > 0:
      time.sleep(wait)
    return record


def behind(disk, monkeypatch):
  read = sources.RecordFiles.read

  def limited(self, file, strict=True):
    def through(record):
      record = tf.numpy_function(disk, [record], tf.string, stateful=False)
      return tf.ensure_shape(record, [])

    return read(self, file, strict).map(through)

  monkeypatch.setattr(sources.RecordFiles, 'read', limited)


class LateSums(allreduce.Copy):
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


def holds(times, whole):
  """What is said of the run as it is, too."""
  return times.step() == pytest.approx(whole, rel=WITHIN)


def test_storage(cpu_devices, photographs, monkeypatch):
  rate = 50  # MiB/s; at 100 two cores' decoding and step take as long
  arguments = (cpu_devices[:2], *TRIVIAL, f'--data_dir={photographs}')
  with monkeypatch.context() as planted:
    behind(Disk(rate * MIB), planted)
    verdict, times, whole = examined(*arguments)
  assert verdict.limit == 'storage', verdict
  expected = 32 * record_bytes(photographs) / rate / MIB
  assert times.parts['storage'] == pytest.approx(expected, rel=WITHIN)
  assert holds(times, whole)
  _, _, after = examined(*arguments)
  assert times.step(['storage']) == pytest.approx(after, rel=WITHIN)


def test_decode(cpu_devices, photographs):
  tiny = ('--model=trivial', '--image_size=32', '--num_classes=10', '--batch_size=16')
  verdict, times, whole = examined(cpu_devices[:2], *tiny, f'--data_dir={photographs}')
  assert verdict.limit == 'decode', verdict
  assert holds(times, whole)
  _, _, after = examined(cpu_devices[:2], *tiny)  # synthetic images
  assert times.step(['decode', 'storage']) == pytest.approx(after, rel=WITHIN)


def test_contention(cpu_devices, photographs):
  arguments = ('--model=lenet', '--batch_size=16')
  verdict, times, whole = examined(cpu_devices[:2], *arguments, f'--data_dir={photographs}')
  assert verdict.limit == 'contention', verdict
  assert holds(times, whole)
  _, _, after = examined(cpu_devices[:2], *arguments)  # synthetic images leave it the cores
  assert times.step(['decode', 'storage']) == pytest.approx(after, rel=WITHIN)


def test_communication(cpu_devices):
  lenet = ('--model=lenet', '--batch_size=64')
  late = f'--all_reduce_spec={__name__}:LateSums'
  verdict, times, whole = examined(cpu_devices[:2], *lenet, late)
  assert verdict.limit == 'communication', verdict
  assert holds(times, whole)
  _, _, after = examined(cpu_devices[:2], *lenet)
  assert times.step(['communication']) == pytest.approx(after, rel=WITHIN)


def test_host(cpu_devices, monkeypatch):
  lenet = ('--model=lenet', '--batch_size=64')
  steps = hpm.TrainStep.run

  def late(self, dataset, num_steps=None, steps_per_call=1):
    for metrics in steps(self, dataset, num_steps, steps_per_call):
      if steps_per_call == 1:
        time.sleep(0.2)
      yield metrics

  with monkeypatch.context() as planted:
    planted.setattr(hpm.TrainStep, 'run', late)
    verdict, times, whole = examined(cpu_devices[:2], *lenet)
  assert verdict.limit == 'host', verdict
  assert holds(times, whole)
  _, _, after = examined(cpu_devices[:2], *lenet)
  assert times.step(['host']) == pytest.approx(after, rel=WITHIN)
