"""What is done: training, evaluation of a checkpoint, or inference alone."""

from absl import flags

from benchmarks.flags import (
  cluster,
  compute,
  evaluation,
  optimizer,
  output,
  profile,
  schedule,
  variables,
)
from hpm.errors import UsageError

# Flags about updates, which only training makes.
UPDATES = (
  *optimizer.UPDATES,
  *schedule.UPDATES,
  *compute.UPDATES,
  *output.KEEPING,
  *output.CURVES,
  *variables.UPDATES,
  *evaluation.UPDATES,
  'loss_type_to_report',
  'zero_init',
  'distort_colors',
)
# Flags about a measurement in steps, which a pass over the validation files is not.
NOT_WITH_EVAL = (
  'num_epochs',
  'num_warmup_batches',
  'num_runs',
  'steps_per_call',
  'print_training_accuracy',
  'display_perf_ewma',
)

TITLE = 'Mode (training, unless one of these is given)'


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_boolean(
    'eval',
    False,
    'Evaluate the newest checkpoint of --train_dir on the validation files of --data_dir.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'forward_only',
    False,
    'Inference benchmark: no gradients, no update.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'dry_run',
    False,
    'Run nothing: read from the graph what training would need and move, on devices that need not\n'
    'be there. Memory, bytes between devices, the largest batch for some memories.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'diagnose',
    False,
    'Time each part of the run alone, and say in a sentence which one limits it; --result_json '
    'has it as well.',
    flag_values=values,
  )


def check(options) -> None:
  if options.diagnose:
    options.refuse_given(
      (
        *('eval', 'forward_only', 'dry_run', 'num_runs', 'train_dir'),
        *('num_batches', 'num_epochs', 'num_warmup_batches', 'steps_per_call', 'data_service'),
        *(*output.CURVES, *profile.FILES, 'profile_dir'),
      ),
      'does not go with --diagnose, which times the parts of a training in one process by itself: '
      'drop one',
    )
    if cluster.tasks(options) is not None:
      raise UsageError(
        '--diagnose times the parts of a training in one process, and this is a cluster: drop it'
      )
  if options.dry_run:
    options.refuse_given(
      (
        *('eval', 'forward_only', 'num_runs', 'train_dir', 'result_json', *output.CURVES),
        *(*profile.FILES, 'profile_dir'),
      ),
      'has no effect with --dry_run, which runs nothing and writes nothing: drop one',
    )
  if options.eval and options.forward_only:
    raise UsageError(
      '--eval and --forward_only exclude each other: --eval measures accuracy, --forward_only speed'
    )
  if not options.eval and not options.forward_only:
    return
  mode = 'eval' if options.eval else 'forward_only'
  options.refuse_given(
    UPDATES,
    f'has no effect with --{mode}, which updates nothing: drop it',
  )
  if options.variable_update == 'replicated':  # there it says where gradients are summed
    options.refuse_given(
      ['local_parameter_device'], f'has no effect on replicated variables with --{mode}: drop it'
    )
  if options.forward_only:
    options.refuse_given(
      ['train_dir'],
      'has no effect with --forward_only, which measures speed and neither reads nor writes '
      'checkpoints: drop it, or use --eval',
    )
    return
  options.refuse_given(
    NOT_WITH_EVAL,
    'has no effect with --eval, which goes once over the validation files: drop it '
    '(--num_batches=N stops after N steps)',
  )
  options.refuse_given(
    (*profile.FILES, 'profile_dir'),
    'does not go with --eval, which has no warm-up to profile: use --forward_only',
  )
  if options.variable_update == 'independent':
    raise UsageError(
      '--variable_update=independent has a model of its own on each device, and --eval asks for '
      'the accuracy of one: drop it, and the checkpoint of device 0 is evaluated'
    )
  if options.train_dir is None:
    raise UsageError('--eval needs --train_dir, the directory of the checkpoints to evaluate')
  if options.data_dir is None and options.data_name != 'digits':
    raise UsageError('--eval needs --data_dir, the directory of the validation-*-of-* files')


def complete(options) -> None:
  if options.eval or options.forward_only:  # nothing is updated, nothing reduced
    for name in UPDATES:
      setattr(options, name, None)
    if options.variable_update == 'replicated':
      options.local_parameter_device = None


def title(options) -> str:
  """The mode as the header says it."""
  if options.diagnose:
    return 'diagnosis'
  return 'evaluation' if options.eval else 'forward only' if options.forward_only else 'training'
