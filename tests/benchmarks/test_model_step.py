"""The comparison of steps: its arithmetic, its refusals, a run in miniature."""

import json

import pytest

from benchmarks import model_step

COMPARISON = {
  'model': 'alexnet',
  'kind': 'training',
  'batch_size': 4,
  'image_size': 64,
  'steps': 2,
}


def a_round(hpm, keras, product=0.5):
  return {
    'hpm': {'wall_s': hpm, 'cpu_s': 2 * hpm, 'peak_mib': 100.0},
    'keras': {'wall_s': keras, 'cpu_s': 2 * keras, 'peak_mib': 200.0},
    model_step.MATMUL: {'wall_s': product, 'cpu_s': product, 'peak_mib': 1.0},
  }


def test_the_interval_of_a_median_holds_it():
  middle, low, high = model_step.ratio_interval([1.1, 1.2, 1.3, 1.2, 1.25])
  assert middle == 1.2
  assert 1.1 <= low <= middle <= high <= 1.3
  assert model_step.ratio_interval([2.0]) == (2.0, 2.0, 2.0)


def test_ratios_are_taken_within_rounds(capsys, monkeypatch):
  console = model_step.rich.console.Console(width=200)
  monkeypatch.setattr(model_step, 'console', console)
  # Each round twice as slow as the one before, whoever runs: the ratio stays 1.5.
  rounds = [a_round(2.0 * 2**i, 3.0 * 2**i, product=2.0**i) for i in range(3)]
  # 1e9 multiply-adds an image, three products of two FLOPs each, 4 images, 2 steps.
  model_step.show({'comparison': COMPARISON, 'macs': 10**9, 'rounds': rounds})
  output = capsys.readouterr().out
  assert '1.500 (1.500 to 1.500)' in output
  ours = 3 * 2 * 1e9 * 4 * 2 / 4.0 / 1e9
  product = 2 * 4096**3 * 3 / 2.0 / 1e9
  assert f'hpm computes {ours:.0f} GFLOP/s' in output
  assert f'{ours / product:.0%} ({ours / product:.0%} to {ours / product:.0%})' in output


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--model=lenet'], '--model=lenet: has no namesake'),
    (['--model=alexnett'], 'did you mean alexnet'),
    (['--contenders=hpm;kears'], 'did you mean keras'),
    (['--contenders=keras'], 'hpm, which they are compared with, lacks'),
    (['alexnet'], "unexpected 'alexnet'"),
    (['--pairs=0'], 'pairs'),
  ],
)
def test_what_can_not_work_is_refused_in_one_line(arguments, message, capsys):
  assert model_step.main(arguments) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.startswith('error: ')
  assert 'Traceback' not in error


def test_rounds_of_another_comparison_are_not_mixed(tmp_path):
  path = tmp_path / 'step.json'
  path.write_text(json.dumps({'comparison': COMPARISON, 'rounds': [a_round(1.0, 2.0)]}))
  assert len(model_step.earlier_rounds(str(path), {'comparison': COMPARISON})) == 1
  assert model_step.earlier_rounds(str(tmp_path / 'none'), {'comparison': COMPARISON}) == []
  with pytest.raises(model_step.UsageError, match='holds another comparison'):
    model_step.earlier_rounds(str(path), {'comparison': {**COMPARISON, 'steps': 1}})


@pytest.mark.long
@pytest.mark.parametrize('kind', ['training', 'forward'])
def test_contenders_run_by_turns_and_rounds_add_up(kind, tmp_path, capsys):
  path = tmp_path / 'step.json'
  arguments = ['--model=alexnet', '--batch_size=2', '--image_size=64', '--steps=1', '--pairs=2']
  arguments += ['--contenders=hpm;keras;keras fit', f'--json={path}']
  arguments += ['--forward_only'] if kind == 'forward' else []
  for count in (2, 4):
    assert model_step.main(arguments) == 0
    result = json.loads(path.read_text())
    assert result['comparison']['kind'] == kind
    assert len(result['rounds']) == count
    for measured in result['rounds']:
      assert set(measured) == {'hpm', 'keras', 'keras fit', model_step.MATMUL}
      assert all(figures['wall_s'] > 0 for figures in measured.values())
  assert 'GFLOP/s' in capsys.readouterr().out
