"""python -m benchmarks.corpus OUT [--num_images=N]; see the package."""

import argparse
import os
import sys

from benchmarks import corpus
from hpm.errors import DataError, UsageError


def main() -> int:
  """Builds the corpus; the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.corpus',
    description=corpus.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('out', metavar='OUT', help='a new directory')
  parser.add_argument('--num_images', type=int, default=1000, help='default: %(default)s')
  args = parser.parse_args()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  from benchmarks.corpus import build

  try:
    print(build.build(args.out, args.num_images))
  except (DataError, UsageError) as error:
    print(f'python -m benchmarks.corpus: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
