"""The doctor's checks beside a bare reading of the same records, by turns.

  python -m benchmarks.doctor --data_dir=DIR

DIR holds ImageNet's TFRecords, train-*-of-*. The doctor reads, verifies checksums, parses, and
looks at kinds, sizes, labels and duplicates, without decoding; `TFRecordDataset` reads and
verifies.
Each ratio is that of a round, above 1 where the doctor is faster; the first round is left out.
"""

from collections.abc import Callable, Sequence
import os
import statistics
import sys
import time

from benchmarks import command, process

__all__ = ['main', 'rounds']


def rounds(data_dir: str, num_rounds: int) -> list[tuple[float, float, float, float]]:
  """(wall, CPU) seconds of the bare reading and of the doctor, a round each.

  Raises:
    DataError: no data.
  """
  import tensorflow as tf

  from hpm.pipelines import doctor, records

  paths = records.shard_files(data_dir, 'train')

  def bare() -> None:
    dataset = tf.data.TFRecordDataset(paths, num_parallel_reads=os.cpu_count())
    for _ in dataset.batch(256):
      pass

  def examine() -> None:
    doctor.examine('imagenet', options={'data_dir': data_dir}, splits=['train'])

  return [(*_timed(bare), *_timed(examine)) for _ in range(num_rounds + 1)][1:]


def _timed(work: Callable[[], None]) -> tuple[float, float]:
  wall, cpu = time.perf_counter(), time.process_time()
  work()
  return time.perf_counter() - wall, time.process_time() - cpu


@command.line()
def main(arguments: Sequence[str]) -> int:
  """Measures and prints; the exit code."""
  parser = command.Parser(prog='python -m benchmarks.doctor', description=__doc__)
  parser.add_argument('--data_dir', required=True, metavar='DIR')
  parser.add_argument('--num_rounds', type=int, default=9, help='%(default)s')
  options = parser.parse_args(arguments)
  process.import_tensorflow()
  measured = rounds(options.data_dir, options.num_rounds)
  for name, bare, doctor in (('wall', 0, 2), ('CPU', 1, 3)):
    ratios = [one[bare] / one[doctor] for one in measured]
    print(
      f'{name} s: bare {statistics.median(one[bare] for one in measured):.3f}, '
      f'doctor {statistics.median(one[doctor] for one in measured):.3f}; bare / doctor '
      f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
    )
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
