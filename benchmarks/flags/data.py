"""What is trained on: records on disk, or synthetic data."""

import os
from typing import Any

from absl import flags

from benchmarks.flags import model
from hpm import errors, pipelines
from hpm.cluster import spec
from hpm.errors import DataError, UsageError
from hpm.pipelines import dali_graph, detect

TITLE = 'Data'

# Images an epoch of synthetic data is counted as: ImageNet's training set, as tf_cnn_benchmarks.
SYNTHETIC_EPOCH = 1281167

# A Python iterable can't be given on a command line.
NAMES = (
  *(name for name in pipelines.SOURCES if name != 'iterable'),
  *pipelines.BUILT_IN,
  *pipelines.SYNTHETIC,
)

WITHOUT_FILES = (*pipelines.BUILT_IN, *pipelines.SYNTHETIC)


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'data_dir',
    None,
    'Directory of a data set, such as TFRecords train-*-of-* and validation-*-of-*. '
    'Default: synthetic data. A small one to try: python -m hpm.pipelines sample --out=DIR',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_name',
    None,
    f'{", ".join(NAMES)}; tfds takes a name, as in tfds:cifar10. '
    'Default: what --data_dir looks like (imagenet: TFRecords), without it synthetic.',
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
    'Default: tfdata; raw for raw shards.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_service',
    None,
    'host:port of a tf.data service (python -m benchmarks.data_service), whose workers read and '
    'decode. The order of batches is then not repeatable. Default: this process decodes.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'distort_colors',
    None,
    'Training changes brightness, saturation, hue and contrast at random. Default: false.',
    flag_values=values,
  )


def check(options) -> None:
  name, directory = options.data_name, options.data_dir
  if name is not None and name.partition(':')[0] not in NAMES:
    raise errors.unknown('--data_name', name, NAMES)
  _check_bad_records(options)
  _check_changes(options)
  _check_pipeline(options)
  if directory is not None and not os.path.isdir(directory):
    found = 'is a file' if os.path.exists(directory) else 'does not exist'
    raise DataError(
      f'--data_dir={directory} {found}: give the directory of the train-*-of-* files, '
      'or leave the flag out for synthetic data'
    )
  if name is None and directory is not None:
    options.data_name = detect.source(directory, '--data_name')
  if name in WITHOUT_FILES and directory is not None:
    raise UsageError(
      f'--data_name={name} reads no files, but --data_dir={directory} is given: drop one'
    )
  if name not in (None, *WITHOUT_FILES) and directory is None:
    raise UsageError(f'--data_name={name} needs --data_dir, the directory of its files')


def synthetic(options) -> bool:
  """Whether images are random; options complete."""
  return options.data_name in pipelines.SYNTHETIC


def source(options) -> str:
  """Where the images come from, in words."""
  if options.data_service is not None:
    return f'the tf.data service {options.data_service}'
  place = f' of {options.data_dir}' if options.data_dir is not None else ''
  return f'{options.data_name}{place}'


def _check_changes(options) -> None:
  if options.distort_colors and options.data_dir is None:
    raise UsageError('--distort_colors has no effect without files to read: give --data_dir')
  if options.image_size is not None and len(model.sizes(options)) > 1:
    if options.data_dir is None:
      options.image_size = str(max(model.sizes(options).values()))
    elif options.bad_records != 'fail':
      raise UsageError(
        f'{options.spelled("bad_records")} would mix the sizes of '
        f'{options.spelled("image_size")} in a batch: drop one'
      )


def _check_bad_records(options) -> None:
  value = options.bad_records
  kind, _, number = value.partition(':')
  if value not in ('fail', 'skip') and not (kind == 'limit' and number.isdecimal()):
    raise UsageError(f'--bad_records={value}: give fail, skip or limit:N')
  if value != 'fail' and options.data_dir is None:
    raise UsageError(
      f'--bad_records={value}: {options.data_name or "synthetic"} data has none; give --data_dir'
    )


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
    options.data_name = 'synthetic'
  if options.pipeline is None and options.data_dir is not None:
    options.pipeline = 'raw' if options.data_name == 'raw' else 'tfdata'


def whole_passes(options) -> bool:
  """Whether training ends with the data; options complete."""
  epochs = options.num_epochs
  return epochs is not None and epochs.is_integer() and not synthetic(options)


def pipeline_options(options, validation: bool = False) -> dict[str, Any]:
  """What `hpm.pipelines.create` takes beside name, batch, classes and seed.

  Args:
    options: complete.
    validation: of one pass over the validation images, whatever the mode.
  """
  validation = validation or options.eval
  found: dict[str, Any] = {}
  sizes = model.sizes(options) if options.image_size is not None else {}
  if not synthetic(options):
    found['split'] = 'validation' if validation else 'train'
    if whole_passes(options) and not validation:
      found['num_epochs'] = int(options.num_epochs)  # the pipeline itself ends, on the last image
  if options.data_dir is None:
    return found
  found |= {
    'data_dir': options.data_dir,
    'bad_records': options.bad_records,
    'pipeline': options.pipeline,
  }
  if options.data_service is not None:
    if validation:
      found['pipeline'] = 'tfdata'  # each image once, which the service does not promise
    else:
      found['service'] = options.data_service
  if not validation:
    if options.distort_colors:
      found['distort_colors'] = True
    if len(sizes) > 1:
      found['image_size'] = sizes
      found['size_step'] = options.batch_size * options.num_gpus
  return found
