"""What is trained on: records on disk, or synthetic data."""

import os
from typing import Any

from absl import flags

from hpm import errors, pipelines
from hpm.errors import DataError, UsageError

TITLE = 'Data'

# Images an epoch of synthetic data is counted as: ImageNet's training set, as tf_cnn_benchmarks.
SYNTHETIC_EPOCH = 1281167

NAMES = (*pipelines.SOURCES, *pipelines.SYNTHETIC)


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'data_dir',
    None,
    'Directory of the TFRecords train-*-of-* and validation-*-of-*. Default: synthetic data. '
    'A small one to try: python -m hpm.pipelines sample --out=DIR',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_name',
    None,
    f'{", ".join(NAMES)}. Default: imagenet with --data_dir, otherwise synthetic.',
    flag_values=values,
  )


def check(options) -> None:
  name, directory = options.data_name, options.data_dir
  if name is not None and name not in NAMES:
    raise errors.unknown('--data_name', name, NAMES)
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


def complete(options) -> None:
  if options.data_name is None:
    options.data_name = 'synthetic' if options.data_dir is None else 'imagenet'


def pipeline_options(options) -> dict[str, Any]:
  """What `hpm.pipelines.create` takes beside name, batch, sizes and seed."""
  if options.data_dir is None:
    return {}
  split = {'data_dir': options.data_dir, 'split': 'validation' if options.eval else 'train'}
  epochs = options.num_epochs
  if epochs is not None and epochs.is_integer():  # the pipeline itself ends, on the last image
    return {**split, 'num_epochs': int(epochs)}
  return split
