"""A ledger of what towers train on: each sample once an epoch, whatever happens on the way.

Each image carries the number of its sample in its first pixels, and the first thing that a tower
does is to write it down. Workers train their shares in processes of their own, so here one after
the other. On the way a training is broken off again and again: in order, with a checkpoint of the
last step, or by a crash, after which the steps since the last checkpoint are made again.
"""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.pipelines import records
from tests.benchmarks.conftest import ROOT

EPOCHS, DEVICES, BATCH, SIZE = 3, 2, 3, 8  # 64 images: neither batches nor workers divide them


@pytest.fixture(scope='module')
def directories(sample, tmp_path_factory):
  """Where the data of each pipeline are."""
  root = tmp_path_factory.mktemp('formats')

  def find(pipeline: str):
    if pipeline in ('tfdata', 'dali'):
      return sample
    if not (root / pipeline).exists():
      command = [sys.executable, '-m', 'hpm.pipelines', 'convert', f'--format={pipeline}']
      subprocess.run([*command, sample, root / pipeline], cwd=ROOT, check=True, capture_output=True)
    return root / pipeline

  return find


class Ledger:
  """The samples of each step, in the order of the steps; a number a sample, from 1 on."""

  def __init__(self):
    self.steps: list[list[int]] = []
    self._towers: list[tuple[int, list[int]]] = []  # number of the batch, its samples
    self._lock = threading.Lock()

  def stamped(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The batches, with their number and that of each sample in the images."""

    def stamp(number, batch):
      images, labels, ids = batch
      flat = tf.reshape(images, [tf.shape(images)[0], SIZE * SIZE * 3])
      numbers = tf.stack([ids + 1, tf.fill(tf.shape(ids), number)], 1)
      front = tf.reshape(tf.bitcast(numbers, tf.uint8), [-1, 16])
      stamped = tf.reshape(tf.concat([front, flat[:, 16:]], 1), tf.shape(images))
      return tf.ensure_shape(stamped, images.shape), labels

    return dataset.enumerate().map(stamp)

  def read(self, images: tf.Tensor, dtype: str, layout: str) -> tf.Tensor:
    """A tower's preprocessing: writes down whom it has got."""

    def write(pixels: np.ndarray) -> np.float32:
      front = np.ascontiguousarray(pixels.reshape(len(pixels), -1)[:, :16]).view(np.int64)
      samples = [number for number in front[:, 0].tolist() if number]  # none is blank
      with self._lock:
        self._towers.append((int(front[0, 1]), samples))
      return np.float32(0)

    done = tf.ensure_shape(tf.numpy_function(write, [images], tf.float32), [])
    flat = tf.reshape(images, [-1, SIZE * SIZE * 3])
    rest = tf.cast(tf.pad(flat[:, 16:], [[0, 0], [16, 0]]), dtype)  # numbers teach nothing
    return tf.reshape(rest / 255 + done, [-1, SIZE, SIZE, 3])

  def finish(self, num_samples: int) -> None:
    """A step has ended, with so many samples by its own count."""
    samples = [number for _, batch in sorted(self._towers) for number in batch]
    assert len(samples) == num_samples
    self.steps.append(samples)
    self._towers = []

  def forget(self, num_steps: int) -> None:
    """What came after these steps is lost."""
    del self.steps[num_steps:]
    self._towers = []


def create_step(ledger: Ledger) -> hpm.TrainStep:
  def network(b, images):
    return b.dense('logits', b.flatten(images), 7)

  model = hpm.models.Model(network, name='mini', image_shape=(SIZE, SIZE, 3), num_classes=7)
  manager = hpm.variable_mgr.create('replicated', hpm.devices.cpu(DEVICES))
  rule = hpm.optimizers.create('momentum', 0.01)
  return hpm.TrainStep(model, manager, rule, preprocess=ledger.read)


def values_of(step: hpm.TrainStep) -> dict[str, np.ndarray]:
  return {name: value.numpy() for name, value in step.snapshot().items()}


def trained(create, directory: str, chance: random.Random) -> tuple[Ledger, dict]:
  """The ledger of a whole training that is broken off on the way, and its last values."""
  ledger = Ledger()
  while True:
    step, pipeline = create_step(ledger), create()
    path = hpm.checkpoint.latest(directory)
    if path is not None:
      hpm.checkpoint.restore(path, step)
      pipeline.restore(hpm.checkpoint.facts(path)['pipeline'])
    done, samples = step.progress()
    ledger.forget(done)
    if samples == EPOCHS * pipeline.epoch_size:  # it was broken off after its last step
      return ledger, values_of(step)
    goes_on, saved = chance.randint(2, 9), chance.randint(1, 9)
    for metrics in step.run(ledger.stamped(pipeline.dataset())):
      ledger.finish(int(metrics.num_samples))
      samples += int(metrics.num_samples)
      count = int(metrics.step) - done
      if count == saved:
        hpm.checkpoint.save(directory, step, pipeline.state(samples))
      if count == goes_on:
        break
    else:
      return ledger, values_of(step)


def check(directories, tmp_path, pipeline: str, num_workers: int) -> None:
  data = directories(pipeline)
  seen: list[list[int]] = [[] for _ in range(EPOCHS)]
  for worker in range(num_workers):

    def create(worker=worker, **more):
      options = {'data_dir': str(data), 'batch_size': BATCH, 'image_size': SIZE, 'num_classes': 7}
      if pipeline != 'raw':
        options['shuffle_buffer'] = 16
      return hpm.pipelines.create(
        'raw' if pipeline == 'raw' else 'imagenet',
        **({'pipeline': pipeline, 'seed': 7, 'with_ids': True, 'num_epochs': EPOCHS} | options),
        **{'num_shards': num_workers, 'shard_index': worker},
      )

    size = create().epoch_size
    chance = random.Random(f'{pipeline} {num_workers} {worker}')
    ledger, values = trained(create, str(tmp_path / f'{worker}'), chance)
    samples = [number for step in ledger.steps for number in step]
    assert len(samples) == EPOCHS * size == values['samples']
    assert len(ledger.steps) == values['step'] == -(-EPOCHS * size // (BATCH * DEVICES))
    for epoch in range(EPOCHS):
      seen[epoch] += samples[epoch * size : (epoch + 1) * size]
    unbroken = Ledger()
    step = create_step(unbroken)
    for metrics in step.run(unbroken.stamped(create().dataset())):
      unbroken.finish(int(metrics.num_samples))
    expected = values_of(step)
    assert ledger.steps == unbroken.steps
    for name, value in expected.items():
      np.testing.assert_array_equal(values[name], value, err_msg=name)
  for epoch in seen:
    assert len(epoch) == len(set(epoch)) == 64
    assert set(epoch) == set(seen[0])
  if pipeline in ('tfdata', 'dali'):
    counts = records.count_records(records.shard_files(str(data), 'train'))
    everyone = {file << 32 | n for file, count in enumerate(counts) for n in range(count)}
    assert {number - 1 for number in seen[0]} == everyone


def test_each_sample_is_trained_once_an_epoch_by_tfdata(directories, tmp_path):
  check(directories, tmp_path, 'tfdata', 3)


def test_each_sample_is_trained_once_an_epoch_by_dali(directories, tmp_path):
  pytest.importorskip('nvidia.dali')
  check(directories, tmp_path, 'dali', 2)


@pytest.mark.long
@pytest.mark.parametrize('num_workers', [1, 2, 3, 4])
@pytest.mark.parametrize('pipeline', ['tfdata', 'dali', 'indexed', 'raw'])
def test_so_it_is_with_any_pipeline_and_number_of_workers(
  directories, tmp_path, pipeline, num_workers
):
  if pipeline == 'dali':
    pytest.importorskip('nvidia.dali')
  check(directories, tmp_path, pipeline, num_workers)
