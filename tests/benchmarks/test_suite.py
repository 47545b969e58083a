"""The suite: the page's method, rounds that can be stopped, and a page at the end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import files, flags, machine, matrix, results, suite
from benchmarks.matrix import Cell, Matrix
import hpm
from hpm.errors import UsageError
from tests.benchmarks.conftest import ROOT, environment

SMALL = Matrix('cpu', (1,), {'trivial': (2,)}, {}, 2, 1, 3)


def result(seconds=(1.0, 3.0), images=4, **changes):
  """A valid result of a run with these step times."""
  from benchmarks import loop, speed

  timed = speed.Speed()
  for value in seconds:
    timed.add(value, images)
  return {
    'schema_version': results.SCHEMA_VERSION,
    'status': 'ok',
    'mode': 'training',
    'started_at': '2026-12-01T00:00:00+00:00',
    'command': [],
    'flags_given': {},
    'flags': {},
    'machine': machine.describe() | {'git_revision': 'abc', 'cpu': 'Some CPU'},
    **loop.throughput(timed),
    'images_per_second_total': 1.0,
    'loop_wall_s': sum(seconds),
    'cpu_s': 1.0,
    'peak_rss_mib': 1.0,
    'time_to_first_step_s': 1.0,
    'losses': [0.0 for _ in seconds],
    **changes,
  }


@pytest.fixture
def ran(monkeypatch):
  """Runs that write a result without running; gives the list of what was asked for."""
  asked = []

  def run(arguments, path, timeout_s):
    asked.append('/'.join(path.split(os.sep)[-2:]).removesuffix('.json'))
    if asked[-1] in run.failing:
      return 'out of memory'
    files.write(path, json.dumps(result()))
    return None

  run.failing = set()
  asked_of = run
  monkeypatch.setattr('benchmarks.cells._run', run)
  return asked, asked_of


def options(*arguments):
  return suite.wanted(suite.parse(['--device=cpu', *arguments]))


def test_the_method_is_the_page_s(tmp_path):
  cells = options(f'--data_dir=imagenet={tmp_path}', '--num_gpus=1,2')
  assert (cells.num_runs, cells.num_warmup_batches, cells.num_batches) == (5, 10, 100)
  assert cells.batches == {
    'inception3': (64, 32),
    'resnet50': (64, 32),
    'resnet152': (64, 32),
    'alexnet': (512,),
    'vgg16': (64, 32),
  }
  listed = cells.cells()
  assert len(listed) == len(set(listed)) == 2 * 2 * (5 + 4)
  assert {cell.data for cell in listed} == {'synthetic', 'imagenet'}


def test_each_cell_has_the_configuration_of_the_page(tmp_path):
  (tmp_path / 'train-00000-of-00001').touch()
  cells = options(f'--data_dir=imagenet={tmp_path}', '--num_gpus=2')
  for cell in cells.cells():
    parsed = flags.parse(matrix.command(cell, cells))
    flags.complete(parsed, ['/CPU:0', '/CPU:1'])
    assert (parsed.model, parsed.num_gpus, parsed.batch_size) == cell[:1] + cell[1:3]
    assert (parsed.optimizer, parsed.precision) == ('sgd', 'fp32')
    assert (parsed.num_warmup_batches, parsed.num_batches, parsed.num_runs) == (10, 100, 1)
    assert (parsed.data_dir is None) == (cell.data == 'synthetic')
    update = 'replicated' if cell.model in ('alexnet', 'vgg16') else 'parameter_server'
    assert parsed.variable_update == update
  assert matrix.configuration(cells)['vgg16'] == ('replicated (without NCCL)', '–')
  assert matrix.configuration(cells)['resnet50'] == ('parameter_server', 'cpu')


def test_times_are_averaged_not_rates():
  cell = Cell('trivial', 1, 2, 'synthetic')
  done = {cell: [result(seconds=(1.0, 1.0)), result(seconds=(3.0, 3.0))]}
  (rate,) = matrix.rates_of(SMALL, done, {})
  assert rate.value == pytest.approx(16 / 8)  # the mean of 4 and 4/3 would be 2.67
  assert (rate.lowest, rate.highest) == (pytest.approx(4 / 3), pytest.approx(4.0))


def test_synthetic_data_has_the_shape_of_the_real_data_which_goes_through_the_pipeline(sample):
  made = {'batch_size': 2, 'image_size': 224, 'num_classes': 1001, 'seed': 1}
  synthetic = hpm.pipelines.create('synthetic', **made)
  real = hpm.pipelines.create('imagenet', data_dir=str(sample), split='train', **made)
  assert synthetic.dataset().element_spec == real.dataset().element_spec
  batches = [images.numpy() for images, _ in real.dataset().take(2)]
  assert (batches[0] != batches[1]).any()  # read, decoded, cut at random


def test_warm_up_is_left_out_and_each_run_is_a_process(tmp_path):
  cells = Matrix('cpu', (2,), {'trivial': (2,)}, {}, 1, 2, 3)
  matrix.prepare(str(tmp_path), cells)
  assert matrix.measure(str(tmp_path), cells, None, 600.0) == {}
  ((cell, (only,)),) = matrix.collect(str(tmp_path), cells).items()
  assert cell.name == 'trivial-2x2-synthetic'
  assert only['num_warmup_steps'] == 2 and len(only['step_seconds']) == 3
  assert only['step_images'] == [4, 4, 4]
  (rate,) = matrix.rates_of(cells, {cell: [only]}, {})
  assert rate.value == pytest.approx(12 / sum(only['step_seconds']))


def test_rounds_are_interleaved_and_the_same_command_goes_on(tmp_path, ran):
  asked, _ = ran
  cells = Matrix('cpu', (1, 2), {'trivial': (2,)}, {}, 2, 1, 3)
  matrix.prepare(str(tmp_path), cells)
  assert matrix.measure(str(tmp_path), cells, None, 600.0) == {}
  one, two = 'trivial-1x2-synthetic', 'trivial-2x2-synthetic'
  assert asked == [f'{one}/run1', f'{two}/run1', f'{one}/run2', f'{two}/run2']
  os.remove(tmp_path / 'cells' / two / 'run1.json')
  del asked[:]
  matrix.prepare(str(tmp_path), cells)
  matrix.measure(str(tmp_path), cells, None, 60.0)
  assert asked == [f'{two}/run1']


def test_a_cell_that_failed_is_left_out_with_its_reason_and_tried_again_next_time(tmp_path, ran):
  asked, run = ran
  cell = Cell('trivial', 1, 2, 'synthetic')
  run.failing.add(f'{cell.name}/run1')
  failures = matrix.measure(str(tmp_path), SMALL, None, 60.0)
  assert failures == {cell: 'out of memory'} and asked == [f'{cell.name}/run1']
  (rate,) = matrix.rates_of(SMALL, {}, failures)
  assert (rate.value, rate.note) == (None, 'out of memory')
  run.failing.clear()
  assert matrix.measure(str(tmp_path), SMALL, None, 60.0) == {}
  assert len(matrix.collect(str(tmp_path), SMALL)[cell]) == 2


def test_no_run_starts_when_time_is_up_or_when_told_to_stop(tmp_path, ran):
  asked, _ = ran
  matrix.measure(str(tmp_path), SMALL, 0.0, 60.0)
  matrix.measure(str(tmp_path), SMALL, None, 60.0, [signal.SIGTERM])
  assert asked == []


def test_a_process_that_takes_too_long_is_ended(tmp_path):
  started = time.monotonic()
  failures = matrix.measure(str(tmp_path), SMALL, None, 0.5)
  assert list(failures.values()) == ['took longer than 0 s']
  assert time.monotonic() - started < 20


def test_a_directory_of_another_matrix_is_refused(tmp_path):
  matrix.prepare(str(tmp_path), SMALL)
  with pytest.raises(UsageError, match='holds another matrix .num_runs 2, asked for 3.'):
    matrix.prepare(str(tmp_path), Matrix('cpu', (1,), {'trivial': (2,)}, {}, 3, 1, 3))


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--platform=dgx1'], "unknown --platform 'dgx1': did you mean dgx1_p100"),
    (['--models=resnet5'], "unknown --models 'resnet5'"),
    (['--data_dir=/nowhere'], '/nowhere is no directory'),
    (['--data_dir=a=.,a=.'], 'give each a name of its own'),
    (['--num_gpus=1,x'], 'numbers of devices, such as 1,2'),
    (['--docs=page.html'], 'a name that ends in .md'),
    (['--sow'], '--help shows the flags'),
    (['now'], "unexpected 'now'"),
  ],
)
def test_what_can_not_work_is_refused_in_one_line(arguments, message, capsys, tmp_path):
  assert suite.main(['--device=cpu', f'--out={tmp_path / "out"}', *arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line
  assert not os.listdir(tmp_path)


def test_charts_without_matplotlib_name_the_install_command(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  assert suite.main(['--device=cpu', f'--out={tmp_path / "out"}']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "pip install '.[report]'" in line and '--charts=false' in line


def test_a_published_platform_is_printed_without_a_run(capsys):
  assert suite.main(['--platform=ec2_k80_distributed']) == 0
  out = capsys.readouterr().out
  for text in ('Amazon EC2 p2.8xlarge', 'distributed_replicated', '2744', '1783', 'sgd'):
    assert text in out


def test_images_a_cpu_second_and_other_load_are_said():
  cell = Cell('trivial', 1, 2, 'synthetic')
  done = {cell: [result(other_load_cores=0.6), result(other_load_cores=1.0)]}
  (rate,) = matrix.rates_of(SMALL, done, {})
  assert rate.per_cpu_s == pytest.approx(16 / 2)
  cores = machine.describe()['cores']
  said = suite.load(done)
  assert (f'0.8 of {cores} cores busy on average, 1.0 at most' in said) == (0.1 * cores < 0.8)
  assert suite.load({cell: [result(other_load_cores=0.0)]}) == ''


@pytest.mark.parametrize('charts', ['true', 'false'])
def test_a_page_is_written_in_all_its_forms(tmp_path, ran, charts, capsys):
  out = tmp_path / 'out'
  docs = tmp_path / 'docs' / 'page.md'
  arguments = [f'--out={out}', f'--docs={docs}', f'--charts={charts}', '--quick']
  assert suite.main(['--device=cpu', f'--data_dir=some={tmp_path}', *arguments]) == 0
  printed = capsys.readouterr().out
  assert 'Run 1, 1 of' in printed and f'Written: {out}' in printed
  page = docs.read_text()
  assert page == (out / 'benchmarks.md').read_text().replace('benchmarks/', 'page/')
  assert '`python -m benchmarks.suite --device=cpu --data_dir=some=DIR' in page
  assert str(tmp_path) not in page
  charted = page.count('](page/')
  assert (charted > 5) == (charts == 'true')
  drawn = os.listdir(out / 'benchmarks') if charts == 'true' else []
  assert len(drawn) == charted
  assert ('<svg' in (out / 'benchmarks.html').read_text()) == (charts == 'true')
  kept = json.loads((out / 'suite.json').read_text())
  assert len(kept['rates']) == 2 * 2 * (5 + 2)
  assert kept['rates'][0]['value'] == 2.0


@pytest.mark.long
def test_the_whole_from_the_command_line_and_after_a_sigterm(tmp_path, sample):
  command = [
    *(sys.executable, '-m', 'benchmarks.suite', '--quick', '--models=trivial', '--num_gpus=1'),
    *('--device=cpu', f'--data_dir=sample={sample}', f'--out={tmp_path / "out"}'),
  ]
  env = environment() | {'PYTHONPATH': str(ROOT)}
  process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
  assert 'Run 1, 1 of 2: trivial-1x4-synthetic' in process.stdout.readline()
  process.terminate()
  process.communicate(timeout=60)
  assert process.returncode == 143
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  first = done.stdout.splitlines()[0]
  assert 'Run 1, 1 of 2' not in first  # what was done is not done again
  page = (tmp_path / 'out' / 'benchmarks.md').read_text()
  assert '5 runs of 1 + 4 steps in place of 5 of 10 + 100' in page
