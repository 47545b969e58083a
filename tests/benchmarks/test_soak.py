"""What a soak finds, and that it finds it."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import command, soak
from tests.benchmarks.conftest import ROOT

MIB = 2**20


def looks(**changes):
  """Of 3,000 steps that are well, but for what these make of the step's number."""
  found = []
  for step in range(50, 3000, 100):
    one = soak.Look(
      step, step / 50, step / 30, 900 * MIB + step % 7 * MIB, 10 + step // 50 % 3, 64 + step % 3
    )
    found.append(one._replace(**{name: change(step) for name, change in changes.items()}))
  return found


def failing(found):
  return [limit.name for limit in soak.held(found) if not limit.holds]


def test_a_process_that_holds_on_to_nothing_passes():
  assert failing(looks()) == []


@pytest.mark.parametrize(
  ('name', 'change'),
  [
    ('memory', {'resident': lambda step: 900 * MIB + step * MIB // 60}),
    ('descriptors', {'descriptors': lambda step: 10 + step // 1000}),
    ('threads', {'threads': lambda step: 64 + step // 200}),
    ('throughput', {'cpu_s': lambda step: step / 30 + (step / 600) ** 2}),
  ],
)
def test_what_grows_or_slows_down_is_found(name, change):
  assert failing(looks(**change)) == [name]


def test_the_first_steps_do_not_count():
  found = looks(resident=lambda step: 900 * MIB - max(0, 1000 - step) * MIB // 2)
  assert failing(found) == ['memory']
  assert failing(soak.settled(found, 20000)) == []
  assert next(one.step for one in soak.settled(found, 3000)) == 350


def test_a_look_sees_this_process():
  before = soak.look(os.getpid(), 1, 0.0)
  with open(os.devnull):
    after = soak.look(os.getpid(), 2, 0.0)
  assert after.descriptors == before.descriptors + 1
  assert before.resident > 10 * MIB and before.threads >= 1 and before.cpu_s > 0


def test_flags_that_can_not_work_are_answered_in_one_line(capsys):
  assert soak.main(['--every=3']) == 2
  assert soak.main(['--num_steps=100']) == 2
  assert soak.main(['--num_steps=100', '--every=10', '--model=none']) == 1
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 3 and 'even number' in lines[0] and '--num_steps=100' in lines[1]
  assert 'the training: ' in lines[2] and 'none' in lines[2]


@pytest.mark.long
def test_a_soak_takes_its_looks_and_says_what_it_found(tmp_path):
  file = tmp_path / 'soak.json'
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'benchmarks.soak', '--num_steps=400', '--every=20'),
      *('--data_name=digits', '--model=lenet', '--image_size=8', '--num_classes=10'),
      *('--device=cpu', '--batch_size=4', f'--soak_json={file}'),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode in (0, 1), done.stderr
  assert [one['step'] for one in json.loads(file.read_text())] == list(range(10, 400, 20))
  lines = done.stdout.splitlines()
  assert ' '.join(line.split()[0] for line in lines) == '400 memory descriptors threads throughput'


def test_a_training_that_fails_is_told(tmp_path):
  with pytest.raises(command.Failed, match='none'):
    soak.train(['--model=none'], 100, 10, str(tmp_path))
