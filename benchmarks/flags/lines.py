"""What the step lines say, and how often."""

from typing import NamedTuple

from absl import flags

from hpm import errors
from hpm.errors import UsageError

TITLE = 'Step lines'
LOSSES = ('total_loss', 'base_loss')


class Lines(NamedTuple):
  """What the step lines look like.

  Attributes:
    every: a line every so many steps, and at step 1.
    loss: the name of the third column.
    accuracies: whether top-1 and top-5 follow it.
    ewma: weight of a new step in the mean of step times; None weighs all alike.
  """

  every: int
  loss: str
  accuracies: bool
  ewma: float | None


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer(
    'display_every',
    10,
    'A line every so many steps, and at step 1. Default: 10.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'display_perf_ewma',
    None,
    'Lines give an exponentially weighted mean of the step times, in which each new step has this '
    'weight, in (0, 1]. The result keeps the mean of all. Default: the mean of all steps so far.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'print_training_accuracy',
    False,
    'Two more columns: top-1 and top-5 accuracy on the training batch. Default: false.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'loss_type_to_report',
    'total_loss',
    f'{", ".join(LOSSES)}: the loss with or without the penalty of --weight_decay. '
    'Default: total_loss.',
    flag_values=values,
  )


def check(options) -> None:
  if options.display_every < 1:
    raise UsageError(f'--display_every={options.display_every}: 1 or more is needed')
  weight = options.display_perf_ewma
  if weight is not None and not 0 < weight <= 1:
    raise UsageError(f'--display_perf_ewma={weight:g}: a weight above 0, at most 1, is needed')
  if options.loss_type_to_report not in LOSSES:
    raise errors.unknown('--loss_type_to_report', options.loss_type_to_report, LOSSES)


def complete(options) -> None:
  del options


def step_options(options) -> dict[str, bool]:
  """What `hpm.TrainStep` takes of these."""
  return {
    'count_hits': options.print_training_accuracy,
    'report_decay': options.loss_type_to_report == 'total_loss',
  }


def shown(options) -> Lines:
  """What the loop prints; options complete."""
  return Lines(
    options.display_every,
    options.loss_type_to_report or 'base_loss',  # of inference, which has no decay
    options.print_training_accuracy,
    options.display_perf_ewma,
  )
