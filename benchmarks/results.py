"""The result file: everything about a run that another program could want, as JSON.

  result = results.read('results/run.json')
  if result['status'] == 'ok':
    print(result['images_per_second'])

A run that failed, or measured nothing, has a reason and no throughput.
"""

from collections.abc import Mapping
import json
import math
import os
import tempfile
from typing import Any

from hpm.errors import DataError

__all__ = ['SCHEMA_VERSION', 'read', 'validate', 'write']

SCHEMA_VERSION = 1

_NUMBER = (int, float)
# Key -> types. `ALWAYS` stands in every result, `THROUGHPUT` in all that measured a speed.
ALWAYS: dict[str, Any] = {
  'schema_version': int,
  'status': str,  # 'ok' or 'failed'
  'mode': str,  # 'training', 'evaluation' or 'forward only'
  'started_at': str,  # UTC, ISO 8601
  'command': list,  # the arguments as given
  'flags_given': dict,
  'flags': dict,  # all of them, as in effect when the run ended
  'machine': dict,  # see machine.describe
}
THROUGHPUT: dict[str, Any] = {
  'images_per_second': _NUMBER,  # images over the seconds of the timed steps
  'images_per_second_total': _NUMBER,  # images over the wall time of the loop
  'images_per_second_median': _NUMBER,  # of the steps
  'standard_error': _NUMBER,  # images/s
  'jitter': _NUMBER,  # images/s
  'step_seconds': list,
  'step_images': list,
}
OPTIONAL: dict[str, Any] = {
  'reason': str,  # of the failure
  'model': str,
  'num_parameters': int,
  'devices': list,
  'batch_size_per_device': int,
  'batch_size_global': int,
  'time_to_first_step_s': _NUMBER,  # from the start of the program
  'loop_wall_s': _NUMBER,
  'cpu_s': _NUMBER,  # of the process, in the timed loop
  'peak_rss_mib': _NUMBER,
  'first_loss': _NUMBER,  # of the first step of all
  'last_loss': _NUMBER,
  'resumed_from': str,
  'checkpoint': str,
  'accuracy': dict,  # top_1, top_5, loss, num_samples
}


def validate(result: Mapping[str, Any]) -> None:
  """ValueError that names what is missing, unknown or of the wrong type."""
  if not isinstance(result, Mapping):
    raise ValueError(f'not an object but {type(result).__name__}')
  known = {**ALWAYS, **THROUGHPUT, **OPTIONAL}
  problems = [f'no {name}' for name in ALWAYS if name not in result]
  problems += [f'unknown {name}' for name in result if name not in known]
  for name, types in known.items():
    value = result.get(name)
    if name in result and (not isinstance(value, types) or isinstance(value, bool)):
      problems.append(f'{name} is {value!r}')
    elif isinstance(value, float) and not math.isfinite(value):
      problems.append(f'{name} is {value}')
  if result.get('schema_version') != SCHEMA_VERSION:
    problems.append(f'schema_version is not {SCHEMA_VERSION}')
  measured = [name for name in THROUGHPUT if name in result]
  if result.get('status') == 'failed':
    problems += [f'{name} of a failed run' for name in measured]
    problems += [] if result.get('reason') else ['no reason for the failure']
  elif result.get('status') != 'ok':
    problems.append(f'status {result.get("status")!r} is neither ok nor failed')
  elif len(measured) < len(THROUGHPUT) and (measured or 'accuracy' not in result):
    problems += [f'no {name}' for name in THROUGHPUT if name not in result]
  elif measured and not len(result['step_seconds']) == len(result['step_images']) > 0:
    problems.append('step_seconds and step_images do not fit')
  if problems:
    raise ValueError(f'not a valid result: {"; ".join(problems)}')


def write(path: str, result: Mapping[str, Any]) -> None:
  """Writes a valid result; the file appears whole or not at all, and its directory is made."""
  validate(result)
  directory = os.path.dirname(path) or '.'
  os.makedirs(directory, exist_ok=True)
  descriptor, scratch = tempfile.mkstemp(prefix='.writing-', dir=directory)
  try:
    with os.fdopen(descriptor, 'w') as file:
      json.dump(result, file, indent=2, allow_nan=False)
      file.write('\n')
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)
  except BaseException:
    os.unlink(scratch)
    raise


def read(path: str) -> dict[str, Any]:
  """A result that `write` wrote.

  Raises:
    DataError: there is none, or it is damaged or of another schema.
  """
  try:
    with open(path) as file:
      result = json.load(file)
    validate(result)
  except (OSError, ValueError) as error:
    raise DataError(f'{path} is no result of benchmarks/run.py: {error}') from error
  return result
