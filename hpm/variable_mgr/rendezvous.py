"""Sums over processes on a parameter server: everybody gives, the chief takes, all are told."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

__all__ = ['Accumulator', 'Rendezvous']

Tensors = Mapping[str, tf.Tensor]

# No gradient is stale: nobody starts a step before the chief has ended the last one for him.
_NEVER_STALE = 2**62


class Accumulator:
  """The sum of what each of so many processes gives once a round, exact whatever their order.

  Args:
    name: the same in all processes.
    place: device of a parameter server's CPU.
    dtype, shape: of what is given.
    num_workers: how many give.
  """

  def __init__(
    self, name: str, place: str, dtype: tf.DType, shape: tf.TensorShape, num_workers: int
  ):
    self._place = place
    self._num_workers = num_workers
    with tf.device(place):
      self._accumulator = tf.compat.v1.ConditionalAccumulator(
        dtype, shape, shared_name=name, reduction_type='SUM'
      )

  def give(self, value: tf.Tensor) -> tf.Operation:
    """Adds this process's value, which is copied there."""
    with tf.device(self._place):
      return self._accumulator.apply_grad(value, tf.constant(_NEVER_STALE, tf.int64))

  def take(self) -> tf.Tensor:
    """The sum, once all have given, and the next round may begin; for one process only."""
    with tf.device(self._place):
      return self._accumulator.take_grad(tf.constant(self._num_workers))


class Rendezvous:
  """Where processes meet once a step: scalars are summed, and nobody leaves before the chief says.

  Every process has a queue of its own on the parameter server. A common one would let a fast
  process take the message that was meant for a slow one.

  Args:
    name: the same in all processes.
    place: device of a parameter server's CPU.
    worker, num_workers: which of how many processes this is; 0 is the chief.
  """

  def __init__(self, name: str, place: str, worker: int, num_workers: int):
    self._name = name
    self._place = place
    self._worker = worker
    self._num_workers = num_workers

  def sums(self, scalars: Tensors) -> tuple[tf.Operation, Tensors]:
    """The op that gives this process's float64 scalars, and their sums, for the chief to take."""
    vector = tf.stack([tf.cast(value, tf.float64) for value in scalars.values()])
    accumulator = Accumulator(
      f'{self._name}/sums', self._place, tf.float64, vector.shape, self._num_workers
    )
    given = accumulator.give(vector)
    if self._worker:
      return given, {}
    with tf.device(self._place):
      return given, dict(zip(scalars, tf.unstack(accumulator.take()), strict=True))

  def tell(self, scalars: Tensors) -> list[tf.Operation]:
    """The chief's message to each process, float64 scalars by name, itself included."""
    with tf.device(self._place):
      message = tf.stack([tf.cast(value, tf.float64) for value in scalars.values()])
      return [
        self._queue(worker, message.shape).enqueue(message) for worker in range(self._num_workers)
      ]

  def told(self, names: Sequence[str]) -> Tensors:
    """The message, once it is there, on the current device; `names` as the chief gave them."""
    with tf.device(self._place):
      message = self._queue(self._worker, tf.TensorShape([len(names)])).dequeue()
    return dict(zip(names, tf.unstack(tf.identity(message)), strict=True))

  def _queue(self, worker: int, shape: tf.TensorShape) -> tf.queue.FIFOQueue:
    return tf.queue.FIFOQueue(
      2, [tf.float64], [shape], shared_name=f'{self._name}/to_worker_{worker}'
    )
