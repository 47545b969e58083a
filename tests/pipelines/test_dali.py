"""The DALI pipeline against tf.data's: order, epochs, resuming, pixels, layouts, absence, GPUs."""

import io
import subprocess
import sys
import textwrap

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from hpm import errors, pipelines
from hpm.pipelines import augment, dali, dali_graph, indexed_jpeg, jpeg_recoder, records
from tests.pipelines import data

SIZE = 32
GOOD = data.image_bytes()


def make(directory, split='train', *, pipeline='dali', **options):
  defaults = {
    'batch_size': 8,
    'image_size': SIZE,
    'num_classes': 7,
    'with_ids': True,
    'shuffle_buffer': 16,
    'num_parallel_calls': 2,
  }
  return pipelines.create(
    'imagenet', pipeline=pipeline, data_dir=directory, split=split, **(defaults | options)
  )


@pytest.fixture(params=dali.BRIDGES)
def bridge(request) -> str:
  return request.param


@pytest.fixture(scope='module')
def tfdata(sample_dir):
  """Images, labels and ids of two epochs and a half of tf.data's pipeline, 160 samples."""
  return data.collect(make(sample_dir, pipeline='tfdata'), 20)


def assert_same(actual, expected, mean=1e-4):
  """Equal ids and labels; pixels that differ by one level at most, and seldom."""
  for one, other in zip(actual[1:], expected[1:]):
    np.testing.assert_array_equal(one, other)
  differences = np.abs(actual[0].astype(int) - expected[0])
  # Where a float32 sum lies on the edge between two levels, either may come out.
  assert differences.max() <= 1
  assert differences.mean() <= mean


def test_training_gives_the_batches_of_tfdata(sample_dir, tfdata, bridge):
  assert_same(data.collect(make(sample_dir, bridge=bridge), 20), tfdata)


def test_evaluation_gives_the_batches_of_tfdata(sample_dir, bridge):
  options = {'split': 'validation', 'batch_size': 6, 'image_size': 64}
  expected = data.collect(make(sample_dir, pipeline='tfdata', **options))
  pipeline = make(sample_dir, bridge=bridge, **options)
  assert [len(batch[1]) for batch in pipeline.dataset()] == [6, 6, 4]
  assert_same(data.collect(pipeline), expected)


def test_training_with_boxes_gives_the_batches_of_tfdata(sample_dir):
  expected = data.collect(make(sample_dir, pipeline='tfdata', use_bbox=True), 4)
  assert_same(data.collect(make(sample_dir, use_bbox=True), 4), expected)


def test_antialiased_training_differs_at_borders_alone(sample_dir):
  options = {'antialias': True, 'image_size': 48}
  expected = data.collect(make(sample_dir, pipeline='tfdata', **options), 8)
  actual = data.collect(make(sample_dir, **options), 8)
  np.testing.assert_array_equal(actual[2], expected[2])
  differences = np.abs(actual[0].astype(int) - expected[0]).max(-1)
  # DALI repeats the border's pixels where the filter reaches beyond it, TensorFlow weighs those
  # that are there.
  assert differences[:, 1:-1, 1:-1].max() <= 1
  assert differences.mean() < 0.5


@pytest.mark.parametrize(
  ('dtype', 'layout', 'bridge'),
  [('float32', 'NHWC', 'python'), ('float32', 'NCHW', 'plugin'), ('float16', 'NCHW', 'python')],
)
def test_types_and_layouts_are_those_of_normalize(sample_dir, tfdata, dtype, layout, bridge):
  pipeline = make(sample_dir, dtype=dtype, data_format=layout, bridge=bridge)
  spec = pipeline.dataset().element_spec[0]
  images, _, ids = data.collect(pipeline, 1)
  np.testing.assert_array_equal(ids, tfdata[2][:8])
  expected = pipelines.normalize(tf.constant(tfdata[0][:8]), dtype, layout).numpy()
  assert images.dtype == expected.dtype == spec.dtype
  assert images.shape == expected.shape == spec.shape
  # One level, where the uint8 pixels differ, is 2/255 of the range; else one unit of float16.
  differences = np.abs(images.astype(np.float32) - expected.astype(np.float32))
  assert differences.max() < 2 / 255 + 1e-3
  assert np.mean(differences > 6e-4) < 0.003


def test_uint8_may_be_channels_first(sample_dir, tfdata):
  images, _, _ = data.collect(make(sample_dir, data_format='NCHW'), 1)
  assert_same([images.transpose(0, 2, 3, 1)], [tfdata[0][:8]])


def decoded(encoded: bytes, height: int, width: int) -> np.ndarray:
  """A whole image as DALI decodes it: the square part of it is not resized."""
  side = min(height, width)
  graph = dali_graph.build(
    training=True, image_size=side, batch_size=1, num_threads=1, prefetch=1, deliver=('images',)
  )
  header = np.array([0, 0, side, side, *[0] * 8], np.int64).tobytes()
  graph.feed_input(dali_graph.INPUT, [np.frombuffer(header + encoded, np.uint8)])
  return np.array(graph.run()[0].as_tensor())[0]


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'subsampling': 0},
    {'subsampling': 1, 'quality': 98},
    {'progressive': True},
    {'mode': 'L'},
    {'mode': 'CMYK'},
    {'quality': 20, 'optimize': True},
  ],
  ids=str,
)
def test_dali_tensorflow_and_pil_decode_the_same_pixels(options):
  encoded = data.image_bytes(93, 71, **options)
  pixels = decoded(encoded, 71, 93)
  by_tensorflow = augment.decode(tf.constant(encoded)).numpy()[:71, :71]
  np.testing.assert_array_equal(pixels, by_tensorflow)
  with Image.open(io.BytesIO(encoded)) as image:
    by_pil = np.asarray(image.convert('RGB'))[:71, :71].astype(int)
  # PIL's own conversion of CMYK rounds differently.
  assert np.abs(by_pil - pixels).max() <= (1 if options.get('mode') == 'CMYK' else 0)


@pytest.mark.parametrize('training', [True, False])
def test_unusual_images_are_those_of_tfdata(tmp_path, training):
  exif = Image.Exif()
  exif[0x0112] = 6  # a quarter turn, which every ImageNet recipe ignores
  images = [
    data.image_bytes(form='PNG'),
    data.image_bytes(form='PNG', mode='RGBA'),
    data.image_bytes(form='PNG', mode='I;16'),
    data.image_bytes(form='GIF'),
    data.image_bytes(form='BMP'),
    data.image_bytes(mode='CMYK'),
    data.image_bytes(mode='L'),
    data.image_bytes(progressive=True),
    data.image_bytes(exif=exif),
    data.image_bytes(40, 41),
    data.image_bytes(3, 500),
  ]
  directory = data.write_shards(tmp_path, [[data.record(image) for image in images]])
  options = {'training': training, 'num_epochs': 1, 'image_size': 64}
  expected = data.collect(make(directory, pipeline='tfdata', **options))
  actual = data.collect(make(directory, **options))
  assert sorted(actual[2]) == list(range(len(images)))
  np.testing.assert_array_equal(actual[2], expected[2])
  differences = np.abs(actual[0].astype(int) - expected[0]).max((1, 2, 3))
  assert differences[np.argsort(expected[2])].tolist() <= [1] * len(images)


@pytest.mark.parametrize('training', [True, False])
def test_indexed_jpegs_give_the_pixels_of_the_originals(tmp_path, training):
  originals = [data.image_bytes(230 + i, 170, quality=90, subsampling=i % 3) for i in range(6)]
  with jpeg_recoder.Recoder() as recoder:
    recoded = [recoder.recode(jpeg)[0] for jpeg in originals]
  assert all(indexed_jpeg.has_index(jpeg) for jpeg in recoded)
  found = []
  for name, images, pipeline in (
    ('plain', originals, 'tfdata'),
    ('plain', originals, 'dali'),
    ('indexed', recoded, 'dali'),
  ):
    directory = data.write_shards(tmp_path / name, [[data.record(image) for image in images]])
    found.append(data.collect(make(directory, pipeline=pipeline, training=training, num_epochs=1)))
  assert_same(found[1], found[0])
  for plain, indexed in zip(found[1], found[2]):
    np.testing.assert_array_equal(indexed, plain)


@pytest.mark.parametrize('name', ['folder', 'cifar10'])
def test_other_sources_give_the_batches_of_tfdata(tmp_path, name):
  if name == 'folder':
    for kind in ('cat', 'dog'):
      (tmp_path / 'train' / kind).mkdir(parents=True)
      for i in range(3):
        (tmp_path / 'train' / kind / f'{i}.jpg').write_bytes(data.image_bytes(90 + i, 80))
  else:  # no JPEGs: pixels of 3 planes behind a byte of label
    for i in range(1, 6):
      random = np.random.default_rng(i).integers(0, 256, (4, 3073), np.uint8)
      random[:, 0] %= 10
      (tmp_path / f'data_batch_{i}.bin').write_bytes(random.tobytes())
  both = [
    data.collect(
      pipelines.create(
        name,
        data_dir=str(tmp_path),
        split='train',
        pipeline=pipeline,
        batch_size=4,
        image_size=SIZE,
        num_classes=10,
        num_epochs=1,
        with_ids=True,
      )
    )
    for pipeline in ('tfdata', 'dali')
  ]
  assert len(both[0][1]) == {'folder': 6, 'cifar10': 20}[name]
  # In noise, where a side grows by a multiple of an eighth, sums half between two levels are
  # common, and DALI rounds some up that TensorFlow rounds to even.
  assert_same(both[1], both[0], mean=1e-4 if name == 'folder' else 5e-3)


def all_ids(directory, split='train'):
  counts = records.count_records(records.shard_files(directory, split))
  return [file << 32 | number for file, count in enumerate(counts) for number in range(count)]


@pytest.mark.parametrize('batch_size', [7, 16])
def test_every_sample_comes_once_an_epoch_and_no_padding(sample_dir, bridge, batch_size):
  pipeline = make(sample_dir, num_epochs=2, batch_size=batch_size, bridge=bridge)
  sizes = [len(labels) for _, labels, _ in pipeline.dataset()]
  assert sizes == [batch_size] * (128 // batch_size) + [128 % batch_size] * (128 % batch_size > 0)
  _, _, ids = data.collect(pipeline)
  assert sorted(ids[:64]) == sorted(ids[64:]) == all_ids(sample_dir)


def test_asking_beyond_the_end_says_so_each_time(sample_dir, bridge):
  iterator = iter(make(sample_dir, 'validation', batch_size=16, bridge=bridge).dataset())
  next(iterator)
  for _ in range(2):
    with pytest.raises(StopIteration):
      next(iterator)


def test_datasets_say_whether_they_end_and_what_they_hold(sample_dir, bridge):
  endless = make(sample_dir, bridge=bridge).dataset()
  finite = make(sample_dir, num_epochs=1, bridge=bridge).dataset()
  assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
  assert finite.cardinality() == tf.data.UNKNOWN_CARDINALITY
  for dataset, size in ((endless, 8), (finite, None)):
    assert dataset.element_spec == (
      tf.TensorSpec([size, SIZE, SIZE, 3], tf.uint8),
      tf.TensorSpec([size], tf.int32),
      tf.TensorSpec([size], tf.int64),
    )
  assert len(make(sample_dir, with_ids=False, bridge=bridge).dataset().element_spec) == 2


@pytest.mark.parametrize('position', [1, 100])
def test_resuming_goes_on_exactly_where_it_stopped(sample_dir, tfdata, position, bridge):
  pipeline = make(sample_dir, bridge=bridge)
  pipeline.restore(make(sample_dir).state(position))
  resumed = data.collect(pipeline, 4)
  assert_same(resumed, [part[position : position + 32] for part in tfdata])


def test_a_position_of_tfdata_is_one_of_dali(sample_dir):
  assert make(sample_dir).state(24) == make(sample_dir, pipeline='tfdata').state(24)
  with pytest.raises(errors.UsageError, match='seed=5'):
    make(sample_dir, seed=5).restore(make(sample_dir, pipeline='tfdata').state(8))


def test_threads_change_nothing(sample_dir):
  one = data.collect(make(sample_dir, num_parallel_calls=1), 4)
  four = data.collect(make(sample_dir, num_parallel_calls=4), 4)
  for a, b in zip(one, four):
    np.testing.assert_array_equal(a, b)


def test_one_shard_a_device_together_see_every_record_once(sample_dir):
  shards = [
    data.collect(make(sample_dir, num_epochs=1, num_shards=3, shard_index=i))[2] for i in range(3)
  ]
  assert sorted(np.concatenate(shards)) == all_ids(sample_dir)


def test_a_batch_is_not_overwritten_by_later_ones(sample_dir, tfdata, bridge):
  kept = [batch[0] for batch in make(sample_dir, bridge=bridge).dataset().take(20)]
  assert_same([np.concatenate(kept)], [tfdata[0]])


def test_a_loop_in_a_function_sees_the_same(sample_dir, tfdata, bridge):
  @tf.function
  def ids(dataset):
    found = tf.zeros([0], tf.int64)
    for batch in dataset:
      tf.autograph.experimental.set_loop_options(shape_invariants=[(found, tf.TensorShape([None]))])
      found = tf.concat([found, batch[2]], 0)
    return found

  pipeline = make(sample_dir, num_epochs=1, bridge=bridge)
  np.testing.assert_array_equal(ids(pipeline.dataset()), tfdata[2][:64])


def test_a_graph_and_a_session_see_the_same(sample_dir, tfdata, bridge):
  with tf.Graph().as_default():
    dataset = make(sample_dir, bridge=bridge).dataset()
    batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    with tf.compat.v1.Session() as session:
      batches = [session.run(batch) for _ in range(4)]
  assert_same([np.concatenate(p) for p in zip(*batches)], [part[:32] for part in tfdata])


def test_without_the_plugin_batches_come_through_python(sample_dir, monkeypatch):
  assert make(sample_dir).bridge == 'plugin'
  monkeypatch.setattr(dali, 'has_plugin', lambda: False)
  assert make(sample_dir).bridge == 'python'
  with pytest.raises(errors.UsageError, match='plugin for this TensorFlow is not installed: make'):
    make(sample_dir, bridge='plugin')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'bridge': 'plugins'}, "unknown bridge 'plugins': did you mean plugin"),
    ({'dtype': 'bfloat16'}, "unknown dtype 'bfloat16'"),
    ({'data_format': 'HWC'}, "unknown data_format 'HWC'"),
    ({'image_size': {0: 32, 2: 64}}, "DALI's graph has one size"),
    ({'distort_colors': True}, "no option 'distort_colors'"),
    ({'device_id': 0}, r'DALI refuses the pipeline with device_id=0 .*leave device_id out'),
    ({'device_id': 0, 'num_epochs': 1}, 'device_id=0 with num_epochs=1'),
    ({'device_id': 0, 'bridge': 'python'}, "device_id=0 needs DALI's plugin"),
    ({'batch_size': 0}, 'batch_size=0'),
  ],
  ids=str,
)
def test_what_cannot_work_is_refused_at_the_door(sample_dir, options, message):
  with pytest.raises(errors.UsageError, match=message) as caught:
    make(sample_dir, **options)
  assert '\n' not in str(caught.value)


def operators(nodes) -> dict[str, str]:
  """Name -> device of all operators behind DALI's `nodes`, but for slices and numbers."""
  found = {}

  def visit(node):
    operator = node.source
    if operator not in found:
      found[operator] = (type(operator._op).__name__, operator._op.device)
      for before in operator.inputs:
        visit(before)

  for node in nodes:
    visit(node)
  return {name: device for name, device in found.values() if name[0] != '_' and name != 'Cast'}


@pytest.mark.parametrize('training', [True, False])
def test_on_a_gpu_all_but_the_bytes_and_numbers_is_there(training):
  """What can be shown without a GPU: where each operator stands, and that it exists there."""
  from nvidia.dali import backend, fn, pipeline, types

  def graph(device_id):
    with pipeline.Pipeline(batch_size=4, num_threads=2, device_id=device_id):
      samples = fn.external_source(name='samples', dtype=types.UINT8, ndim=1)
      return dali_graph.outputs(
        samples,
        training=training,
        image_size=SIZE,
        antialias=False,
        dtype='float16',
        data_format='NCHW',
        on_gpu=device_id is not None,
      )

  on_gpu, on_cpu = graph(0), graph(None)
  assert {node.device for node in on_gpu.values()} == {'gpu'}
  assert {node.device for node in on_cpu.values()} == {'cpu'}
  assert operators(on_gpu.values()) == {
    'ExternalSource': 'cpu',
    'Reinterpret': 'cpu',
    'ImageSlice': 'mixed',  # decodes the window alone
    'Resize': 'gpu',
    'CropMirrorNormalize': 'gpu',
  }
  assert set(operators(on_cpu.values()).values()) == {'cpu'}
  assert 'decoders__ImageSlice' in backend.RegisteredMixedOps()
  assert {'Resize', 'CropMirrorNormalize'} <= set(backend.RegisteredGPUOps())


# A Python that has no DALI.
ABSENT = """
  import importlib.abc, sys

  class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
      if name.split('.')[:2] == ['nvidia', 'dali']:
        raise ModuleNotFoundError(f'No module named {name!r}', name=name)

  sys.meta_path.insert(0, Blocker())
"""


def test_absent_dali_is_one_line_and_missed_by_nothing_else(sample_dir):
  program = f"""
  from hpm import errors, pipelines
  options = {{'data_dir': {sample_dir!r}, 'batch_size': 2, 'image_size': 32}}
  try:
    pipelines.create('imagenet', pipeline='dali', **options)
  except errors.UsageError as error:
    print(error)
  next(iter(pipelines.create('imagenet', **options).dataset()))
  print([name for name in sys.modules if name.startswith('nvidia.dali')])
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(ABSENT) + textwrap.dedent(program)],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.stdout.splitlines() == [
    'NVIDIA DALI is not installed: pip install nvidia-dali-cuda120==2.4.0 (in a checkout: make '
    'dali)',
    '[]',
  ], done.stderr
