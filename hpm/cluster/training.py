"""A training in a worker of any cluster: a `TrainStep`'s methods, and an end that all agree on."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from hpm.step import EvalStep, Metrics, TrainStep

__all__ = ['Training']


class Training:
  """A `TrainStep` in one worker of a cluster, with the methods of one.

  Synchronous workers agree in every step whether one of them has more data, and whether one wants
  to end. Who has no more data goes on with empty batches, which count nothing, until nobody has
  any; so all end with the same step. Asynchronous workers decide for themselves.

  Args:
    step: what runs.
    worker, num_workers: which of how many this is; 0 is the chief.

  Attributes:
    model, manager: the step's.
    consumed: samples that each worker has taken from its pipeline for finished steps. Asynchronous
      workers know their own alone.
    stop: set to True, to break off after the step that runs.
    stopped: whether training has been broken off because a worker wanted to.
    reached: set to True where there is nothing left to train for: all end after the step that runs,
      as at the end of the data.
  """

  def __init__(self, step: TrainStep, worker: int, num_workers: int):
    self.model, self.manager = step.model, step.manager
    self.consumed = [0] * num_workers
    self.stop = self.stopped = self.reached = False
    self._step = step
    self._worker = worker

  def begin(self) -> None:
    """Waits for all workers, and gives them the chief's values; the chief has set them by then."""
    raise NotImplementedError

  def run(
    self, dataset: tf.data.Dataset, num_steps: int | None = None, steps_per_call: int = 1
  ) -> Iterator[Metrics]:
    """Trains as `TrainStep.run`; the batches are of this worker's share of the data."""
    raise NotImplementedError

  def blocked(self, within_s: float) -> str:
    """As `TrainStep.blocked`: of this worker's data and devices."""
    raise NotImplementedError

  def eval_step(self, **options: Any) -> EvalStep:
    """What evaluates the current variables on this worker's devices, all by itself.

    Args:
      **options: as for `hpm.EvalStep`.
    """
    return EvalStep(self.model, self.manager, **options)

  def named_variables(self) -> dict[str, tf.Variable]:
    """As `TrainStep.named_variables`, for names and shapes; `snapshot` has the values."""
    return self._step.named_variables()

  def progress(self) -> tuple[int, int]:
    """Finished steps, and their samples over all workers."""
    raise NotImplementedError

  def snapshot(self, names: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Canonical name -> value, as `TrainStep.snapshot`; of `names` alone, if they are given."""
    raise NotImplementedError

  def restore(self, values: Mapping[str, Any]) -> None:
    """Sets all variables, as `TrainStep.restore`; for the chief, before `begin`."""
    raise NotImplementedError

  # What workers agree on travels as a vector of sums: `_wishes`, then each worker's samples.

  @property
  def _num_votes(self) -> int:
    return 3 + len(self.consumed)

  def _wishes(self) -> list[float]:
    """To break off, to end; whether there is more data comes before them."""
    return [float(self.stop), float(self.reached)]

  def _agreed(self, totals: Iterable[float]) -> bool:
    """Notes the sums over workers after a step; whether training goes on."""
    more, stop, reached, *consumed = (int(total) for total in totals)
    self.stopped = stop > 0
    self.consumed = [n + m for n, m in zip(self.consumed, consumed, strict=True)]
    return more > 0 and not stop and not reached
