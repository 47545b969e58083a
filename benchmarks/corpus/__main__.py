"""python -m benchmarks.corpus OUT [--num_images=N]; see the package."""

from collections.abc import Sequence
import os
import sys

from benchmarks import command, corpus


@command.line()
def main(arguments: Sequence[str]) -> int:
  """Builds the corpus; the exit code."""
  parser = command.Parser(prog='python -m benchmarks.corpus', description=corpus.__doc__)
  parser.add_argument('out', metavar='OUT', help='a new directory')
  parser.add_argument('--num_images', type=int, default=1000, help='default: %(default)s')
  args = parser.parse_args(arguments)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  from benchmarks.corpus import build

  print(build.build(args.out, args.num_images))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
