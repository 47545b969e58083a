"""Signals to a process whose main thread is blocked inside TensorFlow."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = """
import time
from benchmarks import process
import tensorflow as tf

def slow(x):
  print('blocked', flush=True)
  time.sleep({seconds})
  return x

data = tf.data.Dataset.range(1).map(lambda x: tf.py_function(slow, [x], tf.int64), 2)
with process.terminations(lambda line: print('last words:', line, flush=True)) as stop:
  next(iter(data))
  print('stopped by', list(stop), flush=True)
"""


@pytest.fixture
def blocked():
  started = []

  def start(seconds: float) -> subprocess.Popen:
    process = subprocess.Popen(
      [sys.executable, '-c', BLOCKED.format(seconds=seconds)],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3'},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      # Python leaves an ignored one ignored, as a shell's background jobs have it.
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    started.append(process)
    assert process.stdout.readline() == 'blocked\n'
    return process

  yield start
  for process in started:
    process.kill()
    process.wait()


def said(process: subprocess.Popen, words: str) -> None:
  while words not in (line := process.stderr.readline()):
    assert line, 'it has ended'


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_first_is_named_and_the_second_ends_it(blocked, number):
  process = blocked(60)
  process.send_signal(number)
  said(process, f'Notice: {number.name} has come; this process ends when TensorFlow has done')
  process.send_signal(number)
  out, err = process.communicate(timeout=10)
  assert process.returncode == 128 + number
  line = f'ended by a second {number.name}, with the main thread in TensorFlow\n'
  assert (out, err) == (f'last words: {line}', line)


def test_one_that_is_heard_in_time_is_not_spoken_of(blocked):
  process = blocked(1.5)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=20)
  assert (process.returncode, out) == (0, f'stopped by [{int(signal.SIGTERM)}]\n')
  assert 'Notice' not in err


def test_one_that_is_heard_late_is_kept(blocked):
  process = blocked(5)
  process.send_signal(signal.SIGTERM)
  said(process, 'Notice: SIGTERM has come')
  began = time.monotonic()
  out, _ = process.communicate(timeout=20)
  assert (process.returncode, out) == (0, f'stopped by [{int(signal.SIGTERM)}]\n')
  assert time.monotonic() - began > 1
