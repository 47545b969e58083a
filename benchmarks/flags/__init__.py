"""The driver's flags: one file a concern, its cross-checks beside it.

A concern is a module of this package, listed in `CONCERNS`, with

  TITLE                 its heading in --help
  define(values)        defines its absl flags in `values`
  check(options)        refuses what can't work, as soon as the flags are parsed
  complete(options)     fills in what was left out and refuses what these devices can't do,
                        right after the import of TensorFlow, before anything is built

Nothing here imports TensorFlow: --help and wrong flags are answered before that.
"""

from collections.abc import Sequence
import math
import os
import re
import textwrap
import types
from typing import Any

from absl import flags as absl_flags

from benchmarks.flags import (
  cluster,
  compute,
  data,
  devices,
  evaluation,
  lines,
  mode,
  model,
  optimizer,
  output,
  predecessor,
  preset,
  profile,
  recipe,
  runtime,
  schedule,
  steps,
  variables,
)
from hpm import errors
from hpm.errors import UsageError

__all__ = [
  'CONCERNS',
  'Options',
  'check_argument',
  'complete',
  'help_text',
  'next_command',
  'parse',
]

# In the order of --help, in which they are also checked and completed; a preset sets the others.
CONCERNS = (
  preset,
  recipe,
  model,
  devices,
  compute,
  data,
  variables,
  optimizer,
  schedule,
  mode,
  steps,
  evaluation,
  lines,
  output,
  profile,
  runtime,
  cluster,
)

_HELP = {'--help', '-h', '-help', '--h', '-?', '--helpfull', '--helpshort', '--help=true'}
_LONGEST_NAME = 80
_MOST_DIGITS = 400  # of a float written out; Python reads no whole number of more than 4,300
_INDENT = 6 * ' '
_KINDS = {
  'string': ('NAME', 'a text is'),
  'int': ('N', 'a whole number is'),
  'float': ('X', 'a number is'),
  'bool': ('true|false', 'true or false is'),
}


class Options(types.SimpleNamespace):
  """The flags' values by name.

  Attributes:
    given: those that the command line set.
    open: names of those that it left to `complete`, which have no fixed default.
  """

  given: dict[str, Any]
  open: list[str]

  def refuse_given(self, names: Sequence[str], reason: str) -> None:
    """UsageError if the command line set one of these flags."""
    for name in names:
      if name in self.given:
        raise UsageError(f'{self.spelled(name)} {reason}')

  def spelled(self, name: str) -> str:
    """A flag as on the command line."""
    return f'--{name}={_text(getattr(self, name))}'

  def values(self) -> dict[str, Any]:
    """Flag name -> value, given or chosen."""
    return {name: value for name, value in vars(self).items() if name not in ('given', 'open')}

  def chosen(self) -> dict[str, Any]:
    """Flag name -> value of what was left open and has been decided for this machine."""
    return {
      name: value
      for name, value in self.values().items()
      if name in self.open and value not in (None, False)
    }


def parse(arguments: Sequence[str]) -> Options | None:
  """The options that `arguments` (without the program's name) ask for; None if for help.

  Raises:
    UsageError: an unknown flag, a value that doesn't parse, or flags that don't go together.
  """
  if _HELP.intersection(arguments):
    return None
  for argument in arguments:
    check_argument(argument)
  values = _define()
  try:
    rest = values(['run.py', *arguments])[1:]
  except absl_flags.UnrecognizedFlagError as error:
    if answer := predecessor.answer(error.flagname):
      raise UsageError(answer) from None
    names = [f'--{name}' for name in values]
    raise errors.unknown('flag', f'--{error.flagname}', names, '--help lists all') from None
  except absl_flags.Error as error:
    raise UsageError(_reworded(str(error), values)) from None
  if rest:
    raise UsageError(f'unexpected {rest[0]!r}: flags are written --name=value')
  options = Options(**{name: values[name].value for name in values})
  options.given = {name: values[name].value for name in values if values[name].present}
  for name, value in options.given.items():
    if isinstance(value, int) and value > steps.LARGEST:
      raise UsageError(f'--{name}={value}: at most {steps.LARGEST}, as far as TensorFlow counts')
  options.open = [name for name in values if values[name].value is None]
  for concern in CONCERNS:
    concern.check(options)
  for name, value in options.given.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise UsageError(f'{options.spelled(name)}: a finite number is needed')
  return options


def complete(options: Options, devices: Sequence[str]) -> None:
  """Fills in every flag that was left out, once the devices are known.

  Raises:
    UsageError: what the flags ask for can't work on these devices.
  """
  options.device = 'gpu' if 'GPU' in devices[0] else 'cpu'
  options.num_gpus = len(devices)
  for concern in CONCERNS:
    concern.complete(options)


def help_text() -> str:
  """What --help prints: the flags by concern."""
  lines = []
  for concern in CONCERNS:
    values = absl_flags.FlagValues()
    concern.define(values)
    lines.append(f'{concern.TITLE}:')
    for name in values:
      flag = values[name]
      lines.append(f'  --{name}={_KINDS[flag.flag_type()][0]}')
      lines += textwrap.wrap(flag.help, 94, initial_indent=_INDENT, subsequent_indent=_INDENT)
    lines.append('')
  return '\n'.join(lines).rstrip()


def next_command(options: Options) -> list[str]:
  """Flags of a command worth trying after this one; they go together whenever these do."""
  files = ('result_json', *output.CURVES, *profile.FILES, 'profile_dir')
  given = {name: value for name, value in options.given.items() if name not in files}

  def drop(*names: str) -> None:
    for name in names:
      given.pop(name, None)

  if options.eval:  # train on
    drop('eval', 'num_batches')
  elif options.train_dir is not None and options.data_dir is not None:
    drop(*mode.UPDATES, *mode.NOT_WITH_EVAL, 'num_batches', *variables.NAMES)
    given['eval'] = True
  else:  # the next mode; after the last of them, the first with a larger batch
    managers = ['replicated', 'parameter_server', 'independent']
    own = options.variable_update not in managers
    following = 0 if own else managers.index(options.variable_update) + 1
    drop(*variables.NAMES, 'train_dir', *output.KEEPING)
    given['variable_update'] = managers[following % len(managers)]
    if following == len(managers) and options.num_epochs is None:
      given['batch_size'] = 2 * options.batch_size
  return [f'--{name}={_text(value)}' for name, value in given.items()]


def check_argument(argument: str) -> None:
  """Refuses what absl would answer oddly, or read for ever.

  Raises:
    UsageError: that quotes it.
  """
  name, equals, value = argument.lstrip('-').partition('=')
  if len(name) > _LONGEST_NAME and argument.startswith('-'):
    raise UsageError(f"unknown flag '{argument[:_LONGEST_NAME]}...': --help lists all")
  if re.search(rf'\d{{{_MOST_DIGITS},}}', argument):
    raise UsageError(f"'{argument[:_LONGEST_NAME]}...': no number has so many digits")
  if not equals or not argument.startswith('-'):
    return
  if f'--{name}' in _HELP:
    raise UsageError(f'{argument}: help takes no value: write --help')
  if name in ('flagfile', 'undefok') and '\0' in value:
    raise UsageError(f'{argument!r}: there is a zero byte in it')
  if name == 'flagfile' and os.path.exists(value) and not os.path.isfile(value):
    raise UsageError(f'{argument}: a regular file with a flag a line is needed')


def _text(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def _define() -> absl_flags.FlagValues:
  values = absl_flags.FlagValues()
  for concern in CONCERNS:
    concern.define(values)
  return values


def _reworded(message: str, values: absl_flags.FlagValues) -> str:
  """absl's words for a flag that doesn't parse in ours, with what is needed."""
  missing = message.removeprefix('Missing value for flag ')
  if missing != message:
    return f'{missing} has no value: write {missing}=...'
  assignment = message.removeprefix('flag ').partition(':')[0]  # 'flag --x=v: why'
  name = assignment.removeprefix('--').partition('=')[0]
  if name in values:
    return f'{assignment}: {_KINDS[values[name].flag_type()][1]} needed'
  return message.removeprefix('ERROR:: ')  # of --flagfile, which is absl's own
