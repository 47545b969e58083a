"""The sweep: its grid, real runs that go on where they were stopped, and what was published."""

import json

import pytest

from benchmarks import sweep
from hpm.errors import UsageError


def test_the_grid_is_every_combination_of_the_values():
  given = {'model': 'resnet50', 'num_gpus': '2', 'global_batch_size': '8,16', 'xla': 'true,false'}
  cells = sweep.grid(given)
  assert [cell.name for cell in cells] == [
    'global_batch_size=8-xla=true',
    'global_batch_size=8-xla=false',
    'global_batch_size=16-xla=true',
    'global_batch_size=16-xla=false',
  ]
  assert cells[2].command == ['--model=resnet50', '--num_gpus=2', '--xla=true', '--batch_size=8']


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'model': 'lenet'}, 'nothing varies'),
    ({'model': 'lenet,lenett'}, 'lenett'),
    ({'global_batch_size': '4,8'}, '--num_gpus'),
    ({'global_batch_size': '4,9', 'num_gpus': '2'}, '--global_batch_size=9'),
    ({'global_batch_size': '4', 'batch_size': '1,2'}, 'drop one'),
    ({'batch_size': '1,2', 'num_runs': '2'}, '--num_runs'),
  ],
)
def test_what_can_not_work_is_refused_before_anything_runs(given, message):
  with pytest.raises(UsageError, match=message):
    sweep.grid(given)


def test_a_flag_that_there_is_not_is_refused(capsys):
  assert sweep.main(['--batch_sise=1,2']) == 2
  assert '--batch_size' in capsys.readouterr().err


def test_published_points_are_those_of_the_model_as_they_are():
  found = {(p.global_batch, p.images_per_sec) for p in sweep.points('resnet50')}
  assert {(1024, 3186), (1024, 3128), (768, 3280), (512, 1734)} <= found
  rows = [
    {
      **{'cell': 'b', 'model': 'resnet50', 'global_batch': 1024, 'images_per_second': 5.0},
      **{'lowest': 4.0, 'highest': 6.0, 'num_runs': 2},
    },
    {'cell': 'c', 'note': 'out of memory: the system killed it'},
  ]
  lines = sweep.table(rows)
  assert sum(line.startswith('published: resnet50 at 1024') for line in lines) == 2
  assert any(line.startswith('c ') and line.endswith('killed it') for line in lines)
  assert not any('768' in line for line in lines)


@pytest.mark.long
def test_a_sweep_measures_goes_on_and_draws(tmp_path, capfd):
  command = [
    *('--model=trivial', '--device=cpu', '--num_gpus=2', '--global_batch_size=2,4'),
    *('--num_batches=2', '--num_warmup_batches=1', f'--out={tmp_path}'),
  ]
  assert sweep.main([*command, '--sweep_runs=1']) == 0
  assert sweep.main([*command, '--sweep_runs=1']) == 0
  out = capfd.readouterr().out
  assert out.count('Run 1, ') == 2  # the second time nothing is left to do
  rows = json.loads((tmp_path / 'sweep.json').read_text())
  assert [row['global_batch'] for row in rows] == [2, 4]
  assert all(row['images_per_second'] > 0 for row in rows)
  assert (tmp_path / 'sweep.png').read_bytes().startswith(b'\x89PNG')
  assert sweep.main([*command, '--data_format=NHWC']) == 2
  assert 'another sweep' in capfd.readouterr().err
  late = [*command[:-1], f'--out={tmp_path / "late"}', '--cell_timeout_s=0.1', '--sweep_runs=1']
  assert sweep.main(late) == 1
  assert 'took longer' in capfd.readouterr().err
