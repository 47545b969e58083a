"""What is trained: the model, and the batch on each device."""

from absl import flags

from hpm import models
from hpm.errors import UsageError

TITLE = 'Model'

# Samples a device where --batch_size is left out.
BATCH_SIZE = {'gpu': 64, 'cpu': 2}
LIST = 'list'  # the name that asks for the table


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'model',
    'resnet50',
    f'{", ".join(models.MODELS)}; keras:NAME for one of keras.applications; module:function for a '
    "function of your own that returns a Keras model or one of hpm's; list for a table. Default: "
    'resnet50.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'batch_size',
    None,
    'Images per device and step; the global batch is this times the devices. '
    f'Default: {BATCH_SIZE["gpu"]} on GPUs, {BATCH_SIZE["cpu"]} on CPU devices.',
    flag_values=values,
  )


def check(options) -> None:
  if options.model != LIST:
    models.check_name(options.model)
  if options.batch_size is not None and options.batch_size < 1:
    raise UsageError(
      f'--batch_size={options.batch_size}: at least 1 image per device is needed (0 meant the '
      "model's default in tf_cnn_benchmarks; here, leave the flag out for the default)"
    )


def complete(options) -> None:
  if options.batch_size is None:
    options.batch_size = BATCH_SIZE[options.device]


def table() -> list[str]:
  """A line a model: parameters, work, usual sizes."""
  lines = [f'{"model":<16} {"parameters":>12} {"GFLOP/image":>12} {"pixels":>7} {"batch":>6}']
  for model in models.table():
    lines.append(
      f'{model.name:<16} {model.num_params:>12,} {model.num_flops / 1e9:>12.2f} '
      f'{model.image_size:>7} {model.batch_size:>6}'
    )
  return [*lines, 'GFLOP/image: of the forward pass; training takes about three times as much.']
