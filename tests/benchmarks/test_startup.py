"""The measurement of start-up: a cell in miniature, its table, and what it refuses."""

import pytest

from benchmarks import startup


def test_a_cell_gives_the_seconds_of_each_phase(cpu_devices, capsys):
  runs = [startup.start_up('trivial', count, 2, 'replicated', True) for count in (1, 2)]
  for run in runs:
    assert all(run[phase]['cpu_s'] > 0 for phase in ('variables', 'trace', 'first step'))
  cells = [{'model': 'trivial', 'devices': n, 'runs': [run]} for n, run in enumerate(runs, 1)]
  startup.show({'manager': 'replicated', 'batch_size': 2, 'cells': cells})
  assert '1.00' in capsys.readouterr().out


def test_a_model_gets_images_of_its_own_size(cpu_devices):
  assert 'first step' in startup.start_up('lenet', 1, 2, 'replicated', True)


def test_what_is_only_traced_has_no_first_step(cpu_devices):
  assert 'first step' not in startup.start_up('trivial', 8, 2, 'parameter_server', False)


@pytest.mark.long
def test_overhead_takes_each_kind_of_call_in_each_round(cpu_devices):
  times = startup.overhead(rounds=2, steps=2)
  assert {name: len(own) for name, own in times.items()} == {'graph': 2, 'run': 2, 'bare': 2}


def test_spread_is_half_the_distance_of_the_extremes():
  assert startup.spread([3.0, 1.0, 2.0]) == (2.0, 1.0)


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['--overhead', '--first_step'], 'give one of them'),
    (['--counts=1,two'], '--counts=two'),
    (['--models=resnet51'], 'resnet51'),
    (['--manager=replicate'], 'did you mean replicated'),
  ],
)
def test_contradictions_are_refused(arguments, words, capsys):
  assert startup.main(arguments) == 2
  assert words in capsys.readouterr().err
