"""Every op of a step for 8 GPUs stands where its manager says, proven from the graph alone."""

import pytest
import tensorflow as tf

import hpm
from hpm import placement
from tests.placement import steps

GPUS = [f'GPU:{i}' for i in range(8)]
HOST = {'step': 'CPU:0', 'samples': 'CPU:0'}  # the counters, in every mode
NAMES = ('scale', 'fc/kernel', 'fc/bias')


def with_slots(places):
  """Momentum's slots stand with their parameters."""
  return {**places, **{f'momentum/{name}': place for name, place in places.items()}}


def replicas(names):
  return {f'replica_{i}/{name}': f'GPU:{i}' for i in range(8) for name in names}


COPIES = replicas([*NAMES, *(f'momentum/{name}' for name in NAMES)])
TOKENS = {f'collective_token{f"_{i}" if i else ""}': f'GPU:{i}' for i in range(8)}

# Variable -> device. Spread by size, largest first: kernel 240 bytes, scale 48, bias 20.
VARIABLES = {
  'independent': COPIES,
  'parameter_server_cpu': with_slots(dict.fromkeys(NAMES, 'CPU:0')),
  'parameter_server_spread': with_slots(
    {'fc/kernel': 'GPU:0', 'scale': 'GPU:1', 'fc/bias': 'GPU:2'}
  ),
  'replicated_spread': COPIES,
  'replicated_cpu': COPIES,
  'replicated_collective': {**COPIES, **TOKENS},
  'replicated_nccl': {**COPIES, **TOKENS},
}

# Bytes of a parameter -> where its gradients are summed by an add. Where nothing is summed, or by a
# collective, there is none. 'spread' takes the last layer's gradients first.
SUMS = {
  'independent': {},
  'parameter_server_cpu': {240: 'CPU:0', 48: 'CPU:0', 20: 'CPU:0'},
  'parameter_server_spread': {240: 'GPU:0', 48: 'GPU:1', 20: 'GPU:2'},
  'replicated_spread': {20: 'GPU:0', 240: 'GPU:1', 48: 'GPU:2'},
  'replicated_cpu': {240: 'CPU:0', 48: 'CPU:0', 20: 'CPU:0'},
  'replicated_collective': {},
  'replicated_nccl': {},
}


def canonical(places):
  return {key: steps.device(place) for key, place in places.items()}


@pytest.mark.parametrize('mode', steps.MODES)
def test_step_stands_where_its_manager_says(mode):
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 8))
  places = canonical({**HOST, **VARIABLES[mode]})
  assert steps.faults(built, places, sums=canonical(SUMS[mode])) == []


@pytest.mark.parametrize('mode', steps.MODES)
def test_state_of_batch_norm_stands_with_its_copy(mode):
  built = steps.build(steps.batch_norm_model(), steps.create_manager(mode, 8))
  names = ['bn/scale', 'bn/offset', 'fc/kernel', 'fc/bias']
  state = ['bn/moving_mean', 'bn/moving_variance']
  if mode == 'parameter_server_cpu':
    places = {**with_slots(dict.fromkeys(names, 'CPU:0')), **dict.fromkeys(state, 'CPU:0')}
  elif mode == 'parameter_server_spread':
    # 60, 20, then four of 12 bytes in the order of the network, parameters before state.
    places = with_slots(
      {'fc/kernel': 'GPU:0', 'fc/bias': 'GPU:1', 'bn/scale': 'GPU:2', 'bn/offset': 'GPU:3'}
    ) | {'bn/moving_mean': 'GPU:4', 'bn/moving_variance': 'GPU:5'}
  else:
    places = replicas([*names, *(f'momentum/{name}' for name in names), *state])
    if mode in ('replicated_collective', 'replicated_nccl'):
      places |= TOKENS
  assert steps.faults(built, canonical({**HOST, **places})) == []


@pytest.mark.parametrize('mode', ['parameter_server_spread', 'replicated_spread'])
def test_open_batch_size_keeps_everything_in_its_place(mode):
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 8), batch_size=None)
  places = canonical({**HOST, **VARIABLES[mode]})
  assert steps.faults(built, places, sums=canonical(SUMS[mode])) == []


@pytest.mark.parametrize('mode', steps.MODES)
def test_evaluation_calls_one_tower_on_each_gpu(mode):
  graph, metrics = steps.build_eval(steps.three_variables(), steps.create_manager(mode, 8))
  assert placement.check(graph, metrics) == []
  towers = steps.tower_calls(graph, metrics)
  assert sorted(call.device for call in towers) == sorted(map(steps.device, GPUS))
  assert len({call.function for call in towers}) == 1
  assert {tensor.device for tensor in metrics} == {'/device:CPU:0'}


@pytest.mark.parametrize('mode', steps.MODES)
def test_snapshot_and_restore_stay_on_each_variables_device(mode):
  with tf.Graph().as_default() as graph:
    step = hpm.TrainStep(
      steps.batch_norm_model(),
      steps.create_manager(mode, 8),
      hpm.optimizers.create('momentum', 0.1),
    )
    values = step.snapshot()
    with tf.device('/CPU:0'):
      held = {n: tf.compat.v1.placeholder(v.dtype, v.shape) for n, v in values.items()}
    assigned = step.restore(held)
  assert placement.check(graph, [*values.values(), *assigned]) == []


def test_metrics_are_on_the_cpu():
  built = steps.build(steps.three_variables(), steps.create_manager('replicated_spread', 8))
  assert {tensor.device for tensor in built.metrics} == {'/device:CPU:0'}


def test_resnet50_on_eight_gpus():
  """161 parameters, 106 pieces of state; all of it, initialisers included, has its place."""
  built = steps.build(hpm.models.create('resnet50'), steps.create_manager('replicated_spread', 8))
  assert placement.check(built.graph, built.metrics) == []
  assert sorted(call.device for call in steps.tower_calls(built.graph, built.metrics)) == sorted(
    map(steps.device, GPUS)
  )
  assert built.step.num_traces == 1
  # 25,557,032 float32 parameters and 53,120 of state, each summed on one GPU: 7 send, 7 get.
  table = steps.moved(built.graph, built.metrics)
  assert sum(size * count for size, count in table['across'].items()) == 14 * 4 * (25557032 + 53120)
  assert table['out'] == {4: 8}
  assert table['back'] == {4: 8}
  assert table['host'] == {8: 8}
