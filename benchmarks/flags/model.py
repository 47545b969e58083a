"""What is trained: the model, the batch on each device, the precision."""

from absl import flags

from hpm import models
from hpm.errors import UsageError

TITLE = 'Model'

# Samples a device where --batch_size is left out.
BATCH_SIZE = {'gpu': 64, 'cpu': 2}


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'model',
    'resnet50',
    f'{", ".join(models.MODELS)}; keras:NAME for one of keras.applications; module:function for a '
    "function of your own that returns a Keras model or one of hpm's. Default: resnet50.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    'batch_size',
    None,
    'Images per device and step; the global batch is this times the devices. '
    f'Default: {BATCH_SIZE["gpu"]} on GPUs, {BATCH_SIZE["cpu"]} on CPU devices.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'use_fp16',
    False,
    'Compute in float16, with float32 variables and a scaled loss. Default: false.',
    flag_values=values,
  )


def check(options) -> None:
  models.check_name(options.model)
  if options.batch_size is not None and options.batch_size < 1:
    raise UsageError(
      f'--batch_size={options.batch_size}: at least 1 image per device is needed (0 meant the '
      "model's default in tf_cnn_benchmarks; here, leave the flag out for the default)"
    )


def complete(options) -> None:
  if options.batch_size is None:
    options.batch_size = BATCH_SIZE[options.device]
