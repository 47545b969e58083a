"""A published training as a whole; what the command line says beside it goes before it."""

from typing import Any

from absl import flags

from benchmarks.flags import cluster, named, schedule
from hpm import errors, recipes
from hpm.errors import UsageError

TITLE = 'Recipe'
LIST = 'list'  # the name that asks for the table

# Field of the update rule -> flag, for each rule that a recipe may use.
_CONSTANTS = {
  'momentum': {'momentum': 'momentum'},
  'rmsprop': {
    'decay': 'rmsprop_decay',
    'momentum': 'rmsprop_momentum',
    'epsilon': 'rmsprop_epsilon',
  },
}
_RATES = (
  'init_learning_rate',
  'learning_rate_schedule',
  'piecewise_learning_rate_schedule',
  'num_epochs_per_decay',
  'resnet_base_lr',
)
# Flag of a recipe -> flags of the command line that say the same thing in another way.
_SAYS_SO_TOO = {
  'precision': ('use_fp16',),
  'num_epochs': ('num_batches',),
  **dict.fromkeys((*_RATES, 'learning_rate_base_batch', 'learning_rate_decay_factor'), _RATES),
  'polynomial_power': _RATES,
  'eval_during_training_every_n_epochs': (
    'eval_during_training_every_n_steps',
    'eval_during_training_at_specified_steps',
    'eval_during_training_at_specified_epochs',
  ),
}


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'recipe',
    None,
    f'A published training: {", ".join(recipes.RECIPES)}. Sets model, batch, learning rate, '
    'regularisation, sizes and epochs; flags beside it go before it, and the run says so. list '
    'shows them with the accuracy that each states.',
    flag_values=values,
  )


def check(options) -> None:
  """Puts the recipe's flags where the command line has none; comes before all other checks."""
  recipe = find(options)
  if recipe is None:
    return
  for other in ('preset', 'eval', 'forward_only'):
    if other in options.given and getattr(options, other):
      raise UsageError(
        f'{options.spelled("recipe")} is a training: drop it, or {options.spelled(other)}'
      )
  named.put(options, settings(options, recipe), lambda name: _replaced(options, name))


def complete(options) -> None:
  recipe = find(options)
  if recipe is None or options.batch_size is not None:
    return
  workers = cluster.num_together(options)
  size, rest = divmod(recipe.global_batch, options.num_gpus * workers)
  if rest:
    of_each = f' on each of {workers} workers' if workers > 1 else ''
    raise UsageError(
      f"{options.spelled('recipe')}: its batch of {recipe.global_batch} can't be shared by "
      f'{options.num_gpus} devices{of_each}: choose --num_gpus, or --batch_size, which the '
      'learning rate then follows'
    )
  options.batch_size = size


def find(options) -> recipes.Recipe | None:
  """The recipe that the flags ask for."""
  if options.recipe in (None, LIST):
    return None
  if options.recipe not in recipes.RECIPES:
    raise errors.unknown('--recipe', options.recipe, [*recipes.RECIPES, LIST])
  return recipes.find(options.recipe)


def settings(options, recipe: recipes.Recipe) -> dict[str, Any]:
  """Flag -> value; the batch of a device follows from the devices, see `complete`."""
  real = recipe.data == 'digits' or options.data_dir is not None
  found: dict[str, Any] = {
    'model': recipe.model,
    'data_name': recipe.data if real else None,
    'image_size': _sizes(recipe.image_size),
    'num_classes': recipe.num_classes,
    'zero_init': recipe.zero_init or None,
    'distort_colors': (recipe.distort_colors and real) or None,
    'num_epochs': float(recipe.epochs),
    'precision': recipe.precision,
    'optimizer': recipe.optimizer,
    'weight_decay': recipe.weight_decay,
    'label_smoothing': recipe.label_smoothing,
    'gradient_clip': recipe.clip_value,
    'weight_average_decay': recipe.average_decay,
    'learning_rate_base_batch': recipe.rate_batch,
    'num_learning_rate_warmup_epochs': recipe.warmup_epochs,
    'eval_during_training_every_n_epochs': 1.0 if real and not options.dry_run else None,
  }
  for field, value in recipe.constants.items():
    found[_CONSTANTS[recipe.optimizer][field]] = value
  return {name: value for name, value in (found | _rate(recipe)).items() if value is not None}


def facts(options) -> list[tuple[str, str]]:
  """Label and text of the lines that a run says about its recipe."""
  recipe = find(options)
  if recipe is None:
    return []
  own = settings(options, recipe)
  lines = [('Recipe', f'{options.recipe}: {stated(recipe)} ({recipe.source})')]
  if recipe.departures:
    lines.append(('Departures', recipe.departures))
  lines.append(('Recipe sets', ' '.join(f'--{n}={named.shown(v)}' for n, v in own.items())))
  replaced = named.overridden(options, 'recipe', own, lambda name: _replaced(options, name))
  batch = schedule.batch(options)
  if batch != recipe.global_batch:
    replaced.append(f'global batch {batch} (recipe: {recipe.global_batch})')
  return lines + [('Overridden', words) for words in replaced]


def stated(recipe: recipes.Recipe) -> str:
  """The accuracy that its source gives, in words."""
  when = recipe.top_1_epoch or recipe.epochs
  return f'{recipe.top_1:g} % top-1 stated at epoch {when} of {recipe.epochs}'


def table() -> list[str]:
  """A line a recipe."""
  lines = [f'{"recipe":<22} {"model":<14} {"data":<9} {"batch":>5} {"epochs":>6} {"top-1":>6}']
  for name in recipes.RECIPES:
    one = recipes.find(name)
    lines.append(
      f'{name:<22} {one.model:<14} {one.data:<9} {one.global_batch:>5} {one.epochs:>6} '
      f'{one.top_1:>6.2f}  {one.source}'
    )
  return [*lines, 'batch: global; top-1: per cent, as the source states it, not measured here.']


def _rate(recipe: recipes.Recipe) -> dict[str, Any]:
  if recipe.decay == 'steps':
    text = f'{recipe.rate:g}'
    for i, epoch in enumerate(recipe.decay_epochs, 1):
      text += f';{epoch:g};{recipe.rate * recipe.decay_factor**i:.6g}'
    return {'piecewise_learning_rate_schedule': text}
  found: dict[str, Any] = {'init_learning_rate': recipe.rate}
  if recipe.decay == 'exponential':
    found['num_epochs_per_decay'] = float(recipe.decay_epochs[0])
    found['learning_rate_decay_factor'] = recipe.decay_factor
  elif recipe.decay == 'linear':
    found |= {'learning_rate_schedule': 'polynomial', 'polynomial_power': 1.0}
  else:
    found['learning_rate_schedule'] = 'cosine'
  return found


def _sizes(size: Any) -> str | None:
  if size is None or isinstance(size, int):
    return None if size is None else str(size)
  return ';'.join(f'{epoch}:{pixels}' for epoch, pixels in size.items())


def _replaced(options, name: str) -> str | None:
  """The flag of the command line that stands for the recipe's flag `name`."""
  return next((other for other in _SAYS_SO_TOO.get(name, ()) if other in options.given), None)
