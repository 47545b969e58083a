"""The result file: what is in it, and what it may not claim."""

import json
import os

import pytest

from benchmarks import results
from hpm.errors import DataError
from tests.benchmarks.conftest import ROOT


@pytest.fixture
def result():
  return {
    'schema_version': results.SCHEMA_VERSION,
    'status': 'ok',
    'mode': 'training',
    'started_at': '2026-01-01T00:00:00+00:00',
    'command': [],
    'flags_given': {},
    'flags': {},
    'machine': {},
    'images_per_second': 4.0,
    'images_per_second_total': 3.9,
    'images_per_second_median': 4.0,
    'images_per_second_interval': None,
    'standard_error': 0.1,
    'jitter': 0.1,
    'step_seconds': [2.0],
    'step_images': [8],
    'step_seconds_mean': 2.0,
    'step_seconds_median': 2.0,
    'step_seconds_percentiles': {'p50': 2.0},
  }


def without_throughput(result):
  return {name: value for name, value in result.items() if name not in results.THROUGHPUT}


def test_what_is_written_can_be_read(tmp_path, result):
  path = str(tmp_path / 'new' / 'run.json')
  results.write(path, result)
  assert results.read(path) == result
  assert os.listdir(tmp_path / 'new') == ['run.json']


def test_a_failure_has_a_reason_and_no_throughput(result):
  failed = {**without_throughput(result), 'status': 'failed'}
  with pytest.raises(ValueError, match='no reason'):
    results.validate(failed)
  results.validate({**failed, 'reason': 'the loss is nan'})
  with pytest.raises(ValueError, match='images_per_second of a failed run'):
    results.validate({**result, 'status': 'failed', 'reason': 'the loss is nan'})


@pytest.mark.parametrize('status', ['stopped', 'finished'])
def test_what_did_not_end_by_itself_has_a_reason_and_no_throughput(result, status):
  ended = {**without_throughput(result), 'status': status}
  with pytest.raises(ValueError, match=f'no reason for status {status}'):
    results.validate(ended)
  results.validate({**ended, 'reason': 'SIGTERM'})
  with pytest.raises(ValueError, match=f'jitter of a {status} run'):
    results.validate({**ended, 'reason': 'SIGTERM', 'jitter': 1.0})


def test_a_success_measured_something(result):
  nothing = without_throughput(result)
  with pytest.raises(ValueError, match='no images_per_second'):
    results.validate(nothing)
  results.validate({**nothing, 'accuracy': {'top_1': 0.5}})  # an evaluation of one step
  with pytest.raises(ValueError, match='do not fit'):
    results.validate({**result, 'step_seconds': [], 'step_images': []})


@pytest.mark.parametrize(
  ('change', 'problem'),
  [
    ({'status': 'fine'}, 'status'),
    ({'schema_version': 0}, 'schema_version'),
    ({'images_per_second': float('nan')}, 'images_per_second is nan'),
    ({'images_per_second': '4.0'}, "images_per_second is '4.0'"),
    ({'jitter': True}, 'jitter is True'),
    ({'imagse': 1}, 'unknown imagse'),
    ({'step_seconds': [2.0, 'x']}, 'step_seconds is'),
    ({'step_images': [8.5]}, 'step_images is'),
    ({'images_per_second_interval': [1.0, float('inf')]}, 'images_per_second_interval is'),
    ({'losses': [True]}, 'losses is'),
    ({'runs': [1]}, 'runs is'),
  ],
)
def test_every_field_is_checked(result, change, problem):
  with pytest.raises(ValueError, match=problem):
    results.validate({**result, **change})


def test_an_invalid_result_leaves_the_old_file_alone(tmp_path, result):
  path = str(tmp_path / 'run.json')
  results.write(path, result)
  with pytest.raises(ValueError, match='not a valid result'):
    results.write(path, {**result, 'status': 'fine'})
  assert results.read(path) == result


@pytest.mark.parametrize('text', ['', '{"schema_version": 1', '{}', '[]', '3'])
def test_damaged_files_are_refused_with_their_name(tmp_path, text):
  path = tmp_path / 'run.json'
  path.write_text(text)
  with pytest.raises(DataError, match=r'run\.json is no result'):
    results.read(str(path))


def test_the_file_is_plain_json(tmp_path, result):
  path = tmp_path / 'run.json'
  results.write(str(path), result)
  assert json.loads(path.read_text())['step_seconds'] == [2.0]


def test_the_schema_is_documented_as_it_is():
  page = (ROOT / 'docs' / 'results_schema.md').read_text()
  assert page == results.document(), 'python -m benchmarks.results > docs/results_schema.md'
  for name in results.FIELDS:
    assert f'| `{name}` |' in page
