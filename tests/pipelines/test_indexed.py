"""The pipeline of indexed JPEGs against `tfdata` on the originals, and the conversion."""

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import augment, batches, convert, indexed, indexed_jpeg, records
from tests.pipelines import data
from tests.pipelines.test_sources import write_cifar

SIZE = 64
DECODERS = ('native', 'simplejpeg', 'tensorflow')


@pytest.fixture(params=DECODERS)
def decoder(request) -> str:
  """Each decoder that this machine has."""
  if request.param == 'native':
    request.getfixturevalue('native')
  elif request.param == 'simplejpeg':
    pytest.importorskip('simplejpeg')
  return request.param


def odd_images() -> list[bytes]:
  """One of each kind, JPEGs of all samplings, and files that get no index."""
  return [
    *(data.image_bytes(301, 160, subsampling=s, quality=95) for s in (0, 1, 2)),
    data.image_bytes(163, 170, mode='L'),
    data.image_bytes(163, 170, mode='CMYK'),
    data.image_bytes(180, 130, progressive=True),
    data.image_bytes(180, 130, restart_marker_blocks=3),
    data.image_bytes(376, 90, subsampling=0),
    data.image_bytes(464, 90),
    data.image_bytes(1, 1),
    data.image_bytes(7, 300),
    data.image_bytes(form='PNG'),
    data.image_bytes(form='PNG', mode='L'),
    data.image_bytes(form='GIF'),
    data.image_bytes(form='BMP'),
  ]


@pytest.fixture(scope='module')
def ordinary(tmp_path_factory) -> str:
  """Shards of odd images for training and evaluation, one of two boxes a record."""
  directory = tmp_path_factory.mktemp('odd') / 'ordinary'
  contents = [
    records.encode_example(
      {
        'image/encoded': image,
        'image/class/label': 1 + number % 7,
        'image/filename': f'{number}.JPEG'.encode(),
        'extra': number,
        **{
          f'image/object/bbox/{side}': np.array([value], np.float32)
          for side, value in (('ymin', 0.1), ('xmin', 0.5), ('ymax', 0.4), ('xmax', 0.9))
        },
      }
    )
    for number, image in enumerate(odd_images())
  ]
  for split in ('train', 'validation'):
    data.write_shards(directory, [contents[:7], contents[7:]], split)
  return str(directory)


@pytest.fixture(scope='module')
def converted(ordinary, tmp_path_factory) -> str:
  out = str(tmp_path_factory.mktemp('indexed') / 'out')
  result = convert.convert('imagenet', out, 'indexed', options={'data_dir': ordinary}, num_shards=2)
  assert result.counts == {'train': len(odd_images()), 'validation': len(odd_images())}
  return out


def make(directory, pipeline='indexed', split='train', **options):
  defaults = {'batch_size': 8, 'image_size': SIZE, 'num_classes': 7, 'with_ids': True}
  return pipelines.create(
    'imagenet', data_dir=directory, split=split, pipeline=pipeline, **(defaults | options)
  )


def images_of(directory) -> list[bytes]:
  paths = records.shard_files(directory, 'train')
  return [
    tf.train.Example.FromString(record.numpy())
    .features.feature['image/encoded']
    .bytes_list.value[0]
    for record in tf.data.TFRecordDataset(paths)
  ]


def assert_same(actual, wanted):
  for one, other in zip(actual, wanted, strict=True):
    np.testing.assert_array_equal(one, other)


def test_the_conversion_keeps_records_and_files_without_an_index(ordinary, converted):
  before, after = images_of(ordinary), images_of(converted)
  has = [indexed_jpeg.has_index(image) for image in after]
  assert has == [True] * 11 + [False] * 4
  assert after[11:] == before[11:]
  for one, other in zip(before, after, strict=True):
    np.testing.assert_array_equal(augment.decode(one), augment.decode(other))
  record = next(iter(tf.data.TFRecordDataset(records.shard_files(converted, 'train'))))
  features = tf.train.Example.FromString(record.numpy()).features.feature
  assert features['image/filename'].bytes_list.value[0] == b'0.JPEG'
  assert features['extra'].int64_list.value[0] == 0


CASES = {
  'training': {'num_epochs': 5},
  'boxes': {'num_epochs': 2, 'use_bbox': True},
  'antialias': {'num_epochs': 1, 'antialias': True},
  'colors': {'num_epochs': 1, 'distort_colors': True},
  'sizes': {'num_epochs': 2, 'image_size': {0: 32, 1: 48}, 'batch_size': 5},
  'skip': {'num_epochs': 1, 'bad_records': 'skip'},
  'evaluation': {'split': 'validation'},
  'large evaluation': {'split': 'validation', 'image_size': 224},
}


@pytest.mark.parametrize('case', ['training', 'boxes', 'evaluation', 'large evaluation'])
@pytest.mark.parametrize('data_set', ['converted', 'ordinary'])
def test_every_pixel_is_that_of_the_ordinary_pipeline(request, ordinary, data_set, decoder, case):
  assert_same_pipelines(request.getfixturevalue(data_set), ordinary, decoder, CASES[case])


# These go through TensorFlow's ops whatever the decoder.
@pytest.mark.parametrize('case', ['antialias', 'colors', 'sizes', 'skip'])
def test_rare_options_change_no_pixel(ordinary, converted, case):
  assert_same_pipelines(converted, ordinary, 'auto', CASES[case])


def assert_same_pipelines(directory, ordinary, decoder, options):
  pipeline = make(directory, decoder=decoder, **options)
  reference = make(ordinary, 'tfdata', **options)
  assert pipeline.dataset().element_spec == reference.dataset().element_spec
  batches = list(zip(pipeline.dataset(), reference.dataset(), strict=True))
  assert batches
  for actual, wanted in batches:
    assert_same(actual, wanted)


def test_the_ordinary_pipeline_reads_indexed_files_as_they_are(ordinary, converted):
  assert_same(
    data.collect(make(converted, 'tfdata', num_epochs=1)),
    data.collect(make(ordinary, 'tfdata', num_epochs=1)),
  )


@pytest.mark.parametrize('num_parallel_calls', [1, 4])
def test_resuming_equals_an_unbroken_run(converted, decoder, num_parallel_calls):
  options = {'decoder': decoder, 'batch_size': 4, 'seed': 5}
  wanted = data.collect(make(converted, **options), 9)
  pipeline = make(converted, num_parallel_calls=num_parallel_calls, **options)
  state = pipeline.state(12)
  pipeline.restore(state)
  assert_same(data.collect(pipeline, 6), [part[12:] for part in wanted])


@pytest.fixture(scope='module')
def photographs(sample_dir, tmp_path_factory) -> dict[str, str]:
  """The sample's splits, indexed, in as many shards, so that they come in the same order."""
  scratch, made = tmp_path_factory.mktemp('photographs'), {}
  for split, num_shards in (('train', 8), ('validation', 2)):
    made[split] = str(scratch / split)
    options = {'options': {'data_dir': sample_dir}, 'splits': [split]}
    convert.convert('imagenet', made[split], 'indexed', num_shards=num_shards, **options)
  return made


def test_photographs_are_the_same_for_many_crops(sample_dir, photographs, decoder):
  options = {'batch_size': 32, 'image_size': 224, 'seed': 11}
  wanted = data.collect(make(sample_dir, 'tfdata', **options), 8)
  assert_same(data.collect(make(photographs['train'], decoder=decoder, **options), 8), wanted)


@pytest.mark.parametrize('image_size', [48, 224, 331])
def test_photographs_are_the_same_in_evaluation(sample_dir, photographs, decoder, image_size):
  options = {'batch_size': 7, 'image_size': image_size, 'split': 'validation'}
  wanted = data.collect(make(sample_dir, 'tfdata', **options))
  for directory in (sample_dir, photographs['validation']):
    assert_same(data.collect(make(directory, decoder=decoder, **options)), wanted)


# float32 sums in another order, and weights of 11 bits: a value near a half is rounded to the other
# side.
@pytest.mark.parametrize(('resize', 'share'), [('opencv', 0.002), ('fixed', 0.2)])
def test_opencv_is_off_by_one_level_in_few_values(sample_dir, resize, share):
  pytest.importorskip('simplejpeg')
  pytest.importorskip('cv2')
  options = {'batch_size': 32, 'image_size': 224}
  exact, labels, ids = data.collect(make(sample_dir, **options), 4)
  images, *rest = data.collect(make(sample_dir, resize=resize, **options), 4)
  assert_same(rest, [labels, ids])
  difference = np.abs(images.astype(int) - exact)
  assert difference.max() == 1
  assert share / 100 < np.mean(difference > 0) < share


def test_without_opencv_images_are_mirrored_all_the_same(monkeypatch):
  image = np.random.default_rng(1).integers(0, 256, (9, 6, 3), np.uint8)
  for installed in (True, False):
    monkeypatch.setattr(batches, 'installed', lambda module, answer=installed: answer)
    if installed:
      pytest.importorskip('cv2')
    out = np.empty_like(image)
    batches._mirror(image, out)
    np.testing.assert_array_equal(out, image[:, ::-1])


def test_packages_are_asked_for(monkeypatch, ordinary, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  with pytest.raises(errors.DataError, match='python -m hpm.pipelines compile'):
    make(ordinary, decoder='native')
  monkeypatch.setattr(batches, 'installed', lambda module: module != 'cv2')
  with pytest.raises(errors.DataError, match='pip install opencv-python-headless'):
    make(ordinary, resize='opencv')
  monkeypatch.setattr(batches, 'installed', lambda module: False)
  with pytest.raises(errors.DataError, match='pip install simplejpeg'):
    make(ordinary, decoder='simplejpeg')
  with pytest.raises(errors.UsageError, match='pip install simplejpeg'):
    make(ordinary, resize='opencv')
  assert make(ordinary, num_epochs=1)._decode_images is None  # TensorFlow does it


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'decoder': 'pil'}, "unknown decoder 'pil'"),
    ({'resize': 'nearest'}, "unknown resize 'nearest'"),
    ({'resize': 'opencv', 'decoder': 'tensorflow'}, "decoder='tensorflow'"),
    ({'resize': 'fixed', 'decoder': 'tensorflow'}, 'pip install simplejpeg'),
    ({'colour': 1}, "no option 'colour'"),
  ],
)
def test_wrong_options_are_refused(ordinary, options, message):
  with pytest.raises(errors.UsageError, match=message):
    make(ordinary, **options)


@pytest.mark.parametrize('cut', ['in the index', 'in the scan', 'without its end'])
def test_a_damaged_image_is_named(converted, tmp_path, decoder, cut):
  good = images_of(converted)[0]
  scan = indexed_jpeg.layout(good).scan
  end = {'in the index': 50, 'in the scan': scan + 400, 'without its end': len(good) - 40}[cut]
  contents = [
    data.record(image, filename=f'{i}.JPEG') for i, image in enumerate([good, good[:end]])
  ]
  directory = data.write_shards(tmp_path, [contents])
  pipeline = make(directory, decoder=decoder, batch_size=2, shuffle_buffer=1)
  with pytest.raises(tf.errors.OpError) as raised:
    data.collect(pipeline, 1)
  message = str(pipeline.explain(raised.value))
  assert 'train-00000-of-00001: record 1' in message and '1.JPEG' in message


def test_pixels_that_are_no_files_are_read_as_the_ordinary_pipeline_does(tmp_path):
  directory = write_cifar(tmp_path, 1, [f'data_batch_{i}.bin' for i in range(1, 6)])
  options = {'data_dir': directory, 'batch_size': 8, 'image_size': 24, 'num_epochs': 1}
  made = [
    pipelines.create('cifar10', pipeline=name, **options).dataset()
    for name in ('indexed', 'tfdata')
  ]
  for ours, theirs in zip(*made, strict=True):
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])
  with pytest.raises(errors.UsageError, match="decoder='simplejpeg'.* holds pixels: leave both"):
    pipelines.create('cifar10', pipeline='indexed', decoder='simplejpeg', **options)


def test_crops_of_ops_and_of_python_agree(converted):
  rng = np.random.default_rng(2)
  for encoded in images_of(converted)[:11]:
    where = indexed_jpeg.layout(encoded)
    for _ in range(6):
      height, width = rng.integers(1, where.height + 1), rng.integers(1, where.width + 1)
      top, left = rng.integers(where.height - height + 1), rng.integers(where.width - width + 1)
      window = [top, left, height, width]
      jpeg, origin = indexed.assemble(tf.constant(encoded), tf.constant(window, tf.int32))
      small, *offset = indexed_jpeg.assemble(encoded, window)
      assert jpeg.numpy() == small
      assert (np.array([top, left]) - origin.numpy()).tolist() == offset
