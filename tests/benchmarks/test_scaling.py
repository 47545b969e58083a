"""Steps predicted for more devices: arithmetic by hand, the published page, the command."""

import numpy as np
import pytest

from benchmarks import published, scaling, scaling_page
from benchmarks.scaling_model import Load, Machine, Network, exposed, one_device, step

# Two gradients of 1 MB, there after a quarter and at the end of backprop.
READY = ((0.25, 1e6), (1.0, 1e6))


@pytest.mark.parametrize(
  ('seconds', 'backprop_s', 'expected'),
  [
    (0.2, 1.0, 0.1),  # the first has left long ago; the last one's half is left
    (2.0, 1.0, 1.25),  # the first leaves from 0.25 to 1.25, the second until 2.25
    (0.0, 1.0, 0.0),
    (0.4, 0.0, 0.4),  # without backprop nothing is hidden
  ],
)
def test_gradients_queue_up_while_backprop_runs(seconds, backprop_s, expected):
  assert exposed(READY, seconds, backprop_s) == pytest.approx(expected)


def test_a_step_is_its_parts():
  load, machine = Load(2e6, READY, host_bytes=4e6), Machine(0.1, 1e7, 1e6)
  found = step(1.0, load, machine, 4, Network(push=0.2e6, back=0.3e6), backprop=0.5)
  assert found.compute == pytest.approx(1.1)
  assert found.host == pytest.approx(0.1 + 0.2)  # half of 0.2 s behind backprop, and all back
  assert found.network == pytest.approx(0.1 + 0.3)
  assert found.total == pytest.approx(1.8)
  assert step(1.0, load, machine, 1).compute == 1.0  # nobody beside it
  ring = step(1.0, load, machine, 4, Network(0.2e6, 0.2e6, overlaps=True), backprop=0.5)
  assert ring.network == pytest.approx(0.2)


def test_from_a_measured_host_back_to_one_device():
  load, machine = Load(2e6, READY, host_bytes=4e6), Machine(0.1, 1e7)
  assert one_device(step(0.7, load, machine, 4).total, load, machine, 4) == pytest.approx(0.7)


@pytest.mark.parametrize(
  ('hosts', 'num_ps', 'expected'),
  [
    (1, 1, 0),  # all stays on the host
    (2, 2, 50),  # each sends half of it to the other
    (8, 8, 87.5),  # to a server of an eighth from seven others
    (8, 4, 175),  # to one of a quarter
    (8, 1, 700),
  ],
)
def test_servers_on_the_workers_hosts(hosts, num_ps, expected):
  found = Network.of_servers(100, hosts, num_ps)
  assert (found.push, found.back, found.overlaps) == (expected, expected, False)


def test_a_variable_stays_whole_and_servers_may_be_apart():
  assert Network.of_servers(100, 8, 8, largest=40).push == 280
  assert Network.of_servers(100, 8, 8, apart=True).push == 100
  assert Network.of_servers(100, 8, 2, apart=True).push == 400
  assert Network.of_ring(100, 4).push == 75


@pytest.mark.parametrize(
  ('mode', 'factor'),
  [
    ('replicated', 2 * 7),
    ('parameter_server', 2 * 8),
    ('independent', 0),
    ('distributed_replicated', None),
    ('collective_all_reduce', None),
  ],
)
def test_bytes_are_the_managers_own(mode, factor):
  arguments = ['--model=lenet', '--num_gpus=8', f'--variable_update={mode}']
  load = scaling.load_of(arguments, 2)
  assert load.gradient_bytes == sum(count for _, count in load.ready)
  if factor is None:
    assert load.host_bytes > 14 * load.gradient_bytes * 0.99
  else:
    assert load.host_bytes == pytest.approx(factor * load.gradient_bytes, rel=0.01, abs=1e4)
  network = scaling.network_of(arguments, load, 2)
  if mode == 'collective_all_reduce':
    assert network.push == pytest.approx(load.gradient_bytes / 2, rel=0.01)
    assert network.overlaps
  elif mode in ('parameter_server', 'distributed_replicated'):
    assert network.push == 3136 * 512 * 4  # of the largest variable, which stays whole
    assert not network.overlaps
  else:
    assert network is None


def test_no_more_is_fitted_than_is_said():
  """Constants come from rows of at most 8 GPUs of one host."""
  for name in scaling_page.PLATFORMS:
    for point in scaling_page._points(name):
      assert point.row.hosts == 1 and point.row.num_gpus <= 8 and point.row.data == 'synthetic'


def test_what_was_planted_is_fitted():
  planted = Machine(0.05, 2e10)
  load = Load(2e8, ((0.1, 1.5e8), (0.6, 0.5e8)), host_bytes=16e8)
  row = published.results()[0]
  points = [
    scaling_page._Point(row, one_s, step(one_s, load, planted, 8).total, load)
    for one_s in (0.1, 0.3, 1.0)
  ]
  crowding, rate = scaling_page.fit(points)
  assert crowding == pytest.approx(0.05, abs=0.003)
  assert rate == pytest.approx(2e10, rel=0.06)


def test_rows_of_several_hosts_are_predicted_better_than_by_multiplying():
  found = scaling_page.distributed()
  assert len(found) == 15
  mean, worst, linear = scaling_page.summary(found)
  assert linear == pytest.approx(0.0896, abs=0.001)
  assert mean < linear / 2
  assert worst < 0.12
  errors = [
    abs(one.error)
    for name in scaling_page.PLATFORMS
    for _, _, rows in scaling_page.folds(name)
    for one in rows
  ]
  assert np.mean(errors) < 0.03 and max(errors) < 0.15
  without = scaling_page.summary(scaling_page.distributed(push=False))
  assert without[0] > 2 * mean  # what overlaps does count


def test_the_command(capsys):
  arguments = [
    '--rate=51.9',
    '--model=lenet',
    '--num_gpus=8',
    '--hosts=1,2',
    '--crowding=0.05',
    '--variable_update=collective_all_reduce',
    '--host_gb_per_s=11',
  ]
  assert scaling.main([*arguments, '--network_gbit_per_s=10']) == 0
  out = capsys.readouterr().out
  assert 'lenet' in out and '16' in out and 'of linear' in out


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--model=lenet'], 'give --rate'),
    (['--rate=5', '--model=lenet'], '--host_gb_per_s is missing'),
    (['--rate=0', '--host_gb_per_s=1', '--model=lenet'], '--rate=0'),
    (['--rate=5', '--host_gb_per_s=-1'], '--host_gb_per_s=-1'),
    (['--rate=5', '--host_gb_per_s=1', '--hosts=0'], '--hosts=0'),
    (['--rate=5', '--host_gb_per_s=1', '--hosts=1,2'], '--network_gbit_per_s is missing'),
    (
      [
        '--rate=5',
        '--host_gb_per_s=1',
        '--network_gbit_per_s=1',
        '--hosts=2',
        '--variable_update=replicated',
      ],
      'works on one host',
    ),
    (['--rate=5', '--machine=dgx2'], "unknown --machine 'dgx2'"),
    (['--rate=5', '--machine=gce_k80', '--modell=lenet'], 'modell'),
    (['--result=/nowhere.json', '--machine=gce_k80'], '/nowhere.json'),
    (['--plot=x.png', '--rate=5'], '--plot draws'),
    (['--validate', '--model=lenet'], '--model=lenet does not go with --validate'),
  ],
)
def test_what_can_not_work_is_one_line(arguments, message, capsys):
  assert scaling.main(arguments) in (1, 2)
  error = capsys.readouterr().err
  assert error.startswith('error: ') and message in error and error.count('\n') == 1, error


def test_a_plot_is_drawn(tmp_path, monkeypatch):
  monkeypatch.setattr(scaling_page, 'PLATFORMS', {**scaling_page.PLATFORMS})
  scaling_page.draw(str(tmp_path / 'plot.png'))
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')
