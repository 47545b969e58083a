"""Checkpoints are canonical: saved in any mode, on any number of devices, restored in any other."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import DataError, UsageError

# Mode -> the manager's options; the manager is the first word.
MODES = {
  'parameter_server': {},
  'parameter_server spread': {'local_parameter_device': 'spread'},
  'parameter_server device': {'local_parameter_device': '/CPU:0'},
  'replicated': {},
  'replicated collective': {'all_reduce_spec': 'collective'},
  'replicated xring': {'all_reduce_spec': 'xring', 'gradient_repacking': 3},
  'replicated hierarchical': {
    'all_reduce_spec': 'hierarchical_copy',
    'agg_small_grads_max_bytes': 64,
    'batch_norm_statistics': 'first',
  },
  'independent': {},
}
# Modes with values in flight -> what a checkpoint calls them, and what takes their place.
STALE = {
  'parameter_server staged': (
    {'staged_vars': True},
    'carry/variables/...',
    'the first step computes with the current variables',
  ),
  'replicated relaxed': (
    {'variable_consistency': 'relaxed'},
    'carry/gradients/...',
    'the first step applies gradients of zero',
  ),
}
OPTIONS = MODES | {mode: options for mode, (options, *_) in STALE.items()}
GLOBAL_BATCH = 8
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(6, GLOBAL_BATCH, 4, 4, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, size=(6, GLOBAL_BATCH))


def network(b, images):
  x = tf.nn.tanh(b.dense('fc', b.flatten(images), 5))
  return b.dense('logits', x, 3)


def normed(b, images):
  return network(b, b.batch_norm('bn', images))


def make_step(
  mode: str, num_devices: int, net=network, name='mini', num_classes=3, optimizer='momentum'
):
  def wide(b, images):
    return b.dense('wide', net(b, images), num_classes) if num_classes != 3 else net(b, images)

  model = hpm.models.Model(wide, name=name, image_shape=(4, 4, 1), num_classes=num_classes)
  manager = hpm.variable_mgr.create(mode.split()[0], hpm.devices.cpu(num_devices), **OPTIONS[mode])
  rule = hpm.optimizers.create(optimizer, learning_rate=0.1)
  return hpm.TrainStep(model, manager, rule, preprocess=lambda images, *_: images)


def train(step, first: int, last: int):
  count = len(step.manager.devices)
  for images, labels in zip(IMAGES[first:last], LABELS[first:last], strict=True):
    parts = zip(np.split(images, count), np.split(labels, count), strict=True)
    step([(tf.constant(i), tf.constant(y)) for i, y in parts])


def values(step) -> dict[str, np.ndarray]:
  return {name: value.numpy() for name, value in step.snapshot().items()}


@pytest.fixture(scope='module')
def steps(cpu_devices):
  """Every mode on 1, 2 and 4 devices, with the snapshot that it started from."""
  made = {(mode, n): make_step(mode, n) for mode in OPTIONS for n in (1, 2, 4)}
  return {key: (step, step.snapshot()) for key, step in made.items()}


@pytest.fixture(scope='module')
def unbroken(cpu_devices):
  step = make_step('replicated', 1)
  train(step, 0, 6)
  return values(step)


SYNCHRONOUS = [(mode, n) for mode in MODES for n in (1, 2, 4) if mode != 'independent' or n == 1]


@pytest.mark.parametrize('writer', SYNCHRONOUS, ids=str)
def test_any_mode_goes_on_where_any_other_stopped(writer, steps, unbroken, tmp_path):
  step, initial = steps[writer]
  step.restore(initial)
  train(step, 0, 3)
  path = hpm.checkpoint.save(str(tmp_path), step)
  for reader in SYNCHRONOUS:
    other, _ = steps[reader]
    assert hpm.checkpoint.restore(path, other) == []
    train(other, 3, 6)
    for name, value in values(other).items():
      scale = np.abs(unbroken[name]).max()
      assert np.abs(value - unbroken[name]).max() <= 1e-6 * scale, (reader, name)


@pytest.mark.parametrize('writer', [(mode, n) for mode in STALE for n in (1, 2, 4)], ids=str)
def test_values_in_flight_go_on_with_any_number_of_devices(writer, steps, tmp_path):
  step, initial = steps[writer]
  step.restore(initial)
  train(step, 0, 3)
  path = hpm.checkpoint.save(str(tmp_path), step)
  train(step, 3, 6)
  straight = values(step)
  for num_devices in (1, 2, 4):
    other, _ = steps[writer[0], num_devices]
    assert hpm.checkpoint.restore(path, other) == []
    train(other, 3, 6)
    for name, value in values(other).items():
      scale = np.abs(straight[name]).max()
      same = num_devices == writer[1]  # the same sums in the same order
      tolerance = 0.0 if same else 1e-6 * scale
      assert np.abs(value - straight[name]).max() <= tolerance, (num_devices, name)


@pytest.mark.parametrize('mode', STALE)
def test_values_in_flight_that_a_mode_has_no_use_for_are_dropped_and_said(mode, steps, tmp_path):
  _, carried, start = STALE[mode]
  step, initial = steps[mode, 2]
  step.restore(initial)
  train(step, 0, 3)
  path = hpm.checkpoint.save(str(tmp_path), step)
  for reader in MODES:
    other, _ = steps[reader, 1]
    assert hpm.checkpoint.restore(path, other) == [
      f'{carried} of the checkpoint dropped: this mode has no such values in flight'
    ]
    for name, value in values(other).items():
      np.testing.assert_array_equal(value, values(step)[name], err_msg=name)

  for writer in MODES:  # and the other way round
    if writer == 'independent':
      continue
    other, _ = steps[writer, 2]
    other_path = hpm.checkpoint.save(str(tmp_path / 'others'), other)
    assert hpm.checkpoint.restore(other_path, step) == [f'no {carried} in the checkpoint: {start}']
    restored = values(step)
    for name, value in restored.items():
      if name.startswith('carry/variables/'):
        own = restored[name.replace('carry/variables/', 'params/')]
        np.testing.assert_array_equal(value, own)
      elif name.startswith('carry/'):
        assert not value.any(), name


def test_one_stale_mode_drops_the_values_of_the_other(steps, tmp_path):
  staged, _ = steps['parameter_server staged', 2]
  relaxed, _ = steps['replicated relaxed', 2]
  path = hpm.checkpoint.save(str(tmp_path), staged)
  assert hpm.checkpoint.restore(path, relaxed) == [
    'no carry/gradients/... in the checkpoint: the first step applies gradients of zero',
    'carry/variables/... of the checkpoint dropped: this mode has no such values in flight',
  ]


@pytest.mark.parametrize('mode', OPTIONS)
def test_resuming_in_the_same_mode_is_bit_equal_with_batch_norm(mode, cpu_devices, tmp_path):
  straight = make_step(mode, 2, normed)
  train(straight, 0, 3)
  path = hpm.checkpoint.save(str(tmp_path), straight)
  train(straight, 3, 6)
  resumed = make_step(mode, 2, normed)
  assert hpm.checkpoint.restore(path, resumed) == []
  train(resumed, 3, 6)
  expected = values(straight)
  assert {'state/bn/moving_mean', 'slots/momentum/fc/kernel'} < expected.keys()
  for name, value in values(resumed).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_independent_keeps_its_replicas_and_other_modes_drop_them(steps, tmp_path):
  step, initial = steps['independent', 4]
  step.restore(initial)
  train(step, 0, 3)
  written = values(step)
  assert not np.array_equal(written['params/fc/kernel'], written['replica/3/params/fc/kernel'])
  path = hpm.checkpoint.save(str(tmp_path), step)

  other, _ = steps['replicated', 2]
  (notice,) = hpm.checkpoint.restore(path, other)
  assert notice == 'replica 1, 2, 3 of the checkpoint dropped: replica 0 goes on'
  for name, value in values(other).items():
    np.testing.assert_array_equal(value, written[name])

  train(step, 3, 6)
  assert hpm.checkpoint.restore(path, step) == []
  for name, value in values(step).items():
    np.testing.assert_array_equal(value, written[name])


def test_independent_starts_lacking_replicas_from_replica_0(steps, tmp_path):
  step, initial = steps['replicated', 1]
  step.restore(initial)
  train(step, 0, 2)
  path = hpm.checkpoint.save(str(tmp_path), step)
  other, _ = steps['independent', 2]
  (notice,) = hpm.checkpoint.restore(path, other)
  assert notice == 'replica 1 not in the checkpoint: started from replica 0'
  restored = values(other)
  np.testing.assert_array_equal(restored['params/fc/kernel'], values(step)['params/fc/kernel'])
  np.testing.assert_array_equal(
    restored['params/fc/kernel'], restored['replica/1/params/fc/kernel']
  )


def test_samples_and_step_count_finished_steps(steps, tmp_path):
  step, initial = steps['replicated', 4]
  step.restore(initial)
  dataset = tf.data.Dataset.from_tensor_slices(
    (IMAGES.reshape(-1, 4, 4, 1), LABELS.reshape(-1))
  ).batch(2)
  assert len(list(step.run(dataset, num_steps=3))) == 3
  written, meta = hpm.checkpoint.read(hpm.checkpoint.save(str(tmp_path), step))
  assert written['step'] == 3
  assert written['samples'] == 24
  assert meta['num_devices'] == 4
  assert meta['model'] == 'mini'


def test_tensorflow_reads_the_values_by_their_canonical_names(steps, tmp_path):
  step, _ = steps['parameter_server', 2]
  path = hpm.checkpoint.save(str(tmp_path), step)
  reader = tf.train.load_checkpoint(os.path.join(path, 'values'))
  np.testing.assert_array_equal(
    reader.get_tensor('params/logits/bias'), values(step)['params/logits/bias']
  )


def test_latest_is_the_highest_step_and_ignores_what_is_unfinished(steps, tmp_path):
  assert hpm.checkpoint.latest(str(tmp_path / 'none')) is None
  assert hpm.checkpoint.latest(str(tmp_path)) is None
  step, initial = steps['replicated', 1]
  step.restore(initial)
  for first in range(0, 4, 2):
    train(step, first, first + 2)
    path = hpm.checkpoint.save(str(tmp_path), step)
  (tmp_path / '.writing-x').mkdir()
  (tmp_path / 'ckpt-9.old').mkdir()
  assert path.endswith('ckpt-4')
  assert hpm.checkpoint.latest(str(tmp_path)) == path
  assert hpm.checkpoint.save(str(tmp_path), step) == path  # again: replaced, whole
  assert sorted(n for n in os.listdir(tmp_path) if n.startswith('ckpt')) == [
    'ckpt-2',
    'ckpt-4',
    'ckpt-9.old',
  ]


def test_another_model_is_refused_by_both_names(steps, tmp_path):
  path = hpm.checkpoint.save(str(tmp_path), steps['replicated', 1][0])
  with pytest.raises(UsageError, match='holds the model mini, not maxi'):
    hpm.checkpoint.restore(path, make_step('replicated', 1, name='maxi'))


def test_another_optimizer_is_refused_by_the_slots_that_lack(steps, tmp_path):
  path = hpm.checkpoint.save(str(tmp_path), steps['replicated', 1][0])
  with pytest.raises(UsageError, match='lacks slots/m, slots/v'):
    hpm.checkpoint.restore(path, make_step('replicated', 1, optimizer='adam'))


def test_slots_that_nothing_uses_are_dropped_with_a_notice(steps, tmp_path):
  path = hpm.checkpoint.save(str(tmp_path), steps['replicated', 1][0])
  (notice,) = hpm.checkpoint.restore(path, make_step('replicated', 1, optimizer='sgd'))
  assert notice == 'slots/momentum of the checkpoint dropped: nothing here uses it'


def test_other_shapes_are_refused_by_name(cpu_devices, tmp_path):
  path = hpm.checkpoint.save(str(tmp_path), make_step('replicated', 1, num_classes=7))
  with pytest.raises(
    UsageError, match=r'wide/kernel has shape \[3, 7\], this model needs \[3, 9\]'
  ):
    hpm.checkpoint.restore(path, make_step('replicated', 1, num_classes=9))


def test_damaged_checkpoints_are_refused_by_path(steps, tmp_path):
  step, _ = steps['replicated', 1]
  path = hpm.checkpoint.save(str(tmp_path), step)
  (data,) = (n for n in os.listdir(path) if '.data-' in n)
  os.truncate(os.path.join(path, data), 10)
  with pytest.raises(DataError, match=r'ckpt-\d+ is no readable checkpoint'):
    hpm.checkpoint.restore(path, step)
  with pytest.raises(DataError, match='no readable checkpoint'):
    hpm.checkpoint.read(str(tmp_path / 'nothing'))


def test_a_newer_schema_is_refused(steps, tmp_path):
  path = hpm.checkpoint.save(str(tmp_path), steps['replicated', 1][0])
  meta_path = os.path.join(path, 'meta.json')
  with open(meta_path) as file:
    meta = json.load(file)
  with open(meta_path, 'w') as file:
    json.dump({**meta, 'schema_version': 99}, file)
  with pytest.raises(DataError, match='schema 99'):
    hpm.checkpoint.read(path)


def test_a_writer_takes_the_values_at_once_and_writes_them_meanwhile(steps, tmp_path):
  step, initial = steps['replicated', 2]
  step.restore(initial)
  train(step, 0, 2)
  expected = values(step)
  writer = hpm.checkpoint.Writer(str(tmp_path))
  path = writer.save(step, {'seed': 3, 'samples': 16})
  train(step, 2, 4)  # in place, while the values of step 2 are written
  writer.wait()
  assert path == str(tmp_path / 'ckpt-2')
  written, meta = hpm.checkpoint.read(path)
  for name, value in written.items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)
  assert meta['pipeline'] == {'seed': 3, 'samples': 16}
  assert hpm.checkpoint.facts(path) == meta


def test_a_writer_keeps_the_newest(steps, tmp_path):
  step, initial = steps['replicated', 1]
  step.restore(initial)
  (tmp_path / 'ckpt-not').mkdir()
  abandoned = tmp_path / '.writing-killed'
  abandoned.mkdir()
  os.utime(abandoned, (0, 0))
  (tmp_path / '.writing-now').mkdir()
  writer = hpm.checkpoint.Writer(str(tmp_path), keep=2)
  for first in range(4):
    train(step, first, first + 1)
    writer.save(step)
  writer.wait()
  assert sorted(os.listdir(tmp_path)) == ['.writing-now', 'ckpt-3', 'ckpt-4', 'ckpt-not']
  with pytest.raises(UsageError, match='keep 0'):
    hpm.checkpoint.Writer(str(tmp_path), keep=0)


def test_a_writer_says_what_it_could_not_write(steps, tmp_path):
  step, _ = steps['replicated', 1]
  blocked = tmp_path / 'file'
  blocked.write_text('')
  writer = hpm.checkpoint.Writer(str(blocked))
  writer.save(step)
  with pytest.raises(OSError, match='no checkpoint could be written to .*file'):
    writer.wait()
  writer.wait()  # said once
