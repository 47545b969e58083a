"""Keras models in hpm compute what Keras computes, in every mode and precision."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm import placement
from hpm.errors import UsageError
from hpm.models import keras_adapter
from tests.parity import harness

APPLICATIONS = ['ResNet50', 'EfficientNetV2B0', 'ConvNeXtTiny', 'MobileNetV3Small']
PRECISIONS = ['float32', 'bfloat16']
RNG = [3, 5]


class UsersModel(keras.Model):
  """What users write: a frozen part, a constant, batch norm, dropout, regularisers, add_loss."""

  def __init__(self, **options):
    super().__init__(**options)
    self.centre = tf.constant(np.linspace(-0.1, 0.1, 16 * 16).reshape(16, 16, 1), tf.float32)
    self.frozen = keras.layers.Conv2D(6, 3, trainable=False)
    self.convolutions = [
      keras.layers.Conv2D(8, 3, strides=2, use_bias=False, kernel_regularizer='l2')
      for _ in range(2)
    ]
    self.norm = keras.layers.BatchNormalization()
    self.dropout = keras.layers.Dropout(0.5)
    self.top = keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.01))
    self.offset = self.add_weight(shape=(5,), initializer='zeros')
    self.calls = self.add_weight((), 'zeros', 'int32', trainable=False, name='calls')

  def call(self, x, training=False):
    x = self.frozen(x - keras.ops.cast(self.centre, x.dtype))
    for convolution in self.convolutions:
      x = keras.ops.relu(convolution(x))
    x = keras.ops.mean(self.norm(x, training=training), (1, 2))
    self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
    if training:
      self.calls.assign_add(1)
    return self.top(self.dropout(x, training=training)) + self.offset


def users_model(dtype: str = 'float32') -> hpm.models.Model:
  return hpm.models.from_keras(UsersModel, image_shape=(16, 16, 3), dtype=dtype)


def plain_model() -> keras.Model:
  """Neither batch norm nor dropout; a nested model, a name of the user's, a regulariser."""
  inner = keras.Sequential(
    [
      keras.Input((14, 14, 4)),
      keras.layers.Conv2D(4, 3, activation='relu', name='block_7'),
      keras.layers.Conv2D(4, 3, activation='relu'),
    ]
  )
  images = keras.Input((16, 16, 3))
  x = keras.layers.Conv2D(4, 3, kernel_regularizer='l2')(images)
  x = keras.layers.Flatten()(inner(x))
  return keras.Model(images, keras.layers.Dense(5)(x))


def sequential(*layers: keras.Layer, size: int = 8) -> keras.Model:
  return keras.Sequential([keras.Input((size, size, 3)), *layers])


def application(name: str, dtype: str = 'float32') -> hpm.models.Model:
  return hpm.models.create(f'keras:{name}', num_classes=5, image_size=32, dtype=dtype)


def create_step(model, mode, devices, optimizer='momentum', **options):
  return harness.create_step(harness.create_manager(mode, devices), optimizer, model, **options)


def normalized(images: np.ndarray) -> np.ndarray:
  return hpm.pipelines.normalize(images).numpy()


def assert_trains(model, mode, devices, num_steps=2):
  """Losses are finite, what can be trained moves, what is frozen stays, replicas are equal."""
  step = create_step(model, mode, devices)
  before = {name: value.numpy() for name, value in step.snapshot().items()}
  result = harness.train(
    step, harness.random_steps([[2] * len(devices)] * num_steps, (model.image_shape))
  )
  assert step.num_traces == 1
  assert np.isfinite([metrics.loss for metrics in result.metrics]).all()
  unmoved = [
    name
    for name in model.param_specs
    if np.array_equal(result.values[f'params/{name}'], before[f'params/{name}'])
    and np.abs(result.values[f'slots/momentum/{name}']).max() > 1e-6  # else lost in rounding
  ]
  assert not unmoved
  if mode != 'independent':
    harness.assert_replicas_equal(result.copies)
  return before, result


# What is computed is what Keras computes.


def users_keras_model() -> keras.Model:
  model = UsersModel()
  model(np.zeros((1, 16, 16, 3), np.float32))
  return model


def keras_application(name: str) -> keras.Model:
  options = {} if name == 'ResNet50' else {'include_preprocessing': False}
  return getattr(keras.applications, name)(
    weights=None, classes=5, input_shape=(32, 32, 3), classifier_activation=None, **options
  )


@pytest.mark.parametrize(
  'name, dtype',
  [
    ('users', 'float32'),
    ('users', 'bfloat16'),
    ('users', 'float16'),
    ('MobileNetV3Small', 'float32'),
    *(
      pytest.param(name, dtype, marks=pytest.mark.long)
      for dtype in PRECISIONS
      for name in APPLICATIONS
      if (name, dtype) != ('MobileNetV3Small', 'float32')
    ),
  ],
)
def test_a_step_is_that_of_a_plain_keras_loop(name, dtype, cpu_devices):
  keras.utils.set_random_seed(1)
  with keras_adapter.building(dtype, 'NHWC'):
    model = users_keras_model() if name == 'users' else keras_application(name)
  image_shape = (16, 16, 3) if name == 'users' else None
  adapted = hpm.models.from_keras(model, image_shape=image_shape)
  ((batch,),) = harness.random_steps([[4]], adapted.image_shape)
  result = harness.train(create_step(adapted, 'replicated_cpu', cpu_devices[:1]), [[batch]])

  # The loop as Keras's guide has it, on the model itself, with the step's seeds.
  generators = [v for v in model.variables if v.name == 'seed_generator_state']
  for variable, seed in zip(generators, keras_adapter.seed_states([0, 0], len(generators))):
    variable.assign(seed)
  loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  @tf.function
  def plain_step(images, labels):
    with tf.GradientTape() as tape:
      loss = loss_fn(labels, model(images, training=True))
      loss += sum(tf.cast(x, tf.float32) for x in model.losses)
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

  loss, gradients = plain_step(hpm.pipelines.normalize(batch[0], dtype), batch[1])
  np.testing.assert_allclose(result.metrics[0].loss, loss, rtol=1e-5)
  # After the first step the momentum is the gradient. Where that is rounding alone (a bias before
  # a batch norm), it is compared with the largest one.
  largest = max(np.abs(gradient).max() for gradient in gradients)
  for parameter, gradient in zip(adapted.param_specs, gradients, strict=True):
    difference = np.abs(result.values[f'slots/momentum/{parameter}'] - gradient).max()
    assert difference <= 1e-5 * max(np.abs(gradient).max(), 1e-4 * largest), parameter
  weights = {id(v) for v in model.weights}
  state = [v for v in model.non_trainable_variables if id(v) in weights]
  for key, variable in zip(adapted.state_specs, state):
    assert harness.relative_error(result.values[f'state/{key}'], variable.numpy()) <= 1e-5, key


def test_batch_norm_moves_its_variance_by_the_biased_one(cpu_devices):
  model = hpm.models.from_keras(
    sequential(keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dense(5))
  )
  ((batch,),) = harness.random_steps([[4]], (8, 8, 3))
  result = harness.train(create_step(model, 'replicated_cpu', cpu_devices[:1]), [[batch]])
  expected = 0.99 + 0.01 * normalized(batch[0]).var((0, 1, 2))
  np.testing.assert_allclose(
    result.values['state/batch_normalization/moving_variance'], expected, rtol=1e-6
  )


def test_the_penalty_is_the_sum_of_the_keras_losses():
  model = users_keras_model()
  adapted = hpm.models.from_keras(model, image_shape=(16, 16, 3))
  images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
  penalty = adapted.forward(*adapted.init(), images, training=False).penalty
  model(images)
  assert len(model.losses) == 4  # two kernels, add_loss, the activity
  np.testing.assert_allclose(penalty, sum(model.losses), rtol=1e-6)


def test_images_reach_the_model_in_the_range_that_it_asks_for():
  layers = [keras.layers.Flatten(), keras.layers.Dense(2)]
  model = sequential(*layers)
  adapted = hpm.models.from_keras(model, input_range=(0, 255))
  grey = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
  logits, _ = adapted.apply(*adapted.init(), normalized(grey), training=False)
  np.testing.assert_allclose(logits, model(grey.astype(np.float32)), rtol=1e-4, atol=1e-3)


def test_initial_values_are_those_of_the_keras_model():
  model = plain_model()
  model.set_weights([np.full(w.shape, i, np.float32) for i, w in enumerate(model.weights)])
  for seed in (0, 1):
    params, state = hpm.models.from_keras(model).init(seed)
    assert not state
    for i, value in enumerate(params.values()):
      np.testing.assert_array_equal(value, np.full(value.shape, i))


# Modes and precisions.


@pytest.mark.parametrize('dtype', PRECISIONS)
@pytest.mark.parametrize('mode', harness.MODES)
def test_a_users_model_trains_in_every_mode(mode, dtype, cpu_devices):
  # On three devices a mean over towers would move frozen values by rounding.
  before, result = assert_trains(users_model(dtype), mode, cpu_devices[:3])
  for name in ('conv2d/kernel', 'conv2d/bias', 'centre_constant'):
    np.testing.assert_array_equal(result.values[f'state/{name}'], before[f'state/{name}'])
  moving = 'state/batch_normalization/moving_mean'
  assert not np.array_equal(result.values[moving], before[moving])
  assert result.values['state/calls'] == 2  # calls, counted in integers
  assert result.values['state/calls'].dtype == np.int64


def test_gradients_survive_float16_by_the_loss_scale(cpu_devices):
  ((batch,),) = harness.random_steps([[4]], (16, 16, 3))
  gradients = {}
  for dtype, scale in (('float32', 1.0), ('float16', 128.0)):
    model = hpm.models.from_keras(plain_model, dtype=dtype)  # masks would differ by dtype
    step = create_step(model, 'replicated_cpu', cpu_devices[:1], loss_scale=scale)
    gradients[dtype] = harness.train(step, [[batch]]).values['slots/momentum/conv2d/kernel']
  assert harness.relative_error(gradients['float16'], gradients['float32']) < 0.02


def test_a_model_in_channels_first_takes_nchw_images():
  model = hpm.models.from_keras(
    lambda: keras.Sequential(
      [keras.Input((3, 8, 10)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5)]
    ),
    data_format='NCHW',
  )
  assert (model.data_format, model.image_shape) == ('NCHW', (8, 10, 3))
  logits, _ = model.apply(*model.init(), tf.ones([2, 3, 8, 10]), training=False)
  assert logits.shape == (2, 5)
  assert keras.config.image_data_format() == 'channels_last'


@pytest.mark.long
@pytest.mark.parametrize('dtype', PRECISIONS)
@pytest.mark.parametrize('mode', harness.MODES)
@pytest.mark.parametrize('name', APPLICATIONS)
def test_applications_train_in_every_mode(name, mode, dtype, cpu_devices):
  assert_trains(application(name, dtype), mode, cpu_devices[:2])


@pytest.mark.parametrize('mode', harness.SYNCHRONOUS)
def test_two_devices_end_with_the_weights_of_one(mode, cpu_devices):
  model = hpm.models.from_keras(plain_model())
  steps = harness.random_steps([[2, 2]] * 3, model.image_shape)
  joined = [[tuple(np.concatenate(parts) for parts in zip(*towers))] for towers in steps]
  expected = harness.train(create_step(model, mode, cpu_devices[:1]), joined)
  actual = harness.train(create_step(model, mode, cpu_devices[:2]), steps)
  for name, value in expected.values.items():
    assert harness.relative_error(actual.values[name], value) <= 1e-5, name


@pytest.mark.parametrize('mode', ['parameter_server_spread', 'replicated_collective'])
def test_both_runtimes_give_equal_weights(mode, cpu_devices):
  model = users_model()
  devices = cpu_devices[:2]
  steps = harness.random_steps([[2, 2]] * 3, model.image_shape)
  as_function = harness.train(create_step(model, mode, devices), steps)
  in_session = harness.train_in_session(lambda: create_step(model, mode, devices), steps)
  harness.assert_agrees(in_session, as_function)


@pytest.mark.parametrize(
  'name', ['users', *(pytest.param(name, marks=pytest.mark.long) for name in APPLICATIONS)]
)
def test_every_op_stands_where_it_should_and_has_a_gpu_kernel(name):
  devices = ('/GPU:0', '/GPU:1')
  for dtype in PRECISIONS:
    model = users_model(dtype) if name == 'users' else application(name, dtype)
    with tf.Graph().as_default() as graph:
      batches = []
      for device in devices:
        with tf.device(device):
          images = tf.compat.v1.placeholder(tf.uint8, (2, *model.image_shape))
          batches.append((images, tf.compat.v1.placeholder(tf.int64, (2,))))
      metrics = create_step(model, 'replicated_spread', devices).build(batches)
      assert placement.check(graph, list(metrics)) == []


def test_constants_of_layers_go_into_a_plain_graph():
  model = hpm.models.create('keras:EfficientNetB0', num_classes=5, image_size=32)
  constants = [name for name in model.state_specs if name.endswith('_constant')]
  assert constants == ['normalization/mean_constant', 'normalization/variance_constant']
  images = np.zeros((1, 32, 32, 3), np.float32)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    logits = session.run(model.apply(*model.init(), tf.constant(images), training=False)[0])
  np.testing.assert_allclose(
    logits, model.apply(*model.init(), images, training=False)[0], rtol=1e-5, atol=1e-6
  )


def test_a_checkpoint_goes_from_one_build_of_a_model_to_another(cpu_devices, tmp_path):
  steps = harness.random_steps([[2, 2]] * 4, (16, 16, 3))
  written = create_step(users_model(), 'replicated_spread', cpu_devices[:2])
  harness.train(written, steps[:2])
  path = hpm.checkpoint.save(str(tmp_path), written)
  expected = harness.train(written, steps[2:])
  read = create_step(users_model(), 'parameter_server_cpu', cpu_devices[:2])
  assert hpm.checkpoint.restore(path, read) == []
  actual = harness.train(read, steps[2:])
  for name, value in expected.values.items():
    assert harness.relative_error(actual.values[name], value) <= 1e-5, name


# Random numbers.


def test_masks_differ_between_towers_and_between_steps(cpu_devices):
  model = hpm.models.from_keras(
    sequential(keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(5))
  )
  (((images, labels), _),) = harness.random_steps([[2, 2]], (8, 8, 3))
  # With a rate of 0 momentum sums the gradients of equal weights: only the masks can differ.
  optimizer = hpm.optimizers.create('momentum', learning_rate=0.0, momentum=0.0)
  step = create_step(model, 'independent', cpu_devices[:2], optimizer)
  gradients = []
  for _ in range(2):
    step([(images, labels)] * 2)
    gradients += [copy.slots['momentum']['dense/kernel'].numpy() for copy in step.manager.copies]
  dropped = [tuple((gradient == 0).all(1)) for gradient in gradients]
  assert len(set(dropped)) == 4


def test_masks_follow_from_rng_alone():
  model = users_model()
  params, state = model.init()
  images = np.ones((2, 16, 16, 3), np.float32)
  first, again = (model.apply(params, state, images, True, tf.constant(RNG))[0] for _ in range(2))
  np.testing.assert_array_equal(first, again)
  other = model.apply(params, state, images, True, tf.constant([3, 6]))[0]
  assert not np.array_equal(first, other)
  assert not any('seed' in name for name in model.state_specs)


def test_named_applications_begin_with_the_same_values_every_time():
  first, second = (
    {name: value.numpy() for name, value in application('MobileNetV3Small').init()[0].items()}
    for _ in range(2)
  )
  assert first.keys() == second.keys()
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name])


def test_an_application_brings_its_own_image_size():
  assert hpm.models.create('keras:EfficientNetV2B2').image_size == 260
  assert hpm.models.create('keras:MobileNetV3Small').image_size == 224  # it takes any


def test_an_application_takes_options_of_its_own():
  model = hpm.models.create('keras:MobileNetV3Small', alpha=0.75, num_classes=7, image_size=32)
  assert (model.num_classes, model.image_size) == (7, 32)
  assert model.num_params < application('MobileNetV3Small').num_params
  # With its own preprocessing it gets the grey levels that it asks for, and computes the same.
  scaled = hpm.models.create(
    'keras:MobileNetV3Small', num_classes=5, image_size=32, include_preprocessing=True
  )
  images = normalized(np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8))
  logits, expected = (
    model.apply(*model.init(), images, training=False)[0]
    for model in (scaled, application('MobileNetV3Small'))
  )
  assert harness.relative_error(logits.numpy(), expected.numpy()) < 1e-4


# Names.


def test_names_are_the_users_or_counted_within_the_model():
  for _ in range(2):  # Keras goes on counting
    model = hpm.models.from_keras(plain_model())
    assert list(model.param_specs) == [
      f'{layer}/{variable}'
      for layer in ('conv2d', 'sequential/block_7', 'sequential/conv2d', 'dense')
      for variable in ('kernel', 'bias')
    ]
    assert model.name == 'functional'
  for _ in range(2):
    assert list(users_model().param_specs) == [
      'variable',
      'conv2d_1/kernel',
      'conv2d_2/kernel',
      'batch_normalization/gamma',
      'batch_normalization/beta',
      'dense/kernel',
      'dense/bias',
    ]


def test_counts_of_parameters_and_multiply_adds():
  model = hpm.models.from_keras(plain_model())
  assert model.num_params == 4 * 28 + 2 * 4 * 37 + 5 * 401
  assert model.num_macs == 14 * 14 * 4 * 27 + (12 * 12 + 10 * 10) * 4 * 36 + 5 * 400


# Models by name.


def test_names_are_checked_without_tensorflow():
  code = """
import sys
from hpm import models
good = ['resnet50', 'keras:ResNet50', 'keras:no_matter', 'my.own_module:build', 'mine:Net']
bad = ['resnet', 'keras:', ':build', 'my.module:', 'my/module.py:build', 'a:b:c', 'a..b:c', '']
for name in good:
  models.check_name(name)
for name in bad:
  try:
    models.check_name(name)
  except ValueError:
    continue
  raise AssertionError(name)
assert 'tensorflow' not in sys.modules
"""
  subprocess.run([sys.executable, '-c', code], check=True)


USERS_MODULE = """
import keras
import hpm

def network(num_classes=3, image_size=8):
  return keras.Sequential([
    keras.Input((image_size, image_size, 3)), keras.layers.Flatten(),
    keras.layers.Dense(num_classes)])

def fixed():
  return network(3)

def ours(num_classes=3, image_size=8, dtype='float32'):
  return hpm.models.create('lenet', num_classes=num_classes, image_size=20, dtype=dtype)

def nothing():
  pass

def demanding(width):
  return network()
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
  (tmp_path / 'users_module.py').write_text(USERS_MODULE)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield 'users_module'
  sys.modules.pop('users_module', None)


def test_a_users_function_is_called_with_what_it_takes(users_module):
  model = hpm.models.create(f'{users_module}:network', num_classes=4, dtype='bfloat16')
  assert (model.name, model.num_classes, model.dtype) == ('users_module:network', 4, 'bfloat16')
  assert hpm.models.create(f'{users_module}:fixed', num_classes=3, image_size=8).image_size == 8
  model = hpm.models.create(f'{users_module}:ours', num_classes=4, dtype='float16')
  assert (model.name, model.num_classes, model.dtype) == ('lenet', 4, 'float16')
  assert keras.config.dtype_policy().name == 'float32'


@pytest.mark.parametrize(
  'name, options, message',
  [
    ('keras:resnet50', {}, 'did you mean ResNet50'),
    ('keras:ResNet50', {'alpha': 1.0}, "option of keras:ResNet50 'alpha'"),
    ('keras:ResNet50', {'weights': 'imagenet'}, 'weights is decided here'),
    ('keras:ResNet50', {'recompute': True}, 'keras:ResNet50 is built by Keras'),
    ('users_module:demanding', {}, 'users_module:demanding needs width'),
    ('keras:InceptionV3', {'image_size': 32}, 'keras:InceptionV3: .* at least 75x75'),
    ('keras:ResNet50', {'dtype': 'float64'}, 'use float32, float16, bfloat16'),
    ('no_such.module:f', {}, 'there is no module no_such'),
    ('users_module:netwrok', {}, 'did you mean network'),
    ('users_module:nothing', {}, 'returned an object of type NoneType'),
    ('users_module:fixed', {'num_classes': 4}, 'has 3 classes, not 4'),
    ('users_module:fixed', {'image_size': 9}, r'takes images of \(8, 8, 3\), not \(9, 9, 3\)'),
    ('users_module:fixed', {'width': 9}, "option of users_module:fixed 'width'"),
    ('users_module:ours', {'image_size': 32}, None),
    ('users_module:ours', {'data_format': 'NCHW'}, 'has NHWC, not .NCHW.'),
    ('rsenet50', {}, 'did you mean resnet50'),
  ],
)
def test_what_a_name_does_not_give_is_refused(users_module, name, options, message):
  if message is None:  # taken by the function, so its business
    assert hpm.models.create(name, **options).image_size == 20
    return
  with pytest.raises(UsageError, match=message):
    hpm.models.create(name, **options)


# Refusals.


class Foreign(keras.layers.Layer):
  """Does to its input what the test says, with something that is not its own."""

  def __init__(self, function):
    super().__init__()
    self.function = function

  def call(self, x):
    return self.function(x)


def times(factor) -> Foreign:
  return Foreign(lambda x: x * factor)


class AssignsKernel(keras.layers.Dense):
  def call(self, x):
    y = super().call(x)
    self.kernel.assign(self.kernel * 0.5)
    return y


def dense(**options):
  return [keras.layers.Flatten(), keras.layers.Dense(5, **options)]


def two_outputs():
  images = keras.Input((8, 8, 3))
  x = keras.layers.Flatten()(images)
  return keras.Model(images, [keras.layers.Dense(5)(x), keras.layers.Dense(5)(x)])


def two_inputs():
  images = [keras.Input((8, 8, 3)), keras.Input((8, 8, 3))]
  x = keras.layers.Flatten()(keras.layers.Add()(images))
  return keras.Model(images, keras.layers.Dense(5)(x))


def half_weights():
  return sequential(keras.layers.Flatten(), keras.layers.Dense(5, dtype='float16'))


def mixed_layouts():
  return sequential(
    keras.layers.Conv2D(4, 3, data_format='channels_last'),
    keras.layers.GlobalAveragePooling2D(data_format='channels_first'),
    keras.layers.Dense(5),
  )


class BuiltInCall(keras.Model):
  """Keras traces `call` to build it, and the layer's constants stay behind in that graph."""

  def __init__(self):
    super().__init__()
    self.scaling = keras.layers.Normalization(mean=[0.1, 0.0, 0.1], variance=[0.5, 0.4, 0.5])
    self.top = keras.layers.Dense(5)

  def call(self, x):
    return self.top(keras.ops.mean(self.scaling(x), (1, 2)))


def frozen():
  model = sequential(*dense())
  model.trainable = False
  return model


@pytest.mark.parametrize(
  'build, options, message',
  [
    (lambda: sequential(*dense()), {'num_classes': 6}, 'has 5 classes, not 6'),
    (lambda: sequential(*dense()), {'image_shape': (9, 9, 3)}, 'not .9, 9, 3.'),
    (lambda: UsersModel(), {}, 'users_model does not say for which images'),
    (lambda: UsersModel(), {'image_shape': (2, 2, 3)}, 'does not build for images of .2, 2, 3.'),
    (BuiltInCall, {'image_shape': (8, 8, 3)}, "keeps 'mean' from the graph.*in the model's build"),
    (two_outputs, {}, r'one output \[b, num_classes\] is needed'),
    (two_inputs, {}, 'one input, images of rank 4'),
    (lambda: sequential(keras.layers.Conv2D(4, 3)), {}, 'one output'),
    (lambda: sequential(*dense(activation='softmax')), {}, 'ends in dense.*take logits'),
    (lambda: sequential(*dense(), keras.layers.Softmax()), {}, 'ends in softmax.*take logits'),
    (frozen, {}, 'nothing to train'),
    (half_weights, {}, 'in float16: weights must be float32'),
    (mixed_layouts, {}, 'mixes channels_first and channels_last'),
    (
      lambda: sequential(keras.layers.BatchNormalization(synchronized=True), *dense()),
      {},
      'batch_normalization.* is synchronised',
    ),
    (lambda: sequential(*dense()), {'input_range': (1, 0)}, 'input_range'),
    (lambda: 3, {}, 'needs a Keras model, not int'),
  ],
)
@pytest.mark.filterwarnings('ignore:Layer .* looks like it has unbuilt state', 'ignore:`build..`')
def test_what_can_not_be_adapted_is_refused_by_name(build, options, message):
  with pytest.raises(UsageError, match=message):
    hpm.models.from_keras(build(), **options)


def test_a_built_model_is_not_rebuilt_in_another_precision_or_layout():
  model = sequential(keras.layers.Conv2D(4, 3), *dense())
  with pytest.raises(UsageError, match="to compute in float32, not bfloat16.*'mixed_bfloat16'"):
    hpm.models.from_keras(model, dtype='bfloat16')
  with pytest.raises(UsageError, match="built in NHWC, not NCHW.*'channels_first'"):
    hpm.models.from_keras(model, data_format='NCHW')
  with tf.Graph().as_default(), pytest.raises(UsageError, match='build the Keras model eagerly'):
    hpm.models.from_keras(plain_model)


@pytest.mark.parametrize(
  'layer, message',
  [
    (lambda: Foreign(lambda x: x + keras.random.normal((3,))), 'keras.random.SeedGenerator'),
    (lambda: times(tf.Variable(2.0)), 'reads a variable'),
    (lambda: times(tf.ones([8, 8, 3])), r'reads a tensor \[8, 8, 3\]'),
    (lambda: AssignsKernel(3), 'assigns its parameter assigns_kernel/kernel in call'),
  ],
)
def test_what_a_step_can_not_have_is_refused_when_it_is_built(layer, message, cpu_devices):
  model = hpm.models.from_keras(sequential(layer(), *dense()))
  step = create_step(model, 'replicated_cpu', cpu_devices[:1])
  with pytest.raises(UsageError, match=message):
    step(harness.random_steps([[2]], (8, 8, 3))[0])


def test_what_an_application_can_not_have_is_refused():
  model = users_model()
  images = np.zeros((1, 16, 16, 3), np.float32)
  with pytest.raises(UsageError, match='needs rng'):
    model.apply(*model.init(), images, training=True)
  with pytest.raises(UsageError, match='without cross_replica'):
    model.apply(*model.init(), images, True, tf.constant(RNG), cross_replica=tf.identity)
