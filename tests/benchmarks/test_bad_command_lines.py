"""Command lines that can't work: each ends at once, in one line that quotes what is wrong.

A line of `REFUSED` is a command, its arguments, and the gist of what it says. {d} is the empty
directory in which it runs, {s} the sample data set, {f} a file that is nothing. Exit code 2, but 1
where the files that it reads are at fault (`FAILED`).
"""

import importlib
import os
from pathlib import Path
import re
import resource
import shutil
import stat
import subprocess
import sys
import time

import pytest

from hpm import writable
from hpm.errors import UsageError
from tests.benchmarks.conftest import ROOT, environment

CAR = '--variable_update=collective_all_reduce'
PS = '--variable_update=parameter_server'
BIG = '99999999999999999999'
REFUSED = {
  'run': {
    # help, and what is no flag
    '--help=nonsense': '--help=nonsense: help takes no value',
    '-x': "unknown flag '--x'",
    '---x': '--help lists all',
    '--no': "unknown flag '--no'",
    '--nomodel': "unknown flag '--nomodel'",
    '--=3': "unexpected '--=3'",
    '- x': "unexpected '-'",
    'train': "unexpected 'train'",
    '--batchsize=3': 'did you mean --batch_size',
    '--BATCH_SIZE=3': "unknown flag '--BATCH_SIZE'",
    '--ein_schöner_name=1': 'unknown flag',
    '--flagfile=/dev/zero': '--flagfile=/dev/zero: a regular file',
    '--flagfile={d}': 'a regular file',
    # model and batch
    '--model=nope': "unknown --model 'nope'",
    '--model=': "unknown --model ''",
    '--model=résnet50': 'did you mean resnet50',
    '--model=../../etc/passwd': 'unknown --model',
    '--model=keras:': "unknown --model 'keras:'",
    '--model=a:b:c': "unknown --model 'a:b:c'",
    '--model=keras:Nope': "unknown model of keras.applications 'Nope'",
    '--model=nomodule:f': 'there is no module nomodule',
    '--model=os.path:nothing': "unknown function of os.path 'nothing'",
    '--batch_size=1e3': '--batch_size=1e3: a whole number',
    '--batch_size=': '--batch_size=: a whole number',
    f'--batch_size=-{BIG}': f'--batch_size=-{BIG}: at least 1',
    f'--batch_size={BIG}': 'at most 2147483647',
    '--batch_size=300000 --model=lenet': 'GiB of memory at least for lenet',
    '--batch_size=1000000 --model=lenet': 'lower --batch_size',
    '--batch_size=1000000 --model=lenet --forward_only': 'lower --batch_size',
    '--image_size=30000 --model=resnet50': '--image_size',
    '--num_classes=2147483647 --model=lenet': '--num_classes',
    '--image_size=0': '--image_size=0: give pixels',
    '--image_size=-1': '--image_size=-1: give pixels',
    '--image_size=224x224': '--image_size=224x224: give pixels',
    f'--image_size={BIG}': 'at most 65535 pixels',
    '--image_size=0:128;0:129': 'rising epochs',
    '--image_size=1;2': 'give pixels',
    '--num_classes=0': '--num_classes=0: 1 or more',
    '--num_classes=-5': '--num_classes=-5: 1 or more',
    # devices
    '--num_gpus=99': '99 logical CPU devices wanted: at most 64',
    '--num_gpus=257': '--num_gpus=257: at most 256',
    '--num_gpus=1.5': '--num_gpus=1.5: a whole number',
    '--num_gpus=-1': '--num_gpus=-1: at least 1',
    '--device=': "unknown --device ''",
    '--device=cuda': "unknown --device 'cuda'",
    # steps
    '--num_batches=-1': '--num_batches=-1: at least 1',
    '--num_batches=nan': '--num_batches=nan: a whole number',
    '--num_epochs=nan': '--num_epochs=nan: a finite number',
    '--num_epochs=1e400': '--num_epochs=inf: a finite number',
    '--num_epochs=1e308': '--num_epochs=1e+308: at most',
    '--num_runs=-1': '--num_runs=-1: 1 or more',
    '--num_runs=2147483648': 'at most 2147483647',
    '--tf_random_seed=99999999999': 'at most 2147483647',
    '--steps_per_call=-1': '--steps_per_call=-1: 1 or more',
    '--steps_per_call=10001': '--steps_per_call=10001: at most 10000',
    '--accumulate=-1': '--accumulate=-1: 1 or more',
    '--display_every=-1': '--display_every=-1: 1 or more',
    '--display_perf_ewma=nan': '--display_perf_ewma=nan',
    '--usd_per_hour=nan': '--usd_per_hour=nan',
    '--usd_per_hour=-1': '--usd_per_hour=-1',
    # variables and all-reduces
    '--variable_update=nomodule:f': "no module 'nomodule'",
    '--variable_update=os:nothing': "'os' has no 'nothing'",
    '--variable_update=': "unknown --variable_update ''",
    f'--all_reduce_spec=xring#{BIG}': 'at most 4096',
    '--all_reduce_spec=xring#²': '#² after xring',
    '--all_reduce_spec=xring#-1': '#-1 after xring',
    f'--all_reduce_spec=copy:{BIG}g:xring': 'below 2**63 bytes',
    '--all_reduce_spec=copy/copy/copy': '3 levels',
    '--all_reduce_spec=copy:32k:xring:16k:copy': 'larger than the one before',
    '--all_reduce_spec=:': "did you mean|unknown algorithm ''|must follow",
    '--agg_small_grads_max_bytes=1e9': "size '1e9'",
    '--agg_small_grads_max_bytes=': "size ''",
    '--gradient_repacking=9999999999': 'at most 2147483647',
    '--hierarchical_copy --network_topology=/dev/zero': "unknown --network_topology '/dev/zero'",
    '--local_parameter_device=gpu:99': 'the last is gpu:1',
    '--local_parameter_device=gpu:-1': "unknown --local_parameter_device 'gpu:-1'",
    # optimizer and schedule
    '--optimizer=': "unknown --optimizer ''",
    '--momentum=inf': '--momentum=inf',
    '--weight_decay=nan': '--weight_decay=nan',
    '--init_learning_rate=-1': '--init_learning_rate=-1',
    '--piecewise_learning_rate_schedule=': 'rates at both ends',
    '--piecewise_learning_rate_schedule=1;1;1e400': 'rates at both ends',
    '--piecewise_learning_rate_schedule=;;;': 'rates at both ends',
    '--gradient_clip=nan': '--gradient_clip=nan',
    '--label_smoothing=2': '--label_smoothing=2',
    '--weight_average_decay=1.5': '--weight_average_decay=1.5',
    '--num_learning_rate_warmup_epochs=nan': '--num_learning_rate_warmup_epochs=nan',
    '--learning_rate_schedule=polynomial --polynomial_power=nan': '--polynomial_power=nan',
    '--optimizer=rmsprop --rmsprop_decay=2': '--rmsprop_decay=2',
    '--optimizer=adam --adam_beta2=1': '--adam_beta2=1',
    '--precision=fp16 --fp16_loss_scale=nan': '--fp16_loss_scale=nan',
    '--use_fp16=': '--use_fp16=: true or false',
    # data
    '--data_name=nope': "unknown --data_name 'nope'",
    '--data_dir={s} --pipeline=nope': "unknown --pipeline 'nope'",
    '--data_dir={s} --bad_records=limit:-1': '--bad_records=limit:-1',
    '--data_dir={s} --data_service=:1': 'no address',
    '--data_dir={s} --data_service=a:99999': 'a port lies in',
    '--data_dir={s} --data_name=tfds:../x': 'is no name of a data set',
    '--data_dir={s} --data_name=tfds:': 'say which one',
    # places
    '--train_dir=/proc/x': '--train_dir=/proc/x: /proc can not be written to',
    '--result_json=/proc/x.json': '--result_json=/proc/x.json: /proc can not',
    '--result_json=/proc/a/b.json': '/proc can not be written to',
    '--result_json=/dev/null': 'is no regular file',
    '--result_json={d}/': 'is a directory',
    '--result_json={f}/x/y.json': 'is a file, where a directory is needed',
    '--result_json={d}/' + 300 * 'x': 'longer than 255 bytes',
    '--train_dir={d}/' + 300 * 'x' + '/y': 'longer than 255 bytes',
    '--trace_file=/proc/x': '--trace_file=/proc/x: /proc can not',
    '--tfprof_file=/sys/x': '--tfprof_file=/sys/x: /sys can not',
    '--graph_file=/sys/x': '/sys can not be written to',
    '--profile_dir=/sys/x': '/sys can not be written to',
    '--tensorboard_dir=/proc/x': '/proc can not be written to',
    '--curve_file=/proc/x.png': '/proc can not be written to',
    '--train_dir={f}': 'is a file, where a directory is needed',
    '--train_dir={d}/t --save_model_secs=inf': '--save_model_secs=inf: a finite number',
    '--train_dir={d}/t --save_model_secs=nan': '--save_model_secs=nan',
    '--eval --train_dir={d}/nowhere --data_dir={s}': 'is no directory',
    '--eval --train_dir={d} --data_dir={s}': 'has no checkpoint',
    # evaluation
    '--data_name=digits --eval_during_training_every_n_epochs=nan': 'a finite number',
    '--data_name=digits --eval_during_training_at_specified_steps=1,,2': 'numbers above 0',
    '--data_name=digits --eval_during_training_at_specified_epochs=inf': 'numbers above 0',
    # presets and recipes
    '--preset=nope': "unknown platform of --preset 'nope'",
    '--preset=dgx1_p100/nope': "'nope'",
    '--recipe=nope': "unknown --recipe 'nope'",
    '--recipe=': "unknown --recipe ''",
    # clusters
    f'--worker_hosts=a:1,,b:1 --task_index=0 {CAR}': 'an entry between the commas is empty',
    f'--worker_hosts=a:1, --task_index=0 {CAR}': 'an entry between the commas is empty',
    f'--worker_hosts=a:1 --ps_hosts=,b:1 --task_index=0 {PS}': 'between the commas is empty',
    f'--worker_hosts=, --task_index=0 {CAR}': 'between the commas is empty',
    '--worker_hosts= --task_index=0': 'at least one worker',
    f'--worker_hosts=n[0-99999999999]:1 --task_index=0 {CAR}': 'at most 10000 hosts',
    f'--worker_hosts=n[0-999][0-999]:1 --task_index=0 {CAR}': 'at most 10000',
    f'--worker_hosts=http://a:1 --task_index=0 {CAR}': 'without http://',
    f'--worker_hosts=[::g]:1 --task_index=0 {CAR}': 'is no address',
    f'--worker_hosts=a:0 --task_index=0 {CAR}': 'a port lies in',
    f'--worker_hosts=a:1 --task_index=2147483647 {CAR}': "no task 2147483647 of job 'worker'",
    f'--worker_hosts=a:1,b:1 --task_index=0 {CAR} --cluster_timeout_s=inf': 'inf|not known',
    f'--local_cluster=workers:999999999 {CAR}': 'free ports',
    '--heartbeat_timeout_s=nan': '--heartbeat_timeout_s=nan',
    '--cluster_resolver=slurm --cluster_port=0': 'no task of a Slurm step',
    # what does not go together
    '--dry_run --eval': '--eval=true has no effect with --dry_run',
    '--diagnose --dry_run': 'does not go with --diagnose',
    '--diagnose --num_runs=2': 'does not go with --diagnose',
    '--diagnose --model=lenet --batch_size=1000000': 'GiB of memory',
  },
  'allreduce': {
    '--num_gpus=0': '--num_gpus=0',
    '--num_gpus=99999999': 'at most 256 devices',
    '--sets=nope': '--sets=nope',
    '--specs=nope': 'nope',
    '--min_bytes=x': "size 'x'",
    '--min_bytes=1M --max_bytes=1k': '1M',
    '--max_bytes=99999999999T': 'below 2**63',
    '--rounds=0': '--rounds=0',
    '--json=/proc/x.json': '/proc can not be written to',
    '--device=tpu': '--device=tpu',
    'x': "unexpected 'x'",
  },
  'cluster': {
    '--model=nope': "unknown --model 'nope'",
    '--num_workers=1': '--num_workers=1',
    '--num_ps=0': '--num_ps=0',
    '--contenders=nope': "unknown --contenders 'nope'",
    '--backprop_ms=nan': '--backprop_ms=nan: a finite number',
    '--json=/proc/x.json': '/proc can not be written to',
  },
  'cost': {'--usd_per_hour=nan': 'nan', '--usd_per_hour=-1': '-1', '--epochs=inf': 'inf'},
  'data_service': {
    '': '--address is missing',
    '--address=x --num_workers=1': "'x' of --address is no address",
    '--address=127.0.0.1:99999 --num_workers=1': 'a port lies in',
    '--address=127.0.0.1:5050 --num_workers=0': '--num_workers=0',
    '--address=127.0.0.1:5050 --num_workers=99999999': 'free ports',
    '--address=127.0.0.1:5050 --workers=a:1,,b:2': 'between the commas is empty',
    '--address=203.0.113.9:5050 --num_workers=1': 'no address of this machine',
  },
  'mirrored': {
    '--num_gpus=0': '--num_gpus=0',
    '--image_size=1': '--image_size=1',
    '--image_size=9999999': 'GiB of memory at least',
    '--batch_size=99999999': 'GiB of memory at least',
    '--json={d}': 'is a directory',
    '--num_gpus=9999': 'at most 256',
  },
  'model_step': {
    '--model=nope': 'nope',
    '--batch_size=0': '--batch_size=0',
    '--batch_size=99999999': 'GiB of memory at least',
    '--pairs=0': '--pairs=0',
    '--json=/proc/x.json': '/proc can not be written to',
  },
  'parity': {
    '--model=nope': 'nope',
    '--optimizer=nope': 'nope',
    '--learning_rate=nan': '--learning_rate=nan',
    '--tolerance=nan': '--tolerance=nan',
    '--only=nothing_like_it': 'nothing_like_it',
    '--json=/proc/x.json': '/proc can not be written to',
    '--batch_size=99999999': 'GiB of memory at least',
  },
  'startup': {
    '--models=nope': "unknown --models 'nope'",
    '--models=': '--models= is empty',
    '--counts=x': '--counts=x',
    '--traced=-1': '--traced=-1',
    '--manager=nope': "unknown --manager 'nope'",
    '--json=/proc/x': '/proc can not be written to',
  },
  'suite': {
    '--platform=nope': "unknown --platform 'nope'",
    '--models=nope': "unknown --models 'nope'",
    '--max_minutes=nan': '--max_minutes=nan',
    '--out=/proc/x': '/proc can not be written to',
    'x': "unexpected 'x'",
  },
  'sweep': {
    '': 'nothing varies',
    '--batch_size=0,1': '--batch_size=0',
    '--nope=1,2': "unknown flag '--nope'",
    '--model=nope,lenet': "unknown --model 'nope'",
  },
  'input': {
    '': 'give --data_dir=DIR, or --corpus',
    '--nope': '--nope',
    '--batch_size=0 --data_dir={s}': '--batch_size=0',
    '--seconds=nan --data_dir={s}': '--seconds=nan',
    '--cores=x --data_dir={s}': '--cores=x',
    '--json=/proc/x --data_dir={s}': '/proc can not be written to',
  },
  'plan': {
    '--num_gpus=999999': 'at most 256',
    '--model=nope': "unknown --model 'nope'",
    '--result_json=x.json': 'no effect with --dry_run',
  },
  'doctor': {
    '': '--data_dir',
    '--data_dir={s} --num_rounds=0': '--num_rounds=0',
    '--data_dir={s} --num_rounds=x': "'x'",
  },
  'gpu_check': {'--nope': '--nope', '--one=nope': "'nope'", '--out=/proc/x': '/proc can not'},
  'dali_input': {
    '': '--data_dir',
    '--data_dir={s} --batch_size=0': '--batch_size=0',
    '--data_dir={s} --image_size=-1': '--image_size=-1',
    '--data_dir={s} --result_json=/proc/x': '/proc can not be written to',
  },
  'corpus.__main__': {'': 'OUT', '{d}/c --num_images=0': '--num_images=0'},
  'hpm.pipelines.__main__': {
    '': 'COMMAND',
    'nope': "unknown command 'nope'",
    'doctor': 'DIR',
    'doctor {s} --splits=nope': "'nope'",
    'doctor {s} --num_classes=0': 'num_classes=0',
    'doctor {s} --num_classes=x': "'x'",
    'doctor {s} --workers=0': 'num_workers=0',
    'doctor {s} --json=/proc/x': '/proc can not be written to',
    'convert {s} {d}/o --format=nope': "unknown format 'nope'",
    'convert {s} {d}/o --format=raw --num_shards=0': 'num_shards=0',
    'convert {s} {d}/o --format=raw --num_workers=0': 'num_workers=0',
    'convert {s} {d}/o --format=raw --bad_records=x': "bad_records='x'",
    'convert {s} {d}/o --format=raw --splits=nope': "'nope'",
    'convert {s} /proc/x --format=raw': '/proc can not be written to',
    'index {s} --out=/proc/x': '/proc can not be written to',
    'parity {s} --split=nope': "unknown split 'nope'",
    'parity {s} --num_images=0': 'num_images=0',
    'parity {s} --out=x.nope': 'ends in .png, .jpg',
    'sample': '--out',
    'sample --out=/proc/x': '/proc can not be written to',
    'sample --out={d}/s --num_images=0': 'num_images=0',
    'sample --out={d}/s --num_images=x': "'x'",
    'sample --out={f}': 'is a file',
    'show {s}': '--out',
    'show {s} --out=x.nope': 'ends in .png, .jpg',
    'show {s} --out={d}/new/x.png --num_images=0': 'num_images=0',
    'show {s} --out=x.png --num_images=99999999': 'at most 134217728',
    'show {s} --out=x.png --num_views=-1': 'num_views=-1',
    'show {s} --out=x.png --image_size=99999': 'at most 134217728',
    'show {s} --out=x.png --split=nope': "unknown split 'nope'",
    'compile x': 'x',
  },
}
FAILED = {
  'run': {
    '--data_dir={d}/nowhere': '--data_dir={d}/nowhere does not exist',
    '--data_dir=': '--data_dir= does not exist',
    '--data_dir={f}': 'is a file',
    '--data_dir={d}': 'holds no TFRecords',
    '--flagfile=/proc/self/mem': 'Input/output error',
    '--data_dir={s} --data_name=raw': 'holds no train-*-of-*.raw',
    '--data_dir={s} --data_name=cifar10': 'cifar10|data_batch',
    '--data_dir={s} --data_name=tfds:mnist': 'tfds:mnist is not prepared',
  },
  'cost': {
    '{d}/nowhere.json --usd_per_hour=1': 'nowhere.json is no result',
    '/dev/zero --usd_per_hour=1': 'not a regular file',
    '{f} --usd_per_hour=1': 'is no result',
    '{d} --usd_per_hour=1': 'is no result',
  },
  'doctor': {'--data_dir={d}/nowhere': 'does not exist'},
  'dali_input': {'--data_dir={d}/nowhere': 'does not exist'},
  'hpm.pipelines.__main__': {
    'doctor {d}/nowhere': 'nowhere',
    'doctor {f}': 'cannot be read: Not a directory',
    'convert {d}/nowhere {d}/o --format=raw': 'nowhere',
    'index {d}': 'no files match',
    'index {s} --check --out={d}/idx': 'has no index',
  },
}
CASES = [
  pytest.param(command, arguments, code, gist, id=f'{command.partition(".__")[0]} {arguments[:60]}')
  for code, table in ((2, REFUSED), (1, FAILED))
  for command, lines in table.items()
  for arguments, gist in lines.items()
]


@pytest.fixture
def place(tmp_path, monkeypatch):
  """An empty directory, which is also the current one; beside it a file that is nothing."""
  directory, file = tmp_path / 'here', tmp_path / 'file'
  directory.mkdir()
  file.write_text('nothing\n')
  monkeypatch.chdir(directory)
  return directory


def words(arguments, place, sample):
  names = {'{d}': str(place), '{f}': str(place.parent / 'file'), '{s}': str(sample)}
  for name, path in names.items():
    arguments = arguments.replace(name, path)
  return arguments.split()


def written(place):
  return [str(path) for path in place.parent.rglob('*') if path.name not in ('here', 'file')]


def check(code, expected, out, errors, gist, place):
  assert code == expected, errors
  assert out == ''
  assert errors.endswith('\n') and errors.count('\n') == 1, errors
  assert 'Traceback' not in errors
  pattern = '|'.join(re.escape(part.replace('{d}', str(place))) for part in gist.split('|'))
  assert re.search(pattern, errors), errors
  assert written(place) == []


@pytest.mark.parametrize(('command', 'arguments', 'code', 'gist'), CASES)
def test_what_can_not_work_ends_at_once_in_one_line(
  command, arguments, code, gist, place, sample, capfd
):
  module = command if command.startswith('hpm.') else f'benchmarks.{command}'
  given = words(arguments, place, sample)
  if command == 'run' and '--device' not in arguments:
    given.append('--device=cpu')
  main = importlib.import_module(module).main
  capfd.readouterr()
  begun = time.process_time()
  found = main(given)
  seconds = time.process_time() - begun
  captured = capfd.readouterr()
  check(found, code, captured.out, captured.err, gist, place)
  assert seconds < 5


def test_there_are_enough_of_them():
  assert len(CASES) >= 150
  assert len({(case.values[0], case.values[1]) for case in CASES}) == len(CASES)


@pytest.mark.long
@pytest.mark.parametrize(('command', 'arguments', 'code', 'gist'), CASES[::4])
def test_the_same_in_processes_of_their_own(command, arguments, code, gist, place, sample):
  module = command if command.startswith('hpm.') else f'benchmarks.{command}'
  given = words(arguments, place, sample)
  if command == 'run' and '--device' not in arguments:
    given.append('--device=cpu')
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, '-m', module.removesuffix('.__main__'), *given],
    env={**environment(), 'PYTHONPATH': str(ROOT)},
    cwd=place,
    capture_output=True,
    text=True,
    timeout=60,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  check(done.returncode, code, done.stdout, done.stderr, gist, place)
  assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8


# Places


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 256 KiB."""
  directory = tmp_path / 'disk'
  directory.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', str(directory)]
  if (
    os.geteuid()
    or shutil.which('mount') is None
    or subprocess.run(mount, capture_output=True).returncode
  ):
    pytest.skip('mounting a file system takes root')
  yield directory
  subprocess.run(['umount', str(directory)], check=True)


def test_a_full_disk_is_noticed_before_anything_is_built(small_disk, in_process):
  (small_disk / 'filling').write_bytes(bytes(256 * 1024))
  for flag in (f'--result_json={small_disk}/x.json', f'--train_dir={small_disk}/t'):
    run = in_process(flag)
    assert run.code == 2 and run.lines == []
    assert 'No space left on device' in run.errors
  assert [path.name for path in small_disk.iterdir()] == ['filling']


def test_a_read_only_disk_is_noticed_before_anything_is_built(small_disk, in_process):
  subprocess.run(['mount', '-o', 'remount,ro', str(small_disk)], check=True)
  run = in_process(f'--result_json={small_disk}/x.json')
  assert run.code == 2 and run.lines == []
  assert 'not writable' in run.errors or 'Read-only' in run.errors


def test_a_directory_without_rights_is_refused(tmp_path):
  tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
  root = not os.geteuid()
  if root:  # for whom there are no such directories
    os.setresuid(65534, 65534, 0)
  try:
    with pytest.raises(UsageError, match='is not writable: choose another place'):
      writable.check_file('result_json', f'{tmp_path}/x.json')
  finally:
    if root:
      os.setresuid(0, 0, 0)
  assert list(tmp_path.iterdir()) == []


def test_links_lead_where_they_point(place, in_process):
  (place / 'gone').symlink_to(place / 'nowhere')
  run = in_process(f'--train_dir={place}/gone')
  assert run.code == 2 and 'leads nowhere' in run.errors
  (place / 'loop').symlink_to(place / 'loop')
  run = in_process(f'--result_json={place}/loop/x.json')
  assert run.code == 2 and 'leads nowhere' in run.errors


def test_odd_names_are_names(place, in_process):
  odd = place / 'with space, ünïcode\n[red]{0}%s'
  run = in_process(
    '--model=lenet', '--num_batches=1', '--num_warmup_batches=0', f'--result_json={odd}'
  )
  assert run.code == 0, run.errors
  assert Path(odd).is_file()
