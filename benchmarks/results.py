"""The result file: everything about a run that another program could want, as JSON.

  result = results.read('results/run.json')
  if result['status'] == 'ok':
    print(result['images_per_second'])

Only a run that ended well has a throughput; every other has a reason. The schema is `FIELDS`, and
docs/results_schema.md is written from it: python -m benchmarks.results > docs/results_schema.md
"""

from collections.abc import Mapping
import json
import math
from typing import Any, NamedTuple

from benchmarks import files
from hpm import json_file
from hpm.errors import DataError

__all__ = ['FIELDS', 'SCHEMA_VERSION', 'STATUSES', 'Field', 'document', 'read', 'validate', 'write']

# 1: the first. 2: percentiles, interval, warnings, repeated runs, `status` stopped and finished.
SCHEMA_VERSION = 2

STATUSES = {
  'ok': 'measured, evaluated or diagnosed',
  'failed': 'ended by an error, see `reason`',
  'stopped': 'ended by SIGTERM, after a checkpoint where there is a `--train_dir`',
  'finished': 'nothing to do: the checkpoint has reached `--num_batches` or `--num_epochs`',
}


class Field(NamedTuple):
  """A key of the result.

  Attributes:
    kind: 'text', 'count', 'number', 'numbers' (a list), 'counts', 'texts', 'object', 'objects';
      ending in '?' where null is a value.
    group: 'always', 'throughput' (in all that measured a speed, and in no other) or 'optional'.
    text: what it means, with its unit.
  """

  kind: str
  group: str
  text: str


FIELDS = {
  'schema_version': Field('count', 'always', f'{SCHEMA_VERSION}'),
  'status': Field('text', 'always', ', '.join(f'`{name}`' for name in STATUSES)),
  'reason': Field('text', 'optional', 'why there is no throughput; in all but `ok`'),
  'mode': Field('text', 'always', '`training`, `evaluation`, `forward only` or `diagnosis`'),
  'started_at': Field('text', 'always', 'UTC, ISO 8601'),
  'command': Field('texts', 'always', 'the arguments as given'),
  'flags_given': Field('object', 'always', 'flag to value, of those on the command line'),
  'flags': Field('object', 'always', 'flag to value, of all flags, as in effect at the end'),
  'machine': Field(
    'object',
    'always',
    'versions of TensorFlow, Python and NumPy, `system`, `cpu`, `cores` (usable), `memory_mib`, '
    '`gpus`, `gpu_driver`, `onednn`, `environment` (variables that TensorFlow and CUDA read), '
    '`tensorflow_build`, `git_revision`',
  ),
  'model': Field('text', 'optional', ''),
  'num_parameters': Field('count', 'optional', 'trainable values'),
  'devices': Field('texts', 'optional', 'one a tower'),
  'batch_size_per_device': Field('count', 'optional', ''),
  'batch_size_global': Field(
    'count', 'optional', 'of a step, of all workers that make it together'
  ),
  'num_workers': Field('count', 'optional', 'processes that train one model, if several'),
  'worker': Field('count', 'optional', 'which of them wrote this, from 0, the chief'),
  'images_per_second': Field('number', 'throughput', 'images over the seconds of all timed steps'),
  'images_per_second_total': Field(
    'number',
    'throughput',
    'images over the wall time of the loop, what happens between steps '
    'included; the `total images/sec` line; the chief of several workers counts the images of all',
  ),
  'images_per_second_median': Field('number', 'throughput', 'of the steps'),
  'images_per_second_interval': Field(
    'numbers?',
    'throughput',
    '95 % confidence, lower and upper end: from ten blocks of '
    'steps, or with `--num_runs` from the runs; null for a single one, and where they are '
    'so few and so far apart that the rate has no upper end',
  ),
  'standard_error': Field('number', 'throughput', 'of the steps, images/s'),
  'jitter': Field(
    'number', 'throughput', '1.4826 * median absolute deviation of the steps, images/s'
  ),
  'step_seconds': Field('numbers', 'throughput', 'of each timed step'),
  'step_images': Field(
    'counts', 'throughput', 'of each timed step, on all devices of this process'
  ),
  'step_seconds_mean': Field('number', 'throughput', ''),
  'step_seconds_median': Field('number', 'throughput', ''),
  'step_seconds_percentiles': Field(
    'object', 'throughput', '`p5`, `p25`, `p50`, `p75`, `p95`, `p99`'
  ),
  'losses': Field('numbers', 'optional', 'of each timed step'),
  'first_loss': Field('number', 'optional', 'of the first step of the run'),
  'last_loss': Field('number', 'optional', 'of the last timed step'),
  'loop_wall_s': Field('number', 'optional', 'of the timed loop'),
  'cpu_s': Field('number', 'optional', 'of the process, in the timed loop'),
  'other_load_cores': Field(
    'number',
    'optional',
    'cores that other processes kept busy during the timed loop; tasks of one local cluster are no '
    'others to each other',
  ),
  'peak_rss_mib': Field('number', 'optional', 'most host memory of the process'),
  'peak_gpu_mib': Field('numbers', 'optional', 'most memory in use, each GPU'),
  'time_to_first_step_s': Field('number', 'optional', 'from the start of the benchmark'),
  'num_warmup_steps': Field('count', 'optional', 'that were made and not timed'),
  'skipped_steps': Field(
    'count',
    'optional',
    'whose gradients were not finite, so that no variable changed (dynamic loss scale)',
  ),
  'loss_scale': Field('number', 'optional', 'of the last step'),
  'skipped_records': Field(
    'objects', 'optional', 'bad records that the pipeline left out: `what`, `times`'
  ),
  'warnings': Field('texts', 'optional', 'doubts about the measurement'),
  'resumed_from': Field('text', 'optional', 'checkpoint'),
  'checkpoint': Field('text', 'optional', 'the last one written'),
  'accuracy': Field('object', 'optional', '`top_1`, `top_5`, `loss`, `num_samples`'),
  'evaluations': Field(
    'objects',
    'optional',
    'during training: `step`, `images` and `seconds` (of the training, evaluations included, over '
    'all runs of it), `top_1`, `top_5`, `loss`, `num_samples`; `accuracy` is the last of them',
  ),
  'best': Field(
    'object', 'optional', 'the best of them: `step`, `images`, `top_1`, `top_5`, `checkpoint`'
  ),
  'to_accuracy': Field(
    'object',
    'optional',
    'the evaluation that reached `--stop_at_top_1_accuracy`, and `asked`: time and images to it',
  ),
  'curve': Field(
    'object',
    'optional',
    'columns of at most 1,000 rows, warm-up included: `step`, `images` and `seconds` at the end of '
    'a row, mean `loss` and `images_per_second` of its steps, `learning_rate` of the last',
  ),
  'cost': Field(
    'object',
    'optional',
    'with `--usd_per_hour`: that, `images_per_usd`, and `usd_to_accuracy` if one was reached',
  ),
  'files': Field('object', 'optional', 'flag to path, of traces, profiles and graphs written'),
  'image_bytes': Field(
    'object',
    'optional',
    'bytes of an image: `pixels` (uint8, to the device), and `encoded` (mean of the first records '
    'of the data), null without such data',
  ),
  'input_demand': Field(
    'object',
    'optional',
    'of each device of this process: `images_per_second`, and at 10^6 bytes a MB '
    '`pixels_mb_per_second` and `encoded_mb_per_second` (null as above)',
  ),
  'diagnosis': Field(
    'object',
    'optional',
    'of `--diagnose`: `sentence`, `limit`, `gain` (share of speed without it; null: all of it), '
    '`alike`, `behind` and `behind_gain`, `advice`, `parts` (seconds a step of each alone), '
    '`gains`, `predicted_s` and `measured_s` of a step, `images` of a step, '
    '`matrix_product_flops` (a second)',
  ),
  'published': Field(
    'object',
    'optional',
    'the published row of the same model, batch and precision that is nearest: `name`, '
    '`images_per_second` and `num_devices` there, `hardware`, `ratio_per_device` (this run over '
    'it), `scaling` (there, over one device), `differs`',
  ),
  'runs': Field(
    'objects',
    'optional',
    'with `--num_runs`: of each run `images_per_second`, '
    '`images_per_second_total`, `num_steps`, `time_to_first_step_s`',
  ),
  'runs_spread': Field(
    'object',
    'optional',
    'of the rates of the runs: `lowest`, `highest`, `standard_deviation` in images/s',
  ),
}
THROUGHPUT = tuple(name for name, field in FIELDS.items() if field.group == 'throughput')

_TYPES: dict[str, tuple[type, ...]] = {
  'text': (str,),
  'count': (int,),
  'number': (int, float),
  'object': (dict,),
}


def validate(result: Mapping[str, Any]) -> None:
  """ValueError that names what is missing, unknown or of the wrong type."""
  if not isinstance(result, Mapping):
    raise ValueError(f'not an object but {type(result).__name__}')
  problems = [
    f'no {name}' for name, f in FIELDS.items() if f.group == 'always' and name not in result
  ]
  problems += [f'unknown {name}' for name in result if name not in FIELDS]
  problems += [
    f'{name} is {_short(result[name])}'
    for name, field in FIELDS.items()
    if name in result and not _is(result[name], field.kind)
  ]
  if result.get('schema_version') != SCHEMA_VERSION:
    problems.append(f'schema_version is not {SCHEMA_VERSION}')
  problems += _status_problems(result)
  if problems:
    raise ValueError(f'not a valid result: {"; ".join(problems)}')


def write(path: str, result: Mapping[str, Any]) -> None:
  """Writes a valid result; the file appears whole or not at all, and its directory is made."""
  validate(result)
  files.write(path, json.dumps(result, indent=2, allow_nan=False) + '\n')


def read(path: str) -> dict[str, Any]:
  """A result that `write` wrote.

  Raises:
    DataError: there is none, or it is damaged or of another schema.
  """
  try:
    result = json_file.read(path)
    validate(result)
  except (OSError, ValueError) as error:
    raise DataError(f'{path} is no result of benchmarks/run.py: {error}') from error
  return result


def document() -> str:
  """docs/results_schema.md."""
  lines = [
    '# The result file',
    '',
    '<!-- Written by `python -m benchmarks.results > docs/results_schema.md`. -->',
    '',
    f'`--result_json=FILE` writes one JSON object, schema version {SCHEMA_VERSION}. It is checked',
    'when it is written and when `benchmarks.results.read` reads it: a missing or unknown key, a',
    'wrong type, or a number that is not finite is an error. The file appears whole or not at all.',
    '',
    '| status | meaning |',
    '|---|---|',
    *(f'| `{name}` | {text} |' for name, text in STATUSES.items()),
    '',
    'Only `ok` has a throughput, and then all fields of it. Kinds ending in `?` may be null.',
    '',
    '| key | kind | when | meaning |',
    '|---|---|---|---|',
    *(f'| `{name}` | {f.kind} | {f.group} | {f.text} |' for name, f in FIELDS.items()),
  ]
  return '\n'.join(lines) + '\n'


def _status_problems(result: Mapping[str, Any]) -> list[str]:
  status = result.get('status')
  measured = [name for name in THROUGHPUT if name in result]
  if not isinstance(status, str) or status not in STATUSES:
    return [f'status {status!r} is none of {", ".join(STATUSES)}']
  if status != 'ok':
    problems = [f'{name} of a {status} run' for name in measured]
    return problems + ([] if result.get('reason') else [f'no reason for status {status}'])
  instead = 'accuracy' in result or 'diagnosis' in result
  if len(measured) < len(THROUGHPUT) and (measured or not instead):
    return [f'no {name}' for name in THROUGHPUT if name not in result]
  seconds, images = result.get('step_seconds', [0]), result.get('step_images', [0])
  if isinstance(seconds, list) and isinstance(images, list) and len(seconds) == len(images) > 0:
    return []
  return ['step_seconds and step_images do not fit']


def _is(value: Any, kind: str) -> bool:
  if kind.endswith('?'):
    return value is None or _is(value, kind.removesuffix('?'))
  if kind.endswith('s'):
    return isinstance(value, list) and all(_is(item, kind.removesuffix('s')) for item in value)
  if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
    return False
  return not isinstance(value, float) or math.isfinite(value)


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


if __name__ == '__main__':
  print(document(), end='')
