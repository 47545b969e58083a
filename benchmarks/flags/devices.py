"""What computes: the kind of device, and how many of them."""

from absl import flags

from hpm import errors
from hpm.errors import UsageError

TITLE = 'Devices'
MOST = 256  # of one process


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'device',
    None,
    'cpu or gpu. Default: gpu if TensorFlow sees any, otherwise cpu.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_gpus',
    None,
    'Number of compute devices of the kind that --device names: --device=cpu --num_gpus=2 '
    'makes two logical CPU devices. Default: all GPUs, or two logical CPU devices.',
    flag_values=values,
  )


def check(options) -> None:
  if options.device is not None:
    options.device = options.device.lower()
    if options.device not in ('cpu', 'gpu'):
      raise errors.unknown('--device', options.device, ('cpu', 'gpu'))
  if options.num_gpus is not None and options.num_gpus < 1:
    raise UsageError(
      f'--num_gpus={options.num_gpus}: at least 1 compute device is needed '
      '(for one CPU device: --device=cpu --num_gpus=1)'
    )
  if options.num_gpus is not None and options.num_gpus > MOST:
    raise UsageError(f'--num_gpus={options.num_gpus}: at most {MOST} devices in one process')


def complete(options) -> None:
  del options  # both are known before anything is completed
