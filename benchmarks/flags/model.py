"""What is trained: the model, and the batch on each device."""

import re
from typing import Any

from absl import flags

from hpm import models
from hpm.errors import UsageError

TITLE = 'Model'

# Samples a device where --batch_size is left out.
BATCH_SIZE = {'gpu': 64, 'cpu': 2}
LARGEST_SIZE = 65535
LIST = 'list'  # the name that asks for the table
# Models whose residual blocks end in a batch norm.
_ENDS_IN_NORM = r'resnet(18|34|50|101|152|200)(_v1\.5)?'
ZERO_INIT = tuple(name for name in models.MODELS if re.fullmatch(_ENDS_IN_NORM, name))


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
  flags.DEFINE_string(
    'image_size',
    None,
    'Height and width of the images, pixels; or sizes by epoch, as in 0:128;6:176;14:224, each '
    "from its epoch on (models that pool globally). Default: the model's own.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_classes', None, "Outputs of the model. Default: the model's own.", flag_values=values
  )
  flags.DEFINE_boolean(
    'zero_init',
    None,
    'The last batch-norm scale of each residual block starts at nought, so that the block starts '
    f'as its shortcut: {", ".join(ZERO_INIT)}. Default: false.',
    flag_values=values,
  )


def check(options) -> None:
  if options.model != LIST:
    models.check_name(options.model, '--model')
  if options.batch_size is not None and options.batch_size < 1:
    raise UsageError(
      f'--batch_size={options.batch_size}: at least 1 image per device is needed (0 meant the '
      "model's default in tf_cnn_benchmarks; here, leave the flag out for the default)"
    )

  if options.image_size is not None:
    sizes(options)
  if options.num_classes is not None and options.num_classes < 1:
    raise UsageError(f'{options.spelled("num_classes")}: 1 or more is needed')
  if options.zero_init and options.model not in ZERO_INIT:
    raise UsageError(
      f'--zero_init is about residual blocks that end in a batch norm, and --model={options.model} '
      f'has none: drop it, or use one of {", ".join(ZERO_INIT)}'
    )


def complete(options) -> None:
  if options.batch_size is None:
    options.batch_size = BATCH_SIZE[options.device]


def sizes(options) -> dict[int, int]:
  """Epoch -> pixels from there on; one entry, of epoch 0, if the size does not change.

  Raises:
    UsageError: --image_size is of neither form.
  """
  text = options.image_size
  match = re.fullmatch(r'(?:0:)?(\d+)((?:;\d+:\d+)*)', text)
  pairs = [tuple(map(int, p.split(':'))) for p in match[2].split(';')[1:]] if match else []
  epochs = [epoch for epoch, _ in pairs]
  found = {0: int(match[1]), **dict(pairs)} if match else {}
  if found and max(found.values()) > LARGEST_SIZE:
    raise UsageError(f'--image_size={text}: at most {LARGEST_SIZE} pixels, as JPEGs have')
  ordered = all(a < b for a, b in zip([0, *epochs], epochs))
  if not found or not ordered or min(found.values()) < 1 or (pairs and text[:2] != '0:'):
    raise UsageError(
      f'--image_size={text}: give pixels, or EPOCH:PIXELS with rising epochs, as in 0:128;6:176'
    )
  return found


def model_options(options) -> dict[str, Any]:
  """What `hpm.models.create` takes of these."""
  found: dict[str, Any] = {}
  if options.image_size is not None:
    found['image_size'] = max(sizes(options).values())
  if options.num_classes is not None:
    found['num_classes'] = options.num_classes
  if options.zero_init:
    found['zero_init'] = True
  return found


def table() -> list[str]:
  """A line a model: parameters, work, usual sizes."""
  lines = [f'{"model":<16} {"parameters":>12} {"GFLOP/image":>12} {"pixels":>7} {"batch":>6}']
  for model in models.table():
    lines.append(
      f'{model.name:<16} {model.num_params:>12,} {model.num_flops / 1e9:>12.2f} '
      f'{model.image_size:>7} {model.batch_size:>6}'
    )
  return [*lines, 'GFLOP/image: of the forward pass; training takes about three times as much.']
