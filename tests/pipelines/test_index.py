"""Index files: what DALI's reader needs, written right, and refused when they aren't a shard's."""

import os
import re

import numpy as np
import pytest

from hpm import errors
from hpm.pipelines import __main__ as command
from hpm.pipelines import index, records
from tests.pipelines import data


@pytest.fixture
def directory(tmp_path) -> str:
  """Shards of 3 and 2 records, and one of another split."""
  sizes = [[5, 70, 1], [44, 9]]
  data.write_shards(tmp_path, [[b'x' * size for size in shard] for shard in sizes])
  return data.write_shards(tmp_path, [[b'y' * 8]], split='validation')


def run(*arguments: str) -> int:
  return command.main(['index', *arguments])


def test_the_command_indexes_every_split_and_leaves_alone_what_fits(directory, capsys):
  assert run(directory) == 0
  assert capsys.readouterr().out == (
    f'6 records in 3 shards; {directory}/idx: 3 index files written, 0 fit\n'
  )
  with open(f'{directory}/idx/train-00000-of-00002.idx', encoding='ascii') as file:
    assert file.read() == '0 21\n21 86\n107 17\n'
  os.remove(f'{directory}/idx/validation-00000-of-00001.idx')
  assert run(directory) == 0
  assert '1 index files written, 2 fit' in capsys.readouterr().out
  assert run(directory, '--check') == 0
  assert sorted(os.listdir(f'{directory}/idx')) == [
    'train-00000-of-00002.idx', 'train-00001-of-00002.idx', 'validation-00000-of-00001.idx',
  ]  # fmt: skip


def test_an_index_finds_the_records(directory):
  path = f'{directory}/train-00001-of-00002'
  assert index.write(path, f'{directory}/x.idx') == 2
  table = index.read(path, f'{directory}/x.idx')
  np.testing.assert_array_equal(table, [[0, 60], [60, 25]])
  for offset, size in table:
    assert len(records.read_record(path, int(offset))) == size - 16


def test_dalis_own_reader_takes_it(sample_dir, tmp_path):
  from nvidia.dali import fn, pipeline, tfrecord

  paths = records.shard_files(sample_dir, 'validation')
  indices = [index.index_path(path, str(tmp_path)) for path in paths]
  count = sum(index.write(*pair) for pair in zip(paths, indices))
  graph = pipeline.Pipeline(batch_size=count, num_threads=1, device_id=None)
  with graph:
    features = {records.LABEL: tfrecord.FixedLenFeature([1], tfrecord.int64, -1)}
    read = fn.readers.tfrecord(path=paths, index_path=indices, features=features)
    graph.set_outputs(read[records.LABEL])
  graph.build()
  labels = np.array(graph.run()[0].as_tensor()).ravel()
  assert count == 16
  assert set(labels) <= set(range(1, 8))


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, 'has no index .*x.idx: write it anew: python -m hpm.pipelines index .* --out='),
    ('0 60\n', r'lists 1 records but .*train-00001-of-00002 holds 2: it is the index of another'),
    ('0 21\n21 86\n107 17\n', 'lists 3 records but .* holds 2'),
    ('0 60\n60 26\n', r'has record 1 at bytes 60 \+ 26, but .* at 60 \+ 25: it is the index of'),
    ('0 60\n61 24\n', r'has record 1 at bytes 61 \+ 24'),
    ('', 'x.idx is no index'),
    ('0\n60\n', 'x.idx is no index'),
    ('0 60\n60 many\n', 'x.idx is no index'),
    ('\x89PNG', 'x.idx is no index'),
  ],
)
def test_an_index_that_is_not_of_this_shard_is_refused(directory, tmp_path, content, message):
  other = tmp_path / 'other' / 'x.idx'
  other.parent.mkdir()
  if content is not None:
    other.write_text(content, encoding='latin-1')
  with pytest.raises(errors.DataError, match=message) as caught:
    index.read(f'{directory}/train-00001-of-00002', str(other))
  assert '\n' not in str(caught.value)


def test_check_names_the_index_of_another_file_and_writes_nothing(directory, capsys):
  run(directory)
  path = f'{directory}/idx/train-00000-of-00002.idx'
  os.replace(f'{directory}/idx/train-00001-of-00002.idx', path)
  capsys.readouterr()
  assert run(directory, '--check') == 1
  assert re.search(r'train-00000-of-00002.idx lists 2 records but', capsys.readouterr().err)
  assert not os.path.exists(f'{directory}/idx/train-00001-of-00002.idx')


def test_damaged_and_missing_data_are_named(directory, tmp_path, capsys):
  with open(f'{directory}/train-00000-of-00002', 'r+b') as file:
    file.truncate(100)
  assert run(directory) == 1
  assert 'train-00000-of-00002: the file ends inside record 1' in capsys.readouterr().err
  assert not os.path.exists(f'{directory}/idx/train-00000-of-00002.idx')
  with open(f'{directory}/train-00000-of-00002', 'wb'):
    pass
  with pytest.raises(errors.DataError, match='00000-of-00002 is empty'):
    index.write(f'{directory}/train-00000-of-00002', f'{directory}/x.idx')
  (tmp_path / 'none').mkdir()
  with pytest.raises(errors.DataError, match=r'no files match .*\*-of-\*'):
    index.shards(str(tmp_path / 'none'))
  with pytest.raises(errors.DataError, match='cannot be read'):
    index.shards(str(tmp_path / 'missing'))
