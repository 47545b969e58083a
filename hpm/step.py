"""One step of data-parallel training or evaluation, as one graph.

All towers, the aggregation and the update are in it; nothing comes back to Python between them.
`TrainStep.build` is the step's body: it only builds graph, so the same code is traced as a
`tf.function` in one process and built into a `tf.Graph` for a `Session`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hpm.errors import UsageError
from hpm.losses import Loss, softmax_cross_entropy
from hpm.models.builder import Model
from hpm.optimizers.rules import Optimizer
from hpm.pipelines.normalize import normalize
from hpm.staging import Batch, StagedLoop
from hpm.variable_mgr.base import TowerResult, VariableManager
from hpm.variable_mgr.transform import Mean

__all__ = ['EvalMetrics', 'EvalStep', 'Metrics', 'TrainStep']

Preprocess = Callable[[tf.Tensor, str, str], tf.Tensor]


class Metrics(NamedTuple):
  """What a training step reports; scalars on the CPU, valid once the update is done.

  Attributes:
    step: int64, the number of finished steps.
    loss: float32, mean over the step's samples.
    num_samples: int64, of all devices.
  """

  step: tf.Tensor
  loss: tf.Tensor
  num_samples: tf.Tensor


class EvalMetrics(NamedTuple):
  """Sums over the samples of one evaluation step; scalars on the CPU.

  Attributes:
    loss: float32, summed.
    top_1, top_5: int64, samples whose label is the likeliest class, or among the five likeliest.
    num_samples: int64.
  """

  loss: tf.Tensor
  top_1: tf.Tensor
  top_5: tf.Tensor
  num_samples: tf.Tensor


class TrainStep:
  """A model, a variable manager and an optimizer bound into a training step.

  Args:
    model: what to train.
    manager: where its variables live; its variables are created here.
    optimizer: the update rule, which holds the learning rate.
    loss: (labels, logits) -> float32 [b].
    loss_scale: see `hpm.precision.Precision`.
    preprocess: (images, dtype, data_format) -> images, run first thing on the device. The default
      takes uint8 images [b, H, W, 3]; pass one of your own for other input.
    seed: of the initial values and of dropout.

  Attributes:
    num_traces: how often the tower has been traced; once for all devices.
  """

  def __init__(
    self,
    model: Model,
    manager: VariableManager,
    optimizer: Optimizer,
    *,
    loss: Loss | None = None,
    loss_scale: float = 1.0,
    preprocess: Preprocess = normalize,
    seed: int = 0,
  ):
    if loss_scale <= 0:
      raise UsageError(f'loss_scale {loss_scale}: must be positive')
    self.model = model
    self.manager = manager
    self.optimizer = optimizer
    self.num_traces = 0
    self._loss = loss or softmax_cross_entropy()
    self._loss_scale = loss_scale
    self._preprocess = preprocess
    self._seed = seed
    manager.create(*model.init(seed), optimizer)
    with tf.device(manager.home):
      zero = tf.zeros([], tf.int64)
      self._step = tf.Variable(zero, name='step')
      self._samples = tf.Variable(zero, name='samples')
    self._tower = tf.function(self._build_tower, autograph=False)
    self._loop = StagedLoop(self.build, manager.devices)
    self._direct = tf.function(self.build, autograph=False, reduce_retracing=True)

  def run(self, dataset: tf.data.Dataset, num_steps: int | None = None) -> Iterator[Metrics]:
    """Trains on a data set of (images, labels) batches for one device; yields each step's metrics.

    The next batches are copied to the devices while the current ones are trained on. A finite data
    set may end in smaller batches; all samples count alike.
    """
    yield from self._loop.run(dataset, num_steps)

  def __call__(self, batches: Sequence[Batch]) -> Metrics:
    """One step on the given batches, one (images, labels) a device."""
    return self._direct([tuple(batch) for batch in batches])

  def build(self, batches: Sequence[Batch]) -> Metrics:
    """Builds one step into the current graph; its updates run whenever the metrics are fetched."""
    manager = self.manager
    if len(batches) != len(manager.devices):
      raise UsageError(
        f'{len(batches)} batches for {len(manager.devices)} devices: each device needs one'
      )
    with tf.device(manager.home):
      step = tf.raw_ops.ReadVariableOp(resource=self._step.handle, dtype=tf.int64)
      samples = tf.raw_ops.ReadVariableOp(resource=self._samples.handle, dtype=tf.int64)
    scale = self._scale(batches)
    towers, losses = [], []
    for i, (device, (images, labels)) in enumerate(zip(manager.devices, batches, strict=True)):
      params, state = manager.read(i)
      with tf.device(manager.home):
        # int32 stays in host memory, where random ops want their seeds.
        count = tf.cast(step * len(batches) + i, tf.int32)
        rng = tf.stack([tf.constant(self._seed, tf.int32), count])
      with tf.device(device):
        gradients, state, loss = self._tower(params, state, images, labels, rng, scale)
      towers.append(TowerResult(gradients, state, _num_samples(images, device, manager.home)))
      losses.append(loss)
    updates = manager.update(towers, Mean(scale), self.optimizer, step)
    with tf.device(manager.home):
      num_samples = tf.add_n([tower.num_samples for tower in towers])
      loss = tf.add_n(losses) / tf.cast(tf.maximum(num_samples, 1), tf.float32)
      next_step = step + 1
      with tf.control_dependencies([step, samples]):
        updates += [
          tf.raw_ops.AssignVariableOp(resource=self._step.handle, value=next_step),
          tf.raw_ops.AssignVariableOp(resource=self._samples.handle, value=samples + num_samples),
        ]
      # Grouped, the updates of a device send one message home, not one for each variable.
      with tf.control_dependencies([tf.group(*updates)]):
        return Metrics(tf.identity(next_step), tf.identity(loss), tf.identity(num_samples))

  def named_variables(self) -> dict[str, tf.Variable]:
    """Canonical name -> variable of everything that a resumed run needs (see `hpm.checkpoint`).

    'samples' counts the samples of finished steps, never the iterator's prefetched position.
    """
    counters = {'step': self._step, 'samples': self._samples}
    return {**counters, **self.manager.named_variables()}

  def snapshot(self) -> dict[str, tf.Tensor]:
    """Canonical name -> value. Graph-building outside eager mode."""
    with tf.device(self.manager.home):
      counters = {'step': self._step.read_value(), 'samples': self._samples.read_value()}
    return {**counters, **self.manager.snapshot()}

  def restore(self, values: Mapping[str, tf.Tensor]) -> list[tf.Operation]:
    """Sets everything from a snapshot of any manager and number of devices.

    Graph-building outside eager mode.
    """
    with tf.device(self.manager.home):
      counters = [
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=values[name])
        for name, variable in (('step', self._step), ('samples', self._samples))
      ]
    return [*counters, *self.manager.restore(values)]

  @property
  def variables(self) -> list[tf.Variable]:
    """Every variable, for a session's initialisation."""
    return [self._step, self._samples, *self.manager.variables]

  def _scale(self, batches: Sequence[Batch]) -> float:
    """The factor on each sample's loss: with it half-precision gradients stay those of a mean.

    It is one for all towers, whatever the sizes of their batches.
    """
    sizes = [images.shape[0] for images, _ in batches]
    return self._loss_scale / (1 if None in sizes else max(1, *sizes))

  def _build_tower(self, params, state, images, labels, rng, scale):
    """Normalise, model, loss, gradients: traced once, called on every device."""
    self.num_traces += 1
    maybe_empty = not images.shape[0]
    if maybe_empty:
      num_samples = tf.shape(images)[0]
      images, labels = _never_empty(images, labels)
    images = self._preprocess(images, self.model.dtype, self.model.data_format)
    with tf.GradientTape() as tape:
      tape.watch(params)
      forward = self.model.forward(params, state, images, training=True, rng=rng)
      losses = self._loss(labels, forward.logits)
      for logits, weight in forward.auxiliary:
        losses += weight * self._loss(labels, logits)
      if forward.penalty is not None:  # part of the mean loss, so it counts once a sample
        losses += forward.penalty
      if maybe_empty:
        losses = losses[:num_samples]
      loss = tf.reduce_sum(losses)
      objective = loss * scale
    gradients = tape.gradient(objective, params, unconnected_gradients='zero')
    # What the model leaves as it is (frozen variables) the managers needn't move.
    new_state = {n: value for n, value in forward.new_state.items() if value is not state[n]}
    if maybe_empty:
      some = num_samples > 0
      new_state = {name: tf.where(some, new_state[name], state[name]) for name in new_state}
    return gradients, new_state, loss


class EvalStep:
  """A model bound to a manager's variables for evaluation: every sample counts once.

  Args:
    model, loss, preprocess: as for `TrainStep`.
    manager: one that has its variables, from a `TrainStep` or from its own `create`.
  """

  def __init__(
    self,
    model: Model,
    manager: VariableManager,
    *,
    loss: Loss | None = None,
    preprocess: Preprocess = normalize,
  ):
    self.model = model
    self.manager = manager
    self._loss = loss or softmax_cross_entropy()
    self._preprocess = preprocess
    self._tower = tf.function(self._build_tower, autograph=False)
    self._loop = StagedLoop(self.build, manager.devices)

  def run(self, dataset: tf.data.Dataset, num_steps: int | None = None) -> Iterator[EvalMetrics]:
    """Evaluates batches for one device; yields each step's sums."""
    yield from self._loop.run(dataset, num_steps)

  def evaluate(self, dataset: tf.data.Dataset) -> dict[str, Any]:
    """One pass over a finite data set.

    Returns:
      'loss' (mean), 'top_1' and 'top_5' (shares in [0, 1]), 'num_samples'.
    """
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
      raise UsageError('evaluation needs a finite data set: this one repeats for ever')
    totals = [0.0, 0, 0, 0]
    for metrics in self.run(dataset):
      totals = [total + value.numpy() for total, value in zip(totals, metrics, strict=True)]
    loss, top_1, top_5, num_samples = totals
    return {
      'loss': float(loss / num_samples),
      'top_1': float(top_1 / num_samples),
      'top_5': float(top_5 / num_samples),
      'num_samples': int(num_samples),
    }

  def build(self, batches: Sequence[Batch]) -> EvalMetrics:
    """Builds one evaluation step into the current graph."""
    manager = self.manager
    sums, counts = [], []
    for i, (device, (images, labels)) in enumerate(zip(manager.devices, batches, strict=True)):
      params, state = manager.read(i)
      with tf.device(device):
        sums.append(self._tower(params, state, images, labels))
      counts.append(_num_samples(images, device, manager.home))
    with tf.device(manager.home):
      loss, top_1, top_5 = (tf.add_n(list(values)) for values in zip(*sums, strict=True))
      return EvalMetrics(loss, top_1, top_5, tf.add_n(counts))

  def _build_tower(self, params, state, images, labels):
    maybe_empty = not images.shape[0]
    if maybe_empty:
      num_samples = tf.shape(images)[0]
      images, labels = _never_empty(images, labels)
    images = self._preprocess(images, self.model.dtype, self.model.data_format)
    logits, _ = self.model.apply(params, state, images, training=False)
    if maybe_empty:
      logits, labels = logits[:num_samples], labels[:num_samples]
    ranked = min(5, logits.shape[-1])
    return (
      tf.reduce_sum(self._loss(labels, logits)),
      _count(tf.math.in_top_k(labels, logits, 1)),
      _count(tf.math.in_top_k(labels, logits, ranked)),
    )


def _never_empty(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
  """Appends a blank sample to an empty batch; the caller leaves it out of sums and statistics.

  Kernels are not to be trusted with no samples: oneDNN's convolution then returns a wrong shape,
  and batch statistics are NaN.
  """
  missing = tf.maximum(1 - tf.shape(images)[0], 0)
  return tuple(
    tf.concat([t, tf.zeros([missing, *t.shape[1:]], t.dtype)], 0) for t in (images, labels)
  )


def _count(hits: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.cast(hits, tf.int64))


def _num_samples(images: tf.Tensor, device: str, home: str) -> tf.Tensor:
  """int64 scalar at home; a constant where the batch size is static."""
  if images.shape[0] is not None:
    with tf.device(home):
      return tf.constant(images.shape[0], tf.int64)
  with tf.device(device):  # the shape is in host memory whatever the device
    shape = tf.shape(images)
  with tf.device(home):
    return tf.cast(shape[0], tf.int64)
