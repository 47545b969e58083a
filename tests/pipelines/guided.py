"""Fuzzing that follows coverage (atheris): python guided.py TARGET SEED_FILE [libFuzzer's options].

A target reads the bytes as that kind of file. Anything but an error of ours ends it with a code
that isn't 0, and libFuzzer says for which bytes.
"""

import contextlib
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=['hpm.pipelines.indexed_jpeg', 'hpm.pipelines.raw_file']):
  from hpm.pipelines import indexed_jpeg, raw_file

from hpm.errors import DataError


def segments(content: bytes) -> None:
  """A JPEG, indexed or to be."""
  if indexed_jpeg.has_index(content):
    where = indexed_jpeg.layout(content)
    indexed_jpeg.assemble(content, (0, 0, where.height, where.width))
    indexed_jpeg.without_index(content)
  indexed_jpeg.add_index(content)


def raw(content: bytes) -> None:
  """A file of raw images."""
  with tempfile.NamedTemporaryFile() as file:
    file.write(content)
    file.flush()
    opened = raw_file.RawFile(file.name)
    for i in range(min(len(opened), 100)):
      opened.check(i)
    assert isinstance(opened.keys, list)


def main(target: str, *options: str) -> None:
  """Runs until libFuzzer's options end it."""
  read = {'segments': segments, 'raw': raw}[target]

  def one(content: bytes) -> None:
    with contextlib.suppress(DataError):
      read(content)

  atheris.Setup([sys.argv[0], *options], one)
  atheris.Fuzz()


if __name__ == '__main__':
  main(*sys.argv[1:])
