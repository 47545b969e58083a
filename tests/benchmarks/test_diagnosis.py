"""The verdict on given times, by hand."""

import pytest

from benchmarks import diagnosis
from benchmarks.diagnosis import Times


@pytest.mark.parametrize(
  ('parts', 'shared', 'limit', 'gain', 'behind'),
  [
    ({'storage': 4.0, 'decode': 1.0, 'compute': 2.0}, False, 'storage', 1.0, 'compute'),
    ({'storage': 4.0, 'decode': 1.0, 'compute': 1.0}, True, 'storage', 1.0, 'decode'),
    ({'storage': 1.0, 'decode': 3.0, 'compute': 2.0}, False, 'decode', 0.5, 'compute'),
    ({'decode': 9.0, 'compute': 1.0}, True, 'decode', 9.0, 'compute'),
    ({'decode': 1.0, 'compute': 9.0}, True, 'compute', 9.0, 'decode'),
    # Side by side 3 would do where one after the other takes 5.
    ({'decode': 2.0, 'compute': 3.0}, True, 'contention', 2 / 3, 'compute'),
    ({'transfer': 4.0, 'compute': 2.0}, False, 'transfer', 1.0, 'compute'),
    ({'compute': 1.0, 'communication': 3.0}, False, 'communication', 3.0, 'compute'),
    ({'compute': 1.0, 'host': 4.0, 'decode': 2.0}, False, 'host', 1.5, 'decode'),
    ({'compute': 1.0}, False, 'compute', float('inf'), ''),
  ],
)
def test_what_limits_is_what_would_be_gained_without_it(parts, shared, limit, gain, behind):
  found = diagnosis.verdict(Times(parts, shared))
  assert (found.limit, found.behind) == (limit, behind)
  assert found.gain == pytest.approx(gain)
  advice = diagnosis.ADVICE['decode' if limit == 'contention' else limit]
  assert advice in found.sentence


def test_parts_side_by_side_that_end_together_limit_alike():
  found = diagnosis.verdict(Times({'decode': 2.0, 'compute': 2.02, 'storage': 0.5}))
  assert {found.limit, *found.alike} == {'decode', 'compute'}
  assert found.gain < 0.02 and found.behind == 'storage'
  assert 'limit this run alike: none of them alone makes it faster' in found.sentence


def test_parts_one_after_the_other_that_take_as_long_limit_alike():
  found = diagnosis.verdict(Times({'compute': 2.0, 'communication': 2.0}))
  assert {found.limit, *found.alike} == {'compute', 'communication'}
  assert found.gain == pytest.approx(1.0)
  assert 'alike: without either it would be about 100% faster' in found.sentence
