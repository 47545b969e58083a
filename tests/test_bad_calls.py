"""Calls that can't work are refused in one line that quotes what is wrong; nothing is written.

Each is a function of nothing, by the argument that is wrong; what is expected is the gist.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.optimizers import schedules

DEVICES = ('/CPU:0', '/CPU:1')


def manager(name='replicated', **options):
  return hpm.variable_mgr.create(name, DEVICES, **options)


def step(model=None, **options):
  return hpm.TrainStep(
    model or hpm.models.create('lenet'), manager(), hpm.optimizers.create('sgd', 0.1), **options
  )


def pipeline(**options):
  sizes = {'batch_size': 2, 'image_size': 28, 'num_classes': 10}
  return hpm.pipelines.create('synthetic', **{**sizes, **options})


BAD = {
  # devices
  'device kind': (lambda: hpm.devices.select('tpu'), "'tpu'"),
  'no devices': (lambda: hpm.devices.select('cpu', 0), '0'),
  'devices below nought': (lambda: hpm.devices.cpu(-1), '-1'),
  'half a device': (lambda: hpm.devices.cpu(1.5), '1.5'),
  'a word of devices': (lambda: hpm.devices.cpu('2'), "'2'"),
  'devices for ever': (lambda: hpm.devices.cpu(10**9), 'at most 64'),
  'GPUs that are not there': (lambda: hpm.devices.gpu(999), '999 GPUs wanted'),
  # the step
  'loss_scale text': (lambda: step(loss_scale='x'), "loss_scale 'x'"),
  'loss_scale none': (lambda: step(loss_scale=None), 'loss_scale None'),
  'loss_scale nan': (lambda: step(loss_scale=float('nan')), 'loss_scale nan'),
  'loss_scale inf': (lambda: step(loss_scale=float('inf')), 'loss_scale inf'),
  'loss_scale list': (lambda: step(loss_scale=[1.0]), 'loss_scale [1.0]'),
  'accumulate text': (lambda: step(accumulate='2'), "accumulate '2'"),
  'accumulate 0': (lambda: step(accumulate=0), 'accumulate 0'),
  'accumulate half': (lambda: step(accumulate=1.5), 'accumulate 1.5'),
  'accumulate True': (lambda: step(accumulate=True), 'accumulate True'),
  'weight_decay text': (lambda: step(weight_decay='x'), "weight_decay 'x'"),
  'weight_decay nan': (lambda: step(weight_decay=float('nan')), 'weight_decay nan'),
  'clip_norm text': (lambda: step(clip_norm='x'), "clip_norm 'x'"),
  'clip_norm 0': (lambda: step(clip_norm=0), 'clip_norm 0'),
  'clip_value nan': (lambda: step(clip_value=float('nan')), 'clip_value nan'),
  'seed text': (lambda: step(seed='x'), "seed 'x'"),
  'seed below nought': (lambda: step(seed=-1), 'seed -1'),
  'reduction': (lambda: step(gradient_reduction='max'), "'max'"),
  'steps_per_call': (
    lambda: next(step().run(pipeline().dataset(), 1, steps_per_call='x')),
    "steps_per_call 'x'",
  ),
  'no batch': (lambda: next(step().run(pipeline().dataset().take(0))), 'no batch'),
  'a data set of something else': (
    lambda: next(step().run(tf.data.Dataset.range(3))),
    'a data set of tuples',
  ),
  'an endless evaluation': (
    lambda: hpm.EvalStep(hpm.models.create('lenet'), manager()).evaluate(pipeline().dataset()),
    'repeats for ever',
  ),
  # models
  'model': (lambda: hpm.models.create('nope'), "unknown model 'nope'"),
  'model option': (lambda: hpm.models.create('lenet', nope=1), "'nope'"),
  'num_classes 0': (lambda: hpm.models.create('lenet', num_classes=0), '0'),
  'num_classes text': (lambda: hpm.models.create('lenet', num_classes='x'), "'x'"),
  'image_size 0': (lambda: hpm.models.create('lenet', image_size=0), '0'),
  'image_size text': (lambda: hpm.models.create('lenet', image_size='x'), "'x'"),
  'dtype': (lambda: hpm.models.create('lenet', dtype='int8'), 'int8'),
  'data_format': (lambda: hpm.models.create('lenet', data_format='NCWH'), 'NCWH'),
  'weights': (
    lambda: hpm.models.pretrained.load(hpm.models.create('resnet50'), '/nowhere.pth'),
    '/nowhere.pth',
  ),
  'kind of weights': (
    lambda: hpm.models.pretrained.load(hpm.models.create('resnet50'), __file__),
    'weights come as',
  ),
  # optimizers, losses and schedules
  'optimizer': (lambda: hpm.optimizers.create('sgdd', 0.1), "'sgdd'"),
  'optimizer option': (lambda: hpm.optimizers.create('sgd', 0.1, nope=1), "'nope'"),
  'learning_rate text': (lambda: hpm.optimizers.create('sgd', 'x'), "'x'"),
  'learning_rate nan': (lambda: hpm.optimizers.create('sgd', float('nan')), 'nan'),
  'momentum 1': (lambda: hpm.optimizers.create('momentum', 0.1, momentum=1), 'momentum 1'),
  'average_decay text': (
    lambda: hpm.optimizers.create('sgd', 0.1, average_decay='x'),
    "average_decay 'x'",
  ),
  'smoothing text': (lambda: hpm.losses.softmax_cross_entropy('x'), "label_smoothing 'x'"),
  'smoothing 1': (lambda: hpm.losses.softmax_cross_entropy(1.0), 'label_smoothing 1.0'),
  'rates': (lambda: schedules.piecewise([1], [0.1]), '1 boundaries need 2 rates'),
  'boundary text': (lambda: schedules.piecewise(['x'], [1, 2]), "boundary 'x'"),
  'rate nan': (lambda: schedules.piecewise([], [float('nan')]), 'rate nan'),
  'cosine': (lambda: schedules.cosine(0.1, 0), 'num_steps 0'),
  'cosine text': (lambda: schedules.cosine(0.1, 'x'), "num_steps 'x'"),
  'factor': (lambda: schedules.exponential(0.1, 10, 'x'), "factor 'x'"),
  'warmup': (lambda: schedules.warmup(0.1, -1), 'num_steps -1'),
  # precision
  'precision': (lambda: hpm.precision.create('fp8'), "'fp8'"),
  'initial': (lambda: hpm.precision.DynamicLossScale(0.5), '0.5'),
  'initial text': (lambda: hpm.precision.DynamicLossScale('x'), "'x'"),
  'increase_every': (lambda: hpm.precision.DynamicLossScale(1.0, 'x'), "'x'"),
  # managers and all-reduces
  'manager': (lambda: manager('replicatd'), "'replicatd'"),
  'spec': (lambda: manager(all_reduce_spec='cpy'), 'copy'),
  'repacking': (lambda: manager(gradient_repacking='x'), "gradient_repacking 'x'"),
  'small': (lambda: manager(agg_small_grads_max_bytes='x'), "agg_small_grads_max_bytes 'x'"),
  'consistency': (lambda: manager(variable_consistency='lax'), "'lax'"),
  'statistics': (lambda: manager(batch_norm_statistics='frist'), "'frist'"),
  # pipelines
  'pipeline': (lambda: hpm.pipelines.create('imagnet'), "'imagnet'"),
  'batch_size 0': (lambda: pipeline(batch_size=0), 'batch_size=0'),
  'batch_size text': (lambda: pipeline(batch_size='2'), "batch_size='2'"),
  'batch_size half': (lambda: pipeline(batch_size=2.5), 'batch_size=2.5'),
  'no such data': (
    lambda: hpm.pipelines.create(
      'imagenet', data_dir='/nowhere', batch_size=1, image_size=8, num_classes=2
    ),
    '/nowhere',
  ),
  # checkpoints
  'keep': (lambda: hpm.checkpoint.Writer('x', keep=0), 'keep 0'),
  'keep text': (lambda: hpm.checkpoint.Writer('x', keep='x'), "keep 'x'"),
  'no checkpoint': (lambda: hpm.checkpoint.restore('/nowhere/ckpt-1', step()), '/nowhere/ckpt-1'),
}


@pytest.mark.parametrize('name', BAD)
def test_it_is_refused_in_one_line(name, tmp_path, monkeypatch, cpu_devices):
  monkeypatch.chdir(tmp_path)
  call, gist = BAD[name]
  with pytest.raises((UsageError, DataError)) as refusal:
    call()
  message = str(refusal.value)
  assert gist in message
  assert '\n' not in message
  assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A checkpoint of lenet's."""
  return hpm.checkpoint.save(str(tmp_path_factory.mktemp('checkpoints')), step())


def test_another_models_checkpoint_is_refused(checkpoint):
  with pytest.raises(UsageError, match='lenet'):
    hpm.checkpoint.restore(checkpoint, step(hpm.models.create('trivial')))
  with pytest.raises(UsageError, match='shape|classes|fit'):
    hpm.checkpoint.restore(checkpoint, step(hpm.models.create('lenet', num_classes=7)))


@pytest.mark.parametrize(
  'content', ['', '{', '[]', '{}', '"x"', 'null', '1e999', '\x00', 5000 * '[', '{"schema": 99}']
)
def test_what_stands_beside_a_checkpoint_may_be_anything(content, checkpoint, tmp_path):
  import shutil

  copy = tmp_path / Path(checkpoint).name
  shutil.copytree(checkpoint, copy)
  (meta,) = [path for path in copy.iterdir() if path.suffix == '.json']
  meta.write_text(content)
  trained = step()
  with pytest.raises((DataError, UsageError)) as refusal:
    hpm.checkpoint.restore(str(copy), trained)
  assert '\n' not in str(refusal.value)


def test_a_checkpoint_of_a_newer_schema_says_so(checkpoint, tmp_path):
  import shutil

  copy = tmp_path / Path(checkpoint).name
  shutil.copytree(checkpoint, copy)
  (meta,) = [path for path in copy.iterdir() if path.suffix == '.json']
  held = json.loads(meta.read_text())
  (key,) = [key for key in held if 'version' in key or 'schema' in key or 'format' in key]
  meta.write_text(json.dumps({**held, key: held[key] + 1}))
  with pytest.raises(DataError, match='newer'):
    hpm.checkpoint.restore(str(copy), step())


def test_numbers_are_taken_from_any_library():
  assert errors.number('x', np.float32(0.5)) == 0.5
  assert errors.number('x', 3) == 3.0
  assert errors.whole('x', np.int64(3)) == 3
  for wrong in (True, '1', None, 1j, float('nan')):
    with pytest.raises(UsageError):
      errors.number('x', wrong)
  for wrong in (True, '1', None, 1.0, 0):
    with pytest.raises(UsageError):
      errors.whole('x', wrong)


def test_what_can_not_be_printed_is_written_out():
  assert errors.printable('a\nb\x1b[2J\udc80é') == 'a\\nb\\x1b[2J\\udc80é'
  assert len(errors.printable(10**6 * 'x')) < 2000
