"""Compiles the fast reader of JPEGs for this machine, once; pipelines then take it by themselves.

  python -m hpm.pipelines compile

It needs a C compiler and libjpeg-turbo's headers (apt install gcc libjpeg62-turbo-dev). Without it
the `indexed` pipeline gives the same pixels through Python packages, or TensorFlow's own ops.
"""

from typing import Any

from hpm.pipelines import jpeg_native

__all__ = ['add_arguments', 'run']


def add_arguments(parser: Any) -> None:
  """The command takes none."""
  del parser


def run(args: Any) -> str:
  """Compiles; the text to print."""
  del args
  was_there = jpeg_native.is_built()
  path = jpeg_native.build()
  return f'{path} {"is there already" if was_there else "built"}'
