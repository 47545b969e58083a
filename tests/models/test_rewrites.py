"""Convolutions computed in other ways: equal results and gradients, the same parameters."""

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import UsageError
from hpm.models import WITH_STRIDED_STEM, rewrites

# One of each family with a strided stem, with the smallest images that it takes here.
STEMS = {
  'resnet18': 32,
  'resnet50_v1.5': 32,
  'resnet18_v2': 36,
  'densenet121': 32,
  'googlenet': 32,
  'inception1': 32,
  'alexnet': 64,
}
QUICK = ('resnet18',)
REWRITES = pytest.mark.parametrize('rewrite', hpm.models.STEM_REWRITES)


def difference(actual, expected):
  actual, expected = np.asarray(actual), np.asarray(expected)
  return np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30)


def assert_equal_with_gradients(function, reference, *arguments, rtol=2e-6):
  """Values and gradients by all arguments, from the same random gradient."""

  def run(f):
    @tf.function(autograph=False)
    def traced(*arguments):
      with tf.GradientTape() as tape:
        tape.watch(arguments)
        y = f(*arguments)
        loss = tf.reduce_sum(y * tf.random.stateless_normal(tf.shape(y), [7, 7]))
      return y, *tape.gradient(loss, arguments)

    return traced(*arguments)

  for actual, expected in zip(run(function), run(reference), strict=True):
    assert actual.shape == expected.shape
    assert difference(actual, expected) < rtol


def test_pointwise_is_a_convolution():
  x, kernel = (tf.random.stateless_normal(s, [1, 2]) for s in ([2, 5, 7, 6], [1, 1, 6, 4]))
  assert_equal_with_gradients(
    rewrites.pointwise, lambda x, k: tf.nn.conv2d(x, k, 1, 'SAME'), x, kernel
  )


@pytest.mark.parametrize(('height', 'width', 'strides'), [(6, 8, 2), (7, 5, 2), (9, 4, 3)])
def test_subsample_is_a_strided_slice(height, width, strides):
  x = tf.random.stateless_normal([2, height, width, 3], [1, 2])
  assert_equal_with_gradients(
    lambda x: rewrites.subsample(x, strides), lambda x: x[:, ::strides, ::strides], x
  )


@pytest.mark.parametrize('size', [1, 3])
@pytest.mark.parametrize('strides', [1, 2])
@pytest.mark.parametrize('pixels', [8, 9])
def test_the_builders_convolutions_are_tensorflows(size, strides, pixels):
  model = hpm.models.Model(
    lambda b, x: b.flatten(b.conv('conv', x, 4, size, strides, size // 2)),
    name='test',
    image_shape=(pixels, pixels, 8),
    num_classes=4,
  )
  params, _ = model.init()
  x = tf.random.stateless_normal([2, pixels, pixels, 8], [1, 2])
  pads = [[0, 0], [size // 2] * 2, [size // 2] * 2, [0, 0]]
  assert_equal_with_gradients(
    lambda x, kernel: model.apply({'conv/kernel': kernel}, {}, x, True)[0],
    lambda x, kernel: tf.reshape(tf.nn.conv2d(x, kernel, strides, pads), [2, -1]),
    x,
    params['conv/kernel'],
  )


def test_strided_pointwise_convolutions_of_one_tensor_share_its_pixels():
  model = hpm.models.create('resnet50', image_size=32, num_classes=10)
  with tf.Graph().as_default() as graph:
    params, state = model.init()
    model.apply(params, state, tf.zeros([2, 32, 32, 3]), True)
  assert sum(op.type == 'Slice' for op in graph.get_operations()) == 3  # stages 2 to 4


def stem_of(name, **options):
  return hpm.models.create(name, image_size=STEMS[name], num_classes=10, **options)


def outcome(model, params, state, images):
  """Logits, gradients of the parameters, new state."""

  @tf.function(autograph=False)
  def run(params, state, images):
    with tf.GradientTape() as tape:
      tape.watch(params)
      logits, new_state = model.apply(params, state, images, True, tf.constant([1, 2]))
      loss = tf.reduce_sum(tf.sin(logits))
    gradients = tape.gradient(loss, params, unconnected_gradients='zero')
    return {
      'logits': logits,
      **{f'gradient of {name}': value for name, value in gradients.items()},
      **new_state,
    }

  return run(params, state, images)


@REWRITES
@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in STEMS]
)
def test_a_rewritten_stem_computes_the_same_from_the_same_parameters(name, rewrite, monkeypatch):
  # Smooth in the place of ReLU, which turns rounding near zero into whole changes; and of the pool.
  monkeypatch.setattr(tf.nn, 'relu', tf.nn.softplus)

  def mean(x, *args, **options):  # where a pool pads first, by the lowest of all numbers
    return average(tf.maximum(x, -30.0), *args, **options)

  average = tf.nn.avg_pool2d
  monkeypatch.setattr(tf.nn, 'max_pool2d', mean)
  plain, rewritten = stem_of(name), stem_of(name, stem_rewrite=rewrite)
  assert [(n, s.shape) for n, s in rewritten.param_specs.items()] == [
    (n, s.shape) for n, s in plain.param_specs.items()
  ]
  params, state = plain.init(seed=3)
  for key, value in rewritten.init(seed=3)[0].items():
    np.testing.assert_array_equal(value, params[key])
  images = tf.random.stateless_normal([8, *plain.image_shape], [3, 4])
  expected = outcome(plain, params, state, images)
  for key, value in outcome(rewritten, params, state, images).items():
    # Batch norm over a few values at the end of such small images makes rounding grow: to 2e-5.
    assert difference(value, expected[key]) < 1e-4, key


@REWRITES
def test_the_stem_alone_agrees_to_rounding(rewrite):
  def stem(**options):
    return hpm.models.Model(
      lambda b, x: b.flatten(b.conv('conv1', x, 16, 7, 2, 3)),
      name='stem',
      image_shape=(224, 224, 3),
      num_classes=4,
      **options,
    )

  params, _ = stem().init()
  assert params['conv1/kernel'].shape == (7, 7, 3, 16)
  images = tf.random.stateless_normal([2, 224, 224, 3], [1, 2])
  assert_equal_with_gradients(
    lambda kernel: stem(stem_rewrite=rewrite).apply({'conv1/kernel': kernel}, {}, images, True)[0],
    lambda kernel: stem().apply({'conv1/kernel': kernel}, {}, images, True)[0],
    params['conv1/kernel'],
    rtol=1e-5,  # sums of 25,000 terms, in another order
  )


@REWRITES
def test_a_rewritten_stem_in_half_precision_and_under_xla(rewrite):
  for dtype, tolerance in (('float32', 1e-4), ('bfloat16', 1 / 8)):
    model = stem_of('resnet18', dtype=dtype, stem_rewrite=rewrite)
    params, state = model.init()
    images = tf.cast(tf.random.stateless_normal([2, *model.image_shape], [3, 4]), dtype)
    expected, _ = stem_of('resnet18').apply(params, state, tf.cast(images, 'float32'), False)
    compiled = tf.function(
      lambda x: model.apply(params, state, x, False)[0],  # noqa: B023
      autograph=False,
      jit_compile=dtype == 'float32',
    )
    assert difference(compiled(images), expected) < tolerance


def test_space_to_depth_is_one_convolution_of_stride_1():
  model = hpm.models.create('resnet50', stem_rewrite='space_to_depth')
  with tf.Graph().as_default() as graph:
    params, state = model.init()
    model.apply(params, state, tf.zeros([2, 224, 224, 3]), True)
    squares = next(op for op in graph.get_operations() if op.type == 'SpaceToDepth')
    first = next(op for op in graph.get_operations() if op.type == 'Conv2D')
  assert squares.outputs[0].shape == (2, 112, 112, 12)
  assert first.inputs[1].shape == (4, 4, 12, 64)
  assert first.outputs[0].shape == (2, 112, 112, 64)
  assert first.get_attr('strides') == [1, 1, 1, 1]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'name': 'resnet50', 'stem_rewrite': 'space2depth'}, 'did you mean space_to_depth'),
    ({'name': 'vgg16', 'stem_rewrite': 'pad_channels'}, 'model vgg16 does not begin with'),
    ({'name': 'resnet20', 'stem_rewrite': 'pad_channels'}, 'model resnet20 does not begin with'),
    ({'name': 'keras:ResNet50', 'stem_rewrite': 'pad_channels'}, 'keras:ResNet50 does not begin'),
  ],
)
def test_what_can_not_be_rewritten_is_refused_by_name(options, message):
  with pytest.raises(UsageError, match=message):
    hpm.models.create(**options)


def test_images_that_are_not_cut_into_squares_are_refused():
  with pytest.raises(UsageError, match='a multiple of 2 pixels, not 225'):
    hpm.models.create('resnet18', image_size=225, stem_rewrite='space_to_depth').init()


def test_a_network_of_ones_own_without_such_a_stem_is_refused():
  model = hpm.models.Model(
    lambda b, x: b.dense('logits', b.global_average_pool(x), 4),
    name='mine',
    image_shape=(8, 8, 3),
    num_classes=4,
    stem_rewrite='pad_channels',
  )
  with pytest.raises(UsageError, match='model mine has no strided first convolution'):
    model.init()


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=[] if n in ('resnet34', 'lenet', 'vgg11') else pytest.mark.long)
    for n in hpm.models.MODELS
  ],
)
def test_the_list_of_models_with_such_a_stem_is_the_truth(name, monkeypatch):
  monkeypatch.setattr(hpm.models, 'check_stem_rewrite', lambda *_: None)
  model = hpm.models.create(name, stem_rewrite='pad_channels')
  if name in WITH_STRIDED_STEM:
    assert model.num_params == hpm.models.create(name).num_params
  else:
    with pytest.raises(UsageError, match=f'model {name} has no strided first convolution'):
      model.num_params  # noqa: B018
