"""Staging: the next batch of every device is already there while the current step runs.

A functional double buffer. Each step takes the staged batches, and fetches the next ones while it
computes; they are its outputs, and the next step's inputs. Nothing can block: there is no queue to
be full or empty. The end of the data arrives with the batches, so the last ones are trained, and
what the producer raises, the step raises.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import threading
from typing import Any

import tensorflow as tf

from hpm.calls import NO_CONTROL_DEPENDENCIES, uncollected
from hpm.devices import CPU
from hpm.errors import DataError, UsageError, whole

__all__ = ['StagedLoop', 'blocked']

Batch = tuple[tf.Tensor, ...]
Body = Callable[..., Any]


class StagedLoop:
  """Runs a step's body over a data set, with the next batches staged on the devices.

  A step takes one batch a device, in turn. Where the data set is finite the last batches may be
  smaller, and a device that finds none gets one of zero samples.

  Args:
    body: builds one step's graph from one batch a device; returns a nest of tensors.
    devices: device strings.
    result: the nest of `tf.TensorSpec` that the body returns.
    agrees: whether others take part in the step, so that the end of the data here is not for this
      process to decide: the body is then given as well whether there are further batches, and
      returns beside its result whether to go on, bool scalars on the CPU.

  Attributes:
    iterator: over the data set that `run` goes through; None before the first.
    failed: whether a step has failed, so that its updates may have been made in part.
  """

  def __init__(self, body: Body, devices: Sequence[str], result: Any, agrees: bool = False):
    self._body = body if agrees else lambda staged, more: (body(staged), more)
    self._result = result
    self._devices = tuple(devices)
    self._compiled: dict[Any, tuple[Any, Any, Any]] = {}
    self.iterator: Any = None
    self.failed = False

  def run(
    self, dataset: tf.data.Dataset, num_steps: int | None = None, steps_per_call: int = 1
  ) -> Iterator[Any]:
    """Yields the body's result of each step, until the data or `num_steps` ends.

    Args:
      dataset: of batches for one device: a tuple of tensors whose first dimension is the batch.
      num_steps: None runs to the end of the data.
      steps_per_call: steps that run in the graph before their results are yielded.

    Raises:
      DataError: the data set yields nothing at all.
    """
    steps_per_call = whole('steps_per_call', steps_per_call)
    prime, _, steps = self._functions(dataset)
    # The traced function itself: to find it again for each step would cost a millisecond.
    step = self.trace(dataset) if steps_per_call == 1 else steps
    iterator = self.iterator = iter(dataset)
    staged, more = prime(iterator)
    if not more:
      raise DataError('the data set yields no batch at all')
    finished = 0
    while more and (num_steps is None or finished < num_steps):
      if steps_per_call == 1:
        with self.watched():
          result, staged, more = step(iterator, staged)
        finished += 1
        yield result
      else:
        wanted = steps_per_call
        if num_steps is not None:
          wanted = min(wanted, num_steps - finished)
        with self.watched():
          results, staged, more = steps(iterator, staged, tf.constant(wanted))
        parts = [tf.unstack(values) for values in tf.nest.flatten(results)]
        for values in zip(*parts, strict=True):
          finished += 1
          yield tf.nest.pack_sequence_as(results, values)

  def trace(self, dataset: tf.data.Dataset) -> Any:
    """Traces what `run` calls for each step, unless it has been; returns that concrete function.

    It takes an iterator over the data set and the staged batches, one a device, and returns the
    body's result, the next batches, and whether there are any.
    """
    _, step, _ = self._functions(dataset)
    with uncollected():
      return step.get_concrete_function()

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Notes in `failed` if what runs inside fails."""
    try:
      yield
    except tf.errors.OpError:
      self.failed = True
      raise

  def specs(
    self, dataset: tf.data.Dataset
  ) -> tuple[tuple[tf.TensorSpec, ...], list[tuple[tf.TensorSpec, ...]], bool]:
    """What a batch is, what all devices' staged batches are, and whether the data never ends."""
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or not all(isinstance(s, tf.TensorSpec) for s in spec):
      raise UsageError(f'a data set of tuples of tensors is needed, not of {spec}')
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    if not endless:  # the last batches may be short or missing
      spec = tuple(tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in spec)
    return spec, [tuple(_on_device(s) for s in spec)] * len(self._devices), endless

  def _functions(self, dataset: tf.data.Dataset) -> tuple[Any, Any, Any]:
    spec, staged_spec, endless = self.specs(dataset)
    key = (spec, endless)
    if key not in self._compiled:
      iterator_spec = tf.data.IteratorSpec(dataset.element_spec)

      @tf.function(autograph=False, input_signature=[iterator_spec])
      def prime(iterator):
        return self.fetch(iterator, spec, endless)

      # TensorFlow's automatic control dependencies would let every result, the following batches
      # included, wait for all updates: their copies to the devices would come after the step.
      @tf.function(
        autograph=False,
        input_signature=[iterator_spec, staged_spec],
        experimental_attributes=NO_CONTROL_DEPENDENCIES,
      )
      def step(iterator, staged):
        # The fetch stands beside the body, with no edge between them: the two overlap.
        following, more = self.fetch(iterator, spec, endless)
        result, more = self._body(staged, more)
        return result, following, more

      @tf.function(
        autograph=False,
        input_signature=[iterator_spec, staged_spec, tf.TensorSpec([], tf.int32)],
        experimental_attributes=NO_CONTROL_DEPENDENCIES,
      )
      def steps(iterator, staged, count):
        return self._loop(iterator, staged, count, spec, endless)

      self._compiled[key] = (prime, step, steps)
    return self._compiled[key]

  def _loop(
    self,
    iterator: Any,
    staged: list[Batch],
    count: tf.Tensor,
    spec: Sequence[tf.TensorSpec],
    endless: bool,
  ) -> tuple[Any, list[Batch], tf.Tensor]:
    """Up to `count` steps in the graph; results stacked, one row a step."""

    def one(i, staged, more, arrays):
      following, more = self.fetch(iterator, spec, endless)
      result, more = self._body(staged, more)
      with tf.device(CPU):
        written = [a.write(i, t) for a, t in zip(arrays, tf.nest.flatten(result), strict=True)]
        return i + 1, following, more, written

    def go_on(i, staged, more, arrays):
      with tf.device(CPU):
        return tf.logical_and(i < count, more)

    with tf.device(CPU):
      arrays = [
        tf.TensorArray(s.dtype, 0, dynamic_size=True, element_shape=s.shape)
        for s in tf.nest.flatten(self._result)
      ]
      start = (tf.constant(0), staged, tf.constant(True), arrays)
    _, staged, more, arrays = tf.while_loop(go_on, one, start, parallel_iterations=1)
    with tf.device(CPU):
      stacked = [array.stack() for array in arrays]
    # A loop's results are the host's, unless they are asked for elsewhere.
    staged = [self._at(device, batch) for device, batch in zip(self._devices, staged, strict=True)]
    return tf.nest.pack_sequence_as(self._result, stacked), staged, more

  def fetch(
    self, iterator: Any, spec: Sequence[tf.TensorSpec], endless: bool
  ) -> tuple[list[Batch], tf.Tensor]:
    """Builds the fetch of one batch a device, copied there, and whether the first of them exists.

    Args:
      iterator: of the data set.
      spec, endless: from `specs`.
    """

    batches, more = [], []
    before: list[tf.Operation] = []  # devices take the batches in order
    for device in self._devices:
      with tf.device(CPU):
        if endless:
          with tf.control_dependencies(before):
            # `get_next` counts its calls, and takes more than 32 in a graph for a mistake.
            batch = tf.raw_ops.IteratorGetNext(
              iterator=iterator._iterator_resource,
              output_types=[s.dtype for s in spec],
              output_shapes=[s.shape for s in spec],
            )
          before = [batch[0].op]
          more.append(tf.constant(True))
        else:
          with tf.control_dependencies(before):
            optional = iterator.get_next_as_optional()
          exists = optional.has_value()
          before = [exists.op]
          batch = tf.cond(
            exists,
            optional.get_value,
            lambda: tuple(tf.zeros([0, *s.shape[1:]], s.dtype) for s in spec),
          )
          more.append(exists)
        # int32 tensors stay in host memory whatever the device: labels travel as int64.
        batch = [tf.cast(t, tf.int64) if t.dtype == tf.int32 else t for t in batch]
        for tensor, s in zip(batch, spec, strict=True):
          tensor.set_shape(s.shape)
      batches.append(self._at(device, batch))
    return batches, more[0]

  def blocked(self, within_s: float) -> str:
    """What keeps `run` from going on: 'data', 'staging', or '' (see `blocked`)."""
    return blocked(self.iterator, self.copy, within_s)

  def copy(self) -> None:
    """Copies a batch of zeros to each device, as a step does with the next ones (eager mode)."""
    with tf.device(CPU):
      batch = [tf.zeros([d or 1 for d in s.shape], s.dtype) for s in self.iterator.element_spec]
    for device in self._devices:
      self._at(device, batch)

  def _at(self, device: str, batch: Sequence[tf.Tensor]) -> Batch:
    with tf.device(device):
      return tuple(tf.identity(t) for t in batch)


def blocked(iterator: Any, copy: Callable[[], Any], within_s: float) -> str:
  """What doesn't answer, for a loop over a data set that has stopped moving: to be called once.

  It takes a batch, so what is trained afterwards lacks one.

  Args:
    iterator: over the data set; None if there is none yet.
    copy: copies a batch to the devices.
    within_s: that each has for its answer.

  Returns:
    'data', 'staging' where the copies don't arrive, or '' where both answer.
  """
  if iterator is None:
    return ''
  if not _ends(iterator.get_next_as_optional, within_s):
    return 'data'
  return '' if _ends(copy, within_s) else 'staging'


def _ends(call: Callable[[], Any], within_s: float) -> bool:
  """Whether the call comes back in time, with a value or an error."""

  def run() -> None:
    with contextlib.suppress(Exception):
      call()

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(within_s)
  return not thread.is_alive()


def _on_device(spec: tf.TensorSpec) -> tf.TensorSpec:
  return tf.TensorSpec(spec.shape, tf.int64 if spec.dtype == tf.int32 else spec.dtype)
