"""When a training evaluates itself, and at what accuracy it is done."""

from absl import flags

from hpm.errors import UsageError

TITLE = 'Evaluation during training'
WHEN = (
  'eval_during_training_every_n_steps',
  'eval_during_training_every_n_epochs',
  'eval_during_training_at_specified_steps',
  'eval_during_training_at_specified_epochs',
)
UPDATES = (*WHEN, 'stop_at_top_1_accuracy', 'num_eval_batches')


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer(
    'eval_during_training_every_n_steps',
    None,
    'Evaluate on the validation images every so many steps, and at the end; each of them counts '
    'once. With --train_dir the best checkpoint is kept in its directory best.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'eval_during_training_every_n_epochs',
    None,
    'The same every so many epochs; 0 for never.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'eval_during_training_at_specified_steps',
    None,
    'The same after these steps, as in 100,200,400.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'eval_during_training_at_specified_epochs',
    None,
    'The same after these epochs, as in 0.5,1,2.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_eval_batches',
    None,
    'Steps of each such evaluation, which is then of a part alone. Default: all images.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'stop_at_top_1_accuracy',
    None,
    'Training ends as soon as an evaluation finds this top-1 accuracy, a share in (0, 1].',
    flag_values=values,
  )


def check(options) -> None:
  given = [name for name in WHEN if getattr(options, name) is not None]
  if len(given) > 1:
    raise UsageError(
      f'{options.spelled(given[0])} and {options.spelled(given[1])} exclude each other: drop one'
    )
  for name in ('eval_during_training_every_n_steps', 'num_eval_batches'):
    value = getattr(options, name)
    if value is not None and value < 1:
      raise UsageError(f'{options.spelled(name)}: 1 or more is needed')
  every = options.eval_during_training_every_n_epochs
  if every is not None and not 0 <= every < float('inf'):
    raise UsageError(f'{options.spelled(WHEN[1])}: a finite number, 0 or more')
  for name in WHEN[2:]:
    if getattr(options, name) is not None:
      numbers(options, name)
  if not asked(options):
    for name in ('stop_at_top_1_accuracy', 'num_eval_batches'):
      if name in options.given:
        raise UsageError(
          f'{options.spelled(name)} is about evaluations during training: add --{WHEN[1]}=1'
        )
    return
  stop = options.stop_at_top_1_accuracy
  if stop is not None and not 0 < stop <= 1:
    raise UsageError(f'{options.spelled("stop_at_top_1_accuracy")}: a share above 0, at most 1')
  name = given[0]
  if options.data_dir is None and options.data_name != 'digits':
    raise UsageError(
      f'{options.spelled(name)} needs validation images, and synthetic data has none: give '
      '--data_dir'
    )
  if options.variable_update == 'independent':
    raise UsageError(
      f'{options.spelled(name)}: --variable_update=independent has a model of its own on each '
      'device, and one is evaluated: drop one of the two'
    )
  for other, harmless in (('num_runs', 1), ('dry_run', False), ('diagnose', False)):
    if getattr(options, other) != harmless:
      raise UsageError(
        f'{options.spelled(name)} does not go with {options.spelled(other)}: drop one'
      )
  steps, calls = options.eval_during_training_every_n_steps, options.steps_per_call
  if steps is not None and calls > 0 and steps % calls:
    raise UsageError(
      f'{options.spelled(name)} is no multiple of --steps_per_call={calls}, and variables are only '
      'seen between calls: choose a multiple'
    )


def complete(options) -> None:
  del options


def asked(options) -> bool:
  """Whether training evaluates itself."""
  return any(getattr(options, name) not in (None, 0) for name in WHEN)


def needs_epochs(options) -> bool:
  """Whether it has to be known how many images an epoch has."""
  return bool(
    options.eval_during_training_every_n_epochs or options.eval_during_training_at_specified_epochs
  )


def numbers(options, name: str) -> list[float]:
  """The positive numbers of a list such as '100,200'.

  Raises:
    UsageError: something else.
  """
  kind = int if name.endswith('steps') else float
  try:
    found = [kind(word) for word in getattr(options, name).split(',')]
  except ValueError:
    found = []
  if not found or not all(0 < number < float('inf') for number in found):
    raise UsageError(f'{options.spelled(name)}: numbers above 0 are needed, as in 100,200')
  return found


def due(options, epoch_size: int | None, steps: tuple[int, int], images: tuple[int, int]) -> bool:
  """Whether an evaluation belongs between two points of the training.

  Args:
    options: complete.
    epoch_size: images an epoch, if `needs_epochs`.
    steps: finished before, and now.
    images: the same of images.
  """
  every_steps = options.eval_during_training_every_n_steps
  if every_steps is not None:
    return steps[1] // every_steps > steps[0] // every_steps
  every = options.eval_during_training_every_n_epochs
  if every:
    size = every * epoch_size
    return images[1] // size > images[0] // size
  if options.eval_during_training_at_specified_steps is not None:
    points, (before, now) = numbers(options, WHEN[2]), steps
  elif options.eval_during_training_at_specified_epochs is not None:
    points = [number * epoch_size for number in numbers(options, WHEN[3])]
    before, now = images
  else:
    return False
  return any(before < point <= now for point in points)
