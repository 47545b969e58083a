"""One row of `benchmarks.input`: a process that loads images in one way, and measures when told.

It is started by `benchmarks.input` with its configuration as JSON, and answers in JSON, a line
each: `{"ready": true}`, then a measurement for every number of seconds that it reads from stdin,
and at the end what memory it took. Above the rows only the standard library is imported, so that
another Python, one with torch or grain, can run its rows.
"""

from collections.abc import Callable, Iterator
import glob
import json
import os
import random
import sys
import time
from typing import Any, NamedTuple

__all__ = ['ROWS', 'Row', 'main', 'prepare']

WARM_UP_S, MIN_BATCHES = 2.0, 6
PREFETCH = 2  # batches that every pipeline keeps ready which lets itself be told
MOST_READY, WAITED_S = 64, 2e-3
SHUFFLE = 256  # records that are shuffled among one another
SEED = 3
_TICKS = os.sysconf('SC_CLK_TCK')


class Row(NamedTuple):
  """One way to load images.

  Attributes:
    make: (configuration) -> an iterator whose items stand for a batch each.
    text: what it does.
    package: what has to be there beside TensorFlow; None: nothing.
    reads: 'ordinary', 'indexed', 'raw' or 'files', the format.
    group: 'training', 'evaluation' or 'stages'.
  """

  make: Callable[[dict[str, Any]], Iterator[Any]]
  text: str
  package: str | None = None
  reads: str = 'ordinary'
  group: str = 'training'


def _hpm(pipeline: str, reads: str = 'ordinary', **options: Any) -> Callable[..., Iterator[Any]]:
  """A pipeline of hpm's."""

  def make(config: dict[str, Any]) -> Iterator[Any]:
    return iter(_pipeline(config, pipeline, reads, **options).dataset())

  return make


def _pipeline(config: dict[str, Any], pipeline: str, reads: str, **options: Any) -> Any:
  from hpm import pipelines

  if reads != 'raw':
    options = {'shuffle_buffer': SHUFFLE} | options
  if not options.get('training', True):
    options['num_epochs'] = 10**6
  if pipeline == 'dali':
    options['bridge'] = 'plugin'
  return pipelines.create(
    'raw' if reads == 'raw' else 'imagenet',
    data_dir=config['data'][reads],
    batch_size=config['batch_size'],
    image_size=config['image_size'],
    num_classes=1001,
    seed=SEED,
    num_parallel_calls=len(config['cores']),
    prefetch=PREFETCH,
    pipeline=pipeline,
    **options,
  )


def _with_threads(dataset: Any, config: dict[str, Any]) -> Any:
  import tensorflow as tf

  options = tf.data.Options()
  options.deterministic = True
  options.autotune.enabled = False
  return dataset.prefetch(PREFETCH).with_options(options)


def _recipe(config: dict[str, Any]) -> Iterator[Any]:
  """As ImageNet is read in most TensorFlow code: everything per image, in float32."""
  import tensorflow as tf

  size, cores = config['image_size'], len(config['cores'])

  def load(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    features = tf.io.parse_single_example(
      record,
      {
        'image/encoded': tf.io.FixedLenFeature([], tf.string),
        'image/class/label': tf.io.FixedLenFeature([], tf.int64),
      },
    )
    encoded = features['image/encoded']
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
      tf.image.extract_jpeg_shape(encoded),
      tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4]),
      min_object_covered=0.1,
      aspect_ratio_range=[3 / 4, 4 / 3],
      area_range=[0.08, 1.0],
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], extent[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    image = tf.image.resize(image, [size, size])
    image = tf.image.random_flip_left_right(image)
    image = (image - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
    return image, features['image/class/label']

  files = tf.data.Dataset.list_files(os.path.join(config['data']['ordinary'], 'train-*'))
  records = files.interleave(tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=cores)
  images = records.shuffle(SHUFFLE).repeat().map(load, num_parallel_calls=cores)
  return iter(_with_threads(images.batch(config['batch_size'], drop_remainder=True), config))


def _keras(config: dict[str, Any]) -> Iterator[Any]:
  import keras

  dataset = keras.utils.image_dataset_from_directory(
    config['data']['files'],
    image_size=(config['image_size'],) * 2,
    batch_size=config['batch_size'],
    verbose=False,
  )
  return iter(dataset.repeat())


def _crop(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
  """Top, left, height and width: 8 to 100 % of the area, aspect 3/4 to 4/3."""
  for _ in range(100):
    area, aspect = rng.uniform(0.08, 1.0) * height * width, rng.uniform(3 / 4, 4 / 3)
    columns, rows = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    if 0 < columns <= width and 0 < rows <= height:
      return rng.randint(0, height - rows), rng.randint(0, width - columns), rows, columns
  return 0, 0, height, width


def _files(config: dict[str, Any]) -> list[str]:
  return sorted(glob.glob(os.path.join(config['data']['files'], '*', '*.JPEG')))


def _grain(config: dict[str, Any]) -> Iterator[Any]:
  """grain with simplejpeg and OpenCV, threads in one process."""
  import cv2
  import grain.python as grain
  import simplejpeg

  size = config['image_size']
  cv2.setNumThreads(1)

  class Transform(grain.RandomMapTransform):
    def random_map(self, element: str, rng: Any) -> tuple[Any, int]:
      with open(element, 'rb') as file:
        image = simplejpeg.decode_jpeg(file.read())
      generator = random.Random(int(rng.integers(2**62)))
      top, left, rows, columns = _crop(*image.shape[:2], generator)
      image = cv2.resize(image[top : top + rows, left : left + columns], (size, size))
      if generator.random() < 0.5:
        image = cv2.flip(image, 1)
      return image, 0

  dataset = (
    grain.MapDataset.source(_files(config))
    .seed(SEED)
    .shuffle()
    .repeat()
    .random_map(Transform())
    .to_iter_dataset(grain.ReadOptions(num_threads=len(config['cores']), prefetch_buffer_size=128))
  )
  return iter(dataset.batch(config['batch_size'], drop_remainder=True))


def _torchvision(config: dict[str, Any]) -> Iterator[Any]:
  """torchvision's own decoder and transforms, uint8, a worker process a core."""
  import itertools

  import torch
  from torchvision import io
  from torchvision.transforms import v2

  transform = v2.Compose(
    [
      v2.RandomResizedCrop(config['image_size'], antialias=True),
      v2.RandomHorizontalFlip(),
    ]
  )
  torch.set_num_threads(1)

  class Files(torch.utils.data.Dataset):
    def __init__(self) -> None:
      self.paths = _files(config)

    def __len__(self) -> int:
      return len(self.paths)

    def __getitem__(self, index: int) -> Any:
      image = io.decode_jpeg(io.read_file(self.paths[index]), mode=io.ImageReadMode.RGB)
      return transform(image)

  loader = torch.utils.data.DataLoader(
    Files(),
    config['batch_size'],
    shuffle=True,
    num_workers=len(config['cores']),
    drop_last=True,
    persistent_workers=True,
  )
  return itertools.chain.from_iterable(itertools.repeat(loader))


def _raw_alone(config: dict[str, Any]) -> Iterator[Any]:
  """Raw shards without TensorFlow: windows cut out of the mapped files, resized by OpenCV."""
  import cv2
  import numpy as np

  from hpm.pipelines import raw_file

  cv2.setNumThreads(1)
  size, count = config['image_size'], config['batch_size']
  paths = sorted(glob.glob(os.path.join(config['data']['raw'], 'train-*.raw')))
  files = [raw_file.RawFile(path) for path in paths]
  rng = random.Random(SEED)
  places = [(file, index) for file in files for index in range(len(file))]
  chosen = [(*place, _crop(*place[0].image(place[1]).shape[:2], rng)) for place in places]
  rng.shuffle(chosen)

  def work(thread: int, threads: int) -> Iterator[Any]:
    out = np.empty((count, size, size, 3), np.uint8)
    position = thread
    while True:
      for row in range(count // threads):
        file, index, (top, left, rows, columns) = chosen[position % len(chosen)]
        position += threads
        window = file.image(index)[top : top + rows, left : left + columns]
        cv2.resize(window, (size, size), out[row])
      yield out

  threads = len(config['cores'])
  if threads == 1:
    return work(0, 1)
  import concurrent.futures

  pool = concurrent.futures.ThreadPoolExecutor(threads)
  workers = [work(thread, threads) for thread in range(threads)]
  return (list(pool.map(next, workers)) for _ in iter(int, 1))


def _stage(name: str, reads: str) -> Callable[[dict[str, Any]], Iterator[Any]]:
  """The tfdata (or indexed) pipeline up to a stage; what isn't needed for it isn't computed."""

  def make(config: dict[str, Any]) -> Iterator[Any]:
    import tensorflow as tf

    from hpm.pipelines import augment

    kind, options = (
      ('tfdata', {}) if reads == 'ordinary' else ('indexed', {'decoder': 'tensorflow'})
    )
    pipeline = _pipeline(config, kind, reads, **options)
    cores, batch = len(config['cores']), config['batch_size']
    if name in ('batch', 'to device'):
      dataset = pipeline.dataset()
      if name == 'batch':
        return iter(dataset)
      device = '/GPU:0' if tf.config.list_physical_devices('GPU') else '/CPU:0'

      def onto_device() -> Iterator[Any]:
        for images, _ in dataset:
          with tf.device(device):
            yield tf.identity(images)

      return onto_device()

    def load(position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> Any:
      sample = pipeline.source.load(ident, item, False)
      if name == 'parse':
        return sample.encoded, sample.label

      def choose(shape: tf.Tensor) -> tf.Tensor:
        return augment.random_window(shape, tf.stack([tf.constant(5, tf.int64), position]))

      image = pipeline._crop(sample.encoded, choose)  # as the pipeline does it
      if name == 'resize':
        image = augment.resize(image, config['image_size'])
        image = augment.flip(image, tf.stack([tf.constant(6, tf.int64), position]))
      return image[0, 0]

    samples = pipeline._samples(0)
    if name != 'read':
      samples = samples.map(load, num_parallel_calls=cores, deterministic=True)
    return iter(_with_threads(samples.batch(batch, drop_remainder=True), config))

  return make


STAGES = ('read', 'parse', 'decode', 'resize', 'batch', 'to device')

ROWS = {
  'recipe': Row(_recipe, 'decode_and_crop_jpeg, tf.image.resize, float32 an image'),
  'tfdata': Row(_hpm('tfdata'), 'hpm on ordinary TFRecords, exact, uint8'),
  'tfdata, antialias': Row(_hpm('tfdata', antialias=True), 'the same, resized with antialiasing'),
  'native': Row(
    _hpm('indexed', decoder='native'), 'hpm on ordinary TFRecords by the compiled reader'
  ),
  'indexed, native': Row(
    _hpm('indexed', 'indexed', decoder='native'), 'indexed JPEGs by the compiled reader', None,
    'indexed',
  ),
  'simplejpeg': Row(
    _hpm('indexed', decoder='simplejpeg'), 'ordinary TFRecords by simplejpeg', 'simplejpeg'
  ),
  'indexed, ops': Row(
    _hpm('indexed', 'indexed', decoder='tensorflow'), "indexed JPEGs by TensorFlow's ops", None,
    'indexed',
  ),
  'indexed': Row(
    _hpm('indexed', 'indexed', decoder='simplejpeg'), 'indexed JPEGs by simplejpeg', 'simplejpeg',
    'indexed',
  ),
  'indexed, opencv': Row(
    _hpm('indexed', 'indexed', decoder='simplejpeg', resize='opencv'),
    'the same, resized by OpenCV', 'cv2', 'indexed',
  ),
  'raw': Row(
    _hpm('raw', 'raw', resize='tensorflow'), "raw shards, resized by TensorFlow's op", None, 'raw'
  ),
  'raw, native': Row(
    _hpm('raw', 'raw', resize='native'), 'the same by the compiled reader', None, 'raw'
  ),
  'raw, opencv': Row(
    _hpm('raw', 'raw', resize='opencv'), 'raw shards, resized by OpenCV', 'cv2', 'raw'
  ),
  'raw alone': Row(_raw_alone, 'raw shards outside TensorFlow, OpenCV on bytes', 'cv2', 'raw'),
  'dali': Row(_hpm('dali'), 'hpm on DALI, CPU operators', 'nvidia.dali'),
  'dali, indexed': Row(
    _hpm('dali', 'indexed'), 'the same on indexed JPEGs', 'nvidia.dali', 'indexed'
  ),
  'keras': Row(_keras, 'image_dataset_from_directory, whole images', None, 'files'),
  'grain': Row(_grain, 'grain, simplejpeg, OpenCV', 'grain', 'files'),
  'torchvision': Row(
    _torchvision, "torchvision's decoder and v2 transforms", 'torchvision', 'files'
  ),
  'eval tfdata': Row(
    _hpm('tfdata', training=False), 'evaluation, ordinary TFRecords', group='evaluation'
  ),
  'eval native': Row(
    _hpm('indexed', training=False, decoder='native'), 'the same by the compiled reader',
    group='evaluation',
  ),
  'eval indexed': Row(
    _hpm('indexed', 'indexed', training=False, decoder='tensorflow'),
    "evaluation, indexed JPEGs by TensorFlow's ops", None, 'indexed', 'evaluation',
  ),
  'eval indexed, native': Row(
    _hpm('indexed', 'indexed', training=False, decoder='native'),
    'indexed JPEGs by the compiled reader', None, 'indexed', 'evaluation',
  ),
  **{
    f'{reads}: {name}': Row(_stage(name, reads), f'{reads}, up to {name}', None, reads, 'stages')
    for reads in ('ordinary', 'indexed')
    for name in STAGES
  },
}  # fmt: skip


def prepare(data_dir: str, work_dir: str, image_size: int) -> dict[str, Any]:
  """Brings the data into all formats, where that hasn't been done; what `data` and `list` name.

  Args:
    data_dir: ImageNet's TFRecords, train-*-of-*.
    work_dir: where the others go.
    image_size: pixels.

  Returns:
    `data`: format -> directory; `bytes`: format -> bytes of the images; `num_images`; `list`: the
    file with a line an image for the C loop.
  """
  import tensorflow as tf

  from hpm.pipelines import augment, convert, order, sources

  os.makedirs(work_dir, exist_ok=True)
  data = {name: os.path.join(work_dir, name) for name in ('files', 'indexed', 'raw')}
  data['ordinary'] = data_dir
  options = {'data_dir': data_dir}
  num_files = len(glob.glob(os.path.join(data_dir, 'train-*')))
  for name in ('indexed', 'raw'):
    convert.convert(
      'imagenet', data[name], name, options=options, splits=['train'], num_shards=num_files
    )
  listed = os.path.join(work_dir, f'windows-{image_size}.txt')
  if not os.path.exists(listed):
    from hpm import pipelines

    source: sources.Source = pipelines.source('imagenet', data_dir=data_dir)
    lines, position = [], 0
    for file, count in enumerate(source.counts):
      for record in range(count):
        contents = source.contents(file, record)
        if not contents.encoded.startswith(b'\xff\xd8\xff'):
          continue
        directory = os.path.join(data['files'], f'{contents.label:04d}')
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f'{file}-{record}.JPEG')
        with open(path, 'wb') as written:
          written.write(contents.encoded)
        with tf.device('/CPU:0'):
          shape = augment.jpeg_shape(contents.encoded)
          seeds = [
            tf.constant([order.subseed(SEED, use), position], tf.int64) for use in ('crop', 'flip')
          ]
          window = augment.random_window(shape, seeds[0]).numpy().tolist()
          flip = int(augment.flips(seeds[1])[0])
        lines.append(' '.join(map(str, [*window, flip])) + f' {path}\n')
        position += 1
    with open(listed + '.part', 'w', encoding='utf-8') as file_:
      file_.writelines(lines)
    os.replace(listed + '.part', listed)
  with open(listed, encoding='utf-8') as file_:
    num_images = sum(1 for _ in file_)
  sizes = {
    name: sum(
      os.path.getsize(path)
      for path in glob.glob(os.path.join(directory, '**', '*'), recursive=True)
      if os.path.isfile(path) and 'json' not in path
    )
    for name, directory in data.items()
  }
  return {'data': data, 'bytes': sizes, 'num_images': num_images, 'list': listed}


def _family() -> list[int]:
  """This process and all that it started, and they."""
  found, ahead = [], [os.getpid()]
  while ahead:
    pid = ahead.pop()
    found.append(pid)
    for path in glob.glob(f'/proc/{pid}/task/*/children'):
      try:
        with open(path, encoding='ascii') as file:
          ahead += map(int, file.read().split())
      except OSError:
        continue  # it has ended
  return found


def _cpu_seconds() -> float:
  """CPU time of the whole family until now."""
  total = time.process_time()  # finer than the system's ticks
  for pid in _family()[1:]:
    try:
      with open(f'/proc/{pid}/stat', encoding='utf-8') as file:
        total += sum(map(int, file.read().rpartition(')')[2].split()[11:13])) / _TICKS
    except OSError:
      continue
  return total


def _peak_mib() -> float:
  """The most memory that each of the family has held, added up."""
  total = 0
  for pid in _family():
    try:
      with open(f'/proc/{pid}/status', encoding='utf-8') as file:
        total += next(int(line.split()[1]) for line in file if line.startswith('VmHWM'))
    except (OSError, StopIteration):
      continue
  return total / 1024


def _measure(batches: Iterator[Any], batch_size: int, seconds: float) -> dict[str, float]:
  """Images, wall and CPU seconds of as many batches as take so long."""
  # What was made while nobody measured. Keras keeps as much as it likes: until one is waited for.
  for number in range(MOST_READY):
    asked = time.perf_counter()
    next(batches)
    if number > PREFETCH and time.perf_counter() - asked > WAITED_S:
      break
  count, cpu, begin = 0, _cpu_seconds(), time.perf_counter()
  while count < MIN_BATCHES or time.perf_counter() - begin < seconds:
    next(batches)
    count += 1
  wall = time.perf_counter() - begin
  return {'images': count * batch_size, 'wall_s': wall, 'cpu_s': _cpu_seconds() - cpu}


def main(arguments: list[str]) -> int:
  """Answers on stdout until stdin ends."""
  config = json.loads(arguments[0])
  answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
  os.dup2(2, 1)  # what libraries print is no answer

  def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)

  if 'prepare' in config:
    try:
      answer(prepare(**config['prepare']))
    except Exception as error:
      answer({'error': str(error) or repr(error)})
    return 0
  os.sched_setaffinity(0, config['cores'])
  try:
    batches = ROWS[config['row']].make(config)
    begin, count = time.perf_counter(), 0
    while count < MIN_BATCHES or time.perf_counter() - begin < WARM_UP_S:
      next(batches)
      count += 1
    answer({'ready': True})
    for line in sys.stdin:
      answer(_measure(batches, config['batch_size'], float(line)))
    answer({'peak_mib': _peak_mib()})
  except Exception as error:
    answer({'error': (str(error).strip().splitlines() or [repr(error)])[-1][:300]})
  finally:
    answers.flush()
    os._exit(0)  # some libraries' threads wait for one another at the end
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
