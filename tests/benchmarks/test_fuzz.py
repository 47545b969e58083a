"""Whatever text a flag, an environment or a result holds: it is read, or refused in one line."""

import json
import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest

from benchmarks import flags, results
from hpm.cluster import resolve, spec
from hpm.errors import DataError, UsageError, printable
from hpm.variable_mgr import ALL_REDUCES
from hpm.variable_mgr import spec as all_reduces

QUICK = {'deadline': None, 'derandomize': True, 'suppress_health_check': list(HealthCheck)}
AMOUNTS = [60, pytest.param(5000, marks=pytest.mark.long)]

# Of the pieces that such texts are made of, and of anything else.
PIECES = [
  *ALL_REDUCES,
  *('#', ':', '/', ';', ',', '-', '.', '[', ']', '=', '--', ' ', '\n', '\0', 'é', '²', 'k', 'G'),
  *('0', '1', '32k', '-1', '1e9', 'nan', 'inf', '99999999999999999999', 9000 * '9', '0.1', '30'),
  *('host', 'a:1', '[0-3]', '[::1]:5', 'workers:', 'ps:', 'limit:', 'gpu:', 'keras:', 'tfds:'),
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map(''.join)
NAMES = sorted(flags._define())
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
  SCALAR,
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
  ),
  max_leaves=12,
)


def fuzz(strategy, amount, check):
  @settings(max_examples=amount, **QUICK)
  @given(strategy)
  def run(example):
    try:
      check(example)
    except (DataError, UsageError) as error:
      line = printable(error)
      assert line.isprintable() and len(line) <= 2000

  run()


@pytest.mark.parametrize('amount', AMOUNTS)
@pytest.mark.parametrize(
  'parse',
  [
    lambda text: all_reduces.parse(text, ALL_REDUCES),
    all_reduces.parse_size,
    spec.parse_hosts,
    lambda text: spec.parse_address(text, 'worker:0'),
  ],
  ids=['all_reduce', 'size', 'hosts', 'address'],
)
def test_small_languages(parse, amount):
  fuzz(TEXT, amount, parse)


@pytest.mark.parametrize('amount', AMOUNTS)
def test_what_is_read_as_a_spec_is_written_as_one(amount):
  def check(text):
    parsed = all_reduces.parse(text, ALL_REDUCES)
    assert all_reduces.parse(all_reduces.to_text(parsed), ALL_REDUCES) == parsed

  fuzz(TEXT, amount, check)


@pytest.mark.parametrize('amount', [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_command_lines(amount, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  values = TEXT | st.sampled_from(['true', 'false', '1', '2', '0.5', '/proc/x', '.', ''])
  flag = st.tuples(st.sampled_from(NAMES), values).map(lambda pair: f'--{pair[0]}={pair[1]}')
  fuzz(st.lists(flag | TEXT, max_size=4), amount, flags.parse)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('amount', AMOUNTS)
@pytest.mark.parametrize(
  'name', ['piecewise_learning_rate_schedule', 'image_size', 'all_reduce_spec', 'local_cluster']
)
def test_a_flag_with_a_language_of_its_own(name, amount):
  more = ['--variable_update=collective_all_reduce'] if name == 'local_cluster' else []
  pieces = st.lists(
    st.sampled_from([*string.digits, *';:.,e-#/kMg', 'workers', 'ps', 'copy', 'nan'])
  )
  fuzz(pieces.map(''.join) | TEXT, amount, lambda text: flags.parse([f'--{name}={text}', *more]))


@pytest.mark.parametrize('amount', AMOUNTS)
def test_environments(amount):
  task = st.fixed_dictionaries(
    {},
    optional={
      'cluster': st.dictionaries(st.sampled_from(['worker', 'ps', 'chief', 'x']), JSON) | JSON,
      'task': st.fixed_dictionaries({}, optional={'type': JSON, 'index': JSON}) | JSON,
    },
  )
  fuzz(task | JSON, amount, lambda value: resolve.tf_config({'TF_CONFIG': json.dumps(value)}))
  fuzz(TEXT, amount, lambda text: resolve.tf_config({'TF_CONFIG': text}))
  names = (
    'SLURM_STEP_NODELIST',
    'SLURM_STEP_TASKS_PER_NODE',
    'SLURM_NODEID',
    'SLURM_LOCALID',
  )
  slurm = st.fixed_dictionaries({}, optional=dict.fromkeys(names, TEXT))
  fuzz(slurm, amount, lambda variables: resolve.slurm(variables, num_ps=1, port=2222))


@pytest.mark.parametrize('amount', AMOUNTS)
def test_results(amount, tmp_path):
  path = tmp_path / 'run.json'

  def check(value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding='utf-8')
    results.read(str(path))

  known = st.dictionaries(st.sampled_from(sorted(results.FIELDS)), JSON)
  fuzz(known | JSON, amount, check)
  fuzz(st.text(alphabet=st.characters(exclude_categories=['Cs'])), amount, check)


def test_a_result_of_brackets_alone_and_one_without_an_end(tmp_path):
  path = tmp_path / 'run.json'
  path.write_text(100_000 * '[')
  with pytest.raises(DataError, match='nested too deeply'):
    results.read(str(path))
  path.write_bytes(b'\xff\xfe\x00')
  with pytest.raises(DataError, match='is no result'):
    results.read(str(path))
  with path.open('wb') as file:
    file.truncate(2**29)  # a hole
  with pytest.raises(DataError, match='more than 256 MiB'):
    results.read(str(path))


def test_results_of_other_schemas_are_refused(tmp_path):
  path = tmp_path / 'run.json'
  for version in (1, 3, '2', None):
    path.write_text(json.dumps({'schema_version': version, 'status': 'ok'}))
    with pytest.raises(DataError, match='schema_version is not 2'):
      results.read(str(path))
