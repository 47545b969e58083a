"""The language of all-reduces: read, printed, refused; all of it without TensorFlow."""

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from hpm import variable_mgr
from hpm.errors import UsageError
from hpm.variable_mgr import spec as specs
from hpm.variable_mgr.spec import Algorithm, Level, Range

NAMES = variable_mgr.ALL_REDUCES
SHARDED = [name for name in NAMES if name not in specs.WITHOUT_SHARDS]


def test_it_imports_no_tensorflow():
  code = (
    'import sys; from hpm.variable_mgr import spec, topology, ALL_REDUCES; '
    "spec.parse('pscpu:32k:xring', ALL_REDUCES); print('tensorflow' in sys.modules)"
  )
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == 'False'


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('copy', [Range(Algorithm(Level('copy')))]),
    ('xring#2', [Range(Algorithm(Level('xring', 2)))]),
    ('nccl/xring', [Range(Algorithm(Level('nccl'), Level('xring')))]),
    ('psgpu#4/pscpu#2', [Range(Algorithm(Level('psgpu', 4), Level('pscpu', 2)))]),
    (
      'pscpu:32k:xring',
      [Range(Algorithm(Level('pscpu')), 32768), Range(Algorithm(Level('xring')))],
    ),
    (
      'copy:100:rechd:1M:collective',
      [
        Range(Algorithm(Level('copy')), 100),
        Range(Algorithm(Level('rechd')), 1 << 20),
        Range(Algorithm(Level('collective'))),
      ],
    ),
    ('my.module:Reduce', [Range(Algorithm(Level('my.module:Reduce')))]),
  ],
)
def test_specs_by_hand(text, expected):
  assert specs.parse(text, NAMES) == tuple(expected)
  assert specs.to_text(expected) == text


LEVELS = st.one_of(
  st.builds(Level, st.sampled_from(sorted(NAMES))),
  st.builds(Level, st.sampled_from(SHARDED), st.integers(1, 99)),
)
ALGORITHMS = st.one_of(st.builds(Algorithm, LEVELS), st.builds(Algorithm, LEVELS, LEVELS))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
  algorithms=st.lists(ALGORITHMS, min_size=1, max_size=5),
  limits=st.lists(st.integers(1, 2**50), min_size=4, max_size=4, unique=True),
)
def test_what_is_printed_reads_as_the_same(algorithms, limits):
  sizes = [*sorted(limits)[: len(algorithms) - 1], None]
  ranges = tuple(Range(a, size) for a, size in zip(algorithms, sizes, strict=True))
  assert specs.parse(specs.to_text(ranges), NAMES) == ranges


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(alphabet='copyxringscu#:/k0129M.', max_size=20))
def test_whatever_is_written_is_read_or_refused_in_one_line(text):
  try:
    ranges = specs.parse(text, NAMES)
  except UsageError as refusal:
    assert '\n' not in str(refusal)
    assert 'Grammar: ALGORITHM[:SIZE:ALGORITHM]' in str(refusal)
    assert all(name in str(refusal) for name in NAMES)
  else:
    assert specs.parse(specs.to_text(ranges), NAMES) == ranges


@pytest.mark.parametrize(
  ('text', 'problem'),
  [
    ('cpy', "unknown algorithm 'cpy': did you mean copy"),
    ('', "unknown algorithm ''"),
    ('xring#0', '#0 after xring: a whole number above 0 is needed'),
    ('xring#two', '#two after xring'),
    ('copy#2', 'copy takes no #2'),
    ('collective#2', 'collective takes no #2'),
    ('copy/xring/copy', 'has 3 levels'),
    ('pscpu:32k', "'32k' ends it"),
    ('pscpu:32q:xring', "size '32q'"),
    ('pscpu:0:xring', "size '0'"),
    ('copy:32k:xring:32k:copy', 'each size must be larger'),
    ('copy:1M:xring:32k:copy', 'each size must be larger'),
  ],
)
def test_refusals_name_the_problem(text, problem):
  with pytest.raises(UsageError) as refusal:
    specs.parse(text, NAMES)
  assert problem in str(refusal.value)


@pytest.mark.parametrize(
  ('text', 'size'), [('1', 1), ('32k', 32768), ('3K', 3072), ('2M', 2 << 20), ('1g', 1 << 30)]
)
def test_sizes_have_suffixes_of_1024(text, size):
  assert specs.parse_size(text) == size


def test_nccl_needs_gpus_at_any_place_in_a_spec():
  for text in ('nccl', 'nccl/xring', 'copy:1k:nccl', 'xring/nccl'):
    ranges = specs.parse(text, NAMES)
    specs.check_devices(text, ranges, ['/GPU:0', '/GPU:1'])
    with pytest.raises(UsageError, match=f"'{text}' needs GPUs"):
      specs.check_devices(text, ranges, ['/GPU:0', '/CPU:0'])
