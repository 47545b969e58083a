"""What is kept: checkpoints and the result file."""

import importlib.util
import math
import os

from absl import flags

from hpm import writable
from hpm.errors import UsageError

TITLE = 'Checkpoints and results'
CURVES = ('curve_file', 'tensorboard_dir')
KEEPING = ('save_model_steps', 'save_model_secs', 'max_ckpts_to_keep')


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'train_dir',
    None,
    'Directory of checkpoints: training goes on from the newest one, if there is any, until '
    '--num_batches or --num_epochs are reached in all; it writes one at the end and on SIGTERM. '
    '--eval reads the newest.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'save_model_steps', None, 'A checkpoint every so many steps as well.', flag_values=values
  )
  flags.DEFINE_float(
    'save_model_secs', None, 'A checkpoint every so many seconds as well.', flag_values=values
  )
  flags.DEFINE_integer(
    'max_ckpts_to_keep',
    5,
    'Checkpoints that stay in --train_dir, the newest; 0 keeps all. Default: 5.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'result_json',
    None,
    'File for everything that was measured, as JSON (docs/results_schema.md).',
    flag_values=values,
  )
  flags.DEFINE_string(
    'curve_file',
    None,
    'PNG of loss, learning rate, speed and accuracy against steps, time and images; needs '
    'matplotlib.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'tensorboard_dir',
    None,
    'Directory that gets the same as scalars for TensorBoard, every --display_every steps.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'usd_per_hour',
    None,
    'Price of all of this machine, or of all machines of a cluster: the result then gives images '
    'per dollar, and dollars to an accuracy (see also python -m benchmarks.cost).',
    flag_values=values,
  )


def check(options) -> None:
  for name in ('result_json', 'curve_file'):
    if getattr(options, name) is not None:
      writable.check_file(name, getattr(options, name))
  if options.curve_file is not None and importlib.util.find_spec('matplotlib') is None:
    raise UsageError(
      f"{options.spelled('curve_file')} needs matplotlib: pip install 'hpm[report]', or drop it"
    )
  if options.tensorboard_dir is not None:
    writable.check_directory('tensorboard_dir', options.tensorboard_dir)
  price = options.usd_per_hour
  if price is not None and not 0 < price < math.inf:
    raise UsageError(f'--usd_per_hour={price:g}: a finite number above 0 is needed')
  if options.save_model_steps is not None and options.save_model_secs is not None:
    raise UsageError(
      f'{options.spelled("save_model_steps")} and {options.spelled("save_model_secs")} exclude '
      'each other: drop one'
    )
  for name in KEEPING[:2]:
    value = getattr(options, name)
    if value is not None and not value > 0:
      raise UsageError(
        f'--{name}={value}: above 0 is needed (leave the flag out for a checkpoint at the end only)'
      )
  if options.max_ckpts_to_keep < 0:
    raise UsageError(f'{options.spelled("max_ckpts_to_keep")}: 0 or more is needed')
  every, calls = options.save_model_steps, options.steps_per_call
  if every is not None and calls > 0 and every % calls:
    raise UsageError(
      f'--save_model_steps={every} is no multiple of --steps_per_call={calls}, and variables are '
      'only seen between calls: choose a multiple'
    )
  if options.train_dir is None:
    options.refuse_given(KEEPING, 'is about checkpoints, which need --train_dir: add it')
    return
  if options.eval:
    if not options.train_dir:
      raise UsageError('--train_dir= is empty: give the directory of the checkpoints')
    if not os.path.isdir(options.train_dir):
      raise UsageError(
        f'--train_dir={options.train_dir} is no directory: give the one that training wrote '
        'checkpoints to'
      )
  else:
    writable.check_directory('train_dir', options.train_dir)


def complete(options) -> None:
  del options  # nothing is written unless asked for
