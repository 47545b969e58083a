"""The parity check fails on each fault that it exists to find.

Each mutant is the library with one fault planted. Where a control is named, it is the same
construction without the fault's effect, and it passes: the check fails because of the fault.
"""

import dataclasses

import pytest
import tensorflow as tf

import hpm
from hpm.optimizers.rules import Adam, Momentum
from hpm.variable_mgr.base import Update
from hpm.variable_mgr.parameter_server import ParameterServer
from hpm.variable_mgr.transform import Mean
from tests.parity import harness

NUM_STEPS = 5
LOSS_SCALE = 128.0


def assert_found(result, expected):
  with pytest.raises(AssertionError, match='differ by more than'):
    harness.assert_agrees(result, expected)


def rewriting(manager, rewrite):
  """The manager with `rewrite` between the towers and the aggregation."""
  update = manager.update
  manager.update = lambda towers, *args: update(rewrite(towers), *args)
  return manager


def scaled(tower, factor):
  gradients = {name: g * tf.cast(factor, g.dtype) for name, g in tower.gradients.items()}
  return dataclasses.replace(tower, gradients=gradients)


class Sum(Mean):
  """The sum over samples where the mean is due."""

  def scalars(self, statistic, num_samples):
    del num_samples
    return super().scalars(statistic, tf.constant(1, tf.int64))


class KeepsLossScale(Mean):
  def __init__(self, scale=1.0, **options):
    super().__init__(scale / LOSS_SCALE, **options)


@pytest.mark.parametrize('mode', harness.MODES)
def test_sum_for_mean_is_found(mode, cpu_devices, monkeypatch):
  monkeypatch.setattr('hpm.step.Mean', Sum)
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  step = harness.create_step(harness.create_manager(mode, cpu_devices[:2]))
  assert_found(harness.train(step, steps), harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', harness.MODES)
def test_loss_scale_left_in_is_found(mode, cpu_devices, monkeypatch):
  monkeypatch.setattr('hpm.step.Mean', KeepsLossScale)
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = harness.create_manager(mode, cpu_devices[:2])
  step = harness.create_step(manager, loss_scale=LOSS_SCALE)
  assert_found(harness.train(step, steps), harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', harness.SYNCHRONOUS)
def test_a_lost_tower_is_found(mode, cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = rewriting(
    harness.create_manager(mode, cpu_devices[:2]),
    lambda towers: [*towers[:-1], scaled(towers[-1], 0.0)],
  )
  assert_found(harness.train(harness.create_step(manager), steps), harness.simulate(mode, steps))


@pytest.mark.parametrize('mode', harness.chosen(harness.SYNCHRONOUS, harness.TWO))
def test_a_mean_of_tower_means_is_found_where_towers_differ_in_size(mode, cpu_devices):
  def mean_of_means(towers):
    total = tf.add_n([tower.num_samples for tower in towers])
    return [scaled(t, total / (len(towers) * t.num_samples)) for t in towers]

  for sizes, found in (([4, 4], False), ([6, 2], True)):  # of equal size: the control
    steps = harness.random_steps([sizes] * NUM_STEPS)
    manager = rewriting(harness.create_manager(mode, cpu_devices[:2]), mean_of_means)
    result = harness.train(harness.create_step(manager), steps)
    check = assert_found if found else harness.assert_agrees
    check(result, harness.simulate(mode, steps))


class UpdatesOncePerTower(ParameterServer):
  """Applies each tower's share of the mean gradient by an update of its own."""

  def update(self, towers, transform, optimizer, step):
    (copy,) = self.copies
    places, samples = copy.places.values(), self._num_samples(towers)
    scalars = self._scalars({}, copy, samples, transform, optimizer, step, places)
    barriers = self._barriers()
    updates = []
    for tower in towers:
      with tf.control_dependencies(updates):
        updates = self._apply(
          copy, tower.gradients, tower.state, transform, optimizer, scalars, barriers
        )
    return Update(updates, None)


@pytest.mark.parametrize('optimizer', harness.OPTIMIZERS)
def test_one_update_per_tower_is_found(optimizer, cpu_devices):
  steps = harness.random_steps([[2, 2, 2, 2]] * NUM_STEPS)
  step = harness.create_step(UpdatesOncePerTower(cpu_devices[:4]), optimizer)
  result = harness.train(step, steps)
  # sgd is the control: without slots, the shares add up to one update.
  check = harness.assert_agrees if optimizer == 'sgd' else assert_found
  check(result, harness.simulate('parameter_server_cpu', steps, optimizer))


class ReadsForEachTower(ParameterServer):
  """Every tower has reads of its own; with `late`, those of the second wait for an update.

  Built for a tf.Graph and sgd. There is no barrier, and each tower's share of the gradient is
  applied by itself, so that the second tower can read after the update with the first one's share.
  """

  def __init__(self, devices, late):
    super().__init__(devices)
    self._late = late
    self._tower_reads = []

  def read(self, tower):
    self._reads.clear()
    values = super().read(tower)
    (reads,) = self._reads.values()
    self._tower_reads.append([value for _, value in reads.values()])
    return values

  def update(self, towers, transform, optimizer, step):
    (copy,) = self.copies
    places, samples = copy.places.values(), self._num_samples(towers)
    scalars = self._scalars({}, copy, samples, transform, optimizer, step, places)
    all_reads = [value for values in self._tower_reads for value in values]
    waits_for = self._tower_reads[0] if self._late else all_reads
    with tf.control_dependencies(waits_for):
      barrier = tf.no_op()
    barriers = dict.fromkeys(copy.places.values(), barrier)
    first, second = (
      self._apply(copy, t.gradients, t.state, transform, optimizer, scalars, barriers)
      for t in towers
    )
    if self._late:
      for value in self._tower_reads[1]:
        value.op._add_control_inputs(first)
    return Update([*first, *second], None)


def test_a_tower_that_reads_after_the_update_is_found(cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  expected = harness.simulate('parameter_server_cpu', steps, 'sgd')

  def train(late):
    return harness.train_in_session(
      lambda: harness.create_step(ReadsForEachTower(cpu_devices[:2], late), 'sgd'), steps
    )

  harness.assert_agrees(train(late=False), expected)  # the control
  assert_found(train(late=True), expected)


class ForgetsSlots(Momentum):
  """Updates the parameter and leaves its slot as it was."""

  def apply(self, variable, slots, gradient, scalars):
    before = tf.identity(slots['momentum'].read_value())
    with tf.control_dependencies([before]):
      update = super().apply(variable, slots, gradient, scalars)
    with tf.control_dependencies([update]):
      return tf.raw_ops.AssignVariableOp(resource=slots['momentum'].handle, value=before)


@pytest.mark.parametrize('mode', harness.chosen(list(harness.MODES), harness.TWO))
def test_a_slot_that_does_not_advance_is_found(mode, cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  step = harness.create_step(harness.create_manager(mode, cpu_devices[:2]), ForgetsSlots(0.05))
  assert_found(harness.train(step, steps), harness.simulate(mode, steps))


class CountsTwice(Adam):
  """Corrects its bias as if each step were two."""

  def scalars(self, step):
    return super().scalars(2 * step + 1)


def test_a_step_that_counts_as_two_is_found(cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  step = harness.create_step(manager, CountsTwice(0.01, epsilon=1e-3))
  assert_found(harness.train(step, steps), harness.simulate('replicated_spread', steps, 'adam'))


def test_a_replica_that_is_not_updated_is_found(cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = harness.create_manager('replicated_spread', cpu_devices[:2])
  apply = manager._apply_to_each

  def apply_to_first(gradients, states, *args):
    copies, devices = manager.copies, manager.devices
    manager.copies, manager.devices = copies[:1], devices[:1]
    try:
      return apply(gradients[:1], states[:1], *args[:2], args[2][:1], *args[3:])
    finally:
      manager.copies, manager.devices = copies, devices

  manager._apply_to_each = apply_to_first
  result = harness.train(harness.create_step(manager), steps)
  assert_found(result, harness.simulate('replicated_spread', steps))
  with pytest.raises(AssertionError, match='not equal'):
    harness.assert_replicas_equal(result.copies)


class ReducesWrongOnTheLastDevice(hpm.variable_mgr.AllReduce):
  """Sums all on every device but the last, which keeps its own."""

  variables: list[tf.Variable] = []

  def __call__(self, tensors):
    sums = [tf.add_n(values) for values in zip(*tensors, strict=True)]
    return [*([sums] * (len(tensors) - 1)), list(tensors[-1])]


def test_an_all_reduce_that_misses_a_device_is_found(cpu_devices):
  steps = harness.random_steps([[4, 4]] * NUM_STEPS)
  manager = hpm.variable_mgr.create(
    'replicated', cpu_devices[:2], all_reduce_spec=ReducesWrongOnTheLastDevice()
  )
  result = harness.train(harness.create_step(manager), steps)
  assert_found(result, harness.simulate('replicated_spread', steps))
