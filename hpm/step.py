"""One step of data-parallel training or evaluation, as one graph.

All towers, the aggregation and the update are in it; nothing comes back to Python between them.
`TrainStep.build` is the step's body: it only builds graph, so the same code is traced as a
`tf.function` in one process and built into a `tf.Graph` for a `Session`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import math
from typing import Any, NamedTuple

import tensorflow as tf

from hpm.calls import Calls, uncollected
from hpm.errors import UsageError, number, whole
from hpm.losses import Loss, softmax_cross_entropy
from hpm.models.builder import Model
from hpm.optimizers.averages import SLOT as AVERAGE
from hpm.optimizers.rules import Optimizer
from hpm.pipelines.normalization import normalize
from hpm.precision import DynamicLossScale
from hpm.staging import Batch, StagedLoop
from hpm.variable_mgr.base import TowerResult, VariableManager
from hpm.variable_mgr.sums import of_scalars
from hpm.variable_mgr.transform import Mean

__all__ = ['METRICS', 'EvalMetrics', 'EvalStep', 'Metrics', 'TrainStep', 'is_kernel']

Preprocess = Callable[[tf.Tensor, str, str], tf.Tensor]

_PRIME = 7919


def is_kernel(name: str) -> bool:
  """Whether a parameter is a convolution's or a dense layer's kernel, by its name."""
  return name.rpartition('/')[2].endswith('kernel')


class Metrics(NamedTuple):
  """What a training step reports; scalars on the CPU, valid once the update is done.

  Attributes:
    step: int64, the number of finished steps.
    loss: float32, mean over the step's samples.
    num_samples: int64, of all devices.
    loss_scale: float32, that this step used.
    finite: bool, False where a dynamic loss scale was too large and no variable changed.
    top_1, top_5: int64, samples whose label is the likeliest class, or among the five likeliest;
      -1 unless the step counts them.
    own_samples: int64, those of this process. All else is of all processes that train one model in
      step with one another.
  """

  step: tf.Tensor
  loss: tf.Tensor
  num_samples: tf.Tensor
  loss_scale: tf.Tensor
  finite: tf.Tensor
  top_1: tf.Tensor
  top_5: tf.Tensor
  own_samples: tf.Tensor


METRICS = Metrics(
  step=tf.TensorSpec([], tf.int64),
  loss=tf.TensorSpec([], tf.float32),
  num_samples=tf.TensorSpec([], tf.int64),
  loss_scale=tf.TensorSpec([], tf.float32),
  finite=tf.TensorSpec([], tf.bool),
  top_1=tf.TensorSpec([], tf.int64),
  top_5=tf.TensorSpec([], tf.int64),
  own_samples=tf.TensorSpec([], tf.int64),
)


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


_EVAL_METRICS = EvalMetrics(
  *(tf.TensorSpec([], t) for t in (tf.float32, tf.int64, tf.int64, tf.int64))
)


class TrainStep:
  """A model, a variable manager and an optimizer bound into a training step.

  Args:
    model: what to train.
    manager: where its variables live; its variables are created here.
    optimizer: the update rule, which holds the learning rate.
    loss: (labels, logits) -> float32 [b].
    loss_scale: a number, or `hpm.precision.DynamicLossScale`.
    preprocess: (images, dtype, data_format) -> images, run first thing on the device. The default
      takes uint8 images [b, H, W, 3]; pass one of your own for other input.
    seed: of the initial values and of dropout.
    accumulate: the tower takes its batch in so many parts, one after the other, and sums their
      gradients: activations of one part are in memory at a time.
    clip_norm: bound on the norm of the global gradient.
    clip_value: bound on each of its elements.
    weight_decay: factor w of a penalty of w / 2 times the squared norm; its gradient w * parameter
      is added after clipping.
    decayed: which parameters decay, by name; convolution and dense kernels by default.
    report_decay: whether that penalty is in the reported loss. It never is in the towers' losses.
    count_hits: whether the step counts `Metrics.top_1` and `top_5`, on its own training batch.
    xla: compiles the tower by XLA (`jit_compile`); static batch sizes then compile once.
    gradient_reduction: 'mean' over the global batch, or 'sum' over devices of each device's mean,
      as tf_cnn_benchmarks' `replicated` has it: so many times the learning rate.

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
    loss_scale: float | DynamicLossScale = 1.0,
    preprocess: Preprocess = normalize,
    seed: int = 0,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    weight_decay: float = 0.0,
    decayed: Callable[[str], bool] = is_kernel,
    report_decay: bool = False,
    count_hits: bool = False,
    xla: bool = False,
    gradient_reduction: str = 'mean',
  ):
    if not isinstance(loss_scale, DynamicLossScale):
      loss_scale = number(
        'loss_scale', loss_scale, 'a finite number above 0', lambda x: 0 < x < math.inf
      )
    accumulate = whole('accumulate', accumulate)
    weight_decay = number(
      'weight_decay', weight_decay, 'a finite number, 0 or more,', lambda x: 0 <= x < math.inf
    )
    seed = whole('seed', seed, 0)
    if xla and manager.cross_replica:
      raise UsageError(
        'xla: XLA compiles no collective inside a tower, but '
        "batch_norm_statistics='cross_replica' needs some: leave one of the two out"
      )
    if xla and model.recompute:
      raise UsageError(
        f'xla: XLA merges what recompute=True of model {model.name} computes twice, so no memory '
        'would be saved: leave one of the two out'
      )
    if accumulate > 1 and manager.cross_replica:
      # Their keys hold the name of the loop that they stand in, and each tower has a loop of its
      # own: they would wait for one another for ever.
      raise UsageError(
        f"accumulate {accumulate}: the collectives of batch_norm_statistics='cross_replica' "
        "don't meet from loops inside towers: leave one of the two out"
      )
    self.model = model
    self.manager = manager
    self.optimizer = optimizer
    self.num_traces = 0
    self._loss = loss or softmax_cross_entropy()
    self._loss_scale = loss_scale
    self._preprocess = preprocess
    self._seed = seed
    self._accumulate = accumulate
    self._count_hits = count_hits
    params, state = model.init(seed)
    decay = {name: weight_decay for name in params if weight_decay and decayed(name)}
    self._reported_decay = decay if report_decay else {}
    self._transform = functools.partial(
      Mean,
      clip_norm=clip_norm,
      clip_value=clip_value,
      weight_decay=decay,
      check_finite=isinstance(loss_scale, DynamicLossScale),
      reduction=gradient_reduction,
    )
    self._sum_of_means = gradient_reduction == 'sum'
    self._transform()  # refuses bounds before anything is built
    manager.create(params, state, optimizer)
    with tf.device(manager.home):
      self._counters = {
        'step': tf.Variable(tf.zeros([], tf.int64), name='step'),
        'samples': tf.Variable(tf.zeros([], tf.int64), name='samples'),
      }
      if isinstance(loss_scale, DynamicLossScale):
        self._counters |= {
          'loss_scale': tf.Variable(tf.constant(loss_scale.initial), name='loss_scale'),
          'finite_steps': tf.Variable(tf.zeros([], tf.int64), name='finite_steps'),
        }
    self._tower = tf.function(self._build_tower, autograph=False, jit_compile=xla or None)
    self._call = Calls(self._tower)
    self._loop = StagedLoop(self.build, manager.devices, METRICS)
    self._direct = tf.function(self.build, autograph=False, reduce_retracing=True)

  def run(
    self, dataset: tf.data.Dataset, num_steps: int | None = None, steps_per_call: int = 1
  ) -> Iterator[Metrics]:
    """Trains on a data set of (images, labels) batches for one device; yields each step's metrics.

    The next batches are copied to the devices while the current ones are trained on. A finite data
    set may end in smaller batches; all samples count alike.

    Args:
      dataset: each device takes one batch a step, in turn.
      num_steps: None runs to the end of the data.
      steps_per_call: so many steps run in one loop in the graph before their metrics are yielded,
        which saves the host's share of each step.
    """
    yield from self._loop.run(dataset, num_steps, steps_per_call)

  def watched(self) -> contextlib.AbstractContextManager[None]:
    """For other loops: if a step fails inside, `snapshot` refuses to give what is left."""
    return self._loop.watched()

  def blocked(self, within_s: float) -> str:
    """What of the input keeps a `run` that has stopped moving; see `hpm.staging.blocked`."""
    return self._loop.blocked(within_s)

  def trace(self, dataset: tf.data.Dataset) -> Any:
    """Traces the step for a data set, as `run` would; see `StagedLoop.trace`."""
    return self._loop.trace(dataset)

  def __call__(self, batches: Sequence[Batch]) -> Metrics:
    """One step on the given batches, one (images, labels) a device.

    For debugging, `tf.config.run_functions_eagerly(True)` before it runs preprocessing, model and
    loss line by line on tensors that have values; results differ in roundings, since no ops are
    merged. Collectives are refused then.
    """
    with self.watched():
      return self._direct([tuple(batch) for batch in batches])

  @uncollected()
  def build(self, batches: Sequence[Batch]) -> Metrics:
    """Builds one step into the current graph; its updates run whenever the metrics are fetched."""
    return self.build_with_votes(batches, {})[0]

  def build_with_votes(
    self, batches: Sequence[Batch], votes: Mapping[str, tf.Tensor]
  ) -> tuple[Metrics, dict[str, tf.Tensor]]:
    """`build`, and beside it what the processes that train together have to agree on.

    Args:
      batches: one a device.
      votes: name -> float64 scalar at the manager's home, of this process; none of them has the
        name of a metric.

    Returns:
      The metrics, and the votes' sums over all processes of a synchronous manager.
    """
    manager = self.manager
    if len(batches) != len(manager.devices):
      raise UsageError(
        f'{len(batches)} batches for {len(manager.devices)} devices: each device needs one'
      )
    with tf.device(manager.home):
      before = {
        name: tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        for name, variable in self._counters.items()
      }
      loss_scale = before.get('loss_scale', self._loss_scale)
      scale = loss_scale if self._sum_of_means else loss_scale / _largest(batches)
    towers, sums = [], []
    for i, (device, (images, labels)) in enumerate(zip(manager.devices, batches, strict=True)):
      params, state = manager.read(i)
      with tf.device(manager.home):
        # int32 stays in host memory, where random ops want their seeds.
        number = manager.worker * len(batches) + i  # of this tower among those of all processes
        num_towers = manager.num_workers * len(batches)
        count = tf.cast(before['step'] * num_towers + number, tf.int32)
        rng = tf.stack([tf.constant(self._seed, tf.int32), count])
      if i == 0:
        penalty = self._penalty(params)
      num_samples = _num_samples(images, device, manager.home)
      of_loss, token = scale, None
      if self._sum_of_means:
        with tf.device(manager.home):
          of_loss = scale / tf.cast(tf.maximum(num_samples, 1), tf.float32)
      if manager.cross_replica:
        token = manager.cross_replica.token(i)
      with tf.name_scope(f'tower_{i}'), tf.device(device):  # the name is for profiles
        gradients, state, of_tower = self._call(params, state, images, labels, rng, of_loss, token)
      if manager.cross_replica:
        manager.cross_replica.used_in(device, of_tower['loss'].op)
      sums.append({**of_tower, 'num_samples': num_samples})
      reported = sums[-1] if i else {**sums[-1], **votes}
      towers.append(TowerResult(gradients, state, num_samples, reported))
    operations, finite, totals = manager.update(
      towers, self._transform(scale), self.optimizer, before['step']
    )
    with tf.device(manager.home):
      total = {name: of_scalars([of_tower[name] for of_tower in sums]) for name in sums[0]}
      own_samples = total['num_samples']
      if totals is not None:
        total = {name: tf.cast(totals[name], value.dtype) for name, value in total.items()}
        votes = {name: totals[name] for name in votes}
      num_samples = total['num_samples']
      loss = total['loss'] / tf.cast(tf.maximum(num_samples, 1), tf.float32)
      if penalty is not None:
        loss += penalty
      after: dict[str, tf.Tensor] = {}
      if finite is None or not isinstance(self._loss_scale, DynamicLossScale):
        finite = tf.constant(True)
      else:
        after |= _next_loss_scale(self._loss_scale, loss_scale, before['finite_steps'], finite)
      # Added, since processes that don't wait for one another share them.
      more = {'step': tf.constant(1, tf.int64), 'samples': num_samples}
      with tf.control_dependencies(list(before.values())):
        operations += [
          tf.raw_ops.AssignVariableOp(resource=self._counters[name].handle, value=value)
          for name, value in after.items()
        ]
        operations += [
          tf.raw_ops.AssignAddVariableOp(resource=self._counters[name].handle, value=value)
          for name, value in more.items()
        ]
      # Grouped, the updates of a device send one message home, not one for each variable.
      with tf.control_dependencies([tf.group(*operations)]):
        metrics = Metrics(
          tf.identity(before['step'] + 1),
          tf.identity(loss),
          tf.identity(num_samples),
          tf.identity(tf.convert_to_tensor(loss_scale, tf.float32)),
          tf.identity(finite),
          tf.identity(total.get('top_1', tf.constant(-1, tf.int64))),
          tf.identity(total.get('top_5', tf.constant(-1, tf.int64))),
          tf.identity(own_samples),
        )
        return metrics, {name: tf.identity(value) for name, value in votes.items()}

  def tower_graph(self, batch_size: int) -> tf.Graph:
    """The graph of the tower for a batch of this size, traced by itself (see `hpm.plan`)."""
    copy = self.manager.copy_of(0)
    specs = [
      {name: tf.TensorSpec(v.shape, v.dtype) for name, v in variables.items()}
      for variables in (copy.params, copy.state)
    ]
    scale = self._loss_scale
    return self._tower.get_concrete_function(
      *specs,
      tf.TensorSpec([batch_size, *self.model.image_shape], tf.uint8),
      tf.TensorSpec([batch_size], tf.int64),
      tf.TensorSpec([2], tf.int32),
      tf.TensorSpec([])
      if isinstance(scale, DynamicLossScale) or self._sum_of_means
      else scale / batch_size,
      self.manager.cross_replica.token(0) if self.manager.cross_replica else None,
    ).graph

  def named_variables(self) -> dict[str, tf.Variable]:
    """Canonical name -> variable of everything that a resumed run needs (see `hpm.checkpoint`).

    'samples' counts the samples of finished steps, never the iterator's prefetched position.
    """
    return {**self._counters, **self.manager.named_variables()}

  @property
  def counters(self) -> dict[str, tf.Variable]:
    """Name -> variable at the manager's home: 'step', 'samples', and those of a loss scale."""
    return dict(self._counters)

  def progress(self) -> tuple[int, int]:
    """Finished steps, and their samples (eager mode)."""
    return int(self._counters['step']), int(self._counters['samples'])

  def snapshot(self) -> dict[str, tf.Tensor]:
    """Canonical name -> value. Graph-building outside eager mode.

    Raises:
      RuntimeError: a step has failed, perhaps after it had updated some of the variables, and
        nothing has been restored since.
    """
    if self._loop.failed:
      raise RuntimeError(
        'a step failed midway, so that these variables may belong to two steps: restore a '
        'checkpoint first'
      )
    with tf.device(self.manager.home):
      counters = {name: variable.read_value() for name, variable in self._counters.items()}
    return {**counters, **self.manager.snapshot()}

  def restore(self, values: Mapping[str, tf.Tensor]) -> list[tf.Operation]:
    """Sets everything from a snapshot of any manager and number of devices.

    A snapshot without a loss scale leaves it as it is. Graph-building outside eager mode.
    """
    with tf.device(self.manager.home):
      counters = [
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=values[name])
        for name, variable in self._counters.items()
        if name in values or name in ('step', 'samples')
      ]
    self._loop.failed = False
    return [*counters, *self.manager.restore(values)]

  @property
  def variables(self) -> list[tf.Variable]:
    """Every variable, for a session's initialisation."""
    return [*self._counters.values(), *self.manager.variables]

  def _penalty(self, params: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
    """What weight decay adds to the reported loss, from the first tower's parameters."""
    if not self._reported_decay:
      return None
    with tf.device(self.manager.devices[0]):
      return tf.add_n(
        [factor * tf.nn.l2_loss(params[name]) for name, factor in self._reported_decay.items()]
      )

  def _build_tower(self, params, state, images, labels, rng, scale, token):
    """Normalise, model, loss, gradients: traced once, called on every device.

    Returns:
      The gradients, the new state, and sums over samples by name, 'loss' among them.
    """
    self.num_traces += 1
    build = self._gradients if self._accumulate == 1 else self._accumulated
    return build(params, state, images, labels, rng, scale, token)

  def _accumulated(self, params, state, images, labels, rng, scale, token):
    """`_gradients` over the parts of a batch, one after the other, in a loop in the graph."""
    parts, size = self._accumulate, images.shape[0]
    if size is not None and size % parts:
      raise UsageError(f'a batch of {size} is not to be had in {parts} equal parts (accumulate)')
    moved: set[str] = set()

    def cut(batch, i):
      if size is not None:  # a length that XLA sees to be constant
        rest = [0] * (batch.shape.rank - 1)
        return tf.slice(batch, [i * (size // parts), *rest], [size // parts, *batch.shape[1:]])
      count = tf.shape(batch)[0]
      return batch[i * count // parts : (i + 1) * count // parts]

    def part(i, state, gradients, sums):
      some_images, some_labels = cut(images, i), cut(labels, i)
      # Apart from all that towers and steps count up: no two dropout masks alike.
      seed = rng + tf.stack([i * _PRIME, 0])
      more, new_state, more_sums = self._gradients(
        params, state, some_images, some_labels, seed, scale, token
      )
      moved.update(new_state)
      total = {name: gradient + more[name] for name, gradient in gradients.items()}
      sums = {name: value + more_sums[name] for name, value in sums.items()}
      return i + 1, {**state, **new_state}, total, sums

    zeros = {name: tf.zeros_like(value) for name, value in params.items()}
    sums = {'loss': tf.constant(0.0)}
    if self._count_hits:
      sums |= {name: tf.zeros([], tf.int64) for name in ('top_1', 'top_5')}
    _, new_state, gradients, sums = tf.while_loop(
      lambda i, *_: i < parts,
      part,
      (tf.constant(0), state, zeros, sums),
      parallel_iterations=1,
    )
    return gradients, {name: new_state[name] for name in state if name in moved}, sums

  def _gradients(self, params, state, images, labels, rng, scale, token):
    maybe_empty = not images.shape[0]
    options = {}
    if maybe_empty:
      num_samples = tf.shape(images)[0]
      some = num_samples > 0
      images, labels = _never_empty(images, labels)
    if self.manager.cross_replica:  # a blank sample is none of the global batch's
      present = tf.cast(some, tf.float32) if maybe_empty else None
      options['cross_replica'] = self.manager.cross_replica.function(token, present)
    images = self._preprocess(images, self.model.dtype, self.model.data_format)
    with tf.GradientTape() as tape:
      tape.watch(params)
      forward = self.model.forward(params, state, images, training=True, rng=rng, **options)
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
    if maybe_empty and token is None:  # statistics of all towers are as good without this one
      new_state = {name: tf.where(some, new_state[name], state[name]) for name in new_state}
    sums = {'loss': loss}
    if self._count_hits:
      some_samples = slice(num_samples if maybe_empty else None)
      sums |= _hits(labels[some_samples], forward.logits[some_samples])
    return gradients, new_state, sums


class EvalStep:
  """A model bound to a manager's variables for evaluation: every sample counts once.

  Args:
    model, loss, preprocess, xla: as for `TrainStep`.
    manager: one that has its variables, from a `TrainStep` or from its own `create`.
    averaged: evaluates the moving average of the weights, which the optimizer has to keep
      (`hpm.optimizers.Averaged`).
  """

  def __init__(
    self,
    model: Model,
    manager: VariableManager,
    *,
    loss: Loss | None = None,
    preprocess: Preprocess = normalize,
    xla: bool = False,
    averaged: bool = False,
  ):
    self.model = model
    self.manager = manager
    if averaged and not all(AVERAGE in copy.slots for copy in manager.copies):
      raise UsageError(
        'averaged: the optimizer keeps no moving average of the weights: create it with '
        'average_decay, or evaluate the weights themselves'
      )
    self._averaged = averaged
    self._loss = loss or softmax_cross_entropy()
    self._preprocess = preprocess
    self._tower = tf.function(self._build_tower, autograph=False, jit_compile=xla or None)
    self._call = Calls(self._tower)
    self._loop = StagedLoop(self.build, manager.devices, _EVAL_METRICS)

  def run(
    self, dataset: tf.data.Dataset, num_steps: int | None = None, steps_per_call: int = 1
  ) -> Iterator[EvalMetrics]:
    """Evaluates batches for one device; yields each step's sums. Arguments as for `TrainStep`."""
    yield from self._loop.run(dataset, num_steps, steps_per_call)

  def blocked(self, within_s: float) -> str:
    """As `TrainStep.blocked`."""
    return self._loop.blocked(within_s)

  def evaluate(self, dataset: tf.data.Dataset) -> dict[str, Any]:
    """One pass over a finite data set.

    Returns:
      'loss' (mean), 'top_1' and 'top_5' (shares in [0, 1]), 'num_samples'.
    """
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
      raise UsageError('evaluation needs a finite data set: this one repeats for ever')
    totals = [0.0, 0, 0, 0]
    for metrics in self.run(dataset):
      totals = [total + value.numpy().item() for total, value in zip(totals, metrics, strict=True)]
    loss, top_1, top_5, num_samples = totals
    return {
      'loss': float(loss / num_samples),
      'top_1': float(top_1 / num_samples),
      'top_5': float(top_5 / num_samples),
      'num_samples': int(num_samples),
    }

  @uncollected()
  def build(self, batches: Sequence[Batch]) -> EvalMetrics:
    """Builds one evaluation step into the current graph."""
    manager = self.manager
    sums, counts = [], []
    for i, (device, (images, labels)) in enumerate(zip(manager.devices, batches, strict=True)):
      params, state = manager.read(i, training=False)
      if self._averaged:
        params = self._averages(i)
      with tf.name_scope(f'tower_{i}'), tf.device(device):
        sums.append(self._call(params, state, images, labels))
      counts.append(_num_samples(images, device, manager.home))
    with tf.device(manager.home):
      loss, top_1, top_5 = (of_scalars(values) for values in zip(*sums, strict=True))
      return EvalMetrics(loss, top_1, top_5, tf.add_n(counts))

  def _averages(self, tower: int) -> dict[str, tf.Tensor]:
    copy, device = self.manager.copy_of(tower), self.manager.devices[tower]
    params = {}
    for name, variable in copy.slots[AVERAGE].items():
      with tf.device(copy.places[name]):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
      with tf.device(device):
        params[name] = tf.identity(value)
    return params

  def _build_tower(self, params, state, images, labels):
    maybe_empty = not images.shape[0]
    if maybe_empty:
      num_samples = tf.shape(images)[0]
      images, labels = _never_empty(images, labels)
    images = self._preprocess(images, self.model.dtype, self.model.data_format)
    logits, _ = self.model.apply(params, state, images, training=False)
    if maybe_empty:
      logits, labels = logits[:num_samples], labels[:num_samples]
    hits = _hits(labels, logits)
    return tf.reduce_sum(self._loss(labels, logits)), hits['top_1'], hits['top_5']


def _next_loss_scale(
  rule: DynamicLossScale, scale: tf.Tensor, finite_steps: tf.Tensor, finite: tf.Tensor
) -> dict[str, tf.Tensor]:
  """The counters of a dynamic loss scale after a step whose gradients were `finite` or not."""
  none = tf.zeros_like(finite_steps)
  counted = tf.where(finite, finite_steps + 1, none)
  grow = counted >= rule.increase_every
  grown = tf.where(grow, tf.minimum(scale * 2.0, rule.maximum), scale)
  return {
    'loss_scale': tf.where(finite, grown, tf.maximum(scale * 0.5, rule.minimum)),
    'finite_steps': tf.where(grow, none, counted),
  }


def _largest(batches: Sequence[Batch]) -> int:
  """The largest batch of a device; 1 if a size is not known.

  Losses are divided by it, so that half-precision gradients stay in the range of a mean's; it is
  one number for all towers, whatever the sizes of their batches.
  """
  sizes = [images.shape[0] for images, _ in batches]
  return 1 if None in sizes else max(1, *sizes)


def _never_empty(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
  """Appends a blank sample to an empty batch; the caller leaves it out of sums and statistics.

  Kernels are not to be trusted with no samples: oneDNN's convolution then returns a wrong shape,
  and batch statistics are NaN.
  """
  missing = tf.maximum(1 - tf.shape(images)[0], 0)
  return tuple(
    tf.concat([t, tf.zeros([missing, *t.shape[1:]], t.dtype)], 0) for t in (images, labels)
  )


def _hits(labels: tf.Tensor, logits: tf.Tensor) -> dict[str, tf.Tensor]:
  """int64 scalars: samples whose label is among the likeliest one, or five, classes."""
  ranks = {'top_1': 1, 'top_5': min(5, logits.shape[-1])}
  return {
    name: tf.reduce_sum(tf.cast(tf.math.in_top_k(labels, logits, rank), tf.int64))
    for name, rank in ranks.items()
  }


def _num_samples(images: tf.Tensor, device: str, home: str) -> tf.Tensor:
  """int64 scalar at home; a constant where the batch size is static."""
  if images.shape[0] is not None:
    with tf.device(home):
      return tf.constant(images.shape[0], tf.int64)
  with tf.device(device):  # the shape is in host memory whatever the device
    shape = tf.shape(images)
  with tf.device(home):
    return tf.cast(shape[0], tf.int64)
