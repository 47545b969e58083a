"""The matrix of modes: what passes, what is found, what is refused."""

import json

import pytest

from benchmarks import parity
import hpm
from tests.parity import harness


@pytest.fixture(scope='module')
def rows(cpu_devices):
  rule = hpm.optimizers.create('momentum', 0.01)
  return parity.compare(harness.two_layers(), cpu_devices[:3], 2, 4, rule, parity.MODES)


def test_every_mode_that_can_run_here_passes(rows):
  assert len(rows) == len(parity.MODES)
  for row in rows:
    if 'nccl' in row['mode']:
      assert (row['passed'], row['reason']) == (None, 'needs GPUs')
    else:
      assert row['passed'], row
      assert 0.0 <= row['median'] <= row['difference'] <= row['tolerance']


def test_half_precision_shows_its_rounding(rows):
  (half,) = [row for row in rows if 'bfloat16' in row['mode']]
  assert parity.TOLERANCE < half['difference'] <= parity.TOLERANCE_HALF


def test_a_model_with_batch_norm_is_synchronised(cpu_devices):
  modes = [mode for mode in parity.MODES if mode.options.get('all_reduce_spec') == 'copy']
  rule = hpm.optimizers.create('momentum', 0.01)
  rows = parity.compare(harness.normalized(), cpu_devices[:2], 4, 4, rule, modes)
  assert [row['passed'] for row in rows] == [True]


def test_what_rounding_does_to_a_model_is_no_fault_of_a_mode(cpu_devices, monkeypatch):
  # In ResNet-20 another order of the images moves single offsets by a hundredth.
  monkeypatch.setattr(parity, 'wrong', Wrong, raising=False)
  modes = [
    parity.Mode('replicated', {'all_reduce_spec': spec})
    for spec in ('copy', 'benchmarks.parity:wrong')
  ]
  rule = hpm.optimizers.create('momentum', 0.001)
  model = hpm.models.create('resnet20')
  right, wrong = parity.compare(model, cpu_devices[:2], 4, 5, rule, modes)
  assert right['passed'] and right['difference'] > 10 * parity.TOLERANCE
  assert not wrong['passed']
  assert wrong['median'] > 100 * right['median']


class Wrong:
  """An all-reduce that sums nothing."""

  variables = ()

  def __init__(self, devices):
    pass

  def __call__(self, tensors):
    return [list(values) for values in tensors]


def test_a_mode_that_sums_wrong_fails_and_one_that_breaks_says_why(cpu_devices, monkeypatch):
  def broken(devices):
    raise ValueError('no such ring\nat all')

  monkeypatch.setattr(parity, 'wrong', Wrong, raising=False)
  monkeypatch.setattr(parity, 'broken', broken, raising=False)
  modes = [
    parity.Mode('replicated', {'all_reduce_spec': f'benchmarks.parity:{name}'})
    for name in ('wrong', 'broken')
  ]
  rule = hpm.optimizers.create('momentum', 0.01)
  wrong, broken_row = parity.compare(harness.two_layers(), cpu_devices[:2], 2, 3, rule, modes)
  assert not wrong['passed'] and wrong['difference'] > 1e-3
  assert not broken_row['passed'] and broken_row['reason'] == 'ValueError: no such ring'


def test_the_command_prints_the_matrix_and_writes_it(cpu_devices, capsys, tmp_path):
  file = tmp_path / 'parity.json'
  arguments = ['--device=cpu', '--num_gpus=2', '--only=pscpu', '--num_steps=2', f'--json={file}']
  assert parity.main(arguments) == 0
  printed = capsys.readouterr().out
  assert 'lenet, 2 x 4 images' in printed and 'pass' in printed
  record = json.loads(file.read_text())
  assert record['devices'] == ['/CPU:0', '/CPU:1']
  assert all(row['passed'] or 'nccl' in row['mode'] for row in record['modes'])


def test_a_difference_is_exit_code_1(cpu_devices, capsys):
  assert parity.main(['--device=cpu', '--only=pscpu#2', '--num_steps=2', '--tolerance=0']) == 1
  assert '1 of 1 modes differ' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--model=lenett'], 'did you mean lenet'),
    (['--model=alexnet'], 'has dropout'),
    (['--only=nothing'], 'no mode has that in its name'),
    (['--optimizer=adm'], 'use sgd, momentum'),
    (['--num_steps=0'], 'num_steps'),
    (['--nonsense'], 'nonsense'),
    (['lenet'], "unexpected 'lenet'"),
  ],
)
def test_what_can_not_work_is_exit_code_2(arguments, message, cpu_devices, capsys):
  assert parity.main(['--device=cpu', *arguments]) == 2
  assert message in capsys.readouterr().err
