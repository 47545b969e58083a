"""Every source gives the same samples in the same ways: ids, order, resuming, shards, errors."""

import io
import os
import shutil

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import augment, detect, iterable, records, sources, tfdata
from tests.pipelines import data

SIZE = 16
COUNT = 21
KINDS = ['imagenet', 'folder', 'tfds', 'cifar10', 'cifar100', 'iterable']
NUM_CLASSES = {'cifar10': 10, 'cifar100': 100}


def images(count: int = COUNT) -> list[bytes]:
  names = ('astronaut.png', 'coffee.png', 'chelsea.png')
  return [data.image_bytes(40 + i, 60 - i, name=names[i % 3]) for i in range(count)]


def write_folder(directory, encoded) -> str:
  for i, contents in enumerate(encoded):
    path = os.path.join(directory, 'train', f'n{i % 3}', f'{i:03d}.JPEG')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as file:
      file.write(contents)
  return str(directory)


def write_cifar(directory, label_bytes: int, names) -> str:
  os.makedirs(directory, exist_ok=True)
  rng = np.random.default_rng(0)
  for name in names:
    table = rng.integers(0, 256, (7, label_bytes + 3072), np.uint8)
    table[:, :label_bytes] = rng.integers(0, 10, (7, label_bytes))
    table.tofile(os.path.join(directory, name))
  return str(directory)


@pytest.fixture(scope='session')
def tfds_dir(tmp_path_factory) -> str:
  """A prepared TFDS data set, 'photographs', of 21 images in 3 shards and 3 in a test split."""
  tfds = pytest.importorskip('tensorflow_datasets')

  features = tfds.features.FeaturesDict(
    {
      'picture': tfds.features.Image(shape=(None, None, 3), encoding_format='jpeg'),
      'kind': tfds.features.ClassLabel(names=['a', 'b', 'c']),
      'file_name': tfds.features.Text(),
    }
  )
  directory = str(tmp_path_factory.mktemp('tfds'))
  prepared = os.path.join(directory, 'photographs', '1.0.0')
  os.makedirs(prepared)
  encoded = images()
  infos = []
  for split, numbers, num_shards in (('train', range(COUNT), 3), ('test', range(3), 1)):
    template = tfds.core.ShardedFileTemplate(
      data_dir=prepared, dataset_name='photographs', split=split, filetype_suffix='tfrecord'
    )
    for shard in range(num_shards):
      path = template.sharded_filepath(shard_index=shard, num_shards=num_shards)
      records.write_records(
        os.fspath(path),
        (
          features.serialize_example(
            {'picture': io.BytesIO(encoded[i]), 'kind': i % 3, 'file_name': f'{i}.jpg'}
          )
          for i in numbers[shard::num_shards]
        ),
      )
    lengths = [len(numbers[shard::num_shards]) for shard in range(num_shards)]
    infos.append(
      tfds.core.SplitInfo(
        name=split, shard_lengths=lengths, num_bytes=0, filename_template=template
      )
    )
  tfds.folder_dataset.write_metadata(
    data_dir=prepared,
    features=features,
    split_infos=infos,
    supervised_keys=('picture', 'kind'),
  )
  return directory


@pytest.fixture(scope='session')
def data_sets(tmp_path_factory, tfds_dir):
  """kind -> options of `pipelines.create` for its name."""
  root = tmp_path_factory.mktemp('sources')
  encoded = images()
  shards = [[data.record(encoded[i], 1 + i % 3) for i in range(s, COUNT, 3)] for s in range(3)]
  return {
    'imagenet': ('imagenet', {'data_dir': data.write_shards(root / 'imagenet', shards)}),
    'folder': ('folder', {'data_dir': write_folder(root / 'folder', encoded)}),
    'tfds': ('tfds:photographs', {'data_dir': tfds_dir}),
    'cifar10': (
      'cifar10',
      {
        'data_dir': write_cifar(
          root / 'c10', 1, [*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin']
        )
      },
    ),
    'cifar100': (
      'cifar100',
      {'data_dir': write_cifar(root / 'c100', 2, ['train.bin', 'test.bin'])},
    ),
    'iterable': ('iterable', {'samples': [(image, i % 3) for i, image in enumerate(encoded)]}),
  }


def make(data_sets, kind, **options):
  name, own = data_sets[kind]
  defaults = {
    'batch_size': 4,
    'image_size': SIZE,
    'num_classes': NUM_CLASSES.get(kind, 3),
    'with_ids': True,
    'shuffle_buffer': 5,
  }
  return pipelines.create(name, **(defaults | own | options))


def all_ids(source: sources.Source) -> list[int]:
  return [f << 32 | record for f, count in enumerate(source.counts) for record in range(count)]


@pytest.mark.parametrize('kind', KINDS)
def test_an_epoch_is_every_sample_once_and_another_order_each_time(data_sets, kind):
  pipeline = make(data_sets, kind, num_epochs=2)
  size = pipeline.epoch_size
  pixels, labels, ids = data.collect(pipeline)
  first, second = ids[:size], ids[size:]
  assert sorted(first) == sorted(second) == all_ids(pipeline.source)
  assert not np.array_equal(first, second)
  assert not np.array_equal(first, np.sort(first))
  assert pixels.shape == (2 * size, SIZE, SIZE, 3) and pixels.dtype == np.uint8
  # The label of a sample is the one that the source says.
  for ident, label in zip(ids[:5], labels[:5]):
    contents = pipeline.source.contents(int(ident) >> 32, int(ident) & 0xFFFFFFFF)
    assert label == contents.label + pipeline.source.label_offset(pipeline.num_classes)


@pytest.mark.parametrize('kind', KINDS)
def test_every_source_resumes_exactly(data_sets, kind):
  whole = data.collect(make(data_sets, kind, num_epochs=2))
  pipeline = make(data_sets, kind, num_epochs=2, num_parallel_calls=3)
  for position in (3, pipeline.epoch_size + 6):
    pipeline.restore(pipeline.state(position))
    for expected, actual in zip(whole, data.collect(pipeline)):
      np.testing.assert_array_equal(actual, expected[position:])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('shard_by', 'num_shards'), [('record', 2), ('file', 3)])
def test_workers_see_all_records_and_none_twice(data_sets, kind, shard_by, num_shards):
  whole = make(data_sets, kind)
  for seed in (0, None):  # shuffled and in the fixed order
    if shard_by == 'file' and len(whole.source.files) < num_shards:
      match = f'{num_shards} workers .* but {len(whole.source.files)} files'
      with pytest.raises(errors.UsageError, match=match):
        make(data_sets, kind, num_shards=num_shards, shard_by='file')
      return
    seen = []
    for index in range(num_shards):
      pipeline = make(
        data_sets,
        kind,
        num_epochs=1,
        num_shards=num_shards,
        shard_index=index,
        shard_by=shard_by,
        training=seed is not None,
      )
      ids = data.collect(pipeline)[2].tolist()
      assert len(ids) == pipeline.epoch_size
      seen += ids
    assert sorted(seen) == all_ids(whole.source)


@pytest.mark.parametrize('kind', KINDS)
def test_a_worker_resumes_its_own_part(data_sets, kind):
  options = {'num_epochs': 2, 'num_shards': 2, 'shard_index': 1}
  whole = data.collect(make(data_sets, kind, **options))[2]
  pipeline = make(data_sets, kind, **options)
  pipeline.restore(make(data_sets, kind, **options).state(5))
  np.testing.assert_array_equal(data.collect(pipeline)[2], whole[5:])
  with pytest.raises(errors.UsageError, match='num_shards=1, but the position was saved with num_'):
    make(data_sets, kind).restore(pipeline.state(5))


def test_workers_are_numbered_from_0_and_shard_by_is_checked(data_sets):
  with pytest.raises(errors.UsageError, match=r'shard_index=2 with num_shards=2: .* 0 \.\. 1'):
    make(data_sets, 'folder', num_shards=2, shard_index=2)
  with pytest.raises(errors.UsageError, match='did you mean record'):
    make(data_sets, 'folder', num_shards=2, shard_by='records')


def test_a_worker_without_a_record_is_refused():
  pairs = [(image, 0) for image in images(3)]
  options = {'samples': pairs, 'batch_size': 1, 'num_classes': 1, 'num_shards': 5}
  assert pipelines.create('iterable', shard_index=2, **options).epoch_size == 1
  with pytest.raises(errors.UsageError, match=r'5 workers .* but 3 records in list: worker 3'):
    pipelines.create('iterable', shard_index=3, **options)


def test_cifar_images_are_planes_of_red_green_and_blue(data_sets):
  pipeline = make(data_sets, 'cifar10', training=False, image_size=32, label_offset=0)
  path = os.path.join(data_sets['cifar10'][1]['data_dir'], 'data_batch_3.bin')
  table = np.fromfile(path, np.uint8).reshape(7, 3073)
  contents = pipeline.source.contents(2, 4)
  assert contents.label == table[4, 0]
  image = pipeline.source.decode(tf.constant(contents.encoded)).numpy()
  assert image[3, 5].tolist() == table[4, 1:].reshape(3, 32, 32)[:, 3, 5].tolist()
  # The fine label of CIFAR-100 is the second byte.
  hundred = make(data_sets, 'cifar100').source
  path = os.path.join(data_sets['cifar100'][1]['data_dir'], 'train.bin')
  assert hundred.contents(0, 6).label == np.fromfile(path, np.uint8).reshape(7, 3074)[6, 1]


def test_cifar_files_are_looked_for_and_measured(tmp_path):
  with pytest.raises(errors.DataError, match=r'holds no data_batch_1.bin'):
    pipelines.source('cifar10', data_dir=str(tmp_path))
  names = [f'data_batch_{i}.bin' for i in range(1, 6)]
  directory = write_cifar(tmp_path / 'cifar-10-batches-bin', 1, names)
  source = pipelines.source('cifar10', data_dir=str(tmp_path))
  assert source.counts == [7] * 5
  os.truncate(os.path.join(directory, names[3]), 3073 * 2 + 10)
  with pytest.raises(errors.DataError, match=r'data_batch_4.bin: .* inside record 2, 10 bytes'):
    pipelines.create('cifar10', data_dir=str(tmp_path), batch_size=1)
  os.remove(os.path.join(directory, names[3]))
  with pytest.raises(errors.DataError, match=r'data_batch_4.bin is missing'):
    pipelines.source('cifar10', data_dir=str(tmp_path))


def test_folders_are_read_with_and_without_splits(tmp_path):
  directory = write_folder(tmp_path / 'with', images(6))
  source = pipelines.source('folder', data_dir=directory)
  assert source.class_names == ['n0', 'n1', 'n2']
  flat = pipelines.source('folder', data_dir=os.path.join(directory, 'train'))
  assert [os.path.basename(path) for path in flat.files] == [
    os.path.basename(path) for path in source.files
  ]
  with pytest.raises(errors.DataError, match="has no directory for split 'validation'; it has tra"):
    pipelines.source('folder', data_dir=directory, split='validation')
  with pytest.raises(errors.DataError, match=r'no directory validation or val or test: give the'):
    pipelines.source('folder', data_dir=os.path.join(directory, 'train'), split='validation')


def test_validation_labels_are_those_of_the_training_set(tmp_path):
  directory = write_folder(tmp_path, images(6))
  shutil.copytree(tmp_path / 'train' / 'n2', tmp_path / 'val' / 'n2')
  source = pipelines.source('folder', data_dir=directory, split='validation')
  assert {source.contents(file, 0).label for file in range(len(source.files))} == {2}
  (tmp_path / 'val' / 'n9').mkdir()
  with pytest.raises(errors.DataError, match='has 1 classes that .*/train has not, such as n9'):
    pipelines.source('folder', data_dir=directory, split='validation')


def test_a_class_without_images_and_too_many_classes_are_refused(tmp_path):
  directory = write_folder(tmp_path, images(6))
  with pytest.raises(errors.DataError, match=r'has 3 classes, labels up to 2 .* num_classes=2'):
    pipelines.create('folder', data_dir=directory, batch_size=1, num_classes=2)
  (tmp_path / 'train' / 'n4').mkdir()
  (tmp_path / 'train' / 'n4' / 'Thumbs.db').write_bytes(b'x')
  with pytest.raises(errors.DataError, match=r'n4 holds no images \(.jpeg, .jpg'):
    pipelines.source('folder', data_dir=directory)


def test_a_bad_file_of_a_folder_is_named(tmp_path):
  directory = write_folder(tmp_path, images(6))
  path = os.path.join(directory, 'train', 'n1', '004.JPEG')
  with open(path, 'wb') as file:
    file.write(b'no image')
  with pytest.raises(errors.DataError, match=f'{path}: image 004.JPEG of 8 bytes cannot be dec'):
    pipelines.create('folder', data_dir=directory, batch_size=1, num_classes=3)


def test_what_a_folder_and_a_tfrecord_hold_becomes_the_same_pixels(data_sets):
  seen = {}
  for kind in ('imagenet', 'folder', 'tfds', 'iterable'):
    pixels, labels, _ = data.collect(make(data_sets, kind, training=False))
    seen[kind] = sorted((int(label), image.tobytes()) for label, image in zip(labels, pixels))
  assert seen['imagenet'] == seen['folder'] == seen['tfds'] == seen['iterable']


def test_tfds_reads_the_order_of_its_read_configuration(data_sets):
  tfds = pytest.importorskip('tensorflow_datasets')
  directory = data_sets['tfds'][1]['data_dir']
  config = tfds.ReadConfig(interleave_cycle_length=2, interleave_block_length=3, add_tfds_id=False)
  builder = tfds.builder_from_directory(os.path.join(directory, 'photographs', '1.0.0'))
  theirs = [
    example['file_name'].decode()
    for example in builder.as_dataset(split='train', read_config=config).as_numpy_iterator()
  ]
  pipeline = make(data_sets, 'tfds', read_config=config, training=False)
  _, _, ids = data.collect(pipeline)
  ours = [pipeline.source.contents(int(i) >> 32, int(i) & 0xFFFFFFFF).key for i in ids]
  assert ours == theirs
  with pytest.raises(errors.UsageError, match='read_config sets shuffle_seed: use the pipeline op'):
    make(data_sets, 'tfds', read_config=tfds.ReadConfig(shuffle_seed=3))


def test_tfds_splits_directories_and_what_is_missing(data_sets):
  directory = data_sets['tfds'][1]['data_dir']
  assert make(data_sets, 'tfds', split='validation').epoch_size == 3  # its test split
  prepared = os.path.join(directory, 'photographs', '1.0.0')
  assert make(data_sets, 'tfds', data_dir=prepared).epoch_size == COUNT
  with pytest.raises(errors.DataError, match="has no split 'extra'; it has test, train"):
    make(data_sets, 'tfds', split='extra')
  assert detect.source(directory) == detect.source(prepared) == 'tfds:photographs'
  with pytest.raises(errors.DataError, match='tfds:nothing is not prepared in .*tfds build noth'):
    pipelines.create('tfds:nothing', data_dir=directory, batch_size=1)
  with pytest.raises(errors.DataError, match='holds photographs, not other'):
    pipelines.create('tfds:other', data_dir=prepared, batch_size=1)
  with pytest.raises(errors.UsageError, match='say which one, as in tfds:NAME'):
    pipelines.create('tfds', data_dir=directory, batch_size=1)


def test_tfds_records_are_counted_against_its_metadata(data_sets, tmp_path):
  directory = data_sets['tfds'][1]['data_dir']
  prepared = shutil.copytree(os.path.join(directory, 'photographs'), tmp_path / 'photographs')
  (path,) = [str(p) for p in (prepared / '1.0.0').glob('*train*00001-of*')]
  os.truncate(path, os.path.getsize(path) // 2)
  with pytest.raises(errors.DataError, match=f'{path}: the file ends inside record'):
    make(data_sets, 'tfds', data_dir=str(tmp_path)).epoch_size  # noqa: B018


def test_tfds_folder_builder_reads_split_and_class_directories(data_sets, tmp_path):
  directory = write_folder(tmp_path, images(6))
  pipeline = pipelines.create(
    'tfds:image_folder', data_dir=directory, batch_size=2, num_classes=3, image_size=SIZE
  )
  assert pipeline.epoch_size == 6


def test_an_iterable_is_read_once_and_a_sequence_when_it_is_needed():
  pairs = [(image, i) for i, image in enumerate(images(4))]
  source = iterable.IterableSource(pair for pair in pairs)
  assert source.counts == [4]
  asked = []

  class Lazy:
    def __len__(self):
      return 4

    def __getitem__(self, index):
      asked.append(index)
      return pairs[index]

  pipeline = tfdata.TfDataPipeline(
    iterable.IterableSource(Lazy()), batch_size=2, num_classes=4, image_size=8, num_epochs=1
  )
  assert len(asked) == 1  # the first was checked
  _, labels = data.collect(pipeline)
  assert sorted(labels) == [0, 1, 2, 3] and sorted(asked[1:]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
  ('bad', 'what'),
  [
    (3, 'int in place of a pair'),
    (('x.jpg', 1), 'str in place of the bytes of an encoded image'),
    ((b'x', 'cat'), "label='cat' is not an integer"),
    ((b'x', 1), 'image of 1 bytes cannot be decoded'),
  ],
)
def test_pairs_of_an_iterable_that_cannot_be_used_are_named(bad, what):
  pairs = [(image, 0) for image in images(6)]
  pairs[4] = bad
  pipeline = pipelines.create('iterable', samples=pairs, batch_size=1, num_classes=2, image_size=8)
  with pytest.raises(tf.errors.OpError) as caught:
    data.collect(pipeline, 20)
  assert f'list: sample 4: {what}' in str(pipeline.explain(caught.value))
  with pytest.raises(errors.UsageError, match='samples holds nothing'):
    pipelines.create('iterable', samples=[], batch_size=1)


def test_boxes_are_refused_where_a_source_has_none(data_sets):
  with pytest.raises(errors.UsageError, match='use_bbox: .* has no boxes'):
    make(data_sets, 'folder', use_bbox=True)


def test_undecoded_samples_are_what_other_pipelines_build_on(data_sets):
  from hpm.pipelines import order

  for kind in KINDS:
    source = pipelines.source(data_sets[kind][0], **data_sets[kind][1])
    undecoded = order.samples(source, order.Order(seed=None)).map(
      lambda position, ident, item, source=source: (source.load(ident, item, False), ident)
    )
    for position, (sample, ident) in enumerate(undecoded.take(3)):
      contents = source.contents(int(ident) >> 32, int(ident) & 0xFFFFFFFF)
      assert sample.encoded.numpy() == contents.encoded and sample.label.numpy() == contents.label
      assert position < 3
    assert source.describe(0, 0).startswith(source.files[0])


def test_the_size_of_an_image_is_read_from_its_header():
  for form in ('JPEG', 'PNG', 'GIF', 'BMP'):
    assert augment.num_pixels(tf.constant(data.image_bytes(70, 30, form=form))) == 2100
  assert augment.num_pixels(tf.constant(b'text')) == 0
  assert augment.num_pixels(tf.constant(b'')) == 0
  with Image.new('RGB', (3, 2)) as image:
    assert image.size == (3, 2)
