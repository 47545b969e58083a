"""What TensorFlow is told before it starts: threads, GPU memory, cuDNN, oneDNN.

TensorFlow reads these from environment variables, most of them once, while it is imported. So they
are flags here: set before the import, kept in the result. A variable that the user has set stands
unless the flag is given.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

from hpm import errors
from hpm.errors import UsageError

TITLE = 'Threads, GPU memory, kernels (environment variables of TensorFlow, set before it starts)'


class Knob(NamedTuple):
  """A flag that is an environment variable.

  Attributes:
    variable: its name.
    kind: 'bool' or 'int'; 'mode' for a name.
    text: the flag's meaning.
    written: value -> the variable's value; None removes it.
    gpu_only: whether it does nothing on CPU devices.
    default: the value where neither the flag nor the variable is given; None: TensorFlow's own.
    minimum: of an int.
  """

  variable: str
  kind: str
  text: str
  written: Callable[[Any], str | None] = lambda value: str(int(value))
  gpu_only: bool = True
  default: Any = None
  minimum: int = 0


THREAD_MODES = ('global', 'gpu_shared', 'gpu_private')
KNOBS = {
  'mkl': Knob(
    'TF_ENABLE_ONEDNN_OPTS',
    'bool',
    "oneDNN's kernels on the CPU. Default: true on CPU devices, otherwise TensorFlow's choice.",
    gpu_only=False,
  ),
  'num_intra_threads': Knob(
    'TF_NUM_INTRAOP_THREADS',
    'int',
    'Threads inside one op; 0: TensorFlow picks. Default: 0.',
    gpu_only=False,
  ),
  'num_inter_threads': Knob(
    'TF_NUM_INTEROP_THREADS',
    'int',
    'Ops that run side by side on the host; 0: TensorFlow picks. Default: 0.',
    gpu_only=False,
  ),
  'gpu_thread_mode': Knob(
    'TF_GPU_THREAD_MODE',
    'mode',
    'Host threads that launch kernels: global, in the common pool; gpu_shared, in one of their '
    'own; gpu_private, in one for each GPU. Default: gpu_private.',
    written=str,
    default='gpu_private',
  ),
  'per_gpu_thread_count': Knob(
    'TF_GPU_THREAD_COUNT',
    'int',
    'Threads in each pool of --gpu_thread_mode; 0 means 2. Default: 2.',
    written=lambda value: str(value or 2),
    default=2,
  ),
  'allow_growth': Knob(
    'TF_FORCE_GPU_ALLOW_GROWTH',
    'bool',
    'Take GPU memory as it is needed, not all at the start. Default: false.',
    written=lambda value: 'true' if value else 'false',
  ),
  'use_unified_memory': Knob(
    'TF_FORCE_UNIFIED_MEMORY',
    'bool',
    "CUDA's unified memory: more than the GPU has, paged from the host. Default: false.",
  ),
  'tf32': Knob(
    'NVIDIA_TF32_OVERRIDE',
    'bool',
    'Products of float32 in TensorFloat-32, where the GPU has it. Default: true.',
    written=lambda value: None if value else '0',
  ),
  'cudnn_autotune': Knob(
    'TF_CUDNN_USE_AUTOTUNE',
    'bool',
    'Try the convolution algorithms of cuDNN in the first steps and keep the fastest. '
    'Default: true.',
  ),
  'autotune_threshold': Knob(
    'TF_AUTOTUNE_THRESHOLD',
    'int',
    'Times that each algorithm is tried. Default: TensorFlow decides.',
    minimum=1,
  ),
  'winograd_nonfused': Knob(
    'TF_ENABLE_WINOGRAD_NONFUSED',
    'bool',
    "Let cuDNN use Winograd's non-fused convolutions. Default: true.",
    default=True,
  ),
  'batchnorm_persistent': Knob(
    'TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT',
    'bool',
    "cuDNN's persistent batch norm, faster where it applies. Default: true.",
    default=True,
  ),
  'sync_on_finish': Knob(
    'TF_SYNC_ON_FINISH',
    'bool',
    'Wait for all GPUs at the end of each step, not only for its results. Default: false.',
    default=False,
  ),
}


def define(values: flags.FlagValues) -> None:
  for name, knob in KNOBS.items():
    if knob.kind == 'bool':
      flags.DEFINE_boolean(name, None, knob.text, flag_values=values)
    elif knob.kind == 'int':
      flags.DEFINE_integer(name, None, knob.text, flag_values=values)
    else:
      flags.DEFINE_string(name, None, knob.text, flag_values=values)
  flags.DEFINE_integer(
    'datasets_num_private_threads',
    None,
    'Threads that the input pipeline has for itself. Default: it shares those of the ops.',
    flag_values=values,
  )


def check(options) -> None:
  mode = options.gpu_thread_mode
  if mode is not None and mode not in THREAD_MODES:
    raise errors.unknown('--gpu_thread_mode', mode, THREAD_MODES)
  for name, knob in KNOBS.items():
    value = getattr(options, name)
    if knob.kind == 'int' and value is not None and value < knob.minimum:
      raise UsageError(f'--{name}={value}: {knob.minimum} or more is needed')
  threads = options.datasets_num_private_threads
  if threads is not None and threads < 1:
    raise UsageError(
      f'--datasets_num_private_threads={threads}: 1 or more is needed '
      '(leave the flag out for the common threads)'
    )
  if mode == 'global':
    options.refuse_given(
      ['per_gpu_thread_count'], 'has no effect with --gpu_thread_mode=global: drop one'
    )
  if options.device == 'cpu':
    _refuse_gpu_knobs(options)


def complete(options) -> None:
  if options.device == 'cpu':
    _refuse_gpu_knobs(options)


def environment(options, current: dict[str, str]) -> dict[str, str | None]:
  """Variables to set, None to remove, before TensorFlow is imported.

  Args:
    options: parsed, not yet complete: which devices there are is not known.
    current: the environment as it is.
  """
  changes: dict[str, str | None] = {}
  for name, knob in KNOBS.items():
    if knob.gpu_only and options.device == 'cpu':
      continue
    value = getattr(options, name)
    if value is None and knob.variable not in current:
      value = knob.default
    if value is not None:
      changes[knob.variable] = knob.written(value)
  if options.mkl is None and options.device != 'gpu':
    # Off by default on some processors, where it is worth a third of ResNet-50's speed.
    changes.setdefault('TF_ENABLE_ONEDNN_OPTS', current.get('TF_ENABLE_ONEDNN_OPTS', '1'))
  return changes


def given(options) -> list[str]:
  """'VARIABLE=value' of every knob on the command line."""
  words = []
  for name, knob in KNOBS.items():
    if name in options.given:
      value = knob.written(getattr(options, name))
      words.append(f'{knob.variable}={"" if value is None else value}')
  return words


def _refuse_gpu_knobs(options) -> None:
  options.refuse_given(
    [name for name, knob in KNOBS.items() if knob.gpu_only],
    'has no effect on CPU devices: drop it',
  )
