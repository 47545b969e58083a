"""Raw shards: the files, the source, the pipeline, and the conversion."""

import os
import pickle
import shutil

import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines, placement
from hpm.pipelines import __main__ as command_line
from hpm.pipelines import (
  augment,
  convert,
  detect,
  device_crop,
  doctor,
  jpeg_native,
  raw,
  raw_file,
  to_raw,
)
from tests.pipelines import data

SHORT = 64  # of the images in these tests
SIZE = 56  # what evaluation crops of them


@pytest.fixture(scope='module')
def raw_dir(sample_dir, tmp_path_factory) -> str:
  out = str(tmp_path_factory.mktemp('raw') / 'out')
  result = convert.convert(
    'imagenet', out, f'raw:{SHORT}', options={'data_dir': sample_dir}, num_shards=2
  )
  assert result.counts == {'train': 64, 'validation': 16}
  return out


def make(directory, pipeline='raw', split='train', **options):
  defaults = {'batch_size': 8, 'image_size': SIZE, 'num_classes': 7, 'with_ids': True}
  return pipelines.create(
    'raw', data_dir=directory, split=split, pipeline=pipeline, **(defaults | options)
  )


def assert_same(actual, wanted):
  for one, other in zip(actual, wanted, strict=True):
    np.testing.assert_array_equal(one, other)


def some_images(count: int = 5) -> list[raw_file.RawImage]:
  rng = np.random.default_rng(1)
  return [
    raw_file.RawImage(
      rng.integers(0, 256, (10 + i, 20 - i, 3), np.uint8), label=i + 1, key=f'größe {i}'
    )
    for i in range(count)
  ]


def test_a_file_gives_back_what_was_written(tmp_path):
  path, images = str(tmp_path / 'a.raw'), some_images()
  assert raw_file.write(path, images) == 5
  file = raw_file.RawFile(path)
  assert len(file) == 5 and file.keys == [image.key for image in images]
  assert file.table['label'].tolist() == [1, 2, 3, 4, 5]
  for index, image in enumerate(images):
    np.testing.assert_array_equal(file.image(index), image.pixels)
    assert not file.image(index).flags.owndata  # a view
    file.check(index)


def test_a_file_of_nothing(tmp_path):
  path = str(tmp_path / 'a.raw')
  assert raw_file.write(path, []) == 0
  assert len(raw_file.RawFile(path)) == 0


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (lambda bytes_: b'', 'is no file of raw images'),
    (lambda bytes_: bytes_[:-1], 'is no file of raw images'),
    (lambda bytes_: bytes_[: len(bytes_) // 2], 'is no file of raw images'),
    (lambda bytes_: bytes_ + b'\0', 'is no file of raw images'),
    (lambda bytes_: b'\0' + bytes_, 'is not as long as it says'),
    (lambda bytes_: bytes_[:-60] + b'?' + bytes_[-59:], 'checksum of its table'),
    (lambda bytes_: bytes_[:-12] + b'\2' + bytes_[-11:], 'of version 2, not 1'),
  ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
  path = tmp_path / 'a.raw'
  raw_file.write(str(path), some_images())
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.DataError, match=message):
    raw_file.RawFile(str(path))


@pytest.mark.parametrize('pipeline', ['raw', 'tfdata', 'indexed', 'dali'])
def test_a_damaged_file_is_left_out_where_bad_records_are(request, raw_dir, tmp_path, pipeline):
  if pipeline == 'dali':
    request.getfixturevalue('cpu_devices')
    pytest.importorskip('nvidia.dali')
  directory = str(tmp_path / 'raw')
  shutil.copytree(raw_dir, directory)
  path = f'{directory}/train-00000-of-00002.raw'
  os.truncate(path, os.path.getsize(path) // 2)
  with pytest.raises(errors.DataError, match=f'{path} is no file of raw images, or only its beg'):
    make(directory, pipeline, num_epochs=1)
  made = make(directory, pipeline, num_epochs=1, bad_records='skip')
  ids = np.concatenate([batch[2].numpy() for batch in made.dataset()])
  assert sorted(ids.tolist()) == [1 << 32 | record for record in range(32)]
  (skipped,) = made.skipped()
  assert skipped.what.startswith(f'{path} is no file of raw images')


def test_the_doctor_and_the_converter_read_past_a_damaged_file(raw_dir, tmp_path, capsys):
  directory = str(tmp_path / 'raw')
  shutil.copytree(raw_dir, directory)
  path = f'{directory}/train-00000-of-00002.raw'
  open(path, 'w').close()
  assert command_line.main(['doctor', directory]) == 1
  printed = capsys.readouterr().out
  assert f'{directory}, train: 32 images in 1 file\n' in printed
  assert f'{directory}, validation: 16 images in 2 files\n' in printed
  assert f'wrong: {path} is no file of raw images, or only its beginning: copy or conv' in printed
  assert '1 thing wrong, 0 odd' in printed
  out = str(tmp_path / 'out')
  assert command_line.main(['convert', directory, out, '--format=raw', '--bad_records=skip']) == 0
  printed = capsys.readouterr().out
  assert f'left out: {path} is no file of raw images' in printed
  assert '32 train and 16 validation images' in printed


def test_a_changed_pixel_is_found_where_one_looks(tmp_path):
  path = tmp_path / 'train-00000-of-00001.raw'
  raw_file.write(str(path), some_images())
  data.flip_byte(str(path), 10 * 20 * 3 + 5)  # in the second image
  source = raw.RawSource(str(tmp_path))
  source.contents(0, 0)
  with pytest.raises(errors.DataError, match='record 1 is damaged'):
    source.contents(0, 1)
  with pytest.raises(errors.DataError, match='record 1 is damaged'):
    to_raw.check(str(path))


def test_images_are_shrunk_as_evaluation_does_it(sample_dir, raw_dir):
  source, original = raw.RawSource(raw_dir), pipelines.source('imagenet', data_dir=sample_dir)
  position = 0
  for file, count in enumerate(original.counts):
    for record in range(count):
      contents = original.contents(file, record)
      pixels = source.opened(position // 32).image(position % 32)
      assert min(pixels.shape[:2]) == SHORT
      wanted = augment.resize_short_side(augment.decode(tf.constant(contents.encoded)), SHORT)
      np.testing.assert_array_equal(pixels, wanted)
      found = source.contents(position // 32, position % 32)
      assert (found.label, found.key) == (contents.label, contents.key)
      position += 1


def test_evaluation_sees_the_originals_to_one_level(sample_dir, raw_dir):
  images, labels, _ = data.collect(make(raw_dir, split='validation'))
  original = pipelines.create(
    'imagenet', data_dir=sample_dir, split='validation', batch_size=8, image_size=SIZE,
    num_classes=7, with_ids=True,
  )  # fmt: skip
  # Files are read in turn there, one after the other here.
  wanted, others, ids = data.collect(original)
  order = np.argsort(ids)
  np.testing.assert_array_equal(labels, others[order])
  difference = np.abs(images.astype(int) - wanted[order])
  # The same weights at places that are computed in another order of float32 operations.
  assert difference.max() <= 1 and np.mean(difference > 0) < 0.001


@pytest.mark.parametrize(
  'options',
  [
    {'num_epochs': 2},
    {'num_epochs': 1, 'antialias': True},
    {'num_epochs': 1, 'image_size': 100},
    {'split': 'validation'},
    {'num_epochs': 1, 'num_shards': 3, 'shard_index': 1},
  ],
  ids=lambda options: ' '.join(options),
)
@pytest.mark.parametrize('resize', ['native', 'tensorflow'])
def test_both_pipelines_give_the_same_pixels(request, raw_dir, options, resize):
  if resize == 'native':
    request.getfixturevalue('native')
  actual = data.collect(make(raw_dir, resize=resize, **options))
  assert_same(actual, data.collect(make(raw_dir, 'tfdata', **options)))


def test_windows_are_resized_on_the_device_to_the_same_pixels(raw_dir):
  options = {'num_epochs': 2, 'batch_size': 7}
  batches = list(make(raw_dir, resize='device', **options).dataset())
  assert all(images.shape[1] == SHORT + 1 or images.shape[1] > SHORT for images, *_ in batches)
  wanted, labels, ids = data.collect(make(raw_dir, **options))
  np.testing.assert_array_equal(np.concatenate([labels for _, labels, _ in batches]), labels)
  np.testing.assert_array_equal(np.concatenate([ids for *_, ids in batches]), ids)
  resized = [device_crop.resized(images, SIZE) for images, *_ in batches]
  np.testing.assert_array_equal(tf.concat(resized, 0), wanted)
  preprocess = pipelines.crop_on_device(SIZE)
  np.testing.assert_array_equal(
    preprocess(batches[0][0], 'float32', 'NCHW'), pipelines.normalize(resized[0], 'float32', 'NCHW')
  )


def test_resizing_on_a_gpu_has_kernels_and_no_way_back():
  with tf.Graph().as_default() as graph:
    with tf.device('/CPU:0'):
      images = tf.compat.v1.placeholder(tf.uint8, [8, 257, 341, 3])
    with tf.device('/GPU:0'):
      made = pipelines.crop_on_device(224)(tf.identity(images), 'float16', 'NCHW')
  assert made.shape == [8, 3, 224, 224]
  assert placement.check(graph, made) == []
  assert [copy for copy in placement.host_copies(graph, made) if copy.to_host] == []


@pytest.mark.parametrize(
  'options', [{'split': 'validation'}, {'antialias': True}, {'image_size': {0: 32, 1: 48}}]
)
def test_resizing_on_the_device_is_for_plain_training(raw_dir, options):
  with pytest.raises(errors.UsageError, match="resize='device' is for training at one size"):
    make(raw_dir, resize='device', **options)


def test_the_compiled_reader_is_taken_if_it_is_there_and_missed_if_asked_for(
  native, monkeypatch, tmp_path, raw_dir
):
  calls, resized = [], jpeg_native.resized_windows
  monkeypatch.setattr(
    jpeg_native, 'resized_windows', lambda *args: calls.append(1) or resized(*args)
  )
  for resize in ('exact', 'native', 'tensorflow'):
    calls.clear()
    next(iter(make(raw_dir, resize=resize).dataset()))
    assert bool(calls) == (resize != 'tensorflow')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  with pytest.raises(errors.DataError, match="resize='native'.*python -m hpm.pipelines compile"):
    make(raw_dir, resize='native')
  make(raw_dir)


@pytest.mark.parametrize(('resize', 'share'), [('opencv', 0.002), ('fixed', 0.3)])
def test_opencv_is_off_by_one_level_in_few_values(raw_dir, resize, share):
  pytest.importorskip('cv2')
  exact, *rest = data.collect(make(raw_dir, num_epochs=2))
  images, *others = data.collect(make(raw_dir, num_epochs=2, resize=resize))
  assert_same(others, rest)
  difference = np.abs(images.astype(int) - exact)
  assert difference.max() == 1
  assert share / 100 < np.mean(difference > 0) < share


def test_every_image_comes_once_an_epoch_in_an_order_of_its_own(raw_dir):
  _, _, ids = data.collect(make(raw_dir, num_epochs=2))
  everything = [file << 32 | record for file in range(2) for record in range(32)]
  assert sorted(ids[:64]) == sorted(ids[64:]) == everything
  assert ids[:64].tolist() != ids[64:].tolist() != everything


@pytest.mark.parametrize('num_parallel_calls', [1, 4])
def test_resuming_equals_an_unbroken_run(raw_dir, num_parallel_calls):
  wanted = data.collect(make(raw_dir, seed=3), 12)
  pipeline = make(raw_dir, seed=3, num_parallel_calls=num_parallel_calls)
  pipeline.restore(pipeline.state(40))
  assert_same(data.collect(pipeline, 7), [part[40:] for part in wanted])


def test_a_label_that_does_not_fit_is_named(raw_dir):
  with pytest.raises(errors.DataError, match=r'00002.raw: record 0.*outside 0\.\.1'):
    make(raw_dir, num_classes=2)


def test_a_bad_image_is_named_or_left_out_of_the_conversion(tmp_path):
  contents = [data.record(filename='good.JPEG'), data.record(b'no image', filename='bad.JPEG')]
  directory = data.write_shards(tmp_path / 'in', [contents])
  options = {'data_dir': directory}
  with pytest.raises(errors.DataError, match=r'record 1: image bad\.JPEG cannot be decoded'):
    convert.convert('imagenet', str(tmp_path / 'a'), 'raw', options=options)
  result = convert.convert(
    'imagenet', str(tmp_path / 'b'), 'raw', options=options, bad_records='skip'
  )
  assert result.counts == {'train': 1}
  assert len(result.skipped) == 1 and 'bad.JPEG' in result.skipped[0]


def test_a_source_goes_to_another_process(raw_dir):
  source = raw.RawSource(raw_dir)
  assert source.counts == [32, 32]
  copy = pickle.loads(pickle.dumps(source))
  assert copy.contents(1, 3) == source.contents(1, 3)


@pytest.mark.parametrize('detail', ['', '0', '-3', 'big'])
def test_a_wrong_size_is_refused(tmp_path, sample_dir, detail):
  with pytest.raises(errors.UsageError, match='raw'):
    convert.convert(
      'imagenet', str(tmp_path / 'x'), f'raw:{detail}', options={'data_dir': sample_dir}
    )


def test_other_formats_take_no_detail(tmp_path, sample_dir):
  with pytest.raises(errors.UsageError, match="'tfrecord' takes nothing after a colon"):
    convert.convert('imagenet', str(tmp_path / 'x'), 'tfrecord:3', options={'data_dir': sample_dir})


@pytest.mark.parametrize(
  ('prepare', 'message'),
  [
    (lambda directory: None, 'holds no train-'),
    (lambda directory: os.rmdir(directory), 'cannot be read'),
    (
      lambda directory: raw_file.write(f'{directory}/train-00000-of-00002.raw', some_images()),
      'no complete set',
    ),
  ],
)
def test_missing_files_are_named(tmp_path, prepare, message):
  directory = str(tmp_path / 'data')
  os.mkdir(directory)
  prepare(directory)
  with pytest.raises(errors.DataError, match=message):
    raw.RawSource(directory)


def test_wrong_use_is_refused(raw_dir, sample_dir):
  with pytest.raises(errors.UsageError, match="unknown split 'test'"):
    make(raw_dir, split='test')
  with pytest.raises(errors.UsageError, match="pipeline='raw' is for raw images"):
    pipelines.create('imagenet', data_dir=sample_dir, batch_size=2, pipeline='raw', num_classes=7)
  with pytest.raises(errors.UsageError, match='has no boxes'):
    make(raw_dir, use_bbox=True)


def test_commands_know_a_raw_directory_by_its_files(raw_dir):
  assert detect.source(raw_dir) == 'raw'


def test_the_doctor_tells_the_sizes_that_are_stored(raw_dir):
  report = doctor.examine('raw', options={'data_dir': raw_dir})
  sides = report.splits['train'].sides
  assert len(sides) == 64 and {min(side) for side in sides} == {SHORT}
  source = raw.RawSource(raw_dir)
  files = map(source.opened, range(len(source.files)))
  wide = [max(file.image(i).shape) for file in files for i in range(len(file))]
  assert sorted(max(side) for side in sides) == sorted(wide)
