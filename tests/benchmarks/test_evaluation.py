"""Training that evaluates itself, and what is kept of its course."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import cost, curves, flags, results
from benchmarks.loop import Step
import hpm
from hpm.errors import DataError

DIGITS = ['--recipe=digits', '--num_gpus=2', '--display_every=10']


def test_digits_are_evaluated_kept_and_stopped_at_an_accuracy(in_process, tmp_path):
  train = tmp_path / 'train'
  run = in_process(
    *DIGITS,
    *('--num_epochs=8', '--stop_at_top_1_accuracy=0.85', '--usd_per_hour=3.6'),
    *(f'--train_dir={train}', f'--result_json={tmp_path / "r.json"}'),
    *(f'--curve_file={tmp_path / "c.png"}', f'--tensorboard_dir={tmp_path / "board"}'),
  )
  assert run.code == 0, run.errors
  result = results.read(str(tmp_path / 'r.json'))
  reached = result['to_accuracy']
  assert reached['top_1'] >= 0.85 > max(e['top_1'] for e in result['evaluations'][:-1])
  assert reached['num_samples'] == 360  # which 2 devices with 32 images do not divide
  assert any(line.endswith('[360 examples]') for line in run.lines)
  assert any(line.startswith('Reached 0.') for line in run.lines)
  assert result['cost']['usd_to_accuracy'] == pytest.approx(reached['seconds'] / 1000)
  assert reached['step'] == result['evaluations'][-1]['step'] < 8 * 1437 / 64
  curve = result['curve']
  assert curve['step'] == list(range(1, reached['step'] + 1))
  assert curve['images'][-1] == reached['images']
  assert curve['seconds'][-1] <= reached['seconds']
  assert max(curve['learning_rate']) <= 0.05
  assert curve['loss'][0] == result['first_loss']
  assert (tmp_path / 'c.png').read_bytes().startswith(b'\x89PNG')
  scalars = {}
  for file in (tmp_path / 'board').iterdir():
    for event in tf.compat.v1.train.summary_iterator(str(file)):
      for value in event.summary.value:
        assert value.metadata.plugin_data.plugin_name == 'scalars'
        scalars.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
  top_1 = [(e['step'], pytest.approx(e['top_1'])) for e in result['evaluations']]
  assert scalars['top_1'] == top_1
  assert {step % 10 for step, _ in scalars['loss']} == {0}

  best = hpm.checkpoint.latest(str(train / 'best'))
  assert best == result['best']['checkpoint']
  assert hpm.checkpoint.facts(best)['training']['top_1'] == result['best']['top_1']
  evaluated = in_process(
    *('--model=lenet', '--data_name=digits', '--image_size=8', '--num_classes=10', '--eval'),
    *(f'--train_dir={train / "best"}', f'--result_json={tmp_path / "e.json"}', '--batch_size=7'),
  )
  assert evaluated.code == 0, evaluated.errors
  assert any('average' in line for line in evaluated.lines)
  found = json.loads((tmp_path / 'e.json').read_text())['accuracy']
  assert found['top_1'] == result['best']['top_1']
  assert found['num_samples'] == 360


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(
  in_process, tmp_path
):
  run = in_process(
    *('--model=lenet', '--data_name=digits', '--image_size=8', '--num_classes=10'),
    *('--num_gpus=1', '--batch_size=16', '--optimizer=sgd', '--weight_decay=0'),
    *('--piecewise_learning_rate_schedule=0.01;0.05;1e12', '--num_batches=60'),
    *(f'--train_dir={tmp_path}', '--save_model_steps=1', '--max_ckpts_to_keep=0'),
  )
  assert run.code == 1
  # 0.05 epochs are 4 steps, so step 5 is the one that throws the weights out.
  assert 'the loss is nan in step ' in run.errors or 'the loss is inf in step ' in run.errors
  good = hpm.checkpoint.last_finite(str(tmp_path))
  assert f'the last good checkpoint is {good}' in run.errors
  values, _ = hpm.checkpoint.read(good)
  assert all(np.isfinite(value).all() for value in values.values())


@pytest.mark.parametrize(
  ('arguments', 'due'),
  [
    (['--eval_during_training_every_n_steps=4'], [4, 8, 12]),
    (['--eval_during_training_at_specified_steps=2,9'], [2, 9]),
    (['--eval_during_training_every_n_epochs=0.5'], [4, 7, 10, 13]),
    (['--eval_during_training_at_specified_epochs=1,2'], [7, 13]),
    (['--eval_during_training_every_n_epochs=0'], []),
  ],
)
def test_evaluations_are_due(arguments, due):
  options = flags.parse(['--data_name=digits', *arguments])
  steps = [(n - 1, n) for n in range(1, 14)]  # of 16 images each, an epoch of 100
  found = [
    after
    for before, after in steps
    if flags.evaluation.due(options, 100, (before, after), (16 * before, 16 * after))
  ]
  assert found == due


def test_nothing_to_evaluate_is_an_error(cpu_devices):
  model = hpm.models.create('trivial', image_size=8, num_classes=10)
  manager = hpm.variable_mgr.create('replicated', cpu_devices[:1])
  manager.create(*model.init(0))
  empty = tf.data.Dataset.from_tensor_slices(
    (tf.zeros([0, 8, 8, 3], tf.uint8), tf.zeros([0], tf.int64))
  ).batch(2)
  with pytest.raises(DataError, match='no batch'):
    hpm.EvalStep(model, manager).evaluate(empty)


def test_a_long_course_is_kept_in_few_rows_that_add_up():
  curve = curves.Curve(done=10, images=40)
  steps = [Step(0.5, 4, float(i), None) for i in range(3001)]
  assert list(curve.over(iter(steps))) == steps
  rows = curve.values(lambda step: float(step))
  assert 500 <= len(rows['step']) <= 1000
  assert rows['step'][-1] == 3011
  assert rows['images'][-1] == 40 + 4 * 3001
  assert rows['learning_rate'][-1] == 3010
  assert set(rows['images_per_second']) == {8.0}
  counts = np.diff([10, *rows['step']])
  assert np.dot(counts, rows['loss']) == pytest.approx(sum(range(3001)))


def test_the_reference_gives_the_published_costs(capsys):
  assert cost.main(['--reference']) == 0
  rows = capsys.readouterr().out.splitlines()
  stated = [row.split()[-1] for row in rows if ' imagenet ' in row and row.split()[-2] in '866484']
  assert stated == ['73.3', '54.6', '128.5']
  assert sum('cloud_tpu_v2' in row for row in rows) == 3
  assert any(row.rstrip().endswith('75.90') for row in rows)  # no price, so none is made up


def test_the_cost_of_a_result_file(capfd, tmp_path, in_process):
  path = str(tmp_path / 'r.json')
  assert cost.main([]) == 2
  assert cost.main([path]) == 1
  run = in_process('--model=trivial', '--num_gpus=1', '--num_batches=2', f'--result_json={path}')
  assert run.code == 0
  assert cost.main([path]) == 2
  assert '--usd_per_hour' in capfd.readouterr().err
  assert cost.main(['--usd_per_hour=7.2', '--epochs=2', path]) == 0
  rate = results.read(path)['images_per_second']
  out = capfd.readouterr().out
  assert f'{rate * 500:,.0f} images per dollar' in out
  assert f'{2 * 1281167 / rate / 500:.1f} $' in out
