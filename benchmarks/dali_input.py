"""DALI's input beside NVIDIA's documented recipe, and what the way into TensorFlow costs.

  python -m hpm.pipelines sample --out=/tmp/sample
  python -m benchmarks.dali_input --data_dir=/tmp/sample --num_threads=1 --result_json=dali.json

Every row reads the same files in the same process, by turns, with operators on the CPU:

  recipe             DALI's reader, random crop in the decoder, antialiased resize, mirror and
                     normalise to float32 NCHW, by run()
  recipe, plugin     the same through DALIDataset
  hpm                our pipeline: tf.data's records, checksums, order and windows; uint8 NHWC
  hpm, float32 NCHW  the same with what the recipe delivers
  hpm, evaluation    short side, central crop, antialiased
  tfdata             tf.data alone, the same pixels
  graph, run         our graph on samples that lie in memory, by run()
  graph, plugin      the same through DALI's plugin for TensorFlow
  graph, python      the same through Python

The last three differ in the bridge alone: `bridges` gives their CPU time over that of run().
`rows` and `bridges` are for other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks import command, process
from hpm import errors
from hpm.pipelines import dali_graph

__all__ = ['bridges', 'main', 'recipe', 'rows']

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of the recipe


def recipe(
  paths: Sequence[str],
  indices: Sequence[str],
  *,
  batch_size: int,
  num_threads: int,
  image_size: int = 224,
  seed: int = 0,
) -> Any:
  """NVIDIA's recipe for training on ImageNet, on the CPU, as a built pipeline of DALI's.

  As in the examples of https://docs.nvidia.com/deeplearning/dali/user-guide (ResNet-50 training):
  it gives float32 [B, 3, H, W] and labels.

  Args:
    paths: TFRecord files.
    indices: their index files, verified (`hpm.pipelines.index`).
    batch_size: images a batch.
    num_threads: that decode.
    image_size: pixels.
    seed: of order and crops.
  """
  dali_graph.require()
  from nvidia.dali import fn, pipeline, tfrecord, types

  graph = pipeline.Pipeline(
    batch_size=batch_size, num_threads=num_threads, device_id=None, seed=seed
  )
  with graph:
    read = fn.readers.tfrecord(
      path=list(paths),
      index_path=list(indices),
      features={
        'image/encoded': tfrecord.FixedLenFeature([], tfrecord.string, ''),
        'image/class/label': tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
      },
      random_shuffle=True,
      initial_fill=1024,
      name='Reader',
    )
    images = fn.decoders.image_random_crop(
      read['image/encoded'],
      random_aspect_ratio=[0.75, 4 / 3],
      random_area=[0.08, 1.0],
      num_attempts=100,
    )
    images = fn.resize(images, size=[image_size] * 2, interp_type=types.INTERP_TRIANGULAR)
    images = fn.crop_mirror_normalize(
      images,
      mirror=fn.random.coin_flip(),
      dtype=types.FLOAT,
      output_layout='CHW',
      mean=list(MEAN),
      std=list(STD),
    )
    graph.set_outputs(images, read['image/class/label'] - 1)
  graph.build()
  return graph


def rows(
  data_dir: str,
  *,
  batch_size: int = 64,
  image_size: int = 224,
  num_threads: int | None = None,
  num_batches: int = 20,
  num_rounds: int = 3,
) -> list[dict[str, Any]]:
  """Speed and CPU time of every row, the rows taking turns.

  Args:
    data_dir: the directory of TFRecords train-*-of-*.
    batch_size: images a batch.
    image_size: pixels.
    num_threads: for decoding, in every row; None: one a core.
    num_batches: measured at a time.
    num_rounds: times that each row is measured.

  Returns:
    For each row `name`, `images_per_s` and `cpu_ms_per_image` (medians of the rounds), and all
    rounds in `rounds`: [(images per second, CPU milliseconds an image), ...].

  Raises:
    UsageError: DALI or its plugin is absent.
    DataError: as the pipelines raise it.
  """
  dali_graph.require()
  from hpm.pipelines import base

  threads = base.num_cores() if num_threads is None else num_threads
  made = _makers(data_dir, batch_size, image_size, threads)
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
  for _ in range(num_rounds):
    for name, make in made.items():
      found[name].append(_measure(make(), batch_size, num_batches))
  return [
    {
      'name': name,
      'images_per_s': statistics.median(speed for speed, _ in rounds),
      'cpu_ms_per_image': statistics.median(cpu for _, cpu in rounds),
      'rounds': rounds,
    }
    for name, rounds in found.items()
  ]


def bridges(results: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Bridge -> its CPU time an image over that of run(), of `rows`; 1.1 is ten percent more."""
  cpu = {row['name']: row['cpu_ms_per_image'] for row in results}
  return {kind: cpu[f'graph, {kind}'] / cpu['graph, run'] for kind in ('plugin', 'python')}


def _makers(
  data_dir: str, batch_size: int, image_size: int, threads: int
) -> dict[str, Callable[[], Iterator[Any]]]:
  """Name -> () -> an iterator of batches, without end."""
  import tensorflow as tf

  from hpm import pipelines
  from hpm.pipelines import dali, index

  if not dali.has_plugin():
    raise errors.UsageError("DALI's plugin for TensorFlow is not installed: make dali")
  options: dict[str, Any] = {
    'data_dir': data_dir,
    'batch_size': batch_size,
    'image_size': image_size,
    'num_parallel_calls': threads,
    'shuffle_buffer': 1024,
  }
  source = pipelines.source('imagenet', data_dir=data_dir)

  def batches(**more: Any) -> Callable[[], Iterator[Any]]:
    return lambda: iter(pipelines.create('imagenet', **(options | more)).dataset())

  def by_recipe(through_plugin: bool) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
      with tempfile.TemporaryDirectory() as directory:
        indices = [index.index_path(path, directory) for path in source.files]
        for path, name in zip(source.files, indices):
          index.write(path, name)
        graph = recipe(
          source.files,
          indices,
          batch_size=batch_size,
          num_threads=threads,
          image_size=image_size,
        )
        if not through_plugin:
          yield from (graph.run() for _ in itertools.count())
        from nvidia.dali.plugin import tf as plugin

        with tf.device('/CPU:0'):
          dataset = plugin.DALIDataset(
            graph,
            batch_size=batch_size,
            num_threads=threads,
            device_id=None,
            output_dtypes=(tf.float32, tf.int64),
            output_shapes=((batch_size, 3, image_size, image_size), (batch_size,)),
          ).prefetch(4)
        yield from dataset

    return make

  num_cached = 4 * batch_size  # samples in memory

  class Cached(dali.DaliPipeline):
    """Our pipeline on samples that are packed once and then come from memory."""

    def _packed(self, first: int) -> tf.data.Dataset:
      return super()._packed(first).take(num_cached).cache().repeat()

    def run(self) -> Iterator[Any]:
      feed = self._feed(0)
      kept = [[sample.copy() for sample in next(feed)] for _ in range(num_cached // batch_size)]
      cycle = itertools.cycle(kept)
      graph = self._graph(self.batch_size, feed=lambda: next(cycle))
      while True:
        yield graph.run()

  def cached(bridge: str) -> Any:
    more = {name: value for name, value in options.items() if name != 'data_dir'}
    return Cached(source, bridge=bridge, **more)

  ours = {'pipeline': 'dali', 'bridge': 'plugin'}
  return {
    'recipe': by_recipe(False),
    'recipe, plugin': by_recipe(True),
    'hpm': batches(**ours),
    'hpm, float32 NCHW': batches(**ours, dtype='float32', data_format='NCHW'),
    'hpm, evaluation': batches(**ours, training=False, num_epochs=10**6),
    'tfdata': batches(pipeline='tfdata'),
    'graph, run': lambda: cached('plugin').run(),
    'graph, plugin': lambda: iter(cached('plugin').dataset()),
    'graph, python': lambda: iter(cached('python').dataset()),
  }


def _measure(batches: Iterator[Any], batch_size: int, num_batches: int) -> tuple[float, float]:
  """(images per second, CPU milliseconds an image, of all threads)."""
  for _ in range(8):  # until queues are full and caches filled
    next(batches)
  wall, cpu = time.perf_counter(), time.process_time()
  for _ in range(num_batches):
    next(batches)
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  images = num_batches * batch_size
  return images / wall, cpu / images * 1e3


def table(results: Sequence[dict[str, Any]]) -> str:
  """The rows for people."""
  lines = [f'{"":20}{"images/s":>10}{"CPU ms/image":>14}']
  lines += [
    f'{row["name"]:20}{row["images_per_s"]:10.0f}{row["cpu_ms_per_image"]:14.3f}' for row in results
  ]
  over = ', '.join(f'{kind} {ratio:.3f}' for kind, ratio in bridges(results).items())
  return '\n'.join([*lines, f'CPU time over run(): {over}'])


@command.line()
def main(arguments: Sequence[str]) -> int:
  """Measures, prints the table, writes the result; the exit code."""
  parser = command.Parser(prog='python -m benchmarks.dali_input', description=__doc__)
  parser.add_argument('--data_dir', required=True, help='directory of train-*-of-*')
  parser.add_argument('--batch_size', type=int, default=64, help='%(default)s')
  parser.add_argument('--image_size', type=int, default=224, help='%(default)s')
  parser.add_argument('--num_threads', type=int, help='default: one a core')
  parser.add_argument('--num_batches', type=int, default=20, help='measured at a time, %(default)s')
  parser.add_argument('--num_rounds', type=int, default=3, help='%(default)s')
  parser.add_argument('--result_json', metavar='FILE', help='where the numbers go')
  options = vars(parser.parse_args(arguments))
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  path = options.pop('result_json')
  process.import_tensorflow()
  results = rows(options.pop('data_dir'), **options)
  print(table(results))
  if path:
    with open(path, 'w', encoding='utf-8') as file:
      json.dump({'options': options, 'rows': results, 'bridges': bridges(results)}, file, indent=1)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
