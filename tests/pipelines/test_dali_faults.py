"""Bad data on DALI: what its own reader would pass over or lose the place of is named here."""

import re

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import dali, records
from tests.pipelines import data

GOOD = data.image_bytes()


@pytest.fixture(params=dali.BRIDGES)
def bridge(request) -> str:
  return request.param


def make(directory, **options):
  defaults = {
    'batch_size': 4,
    'image_size': 32,
    'num_classes': 10,
    'with_ids': True,
    'num_parallel_calls': 2,
    'shuffle_buffer': 4,
  }
  return pipelines.create(
    'imagenet', pipeline='dali', data_dir=str(directory), **(defaults | options)
  )


def consume(pipeline) -> tuple[list[int], Exception]:
  """The ids that came, and what the iterator raised then."""
  ids: list[int] = []
  with pytest.raises(tf.errors.OpError) as caught:
    for _, _, batch in pipeline.dataset().take(30):
      ids += batch.numpy().tolist()
  return ids, caught.value


def shards(tmp_path, bad: bytes | None = None) -> str:
  """24 records in 3 shards; `bad` is record 5 of the second, the 17th that evaluation reads."""
  contents = [[data.record(GOOD, filename=f'{i}_{j}.JPEG') for j in range(8)] for i in range(3)]
  if bad is not None:
    contents[1][5] = bad
  return data.write_shards(tmp_path, contents)


def place(directory) -> str:
  return f'{directory}/train-00001-of-00003: record 5'


@pytest.mark.parametrize(
  ('bad', 'what'),
  [
    (data.record(GOOD, label=None), r'no single value for image/class/label'),
    (records.encode_example({'image/class/label': 3}), r'no single value for image/encoded'),
    (b'no example', 'not a tf.train.Example'),
    (data.record(GOOD, label=11, filename='x.JPEG'), 'label 11 of image x.JPEG .* outside 0..9'),
    (data.record(b'', filename='x.JPEG'), 'image x.JPEG has 0 bytes'),
    (data.record(b'text', filename='x.JPEG'), 'image x.JPEG of 4 bytes cannot be decoded'),
    (data.record(GOOD[:1200], filename='x.JPEG'), 'image x.JPEG of 1200 bytes cannot be decoded'),
  ],
  ids=['no label', 'no image', 'no example', 'label', 'empty bytes', 'text', 'truncated JPEG'],
)
def test_a_bad_record_in_the_middle_is_named(tmp_path, bad, what):
  # Both ways into TensorFlow are tested, one with each second fault.
  bridge = dali.BRIDGES[len(what) % 2]
  pipeline = make(shards(tmp_path, bad), training=False, bridge=bridge)
  ids, error = consume(pipeline)
  explained = pipeline.explain(error, len(ids))
  assert isinstance(explained, errors.DataError)
  assert re.match(f'{place(tmp_path)}: .*{what}', str(explained))
  assert '\n' not in str(explained)
  # What came before it is right, and there is not more of it than there can be.
  assert ids == [file << 32 | record for record in range(8) for file in range(3)][: len(ids)]
  assert len(ids) <= 16


@pytest.mark.parametrize(('what', 'bridge'), [('payload', 'python'), ('label', 'plugin')])
def test_a_flipped_byte_is_named(tmp_path, what, bridge):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  start = int(records.record_offsets(path)[5])
  with open(path, 'rb') as file:
    content = file.read()
  # DALI's own reader would read the changed label as another class.
  marker = records.LABEL.encode() if what == 'label' else b'\xff\xda'
  at = content.index(marker, start) + len(marker) + 5
  data.flip_byte(path, at)
  pipeline = make(directory, bridge=bridge)
  ids, error = consume(pipeline)
  explained = str(pipeline.explain(error, len(ids)))
  assert re.match(rf'{place(directory)} \(at byte {start}\) is damaged: the checksum', explained)


def test_a_truncated_shard_is_named(tmp_path):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  with open(path, 'r+b') as file:
    file.truncate(int(records.record_offsets(path)[5]) + 100)
  pipeline = make(directory)
  ids, error = consume(pipeline)
  assert f'{path}: the file ends inside record 5' in str(pipeline.explain(error, len(ids)))


def test_an_overlong_shard_is_named(tmp_path):
  directory = shards(tmp_path)
  path = f'{directory}/train-00001-of-00003'
  with open(path, 'ab') as file:
    file.write(b'some bytes too many')
  pipeline = make(directory)
  ids, error = consume(pipeline)
  explained = str(pipeline.explain(error, len(ids)))
  assert explained.startswith(f'{path}: ')
  assert 'record 8' in explained


@pytest.mark.parametrize(
  ('content', 'what'),
  [
    (b'', 'is empty'),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n', 'Git LFS pointer'),
    (GOOD, 'is not a TFRecord'),
  ],
  ids=['zero bytes', 'LFS pointer', 'JPEG'],
)
def test_a_file_that_is_no_tfrecord_is_named_at_the_door(tmp_path, content, what):
  path = f'{shards(tmp_path)}/train-00001-of-00003'
  with open(path, 'wb') as file:
    file.write(content)
  with pytest.raises(errors.DataError, match=f'{path} .*{what}|{path} {what}'):
    make(tmp_path)


def test_what_dali_alone_cannot_decode_is_named(tmp_path, monkeypatch):
  """Should TensorFlow find nothing wrong with a record that DALI fails in."""
  pipeline = make(shards(tmp_path, data.record(GOOD[:1200])), training=False)
  ids, error = consume(pipeline)
  monkeypatch.setattr('hpm.pipelines.faults.examine', lambda *args: None)
  explained = str(pipeline.explain(error, len(ids)))
  assert explained.startswith(f'{place(tmp_path)}: DALI cannot decode its image: write the record')


def test_without_a_culprit_dalis_own_words_are_given(tmp_path):
  pipeline = make(shards(tmp_path), num_epochs=1)
  words = 'Error in CPU operator\nencountered:\n\nout of luck\nCurrent pipeline object is no longer'
  explained = str(pipeline.explain(RuntimeError(words), 4))
  assert 'failed after 4 samples: out of luck (the data seem to be fine' in explained


@pytest.mark.parametrize(
  ('bad', 'bridge'),
  [
    (data.record(GOOD[:1200]), 'plugin'),
    (data.record(GOOD, label=11), 'python'),
    (b'no example', 'plugin'),
  ],
  ids=['truncated JPEG', 'label', 'no example'],
)
def test_bad_records_can_be_skipped_and_listed(tmp_path, bad, bridge):
  directory = shards(tmp_path, bad)
  options = {'training': False, 'bad_records': 'skip'}
  pipeline = make(directory, bridge=bridge, **options)
  images, _, ids = data.collect(pipeline)
  assert ids.tolist() == [
    file << 32 | record for record in range(8) for file in range(3) if (file, record) != (1, 5)
  ]
  assert [skipped.id for skipped in pipeline.skipped()] == [1 << 32 | 5]
  assert pipeline.skipped()[0].what.startswith(place(directory))
  reference = pipelines.create(
    'imagenet', data_dir=directory, batch_size=4, image_size=32, num_classes=10, **options
  )
  expected = np.concatenate([batch[0].numpy() for batch in reference.dataset()])
  assert np.abs(images.astype(int) - expected).max() <= 1


def test_more_bad_records_than_allowed_end_the_run(tmp_path, bridge):
  directory = shards(tmp_path, data.record(GOOD, label=11))
  pipeline = make(directory, training=False, bad_records='limit:0', bridge=bridge)
  ids, error = consume(pipeline)
  assert 'more than bad_records=limit:0' in str(pipeline.explain(error, len(ids)))
