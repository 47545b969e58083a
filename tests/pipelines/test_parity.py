"""`python -m hpm.pipelines parity`: what it finds equal, and that it finds what isn't."""

import json

import numpy as np
from PIL import Image
import pytest

from hpm import errors
from hpm.pipelines import __main__ as command
from hpm.pipelines import augment, parity
from tests.pipelines import data


@pytest.fixture(scope='module')
def results(sample_dir) -> list[parity.Result]:
  return parity.compare(
    'imagenet', num_images=6, data_dir=sample_dir, split='validation', image_size=64, num_classes=7
  )


def test_tfdata_dali_and_pil_agree(results):
  assert [result.mode for result in results] == ['training'] * 6 + ['evaluation'] * 6
  for result in results:
    assert result.agrees
    assert result.window == result.dali_window
    mean, most = result.differences['tfdata-dali']
    assert mean < 0.001 and most <= 1
    # PIL's own resize rounds between its two passes.
    mean, most = result.differences['tfdata-pil']
    assert mean < (0.001 if result.mode == 'training' else 0.5) and most <= 1


def test_a_pixel_a_label_or_a_window_that_differs_is_no_agreement(results):
  def changed(**changes):
    return parity.Result(**(vars(results[0]) | changes))

  assert changed().agrees
  assert not changed(labels=(1, 2)).agrees
  assert not changed(dali_window=(0, 0, 5, 5)).agrees
  assert not changed(differences={'tfdata-dali': (0.01, 2)}).agrees


def test_the_command_writes_a_table_a_picture_and_json(sample_dir, tmp_path, capsys):
  sheet, table = tmp_path / 'sheet.png', tmp_path / 'parity.json'
  arguments = ['--num_images=3', '--image_size=48', '--num_classes=7', '--split=train']
  assert command.main(['parity', sample_dir, *arguments, f'--out={sheet}', f'--json={table}']) == 0
  printed = capsys.readouterr().out
  assert printed.count('3 of 3 agree') == 2
  read = json.loads(table.read_text())
  assert len(read['results']) == 6
  assert read['summary']['evaluation']['pairs']['tfdata-dali'][1] <= 1
  assert all(result['agrees'] for result in read['results'])
  with Image.open(sheet) as image:
    pixels = np.asarray(image)
  assert pixels.shape[1] > 5 * 160
  assert pixels.std() > 30


def test_pipelines_that_differ_are_shown_and_end_with_code_1(sample_dir, monkeypatch, capsys):
  monkeypatch.setattr(
    augment, 'resize', lambda image, size: augment.resize_antialiased(image, size)
  )
  assert command.main(['parity', sample_dir, '--num_images=2', '--num_classes=7']) == 1
  printed = capsys.readouterr().out
  assert 'tf.data and DALI do not agree' in printed
  assert 'DIFFERS' in printed


def test_pil_rounds_a_long_side_as_the_pipelines_do(tmp_path):
  # 60 x 90 pixels with a short side of 73: the long one is 109.5.
  directory = data.write_shards(tmp_path, [[data.record(data.image_bytes(90, 60))]])
  found = parity.compare('imagenet', num_images=1, data_dir=directory, image_size=64)
  assert found[1].mode == 'evaluation' and found[1].differences['tfdata-pil'][1] <= 1


def test_the_table_is_80_columns_wide(results):
  lines = parity.table(results).splitlines()
  assert max(map(len, lines)) <= 80
  assert sum('6 of 6 agree' in line for line in lines) == 2


def test_images_that_are_no_jpegs_are_compared_as_well(tmp_path):
  images = [data.image_bytes(form=form) for form in ('PNG', 'BMP', 'JPEG')]
  directory = data.write_shards(tmp_path, [[data.record(image) for image in images]])
  found = parity.compare('imagenet', num_images=3, data_dir=directory, image_size=32)
  assert all(result.agrees for result in found)
  assert max(result.differences['tfdata-pil'][1] for result in found) <= 1


def test_what_cannot_be_compared_is_refused(sample_dir, tmp_path, results):
  with pytest.raises(errors.UsageError, match='num_images=0'):
    parity.compare('imagenet', num_images=0, data_dir=sample_dir)
  with pytest.raises(errors.DataError, match='does not exist'):
    parity.compare('imagenet', data_dir=str(tmp_path / 'missing'))
  with pytest.raises(errors.UsageError, match='give a name that ends in .png'):
    parity.picture(results, str(tmp_path / 'sheet.unknown'))
  bad = data.write_shards(tmp_path, [[data.record(), data.record(label=0)]])
  with pytest.raises(errors.DataError, match='record 1: label 0'):
    parity.compare('imagenet', data_dir=bad)
