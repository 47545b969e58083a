"""normalize: exact values in every type and layout, in both runtimes, and as a Keras layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hpm import errors, pipelines

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), np.uint8)
IMAGES.flat[:2] = 0, 255
TYPES = ['float32', 'float16', 'bfloat16']
LAYOUTS = ['NHWC', 'NCHW']


def expected(dtype, data_format, mean=127.5, std=127.5):
  values = (IMAGES.astype(np.float64) - mean) / std
  if data_format == 'NCHW':
    values = values.transpose(0, 3, 1, 2)
  return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('data_format', LAYOUTS)
def test_values_are_within_a_rounding(dtype, data_format):
  result = pipelines.normalize(tf.constant(IMAGES), dtype, data_format)
  assert result.dtype == dtype
  correct = expected(dtype, data_format)
  assert result.shape == correct.shape
  # The product of two rounded numbers is rounded: two units in the last place at most.
  tolerance = 2 * {'float32': 2**-23, 'float16': 2**-10, 'bfloat16': 2**-7}[dtype]
  np.testing.assert_allclose(
    tf.cast(result, tf.float64), correct.astype(np.float64), rtol=tolerance
  )
  assert float(tf.reduce_max(result)) == 1.0
  assert float(tf.reduce_min(result)) == -1.0


@pytest.mark.parametrize('data_format', LAYOUTS)
def test_channels_may_have_means_of_their_own(data_format):
  mean, std = [123.68, 116.78, 103.94], [58.4, 57.12, 57.38]
  result = pipelines.normalize(tf.constant(IMAGES), 'float32', data_format, mean, std)
  np.testing.assert_allclose(result, expected('float32', data_format, mean, std), atol=1e-6)


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('data_format', LAYOUTS)
def test_eager_traced_and_graph_agree(dtype, data_format):
  eager = pipelines.normalize(tf.constant(IMAGES), dtype, data_format)
  traced = tf.function(lambda images: pipelines.normalize(images, dtype, data_format))
  np.testing.assert_array_equal(traced(IMAGES), eager)
  with tf.Graph().as_default() as graph:
    with tf.device('/CPU:3'):
      images = tf.compat.v1.placeholder(tf.uint8, [None, 9, 7, 3])
      result = pipelines.normalize(images, dtype, data_format)
    # No op escapes the caller's device, and the chain is short.
    assert {op.device for op in graph.get_operations()} == {'/device:CPU:3'}
    kinds = [op.type for op in graph.get_operations() if op.type not in ('Const', 'Placeholder')]
    assert kinds == ['Transpose'] * (data_format == 'NCHW') + ['Cast', 'Sub', 'Mul']
    config = tf.compat.v1.ConfigProto(device_count={'CPU': 8})
    with tf.compat.v1.Session(config=config) as session:
      np.testing.assert_array_equal(session.run(result, {images: IMAGES}), eager)


def test_wrong_types_and_layouts_are_refused():
  with pytest.raises(errors.UsageError, match=r"dtype='int32': give float32"):
    pipelines.normalize(tf.constant(IMAGES), 'int32')
  with pytest.raises(errors.UsageError, match=r"data_format='NWHC': give NHWC or NCHW"):
    pipelines.normalize(tf.constant(IMAGES), 'float32', 'NWHC')


@pytest.mark.parametrize(
  ('policy', 'dtype'), [('float32', 'float32'), ('mixed_bfloat16', 'bfloat16')]
)
def test_the_layer_computes_in_its_policys_type(policy, dtype):
  layer = pipelines.Normalize(dtype=policy)
  assert layer(IMAGES).dtype == dtype
  np.testing.assert_array_equal(layer(IMAGES), pipelines.normalize(tf.constant(IMAGES), dtype))


def test_the_layer_refuses_another_layout_at_once():
  with pytest.raises(errors.UsageError, match="data_format='CHW': give NHWC or NCHW"):
    pipelines.Normalize('CHW')


def test_the_layer_stands_first_in_a_model_and_survives_saving(tmp_path):
  model = keras.Sequential(
    [
      keras.Input((9, 7, 3), dtype='uint8'),
      pipelines.Normalize(data_format='NCHW', mean=[1.0, 2.0, 3.0], std=50.0),
    ]
  )
  assert model.output_shape == (None, 3, 9, 7)
  model.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  correct = expected('float32', 'NCHW', [1.0, 2.0, 3.0], 50.0)
  for one in (model, loaded):
    np.testing.assert_allclose(one(IMAGES), correct, atol=1e-6)
