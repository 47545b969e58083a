"""Traces, op tables and graphs: from planted events, and from a run."""

import json

import pytest
import tensorflow as tf

from benchmarks import profiling
from benchmarks.profiling import Event


def event(name, start, duration, row='worker', place='/host:CPU', **arguments):
  return Event(name, place, row, start, duration, arguments)


PLANTED = [
  event('step', 100.0, 100.0, row='python', step_num=7, _r=1),
  event('tower_0/Call/conv:Conv2D', 110.0, 20.0),
  event('tower_1/Call/conv:Conv2D', 112.0, 30.0, row='other'),
  event('while/body/tower_0/Call/fc:MatMul', 150.0, 5.0),
  event('sum:AddN', 160.0, 4.0),
  event('ExecutorState::Process', 105.0, 90.0),
  event('kernel_x', 120.0, 8.0, 'Stream #1', '/device:GPU:1', tf_op='tower_1/Call/conv:Conv2D'),
]


def test_spans_stand_for_steps_and_towers():
  trace = profiling.chrome_trace(PLANTED)['traceEvents']
  names = {e['pid']: e['args']['name'] for e in trace if e['name'] == 'process_name'}
  spans = {
    e['name']: (e['ts'], e['dur'])
    for e in trace
    if e['ph'] == 'X' and names[e['pid']] == 'steps and towers'
  }
  assert spans == {
    'step 7': (0.0, 100.0),
    'tower_0': (10.0, 45.0),  # from 110 to 155
    'tower_1': (12.0, 30.0),  # from 112 to 142, its kernel within
  }
  assert set(names.values()) == {'steps and towers', '/host:CPU', '/device:GPU:1'}
  threads = {e['args']['name'] for e in trace if e['name'] == 'thread_name'}
  assert {'steps', 'tower_0', 'tower_1', 'worker', 'other', 'Stream #1'} <= threads


def test_the_table_adds_up_what_an_op_took_in_all_towers():
  lines = profiling.op_table(PLANTED)
  rows = [line.split() for line in lines[1:]]
  assert rows[0] == ['0.050', '74.6%', '2', '/host:CPU', 'Conv2D', 'tower_*/Call/conv']
  assert rows[1] == ['0.008', '11.9%', '1', '/device:GPU:1', 'Conv2D', 'tower_*/Call/conv']
  assert [row[4] for row in rows] == ['Conv2D', 'Conv2D', 'MatMul', 'AddN']
  assert len(rows) == 4  # neither the step nor the executor is an op


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Everything that can be written of one run: (directory, lines)."""
  import contextlib
  import io

  from benchmarks import run

  directory = tmp_path_factory.mktemp('profile')
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    code = run.main(
      [
        *('--device=cpu', '--model=lenet', '--num_batches=2'),
        f'--trace_file={directory}/new/trace.json',
        f'--tfprof_file={directory}/ops.txt',
        f'--profile_dir={directory}/profile',
        f'--graph_file={directory}/graph.pb',
        f'--result_json={directory}/run.json',
      ]
    )
  assert code == 0
  return directory, output.getvalue().splitlines()


def test_a_run_leaves_a_trace_with_its_steps_and_towers(written):
  directory, _ = written
  trace = json.loads((directory / 'new' / 'trace.json').read_text())['traceEvents']
  spans = [e['name'] for e in trace if e['ph'] == 'X']
  assert [name for name in spans if name.startswith('step ')] == ['step 2', 'step 3', 'step 4']
  assert spans.count('tower_0') == spans.count('tower_1') == 3
  assert any('tower_1/' in name and 'MatMul' in name for name in spans)
  assert min(e['ts'] for e in trace if e['ph'] == 'X') == 0.0


def test_a_run_prints_and_keeps_its_costliest_ops(written):
  directory, lines = written
  kept = (directory / 'ops.txt').read_text().splitlines()
  start = lines.index('The costliest ops of the profiled steps:') + 1
  assert lines[start : start + 21] == kept[:21]
  assert any('MatMul' in line for line in kept[:21])
  assert lines.index('Done warm up') > start  # profiled steps are not timed


def test_a_run_leaves_tensorboards_profile_and_its_graph(written):
  directory, _ = written
  assert list(directory.glob('profile/plugins/profile/*/*.xplane.pb'))
  graph = tf.compat.v1.GraphDef.FromString((directory / 'graph.pb').read_bytes())
  calls = [node for node in graph.node if node.name.startswith('tower_')]
  assert [node.device for node in calls] == ['/device:CPU:0', '/device:CPU:1']
  assert len({node.attr['f'].func.name for node in calls}) == 1
  (tower,) = {node.attr['f'].func.name for node in calls}
  assert tower in {function.signature.name for function in graph.library.function}


def test_the_result_names_the_files(written):
  from benchmarks import results

  directory, _ = written
  files = results.read(str(directory / 'run.json'))['files']
  assert set(files) == {'trace_file', 'tfprof_file', 'profile_dir', 'graph_file'}


def test_a_graph_whose_name_ends_in_txt_is_text(in_process, tmp_path):
  run = in_process(
    *('--model=trivial', '--num_batches=1', '--num_warmup_batches=1', '--forward_only'),
    f'--graph_file={tmp_path}/graph.pbtxt',
  )
  assert run.code == 0, run.errors
  text = (tmp_path / 'graph.pbtxt').read_text()
  assert text.startswith('node {\n  name: ')
  assert 'name: "tower_1/' in text
