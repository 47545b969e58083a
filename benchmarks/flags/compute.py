"""How a step is computed: precision, layout, compiler, parts and loops."""

from absl import flags

from hpm import errors, models, precision
from hpm.errors import UsageError

TITLE = 'Computation'
LONGEST_CALL = 10_000  # steps
LAYOUTS = ('NHWC', 'NCHW')

# About the scale of the loss, which only training has.
LOSS_SCALE = ('fp16_loss_scale', 'fp16_enable_auto_loss_scale', 'fp16_inc_loss_scale_every_n')
UPDATES = (*LOSS_SCALE, 'accumulate', 'recompute')


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'precision',
    None,
    f'{", ".join(precision.POLICIES)}: what towers compute in; variables, batch-norm statistics, '
    'loss and update are float32 in all of them. Default: fp32.',
    flag_values=values,
  )
  flags.DEFINE_boolean('use_fp16', None, 'Short form of --precision=fp16.', flag_values=values)
  flags.DEFINE_float(
    'fp16_loss_scale',
    None,
    'Factor on the loss before backprop in fp16, taken out of the gradients again; with '
    f'--fp16_enable_auto_loss_scale the first one. Default: '
    f'{precision.POLICIES["fp16"].loss_scale:g}.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'fp16_enable_auto_loss_scale',
    False,
    'Halve the loss scale where gradients are not finite, and skip that update; double it after '
    '--fp16_inc_loss_scale_every_n good steps.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'fp16_inc_loss_scale_every_n',
    1000,
    'See --fp16_enable_auto_loss_scale. Default: 1000.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'data_format',
    None,
    'Layout of activations: NHWC, or NCHW, which needs GPUs. Default: NHWC.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'stem_rewrite',
    None,
    f'{", ".join(models.STEM_REWRITES)}: compute the strided first convolution of ResNets and some '
    'others in another way, with the same parameters and results. Default: as written.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'xla', False, 'Compile each tower as a whole by XLA. Default: false.', flag_values=values
  )
  flags.DEFINE_boolean('xla_compile', None, 'The same as --xla.', flag_values=values)
  flags.DEFINE_integer(
    'accumulate',
    1,
    'Each device takes its batch in so many parts, one after the other, and sums their gradients '
    'before the update: less memory, the same global batch. Default: 1.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'recompute',
    None,
    'The backward pass computes the activations of each block again: less memory, more time. All '
    f'models of this library but {", ".join(sorted(models.WITHOUT_BLOCKS))}. Default: false.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'steps_per_call',
    1,
    'Steps that run in one loop in the graph before the host sees their metrics. Each of them is '
    'then given the mean time of its loop. Default: 1.',
    flag_values=values,
  )


def check(options) -> None:
  _check_precision(options)
  layout = options.data_format
  if layout is not None:
    options.data_format = layout = layout.upper()
    if layout not in LAYOUTS:
      raise errors.unknown('--data_format', layout, LAYOUTS)
  if options.device == 'cpu':
    _refuse_nchw(options)
  if options.stem_rewrite is not None:
    models.check_stem_rewrite(options.model, options.stem_rewrite)
  if options.xla_compile is not None:
    if 'xla' in options.given and options.xla != options.xla_compile:
      raise UsageError(
        f'{options.spelled("xla_compile")} is the same flag as --xla, but {options.spelled("xla")} '
        'is given: drop one'
      )
    options.xla = options.xla_compile
  if options.recompute:
    models.check_recompute(options.model)
    if options.xla:
      raise UsageError(
        '--recompute has no effect under --xla, which merges what is computed twice: drop one'
      )
  for name in ('accumulate', 'steps_per_call'):
    if getattr(options, name) < 1:
      raise UsageError(f'{options.spelled(name)}: 1 or more is needed')
  if options.steps_per_call > LONGEST_CALL:
    raise UsageError(
      f'{options.spelled("steps_per_call")}: at most {LONGEST_CALL}, since nothing can be seen, '
      'saved or stopped within a call'
    )
  if options.batch_size is not None:
    _check_parts(options)


def complete(options) -> None:
  if options.precision is None:
    options.precision = 'fp32'
  options.use_fp16 = options.precision == 'fp16'
  if options.device == 'cpu':
    _refuse_nchw(options)
  if options.data_format is None:
    options.data_format = 'NHWC'
  options.xla_compile = options.xla
  _check_parts(options)
  if options.fp16_loss_scale is None and options.use_fp16:
    options.fp16_loss_scale = precision.POLICIES['fp16'].loss_scale


def loss_scale(options) -> float | precision.DynamicLossScale:
  """What `hpm.TrainStep` takes; options complete."""
  if not options.use_fp16:
    return 1.0
  if options.fp16_enable_auto_loss_scale:
    return precision.DynamicLossScale(options.fp16_loss_scale, options.fp16_inc_loss_scale_every_n)
  return options.fp16_loss_scale


def _check_precision(options) -> None:
  name = options.precision
  if name is not None and name not in precision.POLICIES:
    raise errors.unknown('--precision', name, precision.POLICIES)
  if options.use_fp16 is not None:
    if name is not None and options.use_fp16 != (name == 'fp16'):
      raise UsageError(
        f'{options.spelled("use_fp16")} and --precision={name} contradict each other: drop one'
      )
    if options.use_fp16:
      options.precision = 'fp16'
  if options.precision != 'fp16':
    options.refuse_given(
      LOSS_SCALE, 'has no effect without float16: drop it, or add --precision=fp16'
    )
  if not options.fp16_enable_auto_loss_scale:
    options.refuse_given(
      ['fp16_inc_loss_scale_every_n'],
      'has no effect on a fixed loss scale: drop it, or add --fp16_enable_auto_loss_scale',
    )
  scale = options.fp16_loss_scale
  largest = precision.DynamicLossScale.maximum
  if scale is not None and not 1 <= scale <= largest:
    raise UsageError(f'--fp16_loss_scale={scale:g}: must lie in 1 .. {largest:g}')
  if options.fp16_inc_loss_scale_every_n < 1:
    raise UsageError(f'{options.spelled("fp16_inc_loss_scale_every_n")}: 1 or more is needed')


def _check_parts(options) -> None:
  if options.batch_size % options.accumulate:
    raise UsageError(
      f'--batch_size={options.batch_size} can not be cut into --accumulate={options.accumulate} '
      'equal parts: choose a divisor'
    )


def _refuse_nchw(options) -> None:
  if options.data_format == 'NCHW':
    raise UsageError(
      '--data_format=NCHW needs GPUs, and the devices are CPUs, whose kernels lack it: use '
      '--data_format=NHWC'
    )
