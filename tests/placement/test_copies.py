"""What each manager moves in one step on 8 and on 2 GPUs, by hand.

The model has scale [12], fc/kernel [12, 5] and fc/bias [5] in float32: 48, 240 and 20 bytes, 308
together. In every mode each tower gets its seed, int32 [2], 8 bytes; it lies in host memory at both
ends, so it crosses no bus ('host'). Each tower's loss, 4 bytes, goes back to the CPU. The factor
that makes a mean of the sum, 4 bytes, goes wherever parameters are updated off the CPU; learning
rate and momentum are constants here, made where they are used. The batch size is static, so no
tower's number of samples travels.
"""

from collections import Counter
import itertools

import pytest
import tensorflow as tf

import hpm
from hpm import placement
from tests.placement import steps

EIGHT = {
  # No gradient leaves its device.
  'independent': {
    'host': {8: 8},  # seeds
    'out': {4: 8},  # the factor, for each device's own number of samples
    'back': {4: 8},  # losses
  },
  # Out: 8 * (3 variables + the seed). Back: 8 * (3 gradients + the loss).
  'parameter_server_cpu': {
    'host': {8: 8},
    'out': {48: 8, 240: 8, 20: 8},
    'back': {48: 8, 240: 8, 20: 8, 4: 8},
  },
  # Each variable lives on one GPU, so 7 others read it and 7 send a gradient: 14 copies each.
  'parameter_server_spread': {
    'host': {8: 8},
    'out': {4: 3},  # the factor, to the three GPUs that hold a variable
    'across': {48: 14, 240: 14, 20: 14},
    'back': {4: 8},
  },
  # Each gradient is summed on one GPU: 7 others send theirs and get the sum back.
  'replicated_spread': {
    'host': {8: 8},
    'out': {4: 8},  # the factor, to every replica
    'across': {48: 14, 240: 14, 20: 14},
    'back': {4: 8},
  },
  # Each gradient goes to the CPU from 8 GPUs, and its sum to 8 GPUs.
  'replicated_cpu': {
    'host': {8: 8},
    'out': {48: 8, 240: 8, 20: 8, 4: 8},
    'back': {48: 8, 240: 8, 20: 8, 4: 8},
  },
  # The gradients move inside the collective op, over no edge: see the test of collectives.
  'replicated_collective': {'host': {8: 8}, 'out': {4: 8}, 'back': {4: 8}},
  'replicated_nccl': {'host': {8: 8}, 'out': {4: 8}, 'back': {4: 8}},
}

# Every single copy on 2 GPUs: (source, destination) -> bytes.
C, G0, G1 = 'CPU:0', 'GPU:0', 'GPU:1'
ALWAYS = {(C, G0): [8], (C, G1): [8], (G0, C): [4], (G1, C): [4]}  # seeds and losses
TWO = {
  'independent': {**ALWAYS, (C, G0): [8, 4], (C, G1): [8, 4]},
  'parameter_server_cpu': {
    (C, G0): [8, 48, 240, 20],
    (C, G1): [8, 48, 240, 20],
    (G0, C): [4, 48, 240, 20],
    (G1, C): [4, 48, 240, 20],
  },
  # By size the kernel is on GPU 0; scale, then bias, on GPU 1, which holds less. GPU 1 reads the
  # kernel and returns its gradient; GPU 0 reads scale and bias and returns theirs.
  'parameter_server_spread': {
    **ALWAYS,
    (C, G0): [8, 4],
    (C, G1): [8, 4],
    (G0, G1): [240, 48, 20],
    (G1, G0): [240, 48, 20],
  },
  # The last layer's gradients first: bias on GPU 0, kernel on GPU 1, scale on GPU 0. For each of
  # them the other GPU sends its gradient and gets the sum: one copy each way.
  'replicated_spread': {
    **ALWAYS,
    (C, G0): [8, 4],
    (C, G1): [8, 4],
    (G0, G1): [240, 48, 20],
    (G1, G0): [240, 48, 20],
  },
  'replicated_cpu': {
    (C, G0): [8, 4, 48, 240, 20],
    (C, G1): [8, 4, 48, 240, 20],
    (G0, C): [4, 48, 240, 20],
    (G1, C): [4, 48, 240, 20],
  },
  'replicated_collective': {**ALWAYS, (C, G0): [8, 4], (C, G1): [8, 4]},
  'replicated_nccl': {**ALWAYS, (C, G0): [8, 4], (C, G1): [8, 4]},
}

# The model with batch norm: bn/scale, bn/offset [3], 12 bytes each, fc/kernel [3, 5], 60, fc/bias
# [5], 20; its state, twice [3], is read as 12 and 12 and returns packed into one tensor of 24.
BATCH_NORM = {
  'independent': {'host': {8: 8}, 'out': {4: 8}, 'back': {4: 8}},
  # Out: 8 * (4 parameters + 2 of state). Back: 8 * (4 gradients + the state packed + the loss).
  'parameter_server_cpu': {
    'host': {8: 8},
    'out': {12: 32, 60: 8, 20: 8},
    'back': {12: 16, 60: 8, 20: 8, 24: 8, 4: 8},
  },
  # Of 6 variables on 6 GPUs each is read by 7 others: four of 12 bytes, 28 copies. Gradients: two
  # of 12 bytes from 7 others, 14. The packed state goes from 7 GPUs to GPU 0; its mean from there
  # to the two GPUs that hold state, 2 more of 12. The factor goes to the 4 that hold parameters.
  'parameter_server_spread': {
    'host': {8: 8},
    'out': {4: 4},
    'across': {12: 44, 60: 14, 20: 14, 24: 7},
    'back': {4: 8},
  },
  # 4 gradients and the packed state: 7 copies each way for each.
  'replicated_spread': {
    'host': {8: 8},
    'out': {4: 8},
    'across': {12: 28, 60: 14, 20: 14, 24: 14},
    'back': {4: 8},
  },
  'replicated_cpu': {
    'host': {8: 8},
    'out': {12: 16, 60: 8, 20: 8, 24: 8, 4: 8},
    'back': {12: 16, 60: 8, 20: 8, 24: 8, 4: 8},
  },
  'replicated_collective': {'host': {8: 8}, 'out': {4: 8}, 'back': {4: 8}},
  'replicated_nccl': {'host': {8: 8}, 'out': {4: 8}, 'back': {4: 8}},
}


@pytest.mark.parametrize('mode', EIGHT)
def test_three_variables_on_eight_gpus(mode):
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 8))
  assert steps.moved(built.graph, built.metrics) == EIGHT[mode]


@pytest.mark.parametrize('mode', TWO)
def test_three_variables_on_two_gpus(mode):
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 2))
  copies = [
    (copy.source, copy.destination, copy.bytes)
    for copy in placement.copies(built.graph, built.metrics)
  ]
  expected = [
    (steps.device(source), steps.device(destination), size)
    for (source, destination), sizes in TWO[mode].items()
    for size in sizes
  ]
  assert sorted(copies) == sorted(expected)


@pytest.mark.parametrize('mode', BATCH_NORM)
def test_batch_norm_on_eight_gpus(mode):
  built = steps.build(steps.batch_norm_model(), steps.create_manager(mode, 8))
  assert steps.moved(built.graph, built.metrics) == BATCH_NORM[mode]


@pytest.mark.parametrize(
  ('mode', 'expected'),
  [
    # 8 * (3 + 1) out, seeds included, and 8 * (3 + 2) back.
    (
      'parameter_server_cpu',
      {
        'host': {8: 8, 16: 8},
        'out': {48: 8, 240: 8, 20: 8},
        'back': {48: 8, 240: 8, 20: 8, 4: 8},
      },
    ),
    # 8 * (1 + 1) each way: seed and factor out, loss and number of samples back.
    ('independent', {'host': {8: 8, 16: 8}, 'out': {4: 8}, 'back': {4: 8}}),
  ],
)
def test_open_batch_size_sends_each_towers_number_of_samples(mode, expected):
  """As the shape of the images, int32 [4], which lies in host memory on a GPU as well."""
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 8), batch_size=None)
  assert steps.moved(built.graph, built.metrics) == expected


def test_a_learning_rate_that_changes_is_copied_and_a_constant_is_not():
  def decay(step):
    return 0.1 / (1.0 + tf.cast(step, tf.float32))

  optimizer = hpm.optimizers.create('momentum', decay)
  built = steps.build(
    steps.three_variables(), steps.create_manager('replicated_spread', 8), optimizer
  )
  assert steps.moved(built.graph, built.metrics)['out'] == {4: 16}  # factor and rate, no momentum


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_half_transfer_halves_what_gradients_move(dtype):
  manager = hpm.variable_mgr.create('replicated', steps.gpus(8), transfer_dtype=dtype)
  built = steps.build(steps.three_variables(), manager)
  assert steps.moved(built.graph, built.metrics)['across'] == {24: 14, 120: 14, 10: 14}


@pytest.mark.parametrize('mode', ['replicated_collective', 'replicated_nccl'])
def test_collectives_have_one_part_on_each_gpu_in_one_order(mode):
  built = steps.build(steps.batch_norm_model(), steps.create_manager(mode, 8))
  parts = placement.collectives(built.graph, built.metrics)
  by_device = {
    place: [part for part in parts if part.device == steps.device(place)]
    for place in (f'GPU:{i}' for i in range(8))
  }
  order = [part.instance for part in by_device['GPU:0']]
  assert len(set(order)) == 5  # four gradients, the last layer's first, and the packed state
  for mine in by_device.values():
    assert [part.instance for part in mine] == order
    assert [part.bytes for part in mine] == [20, 60, 12, 12, 24]
    for before, after in itertools.pairwise(mine):
      op = built.graph.get_operation_by_name(after.name)
      assert before.name in {op.name for op in placement.ops_of(built.graph, op)}
  assert len(parts) == 40


@pytest.mark.parametrize('mode', EIGHT)
def test_updates_send_one_message_home_from_each_gpu(mode):
  """Cross-device control edges cost a message each; the metrics wait for all updates."""
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 8))
  edges = placement.control_edges(built.graph, built.metrics)
  # Variables live on 8 GPUs, or on the CPU alone, or spread: three of them on three GPUs.
  expected = {'parameter_server_cpu': 0, 'parameter_server_spread': 3}.get(mode, 8)
  assert Counter(edge.destination for edge in edges) == Counter({'/device:CPU:0': expected})


@pytest.mark.parametrize(
  ('options', 'sizes'),
  [
    # An eighth is 73 bytes: the large one goes alone.
    ({'all_reduce_spec': 'nccl'}, [60, 400, 60, 60]),
    ({'all_reduce_spec': 'collective', 'transfer_dtype': 'bfloat16'}, [30, 200, 30, 30]),
    ({'all_reduce_spec': 'nccl', 'gradient_repacking': 0}, [20, 20, 20, 400, *[20] * 6]),
    ({'all_reduce_spec': 'nccl', 'gradient_repacking': 2}, [288, 292]),
    ({'all_reduce_spec': 'nccl', 'agg_small_grads_max_bytes': 20}, [60, 400, 120]),
    ({'all_reduce_spec': 'nccl_all_reduce'}, [20, 20, 20, 400, *[20] * 6]),
  ],
  ids=str,
)  # fmt: skip
def test_small_gradients_go_into_a_collective_together(options, sizes):
  def network(b, images):
    x = b.flatten(images)
    for i in range(6):
      x = x[:, :5] * tf.cast(
        b.param(f'scale{i}', (5,), lambda shape, seed: tf.ones(shape)), x.dtype
      )
    x = b.dense('fc', tf.tile(x, [1, 4]), 5)
    for i in range(6, 8):
      x *= tf.cast(b.param(f'scale{i}', (5,), lambda shape, seed: tf.ones(shape)), x.dtype)
    return x

  model = hpm.models.Model(network, name='scales', image_shape=(2, 2, 3), num_classes=5)
  manager = hpm.variable_mgr.create('replicated', steps.gpus(2), **options)
  built = steps.build(model, manager)
  parts = placement.collectives(built.graph, built.metrics)
  assert [part.bytes for part in parts if part.device == steps.device('GPU:0')] == sizes
