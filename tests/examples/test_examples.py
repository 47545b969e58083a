"""The examples run as a newcomer runs them, and do what they say."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob('examples/*.py'))


def run(name: str, *arguments: str) -> str:
  done = subprocess.run(
    [sys.executable, ROOT / 'examples' / name, *arguments],
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '2'},
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize('path', EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_40_lines(path):
  assert len(path.read_text().splitlines()) <= 40


def test_digits_reach_97_percent():
  out = run('digits.py')
  assert float(re.search(r"'top_1': ([\d.]+)", out)[1]) >= 0.97
  assert "'num_samples': 360" in out


def test_own_loop_finds_the_line():
  out = run('own_loop.py')
  assert 'params/slopes [ 2.  -3.   0.5]' in out
  assert 'params/offset [4.]' in out


def test_own_training_learns_with_what_is_frozen():
  assert re.search(r'step 40: loss 0\.0\d\d, right 100%', run('own_training.py'))


def test_debugging_shows_each_towers_tensors():
  out = run('debugging.py')
  assert out.count('relu (2, 6, 6, 8): mean') == out.count('logits (2, 2): mean') == 2
  assert re.search(r'step 1: loss \d\.\d+ over 4 images', out)


@pytest.fixture(scope='module')
def sample(tmp_path_factory):
  directory = tmp_path_factory.mktemp('data') / 'sample'
  command = [sys.executable, '-m', 'hpm.pipelines', 'sample', '--out', directory]
  subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=60)
  return directory


def test_keras_fit_trains_on_a_pipeline(sample):
  out = run('keras_fit.py', str(sample))
  losses = [float(loss) for loss in re.findall(r'loss: ([\d.]+)', out)]
  assert len(losses) == 2
  assert losses[1] < losses[0]


def test_the_program_in_the_readme_runs_as_it_stands(sample, tmp_path):
  (program,) = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
  assert len(program.splitlines()) <= 15
  assert '.data/sample' in program
  program = program.replace('.data/sample', str(sample)).replace('num_steps=20', 'num_steps=2')
  done = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    timeout=120,
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '2'},
  )
  assert done.returncode == 0, done.stderr
  assert re.search(r'step 2: loss \d+\.\d{3} over 4 images', done.stdout)
  assert (tmp_path / 'checkpoints' / 'ckpt-2').is_dir()
