"""How edges, devices and bytes are read from a graph: small graphs, counted by hand."""

import pytest
import tensorflow as tf

from hpm import placement


@pytest.fixture
def graph():
  with tf.Graph().as_default() as graph:
    yield graph


def on(device, function, *args, **options):
  with tf.device(device):
    return function(*args, **options)


def test_a_tensor_is_copied_once_to_each_device_that_wants_it(graph):
  x = on('/GPU:0', tf.zeros, [3, 5], name='x')
  for device in ('/GPU:1', '/GPU:1', '/CPU:0', '/GPU:0'):
    on(device, tf.square, x)
  assert sorted(placement.copies(graph)) == [
    placement.Copy('x:0', '/device:GPU:0', '/device:CPU:0', 60, False),
    placement.Copy('x:0', '/device:GPU:0', '/device:GPU:1', 60, False),
  ]


def test_each_output_of_an_op_is_a_copy_of_its_own(graph):
  parts = on('/GPU:0', tf.split, on('/GPU:0', tf.zeros, [6]), 2)
  on('/GPU:1', tf.add_n, parts)
  assert [copy.bytes for copy in placement.copies(graph)] == [12, 12]


@pytest.mark.parametrize(
  ('dtype', 'size'), [(tf.float16, 14), (tf.uint8, 7), (tf.int64, 56), (tf.bool, 7)]
)
def test_bytes_come_from_shape_and_type(graph, dtype, size):
  x = on('/CPU:0', tf.compat.v1.placeholder, dtype, [7])
  on('/GPU:0', tf.identity, x)
  assert [copy.bytes for copy in placement.copies(graph)] == [size]


def test_bytes_of_an_open_shape_are_unknown(graph):
  on('/GPU:0', tf.identity, on('/CPU:0', tf.compat.v1.placeholder, tf.float32, [None, 7]))
  assert [copy.bytes for copy in placement.copies(graph)] == [None]


def test_what_is_in_host_memory_at_both_ends_crosses_no_bus(graph):
  seed = on('/CPU:0', tf.compat.v1.placeholder, tf.int32, [2])
  on('/GPU:0', tf.identity, seed)  # int32 stays on the host
  on('/GPU:1', tf.bitwise.invert, seed)  # but bitwise ops work in the GPU's memory
  assert sorted((c.destination, c.on_host) for c in placement.copies(graph)) == [
    ('/device:GPU:0', True),
    ('/device:GPU:1', False),
  ]


def test_only_what_the_fetches_need_is_counted(graph):
  x = on('/CPU:0', tf.zeros, [2])
  wanted = on('/GPU:0', tf.square, x)
  on('/GPU:1', tf.square, x)
  assert len(placement.copies(graph)) == 2
  assert [copy.destination for copy in placement.copies(graph, wanted)] == ['/device:GPU:0']
  assert [copy.destination for copy in placement.copies(graph, {'a': [wanted.op]})] == [
    '/device:GPU:0'
  ]


def test_fetches_bring_their_control_inputs(graph):
  first = on('/CPU:0', tf.no_op, name='first')
  with tf.control_dependencies([first]):
    last = on('/CPU:0', tf.no_op, name='last')
  on('/CPU:0', tf.no_op, name='other')
  assert [op.name for op in placement.ops_of(graph, last)] == ['first', 'last']


def test_control_edges_between_devices_count_once_for_each_device(graph):
  done = on('/GPU:0', tf.no_op, name='done')
  with tf.control_dependencies([done]):
    for device in ('/CPU:0', '/CPU:0', '/GPU:0', '/GPU:1'):
      on(device, tf.no_op)
  assert sorted(placement.control_edges(graph)) == [
    placement.Edge('done', '/device:GPU:0', '/device:CPU:0'),
    placement.Edge('done', '/device:GPU:0', '/device:GPU:1'),
  ]


def test_a_handle_read_on_another_device_is_a_resource_edge_and_no_copy(graph):
  variable = on('/GPU:0', tf.Variable, on('/GPU:0', tf.zeros, [2]), name='v')
  on('/GPU:1', tf.raw_ops.ReadVariableOp, resource=variable.handle, dtype=tf.float32)
  edge = placement.Edge('v:0', '/device:GPU:0', '/device:GPU:1')
  assert placement.resource_edges(graph) == [edge]
  assert placement.copies(graph) == []
  assert len(placement.check(graph)) == 1


@pytest.mark.parametrize('device', ['', '/GPU', '/job:worker', '/job:worker/task:1'])
def test_a_device_without_kind_and_number_is_none(graph, device):
  op = on(device, tf.no_op)
  assert placement.device_of(op) == ''
  assert placement.undevised_ops(graph) == [op]


def test_devices_of_other_tasks_keep_their_task(graph):
  op = on('/job:ps/replica:0/task:3/CPU:0', tf.no_op)
  assert placement.device_of(op) == '/job:ps/replica:0/task:3/device:CPU:0'


def test_one_function_called_on_several_devices(graph):
  double = tf.function(lambda x: x * 2.0, autograph=False)
  x = on('/CPU:0', tf.compat.v1.placeholder, tf.float32, [2])
  for i in range(3):
    on(f'/GPU:{i}', double, x)
  calls = placement.calls(graph)
  assert [call.device for call in calls] == [f'/device:GPU:{i}' for i in range(3)]
  assert len({call.function for call in calls}) == 1
  assert placement.check(graph) == []


def test_a_call_without_a_device_is_an_op_without_a_device(graph):
  double = tf.function(lambda x: x * 2.0, autograph=False)
  double(on('/CPU:0', tf.compat.v1.placeholder, tf.float32, [2]))
  assert [op.type for op in placement.undevised_ops(graph)] == ['PartitionedCall']


def test_an_op_deep_in_a_function_that_stands_elsewhere_is_found(graph):
  @tf.function(autograph=False)
  def inner(x):
    return on('/CPU:0', tf.square, x)

  @tf.function(autograph=False)
  def outer(x):
    return inner(x)

  on('/GPU:2', outer, on('/GPU:2', tf.compat.v1.placeholder, tf.float32, [2]))
  (found,) = placement.foreign_ops(graph)
  assert (found.name, found.device, found.caller_device) == (
    'Square',
    '/device:CPU:0',
    '/device:GPU:2',
  )


def test_arguments_of_a_traced_function_have_no_device_to_be_missed():
  @tf.function(autograph=False, input_signature=[tf.TensorSpec([2], tf.float32)])
  def double(x):
    return on('/GPU:0', tf.multiply, x, 2.0)

  graph = double.get_concrete_function().graph
  assert [op.type for op in placement.undevised_ops(graph)] == ['Identity']  # the result's


def test_collectives_are_read_with_their_key_and_size(graph):
  for i in range(2):
    with tf.device(f'/GPU:{i}'):
      tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([5]),
        group_size=tf.constant(2),
        group_key=tf.constant(1),
        instance_key=tf.constant(17),
        ordering_token=[],
        merge_op='Add',
        final_op='Id',
        name=f'sum_{i}',
      )
      tf.raw_ops.NcclAllReduce(
        input=tf.zeros([3], tf.float16),
        reduction='sum',
        num_devices=2,
        shared_name='mine',
        name=f'nccl_{i}',
      )
  assert placement.collectives(graph) == [
    placement.Collective('sum_0', '/device:GPU:0', 17, 20, 2),
    placement.Collective('nccl_0', '/device:GPU:0', b'mine', 6),
    placement.Collective('sum_1', '/device:GPU:1', 17, 20, 2),
    placement.Collective('nccl_1', '/device:GPU:1', b'mine', 6),
  ]
  assert placement.check(graph) == []
