"""Managers and all-reduces from outside the package, as docs/own_managers.md has them."""

import pathlib
import re
import sys

import numpy as np
import pytest

import hpm
from tests.parity import harness, simulation

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'own_managers.md'


@pytest.fixture
def modules(tmp_path, monkeypatch):
  """The page's modules, where Python finds them; what they register is forgotten afterwards."""
  blocks = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  for block in blocks:
    name = re.match(r'# (\w+\.py)\n', block)
    if name:
      (tmp_path / name[1]).write_text(block)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(hpm.variable_mgr, 'ALL_REDUCES', dict(hpm.variable_mgr.ALL_REDUCES))
  monkeypatch.setattr(
    hpm.variable_mgr, 'VARIABLE_MANAGERS', dict(hpm.variable_mgr.VARIABLE_MANAGERS)
  )
  yield [block for block in blocks if not block.startswith('# my_')]
  for name in ('my_reduce', 'my_manager'):
    sys.modules.pop(name, None)


def test_the_page_runs_as_it_stands(modules, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 6)
  made = []
  for block in modules:
    names = {'devices': cpu_devices[:2], 'hpm': hpm}
    exec(block, names)
    made.append(names['manager'])
  reduced, elastic = made
  result = harness.train(harness.create_step(reduced), steps)
  harness.assert_agrees(result, harness.simulate('replicated', steps))
  harness.assert_replicas_equal(result.copies)
  assert type(elastic).__name__ == 'Elastic'


@pytest.mark.parametrize(
  'options',
  [
    {'all_reduce_spec': 'my_reduce:OnTheLast'},
    {'all_reduce_spec': 'mine#2'},
    {'all_reduce_spec': 'mine/xring'},
    {'all_reduce_spec': 'my_reduce:OnTheLast', 'gradient_repacking': 3},
  ],
  ids=str,
)
def test_an_all_reduce_is_taken_by_path_and_by_name(options, modules, cpu_devices, tmp_path):
  with (tmp_path / 'my_reduce.py').open('a') as file:
    file.write('\n\ndef sharded(devices, shards=1):\n  return OnTheLast(devices)\n')
  hpm.variable_mgr.ALL_REDUCES['mine'] = 'my_reduce:sharded'
  steps = harness.random_steps([[2, 2, 2]] * 4)
  manager = hpm.variable_mgr.create('replicated', cpu_devices[:3], **options)
  result = harness.train(harness.create_step(manager), steps)
  harness.assert_agrees(result, harness.simulate('replicated', steps))


def test_half_precision_wraps_one_s_own_all_reduce(modules, cpu_devices):
  options = {'all_reduce_spec': 'my_reduce:OnTheLast', 'transfer_dtype': 'float16'}
  steps = harness.random_steps([[4, 4]] * 4)
  manager = hpm.variable_mgr.create('replicated', cpu_devices[:2], **options)
  result = harness.train(harness.create_step(manager), steps)
  with pytest.raises(AssertionError, match='differ'):
    harness.assert_agrees(result, harness.simulate('replicated', steps))
  harness.assert_agrees(result, harness.simulate('replicated', steps), 2.0**-9)


@pytest.mark.parametrize('session', [False, True])
def test_the_page_s_manager_averages_elastically(session, modules, cpu_devices):
  steps = harness.random_steps([[4, 4]] * 4)

  def create():
    manager = hpm.variable_mgr.create('my_manager:Elastic', cpu_devices[:2])
    return harness.create_step(manager, 'sgd')

  result = harness.train_in_session(create, steps) if session else harness.train(create(), steps)
  copies = [harness.start_values(harness.two_layers())] * 2
  rule = harness.OPTIMIZERS['sgd'][1]
  for towers in steps:
    after = [simulation.train(c, [[b]], rule).values for c, b in zip(copies, towers, strict=True)]
    copies = [{n: own[f'params/{n}'] for n in c} for own, c in zip(after, copies, strict=True)]
    means = {n: np.mean([c[n] for c in copies], axis=0) for n in copies[0]}
    copies = [{n: 0.9 * value + 0.1 * means[n] for n, value in c.items()} for c in copies]
  for actual, expected in zip(result.copies, copies, strict=True):
    for name, value in expected.items():
      assert harness.relative_error(actual[f'params/{name}'], value) <= harness.FP32, name


def test_what_is_nowhere_is_refused_with_the_names(cpu_devices):
  with pytest.raises(hpm.errors.UsageError, match="no module 'my_nothing'"):
    hpm.variable_mgr.create('my_nothing:Manager', cpu_devices[:2])
  with pytest.raises(hpm.errors.UsageError, match="no module 'my_nothing'"):
    hpm.variable_mgr.create('replicated', cpu_devices[:2], all_reduce_spec='my_nothing:Reduce')
  with pytest.raises(hpm.errors.UsageError, match="'json' has no 'Manager'"):
    hpm.variable_mgr.create('json:Manager', cpu_devices[:2])
