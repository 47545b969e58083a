"""How much faster or slower one set of runs is than another, with an interval. Pure arithmetic.

An observation is the seconds an image of a whole run: steps within one share memory, threads and
neighbours. Of several runs a side, made by turns, the two of each turn are compared, so that an
hour in which all were slow is no difference; of runs that were not, the two means are (Welch 1947).
Of one run a side there are only its steps, in blocks long enough to be nearly independent: that
tells nothing of how two runs of one command differ, and is said to be so.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

from benchmarks import speed

__all__ = ['Difference', 'of', 'seconds_per_image']

PAIRED = 'by turns'
APART = 'not by turns'
WITHIN = 'within one run each'


class Difference(NamedTuple):
  """The rate of B over that of A.

  Attributes:
    ratio: best guess; above 1, B is faster.
    low, high: 95 % confidence; None where there are too few values.
    how: `PAIRED`, `APART` or `WITHIN`.
    count: values of A and of B.
  """

  ratio: float
  low: float | None
  high: float | None
  how: str
  count: tuple[int, int]

  @property
  def significant(self) -> bool:
    """Whether they differ: 1 is outside of the interval."""
    return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

  def slower_by(self, threshold: float) -> bool:
    """Whether B is certainly slower by more than this share of A's rate."""
    return self.high is not None and self.high < 1 - threshold


def of(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Difference:
  """The difference of results of status 'ok', at least one a side."""
  runs = [[seconds_per_image(result) for result in side] for side in (a, b)]
  if len(a) == len(b) == 1 and all('runs' not in side[0] for side in (a, b)):
    return _apart(*(_blocks(side[0]) for side in (a, b)), WITHIN)
  runs = [
    [1 / run['images_per_second'] for result in side for run in result['runs']]
    if all('runs' in result for result in side)
    else values
    for side, values in zip((a, b), runs, strict=True)
  ]
  if len(runs[0]) == len(runs[1]) == len(a) and _by_turns(a, b):
    return _paired(*runs)
  return _apart(*runs, APART)


def seconds_per_image(result: Mapping[str, Any]) -> float:
  """Of all timed steps of a result."""
  return sum(result['step_seconds']) / sum(result['step_images'])


def _blocks(result: Mapping[str, Any]) -> list[float]:
  return speed.blocks(result['step_seconds'], result['step_images'])


def _by_turns(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
  """Whether of each pair in order of time one is of either side."""
  order = sorted([(r['started_at'], 'a') for r in a] + [(r['started_at'], 'b') for r in b])
  sides = [side for _, side in order]
  return all(set(pair) == {'a', 'b'} for pair in zip(sides[::2], sides[1::2], strict=True))


def _paired(a: Sequence[float], b: Sequence[float]) -> Difference:
  logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
  middle = statistics.fmean(logs)
  if len(logs) < 2:
    return Difference(math.exp(middle), None, None, PAIRED, (len(a), len(b)))
  half = speed.t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
  low, high = math.exp(middle - half), math.exp(middle + half)
  return Difference(math.exp(middle), low, high, PAIRED, (len(a), len(b)))


def _apart(a: Sequence[float], b: Sequence[float], how: str) -> Difference:
  """Welch's interval, of the logarithm of the ratio of the means."""
  means = [statistics.fmean(side) for side in (a, b)]
  ratio, count = means[0] / means[1], (len(a), len(b))
  if min(count) < 2:
    return Difference(ratio, None, None, how, count)
  # The relative variance of each mean is, to first order, that of its logarithm.
  parts = [
    statistics.variance(side) / len(side) / mean**2
    for side, mean in zip((a, b), means, strict=True)
  ]
  if not sum(parts):
    return Difference(ratio, ratio, ratio, how, count)
  freedom = sum(parts) ** 2 / sum(p**2 / (n - 1) for p, n in zip(parts, count, strict=True))
  half = speed.t95(max(1.0, freedom)) * math.sqrt(sum(parts))
  return Difference(ratio, ratio * math.exp(-half), ratio * math.exp(half), how, count)
