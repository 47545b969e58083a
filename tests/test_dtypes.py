"""Mixed precision, read from the graph: what is computed in half precision, and what never is."""

import pytest
import tensorflow as tf

import hpm

HALF = {'fp16': tf.float16, 'bf16': tf.bfloat16}


def network(b, images):
  x = tf.nn.relu(b.batch_norm('bn', b.conv('conv', images, 8, 3)))
  return b.dense('logits', b.global_average_pool(x), 4)


def build(precision, loss_scale=None):
  """The step's graph in one precision, and the tower's own."""
  policy = hpm.precision.create(precision)
  model = hpm.models.Model(
    network, name='m', image_shape=(8, 8, 3), num_classes=4, dtype=policy.compute_dtype
  )
  manager = hpm.variable_mgr.create('replicated', ['/CPU:0', '/CPU:1'])
  optimizer = hpm.optimizers.create('momentum', 0.1)
  step = hpm.TrainStep(model, manager, optimizer, loss_scale=loss_scale or policy.loss_scale)
  batches = [
    (tf.compat.v1.placeholder(tf.uint8, (4, 8, 8, 3)), tf.compat.v1.placeholder(tf.int64, (4,)))
    for _ in range(2)
  ]
  metrics = step.build(batches)
  graph = tf.compat.v1.get_default_graph()
  call = next(op for op in graph.get_operations() if op.name.startswith('tower_0/Partitioned'))
  return step, metrics, graph, graph._get_function(call.get_attr('f').name).graph


def of_type(graph, *kinds):
  return [op for op in graph.get_operations() if op.type in kinds]


@pytest.mark.parametrize('precision', HALF)
def test_products_are_in_half_precision_forwards_and_backwards(precision):
  with tf.Graph().as_default():
    *_, tower = build(precision)
    products = of_type(
      tower, 'Conv2D', 'Conv2DBackpropFilter', 'Conv2DBackpropInput', 'MatMul', 'BiasAdd', 'Relu'
    )
    assert {op.type for op in products} >= {'Conv2D', 'Conv2DBackpropFilter', 'MatMul'}
    assert {op.outputs[0].dtype for op in products} == {HALF[precision]}


@pytest.mark.parametrize('precision', ['fp32', *HALF])
@pytest.mark.parametrize('scale', [None, hpm.precision.DynamicLossScale(2.0)], ids=['', 'dynamic'])
def test_variables_updates_and_metrics_are_float32(precision, scale):
  with tf.Graph().as_default():
    step, metrics, graph, _ = build(precision, scale)
    for name, variable in step.named_variables().items():
      counter = name in ('step', 'samples', 'finite_steps')
      assert variable.dtype == (tf.int64 if counter else tf.float32), name
    outer = [t for op in graph.get_operations() for t in op.outputs]
    assert not [t.name for t in outer if t.dtype in HALF.values()]
    assert metrics.loss.dtype == tf.float32


@pytest.mark.parametrize('precision', HALF)
def test_loss_and_batch_statistics_are_float32_in_the_tower(precision):
  with tf.Graph().as_default():
    *_, tower = build(precision)
    (loss,) = of_type(tower, 'SparseSoftmaxCrossEntropyWithLogits')
    assert loss.outputs[0].dtype == tf.float32
    (norm,) = of_type(tower, 'FusedBatchNormV3')
    x, scale, *_ = norm.inputs
    assert (x.dtype, scale.dtype) == (HALF[precision], tf.float32)
    assert {t.dtype for t in norm.outputs[1:3]} == {tf.float32}  # the moving averages
    assert {t.dtype for t in tower.outputs} == {tf.float32}  # gradients, state, loss


@pytest.mark.parametrize('precision', HALF)
def test_each_parameter_is_cast_once(precision):
  with tf.Graph().as_default():
    step, *_, tower = build(precision)
    down = [
      op.inputs[0].name
      for op in of_type(tower, 'Cast')
      if op.inputs[0].dtype == tf.float32
      and op.outputs[0].dtype == HALF[precision]
      and op.inputs[0].op.type == 'Placeholder'
    ]
    assert len(down) == len(set(down))
    # The convolution's kernel, the dense layer's kernel and bias; batch norm's stay as they are.
    assert len(down) == 3
    assert len(step.model.param_specs) == 5
