"""What is trained on: records on disk, or synthetic data."""

import os
from typing import Any

from absl import flags

from hpm import errors, pipelines
from hpm.cluster import spec
from hpm.errors import DataError, UsageError
from hpm.pipelines import dali_graph

TITLE = 'Data'

# Images an epoch of synthetic data is counted as: ImageNet's training set, as tf_cnn_benchmarks.
SYNTHETIC_EPOCH = 1281167

# A Python iterable can't be given on a command line.
NAMES = (*(name for name in pipelines.SOURCES if name != 'iterable'), *pipelines.SYNTHETIC)


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'data_dir',
    None,
    'Directory of the TFRecords train-*-of-* and validation-*-of-*, or of what --data_name says. '
    'Default: synthetic data. A small one to try: python -m hpm.pipelines sample --out=DIR',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_name',
    None,
    f'{", ".join(NAMES)}; tfds takes a name, as in tfds:cifar10. '
    'Default: imagenet with --data_dir, otherwise synthetic.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'bad_records',
    'fail',
    'What becomes of records that are damaged or can not be decoded: fail; skip, which counts and '
    'lists them; or limit:N, which does so for at most N different ones.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'pipeline',
    None,
    f'What makes batches of the data: {", ".join(pipelines.PIPELINES)}. All give the same images. '
    'Default: tfdata.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_service',
    None,
    'host:port of a tf.data service (python -m benchmarks.data_service), whose workers read and '
    'decode. The order of batches is then not repeatable. Default: this process decodes.',
    flag_values=values,
  )


def check(options) -> None:
  name, directory = options.data_name, options.data_dir
  if name is not None and name.partition(':')[0] not in NAMES:
    raise errors.unknown('--data_name', name, NAMES)
  _check_bad_records(options)
  _check_pipeline(options)
  if directory is not None and not os.path.isdir(directory):
    found = 'is a file' if os.path.exists(directory) else 'does not exist'
    raise DataError(
      f'--data_dir={directory} {found}: give the directory of the train-*-of-* files, '
      'or leave the flag out for synthetic data'
    )
  if name == 'synthetic' and directory is not None:
    raise UsageError(
      f'--data_name=synthetic reads no files, but --data_dir={directory} is given: drop one'
    )
  if name not in (None, 'synthetic') and directory is None:
    raise UsageError(f'--data_name={name} needs --data_dir, the directory of its files')


def _check_bad_records(options) -> None:
  value = options.bad_records
  kind, _, number = value.partition(':')
  if value not in ('fail', 'skip') and not (kind == 'limit' and number.isdecimal()):
    raise UsageError(f'--bad_records={value}: give fail, skip or limit:N')
  if value != 'fail' and options.data_dir is None:
    raise UsageError(f'--bad_records={value}: synthetic data has none; give --data_dir')


def _check_pipeline(options) -> None:
  name, service = options.pipeline, options.data_service
  if service is not None:
    options.pipeline = 'service'
    if name not in (None, 'service'):
      raise UsageError(
        f"--data_service={service} has the service's workers make the batches, but "
        f'--pipeline={name} is given: drop one'
      )
    if options.data_dir is None:
      raise UsageError(f'--data_service={service}: synthetic data needs none; give --data_dir')
    if options.bad_records != 'fail':
      raise UsageError(
        f'--data_service={service} can not say what --bad_records={options.bad_records} leaves '
        'out: drop one'
      )
    if options.eval:
      raise UsageError(
        f'--data_service={service}: an evaluation takes each image once, in order: drop it'
      )
    spec.parse_address(service, '--data_service')
    return
  if name is None:
    return
  if name == 'service':
    raise UsageError('--pipeline=service needs --data_service, the address of one')
  if name not in pipelines.PIPELINES:
    raise errors.unknown('--pipeline', name, pipelines.PIPELINES)
  if options.data_dir is None:
    raise UsageError(
      f'--pipeline={name} has no effect on synthetic data: give --data_dir, or drop it'
    )
  if name == 'dali':
    dali_graph.require()


def complete(options) -> None:
  if options.data_name is None:
    options.data_name = 'synthetic' if options.data_dir is None else 'imagenet'
  if options.pipeline is None and options.data_dir is not None:
    options.pipeline = 'tfdata'


def pipeline_options(options) -> dict[str, Any]:
  """What `hpm.pipelines.create` takes beside name, batch, sizes and seed."""
  if options.data_dir is None:
    return {}
  split = {
    'data_dir': options.data_dir,
    'split': 'validation' if options.eval else 'train',
    'bad_records': options.bad_records,
    'pipeline': options.pipeline,
  }
  if options.data_service is not None:
    split['service'] = options.data_service
  epochs = options.num_epochs
  if epochs is not None and epochs.is_integer():  # the pipeline itself ends, on the last image
    return {**split, 'num_epochs': int(epochs)}
  return split
