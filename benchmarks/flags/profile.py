"""Looking inside: traces, the costliest ops, the graph."""

import os

from absl import flags

from hpm import writable
from hpm.errors import UsageError

TITLE = 'Profiles'
FILES = ('trace_file', 'tfprof_file', 'graph_file')
# What needs profiled steps: the last ones of the warm-up, since profiling slows them down.
PROFILED = ('trace_file', 'tfprof_file', 'profile_dir')
NUM_STEPS = 3


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'trace_file',
    None,
    f'File for a Chrome trace (chrome://tracing, ui.perfetto.dev) of the last '
    f'{NUM_STEPS} warm-up steps, with steps and towers by name.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'profile_dir',
    None,
    'Directory for the profile of those steps as TensorBoard shows it.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'tfprof_file',
    None,
    'File for a table of the ops of those steps, by time; the 20 costliest are printed too.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'graph_file',
    None,
    "File for the step's graph: a GraphDef, as text where the name ends in txt.",
    flag_values=values,
  )


def check(options) -> None:
  for name in (*FILES, 'profile_dir'):
    if getattr(options, name) == '':
      raise UsageError(f'--{name}= is empty: give a path, or leave the flag out')
  for name in FILES:
    if getattr(options, name) is not None:
      writable.check_file(name, getattr(options, name))
  if options.profile_dir is not None:
    writable.check_directory('profile_dir', options.profile_dir)
  given = [getattr(options, name) for name in (*FILES, 'result_json')]
  paths = [os.path.abspath(path) for path in given if path is not None]
  twice = {path for path in paths if paths.count(path) > 1}
  if twice:
    raise UsageError(f'{twice.pop()} is named by two flags: give each its own file')


def complete(options) -> None:
  del options


def asked(options) -> bool:
  """Whether steps have to be profiled."""
  return any(getattr(options, name) is not None for name in PROFILED)
