"""What managers have in common: places, reads, snapshots, refusals."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.variable_mgr import packing
from hpm.variable_mgr.parameter_server import balance
from hpm.variable_mgr.transform import Mean

MODES = [
  ('independent', {}),
  ('parameter_server', {'local_parameter_device': 'cpu'}),
  ('parameter_server', {'local_parameter_device': 'spread'}),
  ('replicated', {'local_parameter_device': 'cpu'}),
  ('replicated', {'local_parameter_device': 'spread'}),
  ('replicated', {'all_reduce_spec': 'collective'}),
]


def values():
  params = {'big': tf.fill([10, 10], 2.0), 'middle': tf.fill([50], 3.0), 'small': tf.fill([3], 4.0)}
  state = {'average': tf.zeros([40]), 'count': tf.constant(7, tf.int64)}
  return params, state


def create(name, devices, options, optimizer='momentum'):
  manager = hpm.variable_mgr.create(name, devices, **options)
  manager.create(*values(), hpm.optimizers.create(optimizer, 0.1))
  return manager


def test_balance_puts_the_largest_first_where_least_is():
  sizes = {'a': 4, 'b': 10, 'c': 5, 'd': 4, 'e': 1}
  # b -> 0 (10); c -> 1 (5); a -> 1 (9); d -> 1 (13), as 9 < 10; e -> 0 (11).
  places = balance(sizes, ['/GPU:0', '/GPU:1'])
  assert places == {'b': '/GPU:0', 'c': '/GPU:1', 'a': '/GPU:1', 'd': '/GPU:1', 'e': '/GPU:0'}


def test_balance_is_the_same_in_every_process_where_sizes_are_equal():
  names = ['z', 'y', 'x', 'w']
  assert balance(dict.fromkeys(names, 1), ['/GPU:0', '/GPU:1']) == {
    'z': '/GPU:0', 'y': '/GPU:1', 'x': '/GPU:0', 'w': '/GPU:1'
  }  # fmt: skip


@pytest.mark.parametrize('shapes', [[(2, 3)], [(), (1,), (4, 0, 2), (3, 5, 7)], [(5,), (5,)]])
def test_unpacking_is_the_inverse_of_packing(shapes):
  rng = np.random.default_rng(0)
  tensors = [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]
  flat = packing.pack(tensors)
  assert flat.shape == [sum(np.prod(shape, dtype=int) for shape in shapes)]
  for got, tensor in zip(packing.unpack(flat, [t.shape for t in tensors]), tensors, strict=True):
    np.testing.assert_array_equal(got, tensor)
    assert got.shape == tensor.shape


@pytest.mark.parametrize(('name', 'options'), MODES)
def test_every_tower_reads_what_was_created(name, options, cpu_devices):
  manager = create(name, cpu_devices[:3], options)
  read = tf.function(lambda: [manager.read(tower) for tower in range(3)], autograph=False)
  expected = values()
  for tower in read():
    for own, created in zip(tower, expected, strict=True):
      assert list(own) == list(created)
      for key, value in created.items():
        np.testing.assert_array_equal(own[key], value)
        assert own[key].dtype == value.dtype


@pytest.mark.parametrize(('name', 'options'), MODES)
def test_restoring_a_snapshot_brings_every_copy_back(name, options, cpu_devices):
  manager = create(name, cpu_devices[:2], options, 'adam')
  for copy in manager.copies:
    for _, variable in copy.items():
      variable.assign(variable + tf.ones([], variable.dtype))
  snapshot = {key: value.numpy() for key, value in manager.snapshot().items()}
  assert 'slots/m/big' in snapshot and 'slots/v/small' in snapshot
  np.testing.assert_array_equal(snapshot['params/middle'], np.full(50, 4.0))
  assert snapshot['state/count'] == 8
  other = create(name, cpu_devices[:2], options, 'adam')
  other.restore({key: tf.constant(value) for key, value in snapshot.items()})
  for copy in other.copies:
    for key, variable in copy.items():
      np.testing.assert_array_equal(variable.numpy(), snapshot[key], err_msg=key)


def test_a_snapshot_has_the_same_names_in_all_synchronous_modes(cpu_devices):
  names = [
    set(create(name, cpu_devices[:2], options).snapshot())
    for name, options in MODES
    if name != 'independent'
  ]
  assert all(own == names[0] for own in names)


def test_the_copies_of_independent_stand_beside_the_canonical_one(cpu_devices):
  manager = create('independent', cpu_devices[:2], {})
  manager.copies[1].params['small'].assign([1.0, 2.0, 3.0])
  snapshot = manager.snapshot()
  np.testing.assert_array_equal(snapshot['params/small'], [4.0, 4.0, 4.0])
  np.testing.assert_array_equal(snapshot['replica/1/params/small'], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(('name', 'options'), MODES)
def test_a_tower_s_integer_state_is_never_averaged(name, options, cpu_devices):
  optimizer = hpm.optimizers.create('sgd', 0.5)
  manager = hpm.variable_mgr.create(name, cpu_devices[:2], **options)
  manager.create(*values(), optimizer)

  @tf.function(autograph=False)
  def step():
    towers = []
    for i, device in enumerate(manager.devices):
      params, state = manager.read(i)
      with tf.device(device):
        gradients = {key: tf.ones_like(value) for key, value in params.items()}
        state = {'average': state['average'] + i + 1.0, 'count': state['count'] + 10 * (i + 1)}
        samples = tf.constant(1, tf.int64)
      towers.append(hpm.variable_mgr.TowerResult(gradients, state, samples))
    with tf.device('/CPU:0'):
      zero = tf.constant(0, tf.int64)
    update = manager.update(towers, Mean(), optimizer, zero)
    with tf.control_dependencies(update.operations):
      return tf.constant(0)

  step()
  after = manager.snapshot()
  alone = name == 'independent'
  assert after['state/count'] == 17  # the first tower's
  np.testing.assert_array_equal(after['state/average'], np.full(40, 1.0 if alone else 1.5))
  np.testing.assert_array_equal(after['params/small'], np.full(3, 3.5))  # mean gradient: 1


def test_a_manager_takes_one_model_only(cpu_devices):
  manager = create('replicated', cpu_devices[:2], {})
  with pytest.raises(hpm.errors.UsageError, match='make one for each model'):
    manager.create(*values())


def test_wrong_options_are_refused(cpu_devices):
  with pytest.raises(hpm.errors.UsageError, match='at least one device'):
    hpm.variable_mgr.create('independent', ())
  with pytest.raises(hpm.errors.UsageError, match="'replicatd': did you mean replicated"):
    hpm.variable_mgr.create('replicatd', cpu_devices[:2])
  for name in ('replicated', 'parameter_server'):
    with pytest.raises(hpm.errors.UsageError, match="'gpu': use cpu or spread"):
      hpm.variable_mgr.create(name, cpu_devices[:2], local_parameter_device='gpu')
