"""One page of many results: what stands on it, what is escaped, what is drawn."""

import json
import re

import pytest

from benchmarks import demand, diagnosis, report, results
from tests.benchmarks.test_compare import NO_SPEED, noisy, result

VERDICT = {
  'limit': 'decode',
  'gain': 1.5,
  'alike': [],
  'behind': 'compute',
  'behind_gain': None,
  'sentence': 'Decode limits this run. Try --pipeline=indexed',
  'advice': diagnosis.ADVICE['decode'],
  'parts': {'decode': 0.03, 'compute': 0.012, 'transfer': 0.0},
  'gains': {'decode': 1.5, 'compute': 0.0},
  'predicted_s': 0.03,
  'measured_s': 0.031,
  'images': 32,
  'matrix_product_flops': 5e11,
}


@pytest.fixture
def written(tmp_path):
  def write(name, seconds=None, **changed):
    path = str(tmp_path / name)
    results.write(path, result(noisy(1.0) if seconds is None else seconds, **changed))
    return path

  return write


def made(paths, tmp_path, *flags):
  assert report.main([*paths, f'--out={tmp_path}/out', *flags]) == 0
  return (tmp_path / 'out' / 'report.html').read_text()


def test_every_result_stands_on_it(written, tmp_path):
  paths = [
    written('one.json', peak_rss_mib=1234.5, input_demand=demand.of(64, 1, {'pixels': 150528.0})),
    written('two.json', [0.6] * 20, devices=['/CPU:0', '/CPU:1']),
    written('lost.json', **{**NO_SPEED, 'status': 'failed', 'reason': 'the loss is nan in step 2'}),
    written('said.json', **{**NO_SPEED, 'mode': 'diagnosis', 'diagnosis': VERDICT}),
    written('right.json', **{**NO_SPEED, 'mode': 'evaluation', 'accuracy': {'top_1': 0.763}}),
  ]
  html = made(paths, tmp_path)
  for text in (
    'one',
    'two',
    'Failed: the loss is nan in step 2',
    VERDICT['sentence'],
    'top_1 0.763',
  ):
    assert text in html, text
  assert '1,234 MiB at most' in html or '1,235 MiB at most' in html
  assert '9.63 pixels' in html
  assert 'nearly all' not in html and '150%' in html
  assert html.count('<svg') == 6  # throughput, scaling, and two of each that measured steps
  assert '<h2 id="scaling">' in html


def test_it_loads_nothing_and_a_result_can_not_write_on_it(written, tmp_path):
  bad = '<script>alert(1)</script>[x](javascript:alert(1))'
  html = made([written('bad.json', model=bad, command=[bad], warnings=[bad])], tmp_path)
  assert '<script' not in html and 'href="javascript' not in html
  assert '&lt;script&gt;' in html
  assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', html.replace('href="#', ''))
  assert '@import' not in html and 'url(http' not in html


def test_files_of_one_name_are_told_apart(written, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  html = made([written('a/run.json'), written('b/run.json')], tmp_path, '--charts=false')
  assert f'{tmp_path}/a/run' in html and f'{tmp_path}/b/run' in html
  assert '<svg' not in html


def test_files_that_are_no_results(written, tmp_path, capsys):
  other = tmp_path / 'other.json'
  other.write_text(json.dumps({'a': 1}))
  assert report.main([str(other)]) == 1
  assert 'is no result of benchmarks/run.py' in capsys.readouterr().err
  assert report.main([]) == 2
  assert 'nothing to report' in capsys.readouterr().err


def test_demand_is_of_each_device():
  found = demand.of(400.0, 4, {'pixels': 150528.0, 'encoded': 115e3})
  assert found == pytest.approx(
    {'images_per_second': 100, 'pixels_mb_per_second': 15.0528, 'encoded_mb_per_second': 11.5}
  )
  assert demand.of(1.0, 1, {'encoded': None})['encoded_mb_per_second'] is None
  assert 115e3 < demand.IMAGENET_BYTES < 116e3
