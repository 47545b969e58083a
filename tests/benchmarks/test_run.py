"""The driver from the command line: what it prints, keeps, refuses, and how it ends."""

import json
import os
from pathlib import Path
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks import results
from tests.benchmarks.conftest import ROOT, environment

RULE = '-' * 64
STEP = re.compile(
  r'(\d+)\timages/sec: (\d+\.\d) \+/- (\d+\.\d) \(jitter = (\d+\.\d)\)\t(\d+\.\d{3})'
)
SMALL = ('--model=lenet', '--num_batches=4', '--num_warmup_batches=1')


def step_lines(run):
  return [line for line in run.lines if STEP.fullmatch(line)]


def total(run):
  """The number between the rules."""
  first, last = (i for i, line in enumerate(run.lines) if line == RULE)
  assert last == first + 2
  return re.fullmatch(r'total images/sec: (\d+\.\d\d)', run.lines[first + 1])[1]


def one_line(run, code):
  """The error of a run that ended with this code, its only line on stderr."""
  assert run.code == code, run.errors
  assert run.errors.startswith('error: ')
  assert run.errors.count('\n') == 1
  assert not step_lines(run)
  assert RULE not in run.lines
  return run.errors


def started(*arguments, stderr=subprocess.PIPE):
  """A run that goes on while the test does."""
  return subprocess.Popen(
    [sys.executable, '-m', 'benchmarks.run', '--device=cpu', *arguments],
    cwd=ROOT,
    env={**environment(), 'TERM': 'xterm'},
    stdout=subprocess.PIPE,
    stderr=stderr,
    text=True,
  )


# Before TensorFlow


@pytest.mark.parametrize(
  ('arguments', 'code'),
  [(['--help'], 0), (['--modle=lenet'], 2), (['--batch_size=0'], 2), (['--data_dir=nowhere'], 1)],
)
def test_help_and_wrong_flags_answer_within_a_second_without_tensorflow(arguments, code):
  program = (
    'import sys; from benchmarks import run; code = run.main(sys.argv[1:]); '
    'assert not {"tensorflow", "keras"} & set(sys.modules); sys.exit(code)'
  )
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, '-c', program, *arguments], cwd=ROOT, capture_output=True, text=True
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert done.returncode == code, done.stderr
  assert 'Traceback' not in done.stderr
  # CPU time, since the clock's depends on who else uses the machine.
  assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_wrong_flag_is_answered_in_one_line(command_line):
  run = command_line('--model=alexnett')
  assert run.lines == []
  message = one_line(run, 2)
  assert message.startswith("error: unknown --model 'alexnett': did you mean alexnet")


def test_more_gpus_than_there_are(in_process):
  run = in_process('--device=gpu', '--num_gpus=64')
  assert run.lines == []
  assert '64 GPUs wanted' in one_line(run, 2)


# A run


@pytest.fixture(scope='module')
def plain(command_line, tmp_path_factory):
  """The command without anything but a small model: (run, result)."""
  path = tmp_path_factory.mktemp('plain') / 'new' / 'run.json'
  run = command_line(
    '--device=cpu',
    '--model=lenet',
    '--variable_update=replicated',
    '--num_batches=25',
    f'--result_json={path}',
  )
  assert run.code == 0, run.errors
  return run, results.read(str(path))


def test_stderr_stays_empty(plain):
  run, _ = plain
  assert run.errors == ''


def test_header_says_what_is_measured(plain):
  run, result = plain
  facts = run.facts()
  assert facts['TensorFlow'] == '.'.join(result['machine']['tensorflow'].split('.')[:2])
  assert facts['Model'] == 'lenet'
  assert facts['Dataset'] == 'imagenet (synthetic)'
  assert facts['Mode'] == 'training'
  assert facts['Batch size'] == '4 global'
  assert '             2 per device' in run.lines
  assert facts['Devices'] == "['/CPU:0', '/CPU:1']"
  assert facts['Num epochs'] == '0.00 of 1281167 images'
  assert facts['Learn. rate'] == '0.0015625 (0.1 * 4 / 256)'
  assert facts['Variables'] == 'replicated, on the compute devices'
  assert facts['AllReduce'] == 'copy'
  assert facts['oneDNN'] == 'on'
  for chosen in ('--batch_size=2', '--num_gpus=2', '--num_warmup_batches=2'):
    assert chosen in facts['Chosen'].split()
  assert '--num_batches=25' not in facts['Chosen']
  assert all(line[:13].endswith(' ') for line in run.lines[: run.lines.index('==========')])


def test_lines_come_at_step_1_and_every_10(plain):
  run, _ = plain
  start = run.lines.index('==========') + 1
  assert run.lines[start : start + 3] == [
    'Running warm up',
    'Done warm up',
    'Step\tImg/sec\ttotal_loss',
  ]
  lines = step_lines(run)
  assert [int(STEP.fullmatch(line)[1]) for line in lines] == [1, 10, 20]
  assert all(len(line.split()) == 9 for line in lines)
  assert run.lines[start + 3 : start + 6] == lines


def test_result_agrees_with_what_was_printed(plain):
  run, result = plain
  assert result['status'] == 'ok'
  assert f'{result["images_per_second_total"]:.2f}' == total(run)
  assert len(result['step_seconds']) == 25
  assert result['step_images'] == [4] * 25
  assert result['images_per_second'] == pytest.approx(100 / sum(result['step_seconds']))
  assert result['images_per_second_total'] == pytest.approx(100 / result['loop_wall_s'])
  assert result['images_per_second_total'] < result['images_per_second']
  assert result['last_loss'] < result['first_loss']
  assert (result['batch_size_global'], result['batch_size_per_device']) == (4, 2)
  assert result['flags_given']['model'] == 'lenet'
  assert result['flags']['batch_size'] == 2
  assert result['num_parameters'] > 1e6
  assert result['cpu_s'] > 0
  assert result['time_to_first_step_s'] > 0
  assert result['peak_rss_mib'] > 100
  assert result['machine']['cores'] >= 1


def test_last_line_names_the_file_and_a_command_that_runs(plain, in_process):
  run, _ = plain
  match = re.fullmatch(
    r'Result: (\S+run\.json)\. Next: python benchmarks/run\.py (.*)', run.lines[-1]
  )
  assert Path(match[1]).exists()
  following = in_process(*match[2].split(), *SMALL)
  assert following.code == 0
  assert following.facts()['Variables'] == 'parameter_server, on the CPU'


def test_nothing_names_the_machine(plain):
  _, result = plain
  assert os.uname().nodename not in json.dumps(result['machine'])


@pytest.mark.parametrize(
  ('arguments', 'variables'),
  [
    (['--variable_update=independent'], 'independent'),
    (
      ['--variable_update=parameter_server', '--local_parameter_device=gpu', '--num_gpus=3'],
      'parameter_server, on the compute devices',
    ),
    (['--local_parameter_device=cpu'], 'replicated, on the CPU'),
    (['--all_reduce_spec=collective', '--optimizer=adam'], 'replicated, on the compute devices'),
    (['--num_gpus=1', '--use_nccl=false'], 'replicated, on the compute devices'),
  ],
)
def test_every_mode_runs(in_process, arguments, variables):
  run = in_process(*SMALL, *arguments)
  assert run.code == 0
  assert run.facts()['Variables'] == variables
  assert float(total(run)) > 0


def test_fp16_runs_on_the_cpu_and_says_what_that_is_worth(in_process):
  run = in_process(*SMALL, '--use_fp16')
  assert run.code == 0
  assert run.facts()['Precision'].startswith('float16, loss scale 128 (on CPU many times slower')


def test_forward_only_updates_nothing(in_process):
  run = in_process(*SMALL, '--forward_only', '--display_every=1')
  assert run.code == 0
  assert run.facts()['Mode'] == 'forward only'
  assert 'Optimizer' not in run.facts()
  losses = {STEP.fullmatch(line)[5] for line in step_lines(run)}
  assert len(losses) == 1  # the same batch through the same weights


def test_without_warm_up_the_first_step_counts_and_the_header_says_so(in_process):
  run = in_process('--model=lenet', '--num_batches=2', '--num_warmup_batches=0')
  assert run.code == 0
  assert 'the first timed step traces and compiles' in run.facts()['Warm-up']
  assert 'Running warm up' not in run.lines
  assert float(total(run)) > 0


def test_a_loss_that_is_no_number_stops_the_run_with_its_step(in_process, tmp_path):
  path = tmp_path / 'run.json'
  run = in_process(
    '--model=lenet',
    '--init_learning_rate=1e10',
    '--num_warmup_batches=5',
    f'--train_dir={tmp_path}/train',
    f'--result_json={path}',
  )
  assert re.search(r'the loss is (nan|inf) in step \d', one_line(run, 1))
  result = results.read(str(path))
  assert result['status'] == 'failed'
  assert 'the loss is' in result['reason']
  assert not set(results.THROUGHPUT) & set(result)
  assert not list(tmp_path.glob('train/*'))  # no checkpoint of broken weights


def test_an_interrupt_ends_the_run_and_leaves_a_failed_result(tmp_path):
  path = tmp_path / 'run.json'
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'benchmarks.run',
      '--device=cpu',
      '--model=lenet',
      '--num_batches=1000000',
    ]
    + [f'--result_json={path}'],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    # A shell's background job, as these tests may be, ignores it, and so would all its children.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )
  while not STEP.fullmatch(process.stdout.readline().rstrip()):
    assert process.poll() is None
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 130
  assert errors.strip() == 'interrupted'
  result = results.read(str(path))
  assert (result['status'], result['reason']) == ('failed', 'KeyboardInterrupt')


def test_a_reader_that_leaves_early_is_no_fault():
  process = started(*SMALL)
  process.stdout.readline()
  process.stdout.close()
  assert 'Traceback' not in process.stderr.read()
  process.wait(timeout=60)


def test_progress_is_shown_on_a_terminal_and_kept_out_of_stdout():
  ours, theirs = os.openpty()
  process = started('--model=lenet', '--num_batches=30', stderr=theirs)
  os.close(theirs)
  output, _ = process.communicate(timeout=60)
  shown = os.read(ours, 100_000).decode(errors='replace')
  os.close(ours)
  assert process.returncode == 0
  assert 'steps' in shown and '\x1b[' in shown
  assert '\x1b' not in output
  assert len([line for line in output.splitlines() if STEP.fullmatch(line)]) == 4


def test_the_table_of_models_needs_no_tensorflow():
  program = (
    'import sys; from benchmarks import run; code = run.main(["--model=list"]); '
    'assert "tensorflow" not in sys.modules; sys.exit(code)'
  )
  done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].split() == ['model', 'parameters', 'GFLOP/image', 'pixels', 'batch']
  (resnet,) = (line.split() for line in lines if line.startswith('resnet50 '))
  assert resnet[:2] == ['resnet50', '25,557,032']


@pytest.mark.parametrize(
  ('arguments', 'fact'),
  [
    (['--precision=bf16'], ('Precision', 'bfloat16 (on CPU many times slower')),
    (['--accumulate=2', '--batch_size=4'], ('Computed', 'in 2 parts a device')),
    (['--xla', '--num_gpus=1'], ('Computed', 'towers compiled by XLA')),
    (['--steps_per_call=2', '--num_warmup_batches=2'], ('Computed', '2 steps a call')),
    (
      ['--optimizer=rmsprop', '--gradient_clip=1'],
      (
        'Optimizer',
        'rmsprop (rmsprop_decay 0.9, rmsprop_momentum 0.9, rmsprop_epsilon 1, elements',
      ),
    ),
    (['--gradient_clip_norm=1', '--variable_update=independent'], ('Optimizer', 'momentum (mom')),
    (['--learning_rate_schedule=cosine'], ('Learn. rate', '0.0015625 (0.1 * 4 / 256), cosine')),
    (['--learning_rate_schedule=resnet'], ('Learn. rate', '0.002 (0.128 * 4 / 256), a tenth from')),
    (['--local_parameter_device=gpu'], ('Variables', 'replicated, on the compute devices')),
    (['--forward_only', '--xla', '--steps_per_call=2', '--num_warmup_batches=2'], ('Mode', 'forw')),
  ],
  ids=str,
)
def test_options_of_the_step_run_and_are_said(arguments, fact, in_process):
  run = in_process(*SMALL, *arguments)
  assert run.code == 0, run.errors
  assert run.facts()[fact[0]].startswith(fact[1])
  assert float(total(run)) > 0


def test_a_tower_that_xla_can_not_compile_is_refused_with_the_op(in_process, monkeypatch, tmp_path):
  (tmp_path / 'strings_model.py').write_text(
    'import tensorflow as tf, hpm\n'
    'def network(b, images):\n'
    '  lengths = tf.strings.length(tf.strings.as_string(images))\n'
    "  return b.dense('logits', b.flatten(tf.cast(lengths, tf.float32)), 10)\n"
    'def create():\n'
    "  return hpm.models.Model(network, name='s', image_shape=(8, 8, 3), num_classes=10)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  run = in_process('--model=strings_model:create', '--num_batches=2', '--xla')
  message = one_line(run, 1)
  assert message.startswith('error: XLA can not compile the tower, drop --xla: ')
  assert 'AsString' in message


def test_a_dynamic_loss_scale_skips_steps_and_goes_on(in_process, tmp_path):
  path = tmp_path / 'run.json'
  run = in_process(
    *SMALL,
    '--use_fp16',
    '--fp16_enable_auto_loss_scale',
    f'--fp16_loss_scale={2**24}',
    f'--result_json={path}',
  )
  assert run.code == 0, run.errors
  result = results.read(str(path))
  assert 0 < result['skipped_steps'] <= 4
  assert result['loss_scale'] < 2**24


def test_steps_of_one_call_share_its_time(in_process, tmp_path):
  path = tmp_path / 'run.json'
  run = in_process(
    *('--model=trivial', '--num_batches=8', '--steps_per_call=4', '--display_every=1'),
    f'--result_json={path}',
  )
  assert run.code == 0, run.errors
  result = results.read(str(path))
  assert result['num_warmup_steps'] == 4
  seconds = result['step_seconds']
  assert len(step_lines(run)) == len(seconds) == 8
  assert seconds[:4] == [seconds[0]] * 4
  assert seconds[4:] == [seconds[4]] * 4
  assert sum(seconds) <= result['loop_wall_s']


def test_training_accuracy_is_two_more_columns(in_process):
  run = in_process(*SMALL, '--print_training_accuracy', '--display_every=1')
  assert 'Step\tImg/sec\ttotal_loss\ttop_1_accuracy\ttop_5_accuracy' in run.lines
  lines = [line.split() for line in run.lines if re.match(r'\d+\timages/sec', line)]
  assert [len(words) for words in lines] == [11] * 4
  for words in lines:
    top_1, top_5 = map(float, words[9:])
    assert 0 <= top_1 <= top_5 <= 1 and (top_1 * 4) % 1 == 0


def test_the_base_loss_is_without_the_decay(in_process):
  losses = {}
  for kind in ('base_loss', 'total_loss'):
    run = in_process(*SMALL, '--weight_decay=1', f'--loss_type_to_report={kind}')
    assert f'Step\tImg/sec\t{kind}' in run.lines
    losses[kind] = float(STEP.fullmatch(step_lines(run)[0])[5])
  assert losses['total_loss'] > losses['base_loss'] + 10  # half the squared norm of all kernels


def test_doubts_about_the_measurement_are_warnings(in_process, tmp_path):
  path = tmp_path / 'run.json'
  run = in_process(
    '--model=lenet', '--num_batches=2', '--num_warmup_batches=0', f'--result_json={path}'
  )
  warnings = results.read(str(path))['warnings']
  assert 'no warm-up: the first timed step traced and compiled' in warnings
  assert [line for line in run.lines if line.startswith('Warning: ')] == [
    f'Warning: {warning}' for warning in warnings
  ]


# Real images


@pytest.fixture(scope='module')
def trained(command_line, sample, tmp_path_factory):
  """Two epochs on real images with a checkpoint, in a process of its own: (run, directory)."""
  directory = tmp_path_factory.mktemp('trained') / 'train'
  run = command_line(
    '--device=cpu',
    '--model=lenet',
    f'--data_dir={sample}',
    '--batch_size=5',
    '--num_epochs=2',
    f'--train_dir={directory}',
  )
  assert run.code == 0, run.errors
  return run, directory


def test_epochs_end_with_the_last_image_and_a_checkpoint(trained):
  run, directory = trained
  assert run.facts()['Num epochs'] == '2.00 of 64 images'
  # 128 images, 10 a step: 13 steps, the last of 8 images, where one device has 5 and one 3.
  assert [path.name for path in directory.iterdir()] == ['ckpt-13']
  assert f'Saved {directory}/ckpt-13' in run.lines
  assert run.lines[-1].endswith('--eval=true')


def test_evaluation_counts_every_image_once(trained, sample, in_process, tmp_path):
  _, directory = trained
  path = tmp_path / 'run.json'
  flags = (f'--data_dir={sample}', f'--train_dir={directory}', '--model=lenet', '--eval')
  run = in_process(*flags, '--batch_size=3', f'--result_json={path}')
  assert run.code == 0
  assert run.facts()['Mode'] == 'evaluation'
  assert f'Successfully loaded model from {directory}/ckpt-13.' in run.lines
  (line,) = (line for line in run.lines if line.startswith('Accuracy'))
  match = re.fullmatch(
    r'Accuracy @ 1 = ([01]\.\d{4}) Accuracy @ 5 = ([01]\.\d{4}) \[16 examples\]', line
  )
  assert len(line.split()) == 12
  accuracy = results.read(str(path))['accuracy']
  assert accuracy['num_samples'] == 16
  assert f'{accuracy["top_1"]:.4f}' == match[1]
  assert (accuracy['top_1'] * 16) % 1 == 0
  assert float(total(run)) > 0
  # Neither the batch nor the number of devices changes what is counted.
  other = in_process(*flags, '--batch_size=7', '--num_gpus=1')
  assert line in other.lines


def test_training_goes_on_where_the_checkpoint_ends(trained, sample, in_process, tmp_path):
  _, directory = trained
  copy = tmp_path / 'train'
  shutil.copytree(directory, copy)
  flags = ('--model=lenet', f'--data_dir={sample}', f'--train_dir={copy}', '--batch_size=5')
  again = in_process(*flags, '--num_epochs=2', f'--result_json={tmp_path}/again.json')
  assert again.code == 0
  assert again.lines[-1].startswith('Nothing to do: the checkpoint in --train_dir=')
  assert again.lines[-1].endswith('128 images, all of --num_epochs=2; raise that to go on')
  result = results.read(str(tmp_path / 'again.json'))
  assert result['status'] == 'finished' and '128 images' in result['reason']
  run = in_process(*flags, '--num_epochs=3', '--variable_update=parameter_server')
  assert run.code == 0
  assert 'Going on after step 13, 128 images' in run.lines
  assert sorted(path.name for path in copy.iterdir()) == ['ckpt-13', 'ckpt-20']  # 64 more images


def test_a_checkpoint_of_another_model_is_refused(trained, sample, in_process):
  _, directory = trained
  run = in_process('--model=trivial', f'--data_dir={sample}', f'--train_dir={directory}', '--eval')
  message = one_line(run, 2)
  assert 'lenet' in message and 'trivial' in message


def test_evaluation_without_a_checkpoint_is_refused(sample, in_process, tmp_path):
  run = in_process('--model=lenet', f'--data_dir={sample}', f'--train_dir={tmp_path}', '--eval')
  assert 'has no checkpoint' in one_line(run, 2)


def test_epochs_that_are_all_warm_up_are_refused(sample, in_process):
  run = in_process(
    '--model=lenet', f'--data_dir={sample}', '--num_epochs=1', '--num_warmup_batches=100'
  )
  assert 'nothing would be measured' in one_line(run, 2)


def test_an_empty_data_directory(in_process, tmp_path):
  assert str(tmp_path) in one_line(in_process(f'--data_dir={tmp_path}'), 1)


def test_a_shard_of_zero_bytes(in_process, sample, tmp_path):
  data = shutil.copytree(sample, tmp_path / 'data')
  shard = sorted(data.glob('train-*'))[0]
  shard.write_bytes(b'')
  assert shard.name in one_line(in_process(f'--data_dir={data}', *SMALL), 1)


def test_a_damaged_record_ends_the_run_with_its_file_and_number(in_process, sample, tmp_path):
  data = shutil.copytree(sample, tmp_path / 'data')
  shard = sorted(data.glob('train-*'))[-1]
  content = bytearray(shard.read_bytes())
  content[-1000] ^= 0xFF  # in the last record's image, where its checksum finds it
  shard.write_bytes(content)
  path = tmp_path / 'run.json'
  run = in_process('--model=lenet', f'--data_dir={data}', '--num_epochs=1', f'--result_json={path}')
  assert run.code == 1
  assert run.errors.startswith('error: ') and run.errors.count('\n') == 1
  assert shard.name in run.errors and 'record' in run.errors
  assert RULE not in run.lines
  assert results.read(str(path))['status'] == 'failed'
