"""Our networks against keras.applications with the same weights.

The Keras models are built without downloads. Their scales, offsets and biases are drawn at random
and moved into ours; what starts as zeros and ones would hide a wrong name. Equal then: logits,
input gradients, and what a training step makes of batch norm's averages.

Gradients are compared with smooth functions in the place of both sides' ReLUs (and Inception's max
pools): of a million activations some lie so near to zero, or to their neighbour, that rounding
decides, and each such decision moves the gradient by a per cent or so, whoever computes it.

Keras's ResNet v1 has biases in front of batch norm. They fold into the moving mean when weights are
moved, before the step as well as after it, so that both sides agree on what the moving mean is.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.models import pretrained


class Case(NamedTuple):
  application: Any
  name: str
  image_size: int = 64
  options: dict = {'variant': 'keras'}
  tolerance: float = 1e-4  # of the largest logit, in inference


_NO_DROPOUT = {'dropout': 0.0}
CASES = [
  Case(keras.applications.ResNet50, 'resnet50'),
  Case(keras.applications.ResNet50V2, 'resnet50_v2'),
  Case(keras.applications.ResNet101, 'resnet101'),
  # Keras's own logits move by 1.1e-4 when its biases are folded into the moving means: rounding.
  Case(keras.applications.ResNet152, 'resnet152', tolerance=2e-4),
  Case(
    keras.applications.InceptionV3,
    'inception3',
    107,
    {'variant': 'keras', 'auxiliary': False, 'dropout': 0.0},
  ),
  Case(keras.applications.VGG16, 'vgg16', 32, _NO_DROPOUT),
  Case(keras.applications.VGG19, 'vgg19', 32, _NO_DROPOUT),
  Case(keras.applications.DenseNet121, 'densenet121'),
  Case(keras.applications.MobileNetV2, 'mobilenet_v2', 64, {'variant': 'keras', 'dropout': 0.0}),
]
_SHORT = ('resnet50', 'vgg16')
_NUM_CLASSES = 10
_BATCH = 4
_TOLERANCE = 1e-4  # of the tensor's largest value
# Batch norm over the few pixels that small images leave at the end amplifies rounding from layer to
# layer: measured 4e-5 for ResNet-50 and 1.7e-3 for ResNet-152, 1e-5 or less for all with smooth
# activations.
_TRAINING_TOLERANCE = 5e-3


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(case, id=case.name, marks=[] if case.name in _SHORT else pytest.mark.long)
    for case in CASES
  ],
)
def pair(request, tmp_path_factory):
  """(case, Keras model with random weights, path of its weights)."""
  case = request.param
  keras.utils.set_random_seed(1)
  theirs = case.application(
    weights=None,
    input_shape=(case.image_size, case.image_size, 3),
    classes=_NUM_CLASSES,
    classifier_activation=None,
  )
  rng = np.random.default_rng(2)
  for layer in theirs.layers:
    layer.set_weights([_redrawn(rng, w.path, w.numpy()) for w in layer.weights])
  _average(theirs, tf.random.stateless_normal([8, *theirs.input_shape[1:]], [1, 2]))
  path = tmp_path_factory.mktemp('keras') / f'{case.name}.weights.h5'
  theirs.save_weights(path)
  return case, theirs, path


def _redrawn(rng: np.random.Generator, path: str, value: np.ndarray) -> np.ndarray:
  leaf = path.rsplit('/', 1)[-1]
  if leaf == 'gamma':
    return rng.uniform(0.5, 1.5, value.shape)
  if leaf in ('beta', 'bias'):
    return rng.normal(0.0, 0.1, value.shape)
  return value


def _average(model: keras.Model, images: tf.Tensor) -> None:
  """Moving averages become the images' own: with any others the signal fades on its way."""
  norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
  if not norms:
    return
  momentum = norms[0].momentum
  for norm in norms:
    norm.momentum = 0.0
  model(images, training=True)
  for norm in norms:
    norm.momentum = momentum
    # Channels that hardly vary would amplify rounding.
    variance = norm.moving_variance.numpy()
    norm.moving_variance.assign(variance + 0.1 * np.mean(variance))


def _ours(case: Case) -> hpm.models.Model:
  return hpm.models.create(
    case.name, num_classes=_NUM_CLASSES, image_size=case.image_size, **case.options
  )


def _images(case: Case) -> tf.Tensor:
  return tf.random.stateless_normal([_BATCH, case.image_size, case.image_size, 3], [3, 4])


def _difference(actual, expected) -> float:
  expected = np.asarray(expected)
  return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


MODES = pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])


@MODES
def test_logits_and_statistics_equal_kerass(pair, training):
  case, theirs, path = pair
  theirs.load_weights(path)
  model = _ours(case)
  params, state = pretrained.load(model, path)
  images = _images(case)
  run = tf.function(lambda x: model.apply(params, state, x, training), autograph=False)
  logits, new_state = run(images)
  expected = tf.function(lambda x: theirs(x, training=training), autograph=False)(images)
  assert _difference(logits, expected) < (_TRAINING_TOLERANCE if training else case.tolerance)
  _, expected_state = pretrained.load(model, theirs)
  assert new_state.keys() == expected_state.keys()
  for name, value in expected_state.items():
    assert _difference(new_state[name], value) < _TOLERANCE, name
  if training and state:
    assert max(_difference(new_state[name], state[name]) for name in state) > 1e-3


@MODES
def test_input_gradients_equal_kerass(pair, training, monkeypatch):
  case, theirs, path = pair
  _smooth(monkeypatch, case)
  theirs.load_weights(path)
  model = _ours(case)
  params, state = pretrained.load(model, path)
  images = _images(case)
  logits, gradient = _logits_and_gradient(
    lambda x: model.apply(params, state, x, training)[0], images
  )
  expected, expected_gradient = _logits_and_gradient(lambda x: theirs(x, training=training), images)
  assert _difference(logits, expected) < _TOLERANCE
  assert _difference(gradient, expected_gradient) < _TOLERANCE


def _smooth(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
  """Replaces what both our networks and Keras's layers call."""
  monkeypatch.setattr(tf.nn, 'relu', tf.nn.softplus)
  monkeypatch.setattr(tf.nn, 'relu6', tf.nn.softplus)
  if case.name == 'inception3':  # the others have one pool, or ReLUs right before it
    monkeypatch.setattr(tf.nn, 'max_pool', tf.nn.avg_pool2d)
    monkeypatch.setattr(tf.nn, 'max_pool2d', tf.nn.avg_pool2d)


def _logits_and_gradient(function, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Logits, and the gradient of a fixed combination of them by the images."""

  @tf.function(autograph=False)
  def run(images):
    with tf.GradientTape() as tape:
      tape.watch(images)
      logits = function(images)
      loss = tf.reduce_sum(logits * tf.random.stateless_normal(logits.shape, [5, 6]))
    return logits, tape.gradient(loss, images)

  return run(images)


def test_keras_takes_our_weights_back(pair):
  case, theirs, path = pair
  theirs.load_weights(path)
  model = _ours(case)
  params, state = pretrained.load(model, path)
  images = _images(case)
  expected = theirs(images, training=False)
  for layer in theirs.layers:
    layer.set_weights([np.ones_like(value) for value in layer.get_weights()])
  pretrained.to_keras(model, params, state, theirs)
  assert _difference(theirs(images, training=False), expected) < case.tolerance
