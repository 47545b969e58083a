"""Cells of a measurement: runs of the driver, each in a process of its own, by turns, resumable.

A cell has a name and a command. `measure` runs one of each cell before the second of any, ends what
takes too long, and leaves each run's result and lines in OUT/cells/NAME/runN.json and .log; what is
there already is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks import progress, results
from benchmarks.loop import say
from hpm.errors import DataError

__all__ = ['collect', 'measure']


def measure(
  out: str,
  commands: Mapping[str, Sequence[str]],
  num_runs: int,
  limit_s: float | None,
  timeout_s: float,
  stop: Sequence[int] = (),
) -> dict[str, str]:
  """Runs what is missing, round by round; returns the cells that failed, with the reason.

  Args:
    out: directory of the results.
    commands: name of a cell -> arguments of `benchmarks/run.py`, without --result_json.
    num_runs: of each cell.
    limit_s: no run starts after so many seconds, and no round that would not end before.
    timeout_s: of one process.
    stop: not empty as soon as nothing more may start.
  """
  begun = time.monotonic()
  failures: dict[str, str] = {}
  with progress.bar('runs', len(commands) * num_runs) as advance:
    for number in range(1, num_runs + 1):
      round_begun, measured = time.monotonic(), 0
      for place, (name, command) in enumerate(commands.items(), 1):
        advance()
        path = _path(out, name, number)
        if name in failures or _done(path):
          continue
        elapsed = time.monotonic() - begun
        if stop or (limit_s is not None and elapsed > limit_s):
          return failures
        started = time.monotonic()
        reason = _run([*command, f'--result_json={path}'], path, timeout_s)
        measured += 1
        if stop:
          return failures
        if reason is not None:
          failures[name] = reason
        said = reason or f'{results.read(path)["images_per_second"]:.2f} images/sec'
        took = time.monotonic() - started
        say(f'Run {number}, {place} of {len(commands)}: {name}: {said} ({took:.0f} s)')
      # Rounds are alike: the next one would take as long as this.
      took = time.monotonic() - round_begun
      left = None if limit_s is None else limit_s - (time.monotonic() - begun)
      if measured and left is not None and number < num_runs and took > left:
        say(f'Round {number} took {took:.0f} s, and {left:.0f} s are left: no further round')
        return failures
  return failures


def collect(out: str, name: str, num_runs: int) -> list[dict[str, Any]]:
  """The results of a cell's runs that ended well."""
  paths = [_path(out, name, number) for number in range(1, num_runs + 1)]
  return [results.read(path) for path in paths if _done(path)]


def _path(out: str, name: str, number: int) -> str:
  return os.path.join(out, 'cells', name, f'run{number}.json')


def _done(path: str) -> bool:
  try:
    return results.read(path)['status'] == 'ok'
  except DataError:
    return False


def _run(arguments: Sequence[str], path: str, timeout_s: float) -> str | None:
  """One run in a process group of its own; the reason if it failed."""
  program = str(Path(__file__).with_name('run.py'))
  log = f'{path.removesuffix(".json")}.log'
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with contextlib.suppress(FileNotFoundError):
    os.remove(path)
  with open(log, 'w') as lines:
    child = subprocess.Popen(
      [sys.executable, program, *arguments],
      stdout=lines,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    with _ended(child):
      try:
        child.wait(timeout_s)
      except subprocess.TimeoutExpired:
        return f'took longer than {timeout_s:.0f} s'
  if _done(path):
    return None
  if child.returncode == -signal.SIGKILL:
    return 'out of memory: the system killed it'
  try:
    kind, _, words = results.read(path)['reason'].partition(': ')
    return words or kind
  except DataError:
    return f'ended with code {child.returncode}, see {log}'


@contextlib.contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
  """No process of the child's group outlives the context; a SIGTERM reaches it at once."""
  before = signal.getsignal(signal.SIGTERM)

  def terminate(number: int, frame: Any) -> None:
    child.terminate()
    if callable(before):
      before(number, frame)

  signal.signal(signal.SIGTERM, terminate)
  try:
    yield
  finally:
    if child.poll() is None:
      os.killpg(child.pid, signal.SIGKILL)
      child.wait()
    signal.signal(signal.SIGTERM, before)
