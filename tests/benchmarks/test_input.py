"""The measurement of input: rows, turns and what is left out; the corpus."""

import json
import os
from pathlib import Path
import random
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from benchmarks import input as measured
from benchmarks import input_worker
from benchmarks.corpus import build, photographs
from hpm import errors
from hpm.pipelines import sample

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def result(tmp_path_factory) -> dict:
  """One short run over some rows of a small data set, as a user starts it."""
  directory = tmp_path_factory.mktemp('input')
  data_dir, json_path = str(directory / 'sample'), directory / 'result.json'
  sample.write_sample(data_dir, num_images=80)
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'benchmarks.input', f'--data_dir={data_dir}', '--cores=1'),
      *(f'--work_dir={directory / "work"}', f'--json={json_path}', '--batch_size=16'),
      *(
        '--seconds=0.1',
        '--num_rounds=2',
        '--rows=C loop; recipe; indexed, ops; grain; ordinary: read',
      ),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(json_path.read_text(encoding='utf-8'))
  return found | {'printed': done.stdout}


def test_rows_are_measured_by_turns(result):
  rows = {row['name']: row for row in result['rows']}
  assert list(rows) == ['C loop', 'recipe', 'indexed, ops', 'grain', 'ordinary: read']
  for name in ('recipe', 'indexed, ops', 'ordinary: read'):
    row = rows[name]
    assert len(row['rounds']) == 2 and row['peak_mib'] > 50
    middle, low, high = row['images_per_s']
    assert 0 < low <= middle <= high
    assert row['times_recipe'] > 0
    assert name in result['printed']
  assert rows['recipe']['times_recipe'] == 1
  assert result['num_images'] == 64
  assert set(result['bytes']) == {'files', 'indexed', 'ordinary', 'raw'}
  # Each format holds all images.
  assert result['bytes']['raw'] > 64 * 3 * 256 * 256
  # Files that were written with standard Huffman tables get their own, and shrink.
  assert 0.7 < result['bytes']['indexed'] / result['bytes']['ordinary'] < 1.05


def test_a_row_that_cannot_run_says_why(result):
  row = next(row for row in result['rows'] if row['name'] == 'grain')
  try:
    import grain  # noqa: F401
  except ImportError:
    assert row['left_out'] == 'grain is not installed' and 'images_per_s' not in row
    assert 'left out: grain is not installed' in result['printed']
  else:
    assert row['rounds']


def test_the_c_loop_runs_where_it_can_be_compiled(result):
  row = next(row for row in result['rows'] if row['name'] == 'C loop')
  assert 'left_out' in row or row['images_per_s'][0] > 0
  if os.path.exists('/usr/include/jpeglib.h'):
    assert 'left_out' not in row


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], 'give --data_dir=DIR, or --corpus'),
    (['--data_dir=x', '--corpus'], 'give --data_dir=DIR, or --corpus'),
    (['--data_dir=x', '--rows=nothing'], "no row or group 'nothing'"),
    (['--data_dir=x', '--cores=1,b'], '--cores=1,b'),
    (['--data_dir=x', '--cores=4096'], 'this process may use'),
  ],
)
def test_wrong_use_is_refused_in_a_line(capsys, arguments, message):
  assert measured.main(arguments) == 2
  errors_ = capsys.readouterr().err
  assert message in errors_ and errors_.count('\n') == 1


def test_missing_data_is_named(capsys, tmp_path):
  assert measured.main([f'--data_dir={tmp_path}', f'--work_dir={tmp_path}/w', '--cores=1']) == 1
  assert str(tmp_path) in capsys.readouterr().err


def test_rows_are_chosen_by_name_and_group():
  assert measured._names(None) == list(measured.ROWS)
  chosen = measured._names('evaluation; recipe')
  assert chosen[:2] == ['recipe', 'eval tfdata'] and 'eval indexed, native' in chosen
  assert all(name.startswith('eval ') for name in chosen[1:])
  stages = measured._names('stages')
  assert len(stages) == 2 * len(input_worker.STAGES) and all(':' in name for name in stages)


def test_every_row_is_measured_once_beside_what_it_is_compared_with():
  names = list(measured.ROWS)
  chunks = measured._chunks(names)
  assert all(chunk[:2] == ['C loop', 'recipe'] and len(chunk) <= 8 for chunk in chunks)
  assert [name for chunk in chunks for name in chunk[2:]] == names[:1][1:] + [
    name for name in names if name not in ('C loop', 'recipe')
  ]
  assert measured._chunks(['recipe']) == [['recipe']]
  assert measured._chunks(['indexed']) == [['indexed']]


def test_a_summary_compares_cpu_time_on_as_many_cores():
  def row(name, cores, *cpu):
    rounds = [{'images': 100, 'wall_s': 0.1, 'cpu_s': seconds} for seconds in cpu]
    return {'name': name, 'text': '', 'cores': cores, 'rounds': rounds}

  rows = measured.summary(
    [
      row('recipe', 1, 0.2, 0.4, 0.3),
      row('C loop', 1, 0.1),
      row('tfdata', 1, 0.15, 0.1, 0.2),
      row('tfdata', 2, 0.1),
      row('grain', 1),
    ]
  )
  recipe, _, tfdata, two_cores, grain = rows
  assert recipe['cpu_ms'] == pytest.approx((3.0, 2.0, 4.0))
  assert tfdata['images_per_s'] == pytest.approx((1000, 1000, 1000))
  assert tfdata['times_recipe'] == pytest.approx(2.0)
  assert tfdata['times_c_loop'] == pytest.approx(1 / 1.5)
  assert 'times_recipe' not in two_cores and 'cpu_ms' not in grain


def test_random_crops_lie_inside_the_image():
  rng = random.Random(1)
  for _ in range(500):
    height, width = rng.randint(1, 300), rng.randint(1, 300)
    top, left, rows, columns = input_worker._crop(height, width, rng)
    assert top >= 0 and left >= 0 and rows > 0 and columns > 0
    assert top + rows <= height and left + columns <= width


def test_the_corpus_is_the_same_every_time(tmp_path):
  sources = photographs.installed()
  first = build.cut(sources, tmp_path / 'a', 12)
  second = build.cut(sources, tmp_path / 'b', 12)
  assert [entry.path.read_bytes() for entry in first] == [
    entry.path.read_bytes() for entry in second
  ]
  sizes = {Image.open(entry.path).size for entry in first}
  assert len(sizes) > 3 and all(1 <= entry.label <= 1000 for entry in first)
  build._write_shards(first, tmp_path / 'shards')
  paths = sorted(map(str, (tmp_path / 'shards').iterdir()))
  assert len(paths) == build.SHARDS
  records = [record.numpy() for record in tf.data.TFRecordDataset(paths)]
  images = {
    tf.train.Example.FromString(record).features.feature['image/encoded'].bytes_list.value[0]
    for record in records
  }
  assert images == {entry.path.read_bytes() for entry in first}


def test_sizes_follow_those_of_imagenet():
  rng = random.Random(2)
  sizes = np.array([build._size(rng) for _ in range(4000)])
  assert np.mean((sizes == (500, 375)).all(1)) == pytest.approx(0.42, abs=0.03)
  assert sizes.mean(0) == pytest.approx((487, 428), rel=0.05)


def test_the_corpus_leaves_other_directories_alone(tmp_path):
  with pytest.raises(errors.UsageError, match='holds no corpus'):
    build.build(str(tmp_path))


def test_debian_packages_are_needed(tmp_path, monkeypatch):
  monkeypatch.setattr(photographs.shutil, 'which', lambda program: None)
  with pytest.raises(errors.DataError, match='no apt-get'):
    build.build(str(tmp_path / 'corpus'))
  assert not list(tmp_path.iterdir())
