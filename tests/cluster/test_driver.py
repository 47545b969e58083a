"""The driver in a cluster: lines, totals, checkpoints, the same command again, and how it ends."""

import json
import math
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import results
from hpm import checkpoint, pipelines

ROOT = Path(__file__).parents[2]
MODES = {
  'parameter_server': 'workers:2,ps:2',
  'distributed_replicated': 'workers:2,ps:1',
  'collective_all_reduce': 'workers:2',
}
DIGITS = ('--recipe=digits', '--num_gpus=2', '--display_every=1')
END_S = 10.0  # from the last step or evaluation to the end of all processes
LENET = (
  '--model=lenet',
  '--device=cpu',
  '--num_gpus=2',
  '--batch_size=2',
  '--num_warmup_batches=1',
)


@pytest.fixture(scope='module')
def sample(tmp_path_factory) -> Path:
  """56 training images in 8 files: 28 for each of two workers, seven steps of four."""
  directory = tmp_path_factory.mktemp('data') / 'sample'
  command = [sys.executable, '-m', 'hpm.pipelines', 'sample', '--num_images=70']
  subprocess.run([*command, f'--out={directory}'], cwd=ROOT, check=True, capture_output=True)
  return directory


def started(mode: str, *arguments: str, model: tuple[str, ...] = LENET) -> subprocess.Popen:
  return subprocess.Popen(
    [
      *(sys.executable, 'benchmarks/run.py', f'--variable_update={mode}'),
      *(f'--local_cluster={MODES[mode]}', '--heartbeat_timeout_s=60', *model, *arguments),
    ],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(mode: str, *arguments: str, model: tuple[str, ...] = LENET) -> list[str]:
  """The lines of a cluster that ends well."""
  return timed(mode, *arguments, model=model)[0]


def timed(mode: str, *arguments: str, model: tuple[str, ...] = LENET) -> tuple[list[str], float]:
  """The same, and the seconds from the last line of a step or an evaluation to the end."""
  process = started(mode, *arguments, model=model)
  stop = threading.Timer(300, process.kill)
  stop.start()
  lines, last = [], time.monotonic()
  for line in process.stdout:
    lines.append(line.rstrip('\n'))
    if re.search(r'\timages/sec|\] Accuracy @ 1', line):
      last = time.monotonic()
  code = process.wait()
  stop.cancel()
  assert code == 0, '\n'.join(lines)
  return lines, time.monotonic() - last


def values_of(directory: Path) -> dict[str, np.ndarray]:
  return checkpoint.read(checkpoint.latest(str(directory)))[0]


def check_resumed(mode: str, sample: Path, directory: Path, *arguments: str) -> None:
  """Two epochs in one run, and in two: the same weights, slots, steps and samples."""
  data = (f'--data_dir={sample}', *arguments)
  run(mode, *data, '--num_epochs=2', f'--train_dir={directory}/whole')
  lines = run(mode, *data, '--num_batches=8', f'--train_dir={directory}/parts')
  assert any(re.search(r'Saved .*ckpt-9$', line) for line in lines)
  lines = run(mode, *data, '--num_epochs=2', f'--train_dir={directory}/parts')
  for worker in (0, 1):
    assert f'[worker:{worker}] Going on after step 9, 36 images' in lines
  whole, parts = values_of(directory / 'whole'), values_of(directory / 'parts')
  assert whole['samples'] == 112
  assert set(whole) == set(parts)
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)


def test_lines_total_and_results_of_all_workers(tmp_path):
  result = tmp_path / 'run.json'
  lines = run('distributed_replicated', '--num_batches=6', f'--result_json={result}')
  text = '\n'.join(lines)
  rates = {int(n): float(r) for n, r in re.findall(r'images/sec of worker:(\d): ([\d.]+)', text)}
  assert set(rates) == {0, 1}
  totals = re.findall(r'\[(.*)\] total images/sec: ([\d.]+)', text)
  assert [who for who, _ in totals] == ['worker:0']
  chief = json.loads(result.read_text())
  other = json.loads((tmp_path / 'run.worker-1.json').read_text())
  assert chief['batch_size_global'] == other['batch_size_global'] == 8
  assert chief['step_images'] == other['step_images'] == [4] * 6
  assert chief['losses'] == other['losses']
  slowest = max(chief['loop_wall_s'], other['loop_wall_s'])
  total = chief['images_per_second_total']  # from the first to begin to the last to end
  assert 0.7 * 48 / slowest < total < 1.001 * 48 / slowest
  assert float(totals[0][1]) == pytest.approx(total, abs=0.01)


def test_the_same_command_goes_on_over_parameter_servers(sample, tmp_path):
  check_resumed('distributed_replicated', sample, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize('mode', ['parameter_server', 'collective_all_reduce'])
def test_the_same_command_goes_on(mode, sample, tmp_path):
  check_resumed(mode, sample, tmp_path)


def check_killed(mode: str, sample: Path, directory: Path, step: int) -> None:
  """Killed with all its tasks after that step, and started again: the same bits in the end."""
  data = (f'--data_dir={sample}', '--num_epochs=2', '--display_every=1')
  run(mode, *data, f'--train_dir={directory}/whole')
  data += ('--save_model_steps=2', f'--train_dir={directory}/parts')
  process = started(mode, *data)
  for line in process.stdout:
    if re.search(rf'\[worker:0\] {step}\t', line):
      process.kill()  # and the kernel its children
  process.wait()
  lines = run(mode, *data)
  assert any(re.match(r'\[worker:0\] Going on after step \d+, ', line) for line in lines)
  whole, parts = values_of(directory / 'whole'), values_of(directory / 'parts')
  assert whole['step'] == 14 and set(whole) == set(parts)
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize('step', [4, 9])
@pytest.mark.parametrize('mode', MODES)
def test_killed_with_all_its_tasks_a_training_goes_on_with_the_same_bits(
  mode, sample, tmp_path, step
):
  check_killed(mode, sample, tmp_path, step)


@pytest.mark.long
def test_another_number_of_workers_is_refused_for_data_and_taken_for_synthetic(sample, tmp_path):
  mode = 'collective_all_reduce'
  for data in ([f'--data_dir={sample}'], []):
    directory = tmp_path / f'train{len(data)}'
    run(mode, *data, '--num_batches=2', f'--train_dir={directory}')
    process = started(
      mode, *data, '--num_batches=4', f'--train_dir={directory}', '--local_cluster=workers:3'
    )
    out, _ = process.communicate(timeout=300)
    if data:
      assert process.returncode == 2, out
      assert 'by 2 workers, each with a share of the data, and now there would be 3 workers' in out
    else:
      assert process.returncode == 0, out
      assert '[worker:2] Going on after step 3, 8 images' in out
      assert values_of(directory)['samples'] == 24 + 2 * 12


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_a_termination_stops_all_after_the_same_step_with_a_checkpoint(mode, tmp_path):
  process = started(mode, '--num_batches=100000', f'--train_dir={tmp_path}', '--display_every=1')
  for line in process.stdout:
    if re.search(r'\[worker:0\] 3\t', line):
      break
  process.send_signal(signal.SIGTERM)
  begun = time.monotonic()
  out, _ = process.communicate(timeout=60)
  assert time.monotonic() - begun < 30
  assert process.returncode == 143, out
  assert 'saved' in out
  values = values_of(tmp_path)
  assert values['samples'] == 8 * values['step']


@pytest.mark.long
def test_asynchronous_workers_end_apart_and_count_together(tmp_path):
  lines = run(
    'parameter_server',
    *('--cross_replica_sync=false', '--num_batches=6', f'--train_dir={tmp_path}'),
  )
  assert any(line.startswith('[worker:0] total images/sec') for line in lines)
  values = values_of(tmp_path)
  assert values['step'] == 2 * 7
  assert values['samples'] == 14 * 4


def check_evaluated(mode: str, directory: Path, *arguments: str) -> None:
  """Evaluated once an epoch of all workers by the chief, who ends the training at an accuracy."""
  files = (f'--train_dir={directory}/train', f'--result_json={directory}/run.json')
  lines = run(
    mode,
    *('--num_epochs=8', '--stop_at_top_1_accuracy=0.85', f'--curve_file={directory}/curve.png'),
    *(*files, *arguments),
    model=DIGITS,
  )
  assert not [line for line in lines if 'Evaluation' in line and not line.startswith('[worker:0]')]
  result = results.read(str(directory / 'run.json'))
  assert result['batch_size_per_device'] * 4 == result['batch_size_global'] == 64
  found, reached = result['evaluations'], result['to_accuracy']
  images = [one['images'] for one in found if one['step'] <= reached['step']]
  # Of 1,437 training images, by two workers in whole batches of 64.
  calls = int(dict(a.split('=') for a in arguments).get('--steps_per_call', 1))
  for epoch, count in enumerate(images, 1):
    assert 1437 * epoch <= count < 1437 * epoch + 64 * calls
  assert reached['top_1'] >= 0.85
  assert all(one['top_1'] < 0.85 for one in found if one['step'] < reached['step'])
  assert {one['num_samples'] for one in found} == {360}
  last = checkpoint.latest(str(directory / 'train'))
  values = checkpoint.read(last)[0]
  assert values['step'] == found[-1]['step'] == reached['step'] + 1  # the others were in it already
  assert result['curve']['step'] == list(range(1, values['step'] + 1))
  assert result['curve']['images'][-1] == values['samples'] == found[-1]['images']
  assert (directory / 'curve.png').read_bytes().startswith(b'\x89PNG')
  other = results.read(str(directory / 'run.worker-1.json'))
  assert 'evaluations' not in other and 'curve' not in other
  # One process that evaluates the checkpoint finds the same.
  command = ('--model=lenet', '--data_name=digits', '--image_size=8', '--num_classes=10', '--eval')
  done = subprocess.run(
    [
      *(sys.executable, 'benchmarks/run.py', *command, f'--train_dir={directory}/train'),
      *('--device=cpu', '--batch_size=90', f'--result_json={directory}/eval.json'),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  accuracy = results.read(str(directory / 'eval.json'))['accuracy']
  assert accuracy['top_1'] == pytest.approx(found[-1]['top_1'])


def test_the_chief_evaluates_and_all_end_at_an_accuracy(tmp_path):
  check_evaluated('collective_all_reduce', tmp_path, '--steps_per_call=4')


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_so_it_is_in_every_mode(mode, tmp_path):
  check_evaluated(mode, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize('mode', [*MODES, 'asynchronous'])
def test_each_image_comes_once_an_epoch_of_unequal_shares_and_then_nothing_is_left(mode, tmp_path):
  """1,437 images: 719 and 718. The same command again has nothing to do, in all workers."""
  apart = mode == 'asynchronous'
  mode = 'parameter_server' if apart else mode
  arguments = [f'--train_dir={tmp_path}', '--num_epochs=3']
  if apart:
    model = (*LENET, '--data_name=digits', '--image_size=8', '--num_classes=10', '--batch_size=16')
    arguments += ['--cross_replica_sync=false', '--eval_during_training_every_n_epochs=1']
  else:
    model = DIGITS
  lines, seconds = timed(mode, *arguments, model=model)
  print(f'{mode}: all had ended {seconds:.1f} s after the last evaluation')
  assert seconds < END_S
  assert values_of(tmp_path)['samples'] == 3 * 1437
  assert any(line.startswith('[worker:0] Accuracy @ 1') for line in lines)
  again = run(mode, *arguments, model=model)
  for worker in (0, 1):
    (line,) = [line for line in again if line.startswith(f'[worker:{worker}] Nothing to do')]
    assert '3' in line
  assert values_of(tmp_path)['samples'] == 3 * 1437


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_a_part_of_an_epoch_ends_after_so_many_steps(mode, tmp_path):
  """Also with synthetic data, which never ends."""
  run(mode, f'--train_dir={tmp_path}/a', '--num_epochs=1.5', model=DIGITS)
  assert values_of(tmp_path / 'a')['samples'] == 64 * math.ceil(1.5 * 1437 / 64)
  run(mode, f'--train_dir={tmp_path}/b', '--num_epochs=0.00003')
  assert values_of(tmp_path / 'b')['step'] == math.ceil(0.00003 * 1281167 / 8)


@pytest.mark.long
@pytest.mark.parametrize('mode', MODES)
def test_each_sample_comes_once_an_epoch(mode, sample, tmp_path):
  """What the workers' pipelines deliver, all of it, as the driver shares it out."""
  ids = []
  for worker in range(2):
    pipeline = pipelines.create(
      'imagenet',
      **{'data_dir': str(sample), 'batch_size': 2, 'image_size': 28, 'num_classes': 1000},
      **{'seed': 1234, 'num_epochs': 1, 'with_ids': True},
      **{'num_shards': 2, 'shard_index': worker},
    )
    ids += [i for _, _, batch in pipeline.dataset() for i in batch.numpy().tolist()]
  assert len(ids) == len(set(ids)) == 56
  lines = run(mode, f'--data_dir={sample}', '--num_epochs=1', f'--train_dir={tmp_path}')
  assert values_of(tmp_path)['samples'] == 56
  assert any(line.endswith('ckpt-7') for line in lines)
