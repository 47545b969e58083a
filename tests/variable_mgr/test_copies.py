"""What each all-reduce moves between 2 to 8 GPUs: counted in the graph, by formula and by hand.

`hpm.placement` counts the graph's edges and knows no algorithm. The formulas stand here.
"""

from collections import Counter
import math

import pytest
import tensorflow as tf

import hpm
from hpm import placement
from hpm.errors import UsageError
from hpm.variable_mgr import packing
from hpm.variable_mgr.composed import groups_of

SIZE = 1680 * 4  # bytes: divides into shares for 2 to 8 devices, twice over


def gpus(count):
  return [f'/GPU:{i}' for i in range(count)]


def moved(all_reduce, devices, shapes=((1680,),)):
  """(source, destination, bytes) of every copy, devices as 'GPU:3'."""
  with tf.Graph().as_default() as graph:
    lists = []
    for device in devices:
      with tf.device(device):
        lists.append([tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes])
    results = all_reduce(lists)
    assert placement.check(graph, results) == []
    for device, values in zip(devices, results, strict=True):
      for value, shape in zip(values, shapes, strict=True):
        assert placement.device_of(value.op) == f'/device:{device[1:]}'
        assert value.shape == shape
    copies = placement.copies(graph, results)
  assert not any(copy.on_host for copy in copies)
  return [
    (copy.source.removeprefix('/device:'), copy.destination.removeprefix('/device:'), copy.bytes)
    for copy in copies
  ]


def reduce(spec, devices, **options):
  return hpm.variable_mgr.all_reduce(spec, devices, **options)


def totals(copies):
  """Bytes that leave, and that reach, each device."""
  sent, received = Counter(), Counter()
  for source, destination, size in copies:
    sent[source] += size
    received[destination] += size
  return sent, received


@pytest.mark.parametrize('count', range(2, 9))
@pytest.mark.parametrize(
  'spec', ['copy', 'psgpu', 'xring', 'xring#2', 'rechd', 'hierarchical_copy']
)
def test_every_algorithm_over_devices_moves_each_tensor_n_minus_1_times_to_and_fro(spec, count):
  copies = moved(reduce(spec, gpus(count)), gpus(count))
  assert sum(size for *_, size in copies) == 2 * (count - 1) * SIZE
  assert {source[:3] for source, *_ in copies} == {'GPU'}


@pytest.mark.parametrize('count', range(2, 9))
@pytest.mark.parametrize('spec', ['psgpu', 'xring', 'xring#2'])
def test_rings_and_shards_load_every_device_alike(spec, count):
  sent, received = totals(moved(reduce(spec, gpus(count)), gpus(count)))
  share = 2 * (count - 1) * SIZE // count
  assert sent == received == {f'GPU:{i}': share for i in range(count)}


@pytest.mark.parametrize('count', range(2, 9))
@pytest.mark.parametrize('shards', [1, 2])
def test_rings_talk_to_neighbours_alone(count, shards):
  copies = moved(reduce(f'xring#{shards}', gpus(count)), gpus(count))
  for source, destination, size in copies:
    assert int(destination[4:]) == (int(source[4:]) + 1) % count
    assert size == SIZE // (count * shards)
  assert len(copies) == 2 * (count - 1) * count * shards


@pytest.mark.parametrize('count', [2, 4, 8])
def test_halving_and_doubling_exchanges_a_logarithm_of_times(count):
  copies = moved(reduce('rechd', gpus(count)), gpus(count))
  exchanges = int(math.log2(count))
  assert Counter(source for source, *_ in copies) == {
    f'GPU:{i}': 2 * exchanges for i in range(count)
  }
  sizes = Counter(size for *_, size in copies)
  assert sizes == {SIZE >> (k + 1): 2 * count for k in range(exchanges)}


@pytest.mark.parametrize('count', range(2, 9))
@pytest.mark.parametrize('shards', [1, 3])
def test_shards_on_the_host_come_from_all_devices_and_return(count, shards):
  copies = moved(reduce(f'pscpu#{shards}', gpus(count)), gpus(count))
  sent, received = totals(copies)
  assert sent == received == {'CPU:0': count * SIZE, **{f'GPU:{i}': SIZE for i in range(count)}}
  assert {size for *_, size in copies} == {SIZE // shards}


@pytest.mark.parametrize('count', range(2, 9))
def test_hierarchical_copy_crosses_between_the_halves_once_each_way(count):
  half = count // 2
  copies = moved(reduce('hierarchical_copy', gpus(count)), gpus(count), [(1680,)] * (2 * half))
  crossing = Counter(
    (int(source[4:]), int(destination[4:]))
    for source, destination, _ in copies
    if (int(source[4:]) < half) != (int(destination[4:]) < half)
  )
  # 2 * half tensors, over half links, each way.
  assert crossing == {pair: 2 for i in range(half) for pair in ((i, half + i), (half + i, i))}


def test_hierarchical_copy_by_hand():
  # Tensor 0 meets on 0, the other half's main device being 2.
  copies = moved(reduce('hierarchical_copy', gpus(4)), gpus(4))
  assert Counter(copies) == Counter(
    [
      ('GPU:1', 'GPU:0', SIZE),  # each half sums
      ('GPU:3', 'GPU:2', SIZE),
      ('GPU:2', 'GPU:0', SIZE),  # the sums meet
      ('GPU:0', 'GPU:2', SIZE),  # and go back
      ('GPU:0', 'GPU:1', SIZE),
      ('GPU:2', 'GPU:3', SIZE),
    ]
  )


def test_copy_by_hand():
  # Of three tensors on two devices the second is summed on device 1.
  copies = moved(reduce('copy', gpus(2)), gpus(2), [(1,), (2,), (3,)])
  assert Counter(copies) == Counter(
    [
      *[('GPU:1', 'GPU:0', size) for size in (4, 8, 12)],
      *[('GPU:0', 'GPU:1', size) for size in (4, 8, 12)],
    ]
  )
  copies = moved(reduce('copy', gpus(3), sum_on='/GPU:2'), gpus(3))
  assert Counter(copies) == Counter(
    (a, b, SIZE) for i in (0, 1) for a, b in ((f'GPU:{i}', 'GPU:2'), ('GPU:2', f'GPU:{i}'))
  )


def test_ring_by_hand():
  # Three shares of 12 bytes, each summed from where it starts to the device before it, then on.
  copies = moved(reduce('xring', gpus(3)), gpus(3), [(9,)])
  assert Counter(copies) == {
    ('GPU:0', 'GPU:1', 12): 4,
    ('GPU:1', 'GPU:2', 12): 4,
    ('GPU:2', 'GPU:0', 12): 4,
  }


def test_two_levels_by_hand():
  # Halves 0, 1 and 2, 3. Each sums by copy; device 0 speaks with 2 and hands on to its neighbour.
  copies = moved(reduce('copy/copy', gpus(4)), gpus(4))
  assert Counter(copies) == Counter(
    [
      ('GPU:1', 'GPU:0', SIZE),
      ('GPU:3', 'GPU:2', SIZE),
      ('GPU:2', 'GPU:0', SIZE),
      ('GPU:0', 'GPU:2', SIZE),
      ('GPU:0', 'GPU:1', SIZE),
      ('GPU:2', 'GPU:3', SIZE),
    ]
  )


def test_hosts_are_groups():
  devices = [f'/job:worker/task:{task}/GPU:{i}' for task in range(3) for i in range(2)]
  assert groups_of(devices) == [[0, 1], [2, 3], [4, 5]]
  assert groups_of(gpus(5)) == [[0, 1], [2, 3, 4]]
  assert groups_of(gpus(1)) == [[0]]


def test_ranges_go_by_size_in_bytes_limit_included():
  spec = 'pscpu:16:copy:20:xring'
  copies = moved(reduce(spec, gpus(2)), gpus(2), [(3,), (4,), (5,), (6,)])
  by_size = Counter((s[:3], d[:3], n) for s, d, n in copies)
  assert by_size == {
    ('GPU', 'CPU', 12): 2, ('CPU', 'GPU', 12): 2,  # 12 and 16 bytes on the host
    ('GPU', 'CPU', 16): 2, ('CPU', 'GPU', 16): 2,
    ('GPU', 'GPU', 20): 2,  # as a whole
    ('GPU', 'GPU', 12): 4,  # 24 bytes in two shares
  }  # fmt: skip


@pytest.mark.parametrize(('dtype', 'count'), [('float16', 2), ('bfloat16', 5)])
@pytest.mark.parametrize('spec', ['copy', 'psgpu', 'pscpu', 'xring', 'rechd', 'hierarchical_copy'])
def test_half_precision_halves_every_copy(spec, count, dtype):
  plain = moved(reduce(spec, gpus(count)), gpus(count))
  compact = moved(reduce(spec, gpus(count), transfer_dtype=dtype), gpus(count))
  assert Counter(compact) == Counter((a, b, size // 2) for a, b, size in plain)


@pytest.mark.parametrize('buckets', [1, 2, 3])
def test_repacking_moves_the_same_bytes_in_as_many_copies_as_buckets(buckets):
  shapes = [(10,), (), (3, 7), (100,), (1,), (11,)]  # 144 elements
  all_reduce = packing.Repacked(reduce('copy', gpus(3)), gpus(3), buckets)
  copies = moved(all_reduce, gpus(3), shapes)
  assert {size for *_, size in copies} == {144 * 4 // buckets}
  assert len(copies) == 4 * buckets


def test_aggregation_packs_runs_of_small_tensors():
  shapes = [(10,), (2,), (3,), (1,), (10,), (1,), (10,), (2,), (2,)]
  # Small are those of up to 12 bytes, at most two together: 2 + 3, 1 alone, 1 alone, 2 + 2.
  all_reduce = packing.Aggregated(reduce('copy', gpus(2)), gpus(2), 12, 2)
  copies = moved(all_reduce, gpus(2), shapes)
  assert Counter(size for *_, size in copies) == {40: 6, 20: 2, 4: 4, 16: 2}


def test_collectives_are_one_for_each_tensor_or_bucket():
  devices, shapes = gpus(4), [(10,), (20,), (30,)]
  for buckets, expected in ((0, [40, 80, 120]), (2, [120, 120])):
    with tf.Graph().as_default() as graph:
      lists = []
      for device in devices:
        with tf.device(device):
          lists.append([tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes])
      all_reduce = reduce('nccl', devices)
      if buckets:
        all_reduce = packing.Repacked(all_reduce, devices, buckets)
      results = all_reduce(lists)
      assert placement.check(graph, results) == []
      assert placement.copies(graph, results) == []
      parts = placement.collectives(graph, results)
    for device in devices:
      assert [p.bytes for p in parts if p.device == f'/device:{device[1:]}'] == expected


@pytest.mark.parametrize('count', range(2, 9))
def test_nccl_all_reduce_is_one_op_a_device_and_tensor_that_meet_by_name(count):
  with tf.Graph().as_default() as graph:
    lists = []
    for device in gpus(count):
      with tf.device(device):
        dtypes = ('float32', 'float16', 'float64', 'int64')
        lists.append([tf.compat.v1.placeholder(dtype, (10,)) for dtype in dtypes])
    results = reduce('nccl_all_reduce', gpus(count))(lists)
    assert placement.check(graph, results) == []  # a kernel is registered for each
    assert placement.copies(graph, results) == []
    parts = placement.collectives(graph, results)
  names = [{p.instance for p in parts if p.device == f'/device:{d[1:]}'} for d in gpus(count)]
  assert len(parts) == 4 * count
  assert all(len(own) == 4 and own == names[0] for own in names)
  assert [part.bytes for part in parts[:4]] == [40, 20, 80, 80]


def test_a_session_runs_every_member_of_a_group_under_nccl_all_reduce():
  with tf.Graph().as_default() as graph:
    lists = []
    for device in gpus(4):
      with tf.device(device):
        lists.append([tf.compat.v1.placeholder(tf.float32, (10,))])
    results = reduce('nccl_all_reduce/copy', gpus(4))(lists)
    parts = placement.collectives(graph, results)
  assert [part.device for part in parts] == [f'/device:{device[1:]}' for device in gpus(4)]


def test_nccl_all_reduce_has_no_bfloat16():
  with pytest.raises(UsageError, match="no bfloat16: use 'nccl'"):
    reduce('nccl_all_reduce', gpus(2), transfer_dtype='bfloat16')
  with tf.Graph().as_default():
    lists = [[tf.compat.v1.placeholder(tf.bfloat16, (10,))] for _ in gpus(2)]
    with pytest.raises(UsageError, match='no bfloat16'):
      reduce('nccl_all_reduce', gpus(2))(lists)
    half = reduce('nccl_all_reduce', gpus(2), transfer_dtype='float16')
    results = half([[tf.compat.v1.placeholder(tf.float32, (10,))] for _ in gpus(2)])
    assert [value.dtype for (value,) in results] == [tf.float32] * 2
    parts = placement.collectives(tf.compat.v1.get_default_graph())
    assert [part.bytes for part in parts] == [20, 20]
