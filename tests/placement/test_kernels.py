"""Every op of a step that stands on a GPU has a GPU kernel for its types.

TensorFlow's registry is asked, which lists GPU kernels without a GPU. It doesn't know what a kernel
refuses at run time.
"""

import itertools

import pytest
import tensorflow as tf

import hpm
from hpm import placement
from hpm.errors import UsageError
from tests.placement import steps

MODELS = ('trivial', 'lenet', 'alexnet', 'resnet50', 'resnet50_v1.5')
LAYOUTS = ('NHWC', 'NCHW')


def test_this_tensorflow_lists_gpu_kernels():
  assert {kernel.device_type for kernel in placement.kernels_of('Conv2D')} == {'GPU'}
  assert placement.kernels_of('DecodeJpeg') == []


def test_a_tensorflow_without_gpu_kernels_is_refused(monkeypatch):
  monkeypatch.setattr(placement, '_registered', lambda op_type, kind: ())
  with pytest.raises(UsageError, match="pip install 'tensorflow', in place of tensorflow-cpu"):
    placement.check(tf.Graph())


def audited():
  """(model, layout, precision). resnet50_v1.5 has resnet50's ops: all its cases take long."""
  cases = []
  for name, layout, precision in itertools.product(MODELS, LAYOUTS, ('fp32', 'fp16', 'bf16')):
    long = name == 'resnet50_v1.5' and (layout, precision) != ('NHWC', 'fp16')
    marks = [pytest.mark.long] if long else []
    cases.append(pytest.param(name, layout, precision, marks=marks))
  return cases


@pytest.mark.parametrize(('name', 'data_format', 'precision'), audited())
def test_models_train_and_evaluate_on_a_gpu(name, data_format, precision):
  policy = hpm.precision.create(precision)
  model = hpm.models.create(name, dtype=policy.compute_dtype, data_format=data_format)
  built = steps.build(
    model,
    steps.create_manager('replicated_spread', 1),
    hpm.optimizers.create('sgd', 0.1),  # the others have their own test
    loss_scale=policy.loss_scale,
  )
  assert placement.check(built.graph) == []
  graph, metrics = steps.build_eval(model, steps.create_manager('replicated_spread', 1))
  assert placement.check(graph, metrics) == []

  # TensorFlow derives a random op's key and counter on the host and draws on the GPU: two copies
  # for each of AlexNet's two dropouts, towards the GPU. Nothing makes the host wait.
  copied = placement.host_copies(built.graph, built.metrics)
  assert [copy for copy in copied if copy.to_host] == []
  assert len(copied) == (4 if name == 'alexnet' else 0)
  assert placement.host_copies(graph, metrics) == []


@pytest.mark.parametrize('batch_size', [4, None])
@pytest.mark.parametrize('mode', steps.MODES)
def test_managers_update_on_gpus(mode, batch_size):
  built = steps.build(
    steps.batch_norm_model(), steps.create_manager(mode, 2), batch_size=batch_size
  )
  assert placement.check(built.graph) == []
  graph, metrics = steps.build_eval(
    steps.batch_norm_model(), steps.create_manager(mode, 2), batch_size
  )
  assert placement.check(graph, metrics) == []


@pytest.mark.parametrize('mode', ['independent', 'replicated_nccl'])
@pytest.mark.parametrize('name', hpm.optimizers.OPTIMIZERS)
def test_optimizers_update_on_gpus(name, mode):
  optimizer = hpm.optimizers.create(name, lambda step: 0.1 / (1.0 + tf.cast(step, tf.float32)))
  built = steps.build(steps.three_variables(), steps.create_manager(mode, 2), optimizer)
  assert placement.check(built.graph) == []


@pytest.mark.parametrize('spec', ['copy', 'nccl'])
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_half_transfer_sums_on_gpus(dtype, spec):
  manager = hpm.variable_mgr.create(
    'replicated', steps.gpus(2), all_reduce_spec=spec, transfer_dtype=dtype
  )
  built = steps.build(steps.three_variables(), manager)
  assert placement.check(built.graph) == []


def test_label_smoothing_and_cross_replica_batch_norm_on_a_gpu():
  loss = hpm.losses.softmax_cross_entropy(label_smoothing=0.1)
  built = steps.build(
    steps.batch_norm_model(), steps.create_manager('replicated_spread', 2), loss=loss
  )
  assert placement.check(built.graph) == []

  model = steps.batch_norm_model(dtype='float16')
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    params, state = model.init(0)
    images = tf.compat.v1.placeholder(tf.float16, (4, 2, 2, 3))
    with tf.GradientTape() as tape:
      tape.watch(params)
      logits, new_state = model.apply(
        params, state, images, training=True, cross_replica=lambda sums: sums * 2.0
      )
    gradients = tape.gradient(logits, params)
  assert placement.check(graph, [gradients, new_state]) == []


# What has no kernel is found, wherever it hides.


def on_gpu(build):
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    build()
  return placement.check_kernels(graph)


@pytest.mark.parametrize(
  ('build', 'problem'),
  [
    (
      lambda: tf.Variable(tf.constant(1), name='count'),
      "VarHandleOp 'count' on /device:GPU:0: no GPU kernel for dtype=int32",
    ),
    (
      lambda: tf.constant('text', name='label'),
      "Const 'label' on /device:GPU:0: no GPU kernel for dtype=string",
    ),
    (
      lambda: tf.compat.v1.summary.scalar('loss', tf.constant(1.0)),
      "ScalarSummary 'loss' on /device:GPU:0: no GPU kernel for T=float32",
    ),
    (
      lambda: tf.io.decode_jpeg(tf.compat.v1.placeholder(tf.string, [])),
      "DecodeJpeg 'DecodeJpeg' on /device:GPU:0: no GPU kernel for ",
    ),
    (
      lambda: tf.compat.v1.ConditionalAccumulator(tf.float32, name='gradient'),
      "ResourceConditionalAccumulator 'gradient' on /device:GPU:0: no GPU kernel for dtype=float32",
    ),
  ],
  ids=['int32_variable', 'string', 'summary', 'jpeg', 'accumulator'],
)
def test_op_without_a_gpu_kernel(build, problem):
  assert problem in on_gpu(build)


def in_call(x):
  return tf.function(tf.strings.as_string, autograph=False)(x)


def in_branch(x):
  return tf.cond(x > 0, lambda: tf.strings.as_string(x), lambda: tf.strings.as_string(-x))


def in_loop(x):
  def body(i):
    text = tf.strings.as_string(i)
    return tf.strings.to_number(text) + 1.0

  return tf.while_loop(lambda i: i < 3.0, body, [x])


def in_case(x):
  branches = [lambda: x, lambda: tf.strings.to_number(tf.strings.as_string(x))]
  return tf.switch_case(tf.cast(x, tf.int32), branches)


def in_call_in_branch(x):
  return tf.cond(x > 0, lambda: in_call(x), lambda: in_call(-x))


def in_gradient(x):
  @tf.function(autograph=False)
  def forward(y):
    @tf.custom_gradient
    def identity(z):
      return tf.identity(z), lambda dz: tf.strings.to_number(tf.strings.as_string(dz))

    return identity(y)

  return tf.gradients(forward(x), x)


@pytest.mark.parametrize(
  'build', [in_call, in_branch, in_loop, in_case, in_call_in_branch, in_gradient]
)
def test_functions_are_walked_at_any_depth(build):
  def step():
    x = tf.compat.v1.placeholder(tf.float32, [])
    tf.function(build, autograph=False)(x)

  found = on_gpu(step)
  assert any(line.startswith("AsString '") and ' in ' in line for line in found), found


def test_host_op_inside_a_function_called_on_a_gpu_is_no_kernel_problem():
  @tf.function(autograph=False)
  def log(x):
    with tf.device('/CPU:0'):
      return tf.strings.to_number(tf.strings.as_string(x))

  def step():
    log(tf.compat.v1.placeholder(tf.float32, []))

  assert on_gpu(step) == []


def test_gpu_op_inside_a_function_called_on_the_host_is_checked():
  @tf.function(autograph=False)
  def log(x):
    with tf.device('/GPU:1'):
      return tf.strings.as_string(x)

  with tf.Graph().as_default() as graph, tf.device('/CPU:0'):
    log(tf.compat.v1.placeholder(tf.float32, []))
  (problem,) = [line for line in placement.check_kernels(graph) if 'AsString' in line]
  assert '/device:GPU:1' in problem


def test_default_attributes_count_where_a_node_leaves_them_out():
  """A stripped graph has no `out_type`; the kernel's constraint on it still has to be met."""
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    tf.shape(tf.compat.v1.placeholder(tf.float32, [None]), name='shape')
  node = graph.get_operation_by_name('shape').node_def
  del node.attr['out_type']
  kernel = placement._kernel(node, 'GPU')
  assert kernel is not None
  assert kernel.host_arguments == {'output'}


def test_kernels_for_any_device_count_after_the_gpus_own():
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    number = tf.constant(1, name='int')  # int32 constants have a DEFAULT kernel alone
  assert placement.check_kernels(graph) == []
  kernel = placement._kernel(number.op.node_def, 'GPU')
  assert (kernel.device_type, kernel.host_arguments) == ('DEFAULT', {'output'})


def test_labelled_kernels_are_another_kernel():
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    pooled = tf.nn.max_pool2d(tf.compat.v1.placeholder(tf.float32, (1, 4, 4, 1)), 2, 2, 'VALID')
  node = pooled.op.node_def
  assert placement._kernel(node, 'GPU').label == ''
  node.attr['_kernel'].s = b'eigen_tensor'
  assert placement._kernel(node, 'GPU').label == 'eigen_tensor'
  node.attr['_kernel'].s = b'no_such_label'
  assert placement._kernel(node, 'GPU') is None
  assert placement.check_kernels(graph) == []


def test_int32_arithmetic_between_host_and_device_memory_is_listed():
  """Xor of int32 is done on the GPU, while the seed of a random op must be on the host."""

  def build():
    seed = tf.compat.v1.placeholder(tf.int32, [2], name='seed')
    mixed = tf.bitwise.bitwise_xor(seed, seed, name='mixed')
    tf.raw_ops.StatelessRandomGetKeyCounter(seed=mixed, name='key')

  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    build()
  copies = placement.host_copies(graph)
  assert placement.HostCopy('mixed', '/device:GPU:0', True, 'key') in copies


def test_int32_sums_stay_on_the_host():
  with tf.Graph().as_default() as graph, tf.device('/GPU:0'):
    seed = tf.raw_ops.Shape(input=tf.compat.v1.placeholder(tf.float32, [None, 2]))
    tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed + tf.constant([7, 0]))
  assert placement.host_copies(graph) == []


def test_host_copies_inside_a_function_are_listed_for_each_device_that_calls_it():
  @tf.function(autograph=False)
  def mix(seed):
    return tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.bitwise.bitwise_xor(seed, seed))

  with tf.Graph().as_default() as graph:
    for i in range(2):
      with tf.device(f'/GPU:{i}'):
        mix(tf.raw_ops.Shape(input=tf.compat.v1.placeholder(tf.float32, [None, 2])))
  copies = placement.host_copies(graph)
  assert sorted((copy.device, copy.to_host) for copy in copies) == [
    (f'/device:GPU:{i}', to_host)
    for i in range(2)
    # The argument to the xor; key and counter, which come from the host, to the function's results;
    # and the xor's result to the random op.
    for to_host in (False, False, False, True)
  ]
