"""The published tables: whole, typed, empty only with a reason, and without TensorFlow."""

from collections import Counter
import subprocess
import sys

import pytest

from benchmarks import published
from hpm import models
from hpm.errors import DataError
from tests.benchmarks.conftest import ROOT


def test_the_page_has_207_figures_and_two_cells_with_their_reason():
  rows = published.results()
  assert len(rows) == len(set(rows)) == 209
  empty = [row for row in rows if row.images_per_sec is None]
  assert [(row.platform, row.model, row.num_gpus, row.data) for row in empty] == [
    ('dgx1_p100', 'alexnet', 8, 'imagenet'),
    ('ec2_k80', 'alexnet', 8, 'imagenet'),
  ]
  assert [published.reason(row, 'images_per_sec') for row in empty] == [
    'not published: the input pipeline was at its maximum',
    'not published: the EFS volume did not give enough throughput',
  ]


def test_each_platform_has_its_rows():
  # Synthetic and real: 5 models on 1, 2, 4, 8 GPUs, and the other batch of 4 or 2 models; alone
  # synthetic: 3 models on 1, 8, 16, 32, 64 GPUs, and the other batch of 2.
  counts = Counter(row.platform for row in published.results())
  assert counts == {
    'dgx1_p100': 2 * 4 * (5 + 4),
    'gce_k80': 2 * 4 * (5 + 2),
    'ec2_k80': 2 * 4 * (5 + 2),
    'ec2_k80_distributed': 5 * (3 + 2),
  }
  assert list(published.platforms()) == list(counts)
  others = [
    row
    for row in published.results()
    if row.batch_size_per_gpu != published.headline_batch(row.platform, row.model)
  ]
  assert len(others) == 74 and {row.batch_size_per_gpu for row in others} == {32}


def test_single_figures_are_the_page_s():
  row = published.cell('dgx1_p100', 'resnet50', 8, 64, 'synthetic')
  assert row.images_per_sec == 1734 and row.per_device == 1734 / 8
  assert published.scaling(row) == pytest.approx(1734 / (8 * 219))
  assert published.cell('gce_k80', 'resnet152', 1, 32, 'imagenet').images_per_sec == 20.0
  assert published.cell('gce_k80', 'resnet152', 1, 64, 'imagenet') is None
  assert published.scaling(published.cell('ec2_k80', 'alexnet', 8, 512, 'imagenet')) is None
  vgg = published.cell('dgx1_p100', 'vgg16', 4, 64, 'synthetic')
  assert (vgg.variable_update, vgg.nccl, vgg.local_parameter_device) == ('replicated', True, None)
  far = published.cell('ec2_k80_distributed', 'inception3', 64, 64, 'synthetic')
  assert (far.hosts, far.gpus_per_host, far.ps_tasks, far.cross_replica_sync) == (8, 8, 6, True)


def test_every_row_is_one_that_the_driver_can_name():
  for row in published.results():
    models.check_name(row.model)
    assert row.model in published.MODELS
    assert row.num_gpus == row.hosts * row.gpus_per_host
    assert row.optimizer == 'sgd' and row.data in ('synthetic', 'imagenet')
    assert (row.nccl is None) == (row.variable_update != 'replicated')


def test_an_empty_cell_has_a_reason_and_a_full_one_has_none():
  rows = [*published.results(), *published.platforms().values(), *published.accelerators()]
  for row in rows:
    for column, value in row._asdict().items():
      if value is None:
        assert published.reason(row, column), (row, column)
      elif value != '':
        assert published.reason(row, column) is None


def test_the_cost_of_an_accuracy_follows_from_rate_and_price():
  costs = {
    row.usd_to_top1: row.epochs * 1281167 / row.images_per_sec / 3600 * row.usd_per_hour
    for row in published.accelerators()
    if row.usd_to_top1
  }
  assert costs == {
    73: pytest.approx(73.3, abs=0.05),
    55: pytest.approx(54.6, abs=0.05),
    128.5: pytest.approx(128.5, abs=0.05),
  }


def test_batch_sizes_of_accelerators_are_global():
  row = next(r for r in published.accelerators() if 'tf_cnn_benchmarks' in r.framework)
  assert (row.global_batch, row.chips, row.batch_size_per_device) == (1024, 4, 256)


def test_a_platform_names_its_gpu():
  assert [p.gpu for p in published.platforms().values()] == ['Tesla P100', *['Tesla K80'] * 3]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('platform,model\n', 'columns'),
    ('system,images\nx,fast\n', 'line 2: could not convert'),
  ],
)
def test_a_damaged_table_is_named(tmp_path, monkeypatch, text, message):
  from typing import NamedTuple

  class Row(NamedTuple):
    system: str
    images: float

  (tmp_path / 'rows.csv').write_text(text)
  monkeypatch.setattr(published, '__file__', str(tmp_path / '__init__.py'))
  with pytest.raises(DataError, match=message):
    published._read('rows.csv', Row)


def test_reading_needs_no_tensorflow():
  code = (
    'import sys; from benchmarks import published; published.results(); '
    'published.platforms(); published.accelerators(); sys.exit("tensorflow" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
