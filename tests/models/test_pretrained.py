"""Weights of other libraries: names, shapes and forms that don't fit are refused by name.

That what fits computes the same is for test_keras_parity and test_torch_parity.
"""

import importlib
import json
import struct
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.errors import DataError, UsageError
from hpm.models import pretrained

SMALL = {'num_classes': 10, 'image_size': 32}


@pytest.fixture(scope='module')
def keras_model():
  return keras.applications.MobileNetV2(
    weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
  )


@pytest.fixture(scope='module')
def keras_file(keras_model, tmp_path_factory):
  path = tmp_path_factory.mktemp('weights') / 'm.weights.h5'
  keras_model.save_weights(path)
  return path


def mobilenet(**options):
  return hpm.models.create('mobilenet_v2', variant='keras', **{**SMALL, **options})


def torch_state_dict(model, seed=0):
  """Random values under torchvision's names and in torch's shapes."""
  family = importlib.import_module(hpm.models.MODELS[model.name].split(':')[0])
  rng = np.random.default_rng(seed)
  values = {}
  for name, spec in {**model.param_specs, **model.state_specs}.items():
    layer, _, leaf = name.rpartition('/')
    value = rng.normal(size=spec.shape).astype(np.float32)
    if leaf == 'kernel':
      value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    if leaf == 'depthwise_kernel':
      value = value.transpose(2, 3, 0, 1)
    values[f'{family.torch_layer(model.name, layer)}.{pretrained._TORCH_LEAVES[leaf]}'] = value
    if leaf == 'moving_mean':
      values[f'{family.torch_layer(model.name, layer)}.num_batches_tracked'] = np.array(3)
  return values


def write_safetensors(path, values, dtype='F32', cast=np.float32):
  header, body = {'__metadata__': {'format': 'pt'}}, b''
  for name, value in values.items():
    data = np.asarray(value).astype(cast).tobytes()
    offsets = [len(body), len(body) + len(data)]
    header[name] = {'dtype': dtype, 'shape': list(np.shape(value)), 'data_offsets': offsets}
    body += data
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + body)


def assert_same(first, second):
  assert first.keys() == second.keys()
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_a_file_and_the_keras_model_itself_give_the_same(keras_model, keras_file):
  model = mobilenet()
  for first, second in zip(
    pretrained.load(model, keras_file), pretrained.load(model, keras_model), strict=True
  ):
    assert_same(first, second)
  params, state = pretrained.load(model, keras_file)
  assert params.keys() == model.param_specs.keys()
  assert state.keys() == model.state_specs.keys()


def test_weights_of_keras_2_are_read(keras_model, keras_file, tmp_path):
  path = tmp_path / 'keras_2.h5'
  with h5py.File(path, 'w') as file:
    file.attrs['layer_names'] = [layer.name.encode() for layer in keras_model.layers]
    for layer in keras_model.layers:
      group = file.create_group(layer.name)
      names = [f'{layer.name}/{weight.name}:0' for weight in layer.weights]
      group.attrs['weight_names'] = [name.encode() for name in names]
      for name, weight in zip(names, layer.weights, strict=True):
        group.create_dataset(name, data=weight.numpy())
  for first, second in zip(
    pretrained.load(mobilenet(), path), pretrained.load(mobilenet(), keras_file), strict=True
  ):
    assert_same(first, second)


def test_another_number_of_classes_is_refused_unless_the_layer_stays_fresh(keras_file):
  model = mobilenet(num_classes=7)
  with pytest.raises(DataError, match=r"'predictions' gives logits/kernel the shape \(1280, 10\)"):
    pretrained.load(model, keras_file)
  params, _ = pretrained.load(model, keras_file, fresh=('logits',), seed=3)
  initial, _ = model.init(3)
  expected, _ = pretrained.load(mobilenet(), keras_file)
  for name, value in params.items():
    source = initial if name.startswith('logits/') else expected
    np.testing.assert_array_equal(value, source[name])


def test_layers_that_stay_fresh_are_the_models(keras_file):
  with pytest.raises(UsageError, match="unknown layer of mobilenet_v2 in fresh 'logit'.*logits"):
    pretrained.load(mobilenet(), keras_file, fresh=('logit',))
  with pytest.raises(UsageError, match=r"a sequence of layers is needed, such as \('logits',\)"):
    pretrained.load(mobilenet(), keras_file, fresh='logits')


def test_the_variant_must_be_the_librarys(keras_file):
  model = hpm.models.create('mobilenet_v2', **SMALL)
  with pytest.raises(UsageError, match=r"create\('mobilenet_v2', variant='keras'\)"):
    pretrained.load(model, keras_file)


def test_weights_of_another_network_are_refused_by_layer(keras_file):
  model = hpm.models.create('resnet18', variant='keras', **SMALL)
  with pytest.raises(DataError, match=r'lacks conv1_conv \(ours: conv1\).*and \d+ more; it has'):
    pretrained.load(model, keras_file)


@pytest.mark.parametrize(
  ('name', 'source', 'message'),
  [
    ('resnet50', 'torch', 'use resnet50_v1.5'),
    ('resnet50_v2', 'torch', 'torchvision has no ResNet v2'),
    ('lenet', 'torch', 'no model .lenet. is known of torchvision or timm'),
    ('inception1', 'torch', 'torchvision has googlenet and inception3'),
    ('alexnet', 'keras', 'no model .alexnet. is known of keras.applications'),
    ('inception4', 'keras', 'keras.applications has Inception v3 alone'),
  ],
)
def test_networks_that_a_library_does_not_have(name, source, message, keras_model):
  with pytest.raises(UsageError, match=message):
    pretrained.load(hpm.models.create(name), {} if source == 'torch' else keras_model)


def test_kerass_inception3_has_no_auxiliary_head(keras_model):
  with pytest.raises(UsageError, match='auxiliary=False'):
    pretrained.load(hpm.models.create('inception3', variant='keras'), keras_model)


@pytest.mark.parametrize('name', ['resnet18', 'mobilenet_v2'])
def test_safetensors_and_a_state_dict_give_the_same(name, tmp_path):
  options = {'variant': 'torch'} if name == 'mobilenet_v2' else {}
  model = hpm.models.create(name, num_classes=10, **options)
  values = torch_state_dict(model)
  write_safetensors(tmp_path / 'w.safetensors', values)
  for first, second in zip(
    pretrained.load(model, tmp_path / 'w.safetensors'), pretrained.load(model, values), strict=True
  ):
    assert_same(first, second)


def test_a_dense_layer_behind_an_image_is_reordered():
  rng = np.random.default_rng(0)
  image, weight = rng.normal(size=(3, 4, 4)), rng.normal(size=(5, 48))  # torch: channels first
  kernel = pretrained._torch_kernel(weight, 'kernel', rank=2, channels=3)
  np.testing.assert_allclose(image.transpose(1, 2, 0).ravel() @ kernel, weight @ image.ravel())


@pytest.mark.parametrize('name', ['vgg11_bn', 'mobilenet_v2'])
def test_timms_names_give_what_torchvisions_give(name):
  options = {'variant': 'torch'} if name == 'mobilenet_v2' else {}
  model = hpm.models.create(name, num_classes=10, image_size=32, **options)
  family = importlib.import_module(hpm.models.MODELS[name].split(':')[0])
  torchvisions = torch_state_dict(model)
  renamed = {
    family.torch_layer(name, layer): family.timm_layer(name, layer)
    for layer in {key.rpartition('/')[0] for key in model.param_specs}
  }
  timms = {}
  for key, value in torchvisions.items():
    prefix, _, leaf = key.rpartition('.')
    prefix = renamed[prefix]
    if prefix.startswith('pre_logits') and leaf == 'weight':
      value = value[:, :, None, None]  # over an image of one pixel
    timms[f'{prefix}.{leaf}'] = value
  assert torchvisions.keys() != timms.keys()
  for first, second in zip(
    pretrained.load(model, torchvisions), pretrained.load(model, timms), strict=True
  ):
    assert_same(first, second)
  del timms[next(key for key in timms if key.startswith(('head', 'classifier')))]
  with pytest.raises(DataError, match=r'lacks (head.fc|classifier)\.\w+ \(ours: logits'):
    pretrained.load(model, timms)


def test_half_precision_files_become_float32(tmp_path):
  bfloat16 = tf.bfloat16.as_numpy_dtype
  values = {'a': np.array([[1.5, -2.0]]), 'b': np.array(3.0)}
  for dtype, cast in (('F16', np.float16), ('BF16', bfloat16), ('F64', np.float64)):
    path = tmp_path / f'{dtype}.safetensors'
    write_safetensors(path, values, dtype, cast)
    read = pretrained.read_state_dict(path)
    assert {name: value.astype(np.float32).tolist() for name, value in read.items()} == {
      'a': [[1.5, -2.0]],
      'b': 3.0,
    }


def test_missing_and_left_over_names_are_named():
  model = hpm.models.create('resnet18', num_classes=10)
  values = torch_state_dict(model)
  values['extra.weight'] = values.pop('layer2.0.downsample.0.weight')
  with pytest.raises(DataError) as caught:
    pretrained.load(model, values)
  assert 'lacks layer2.0.downsample.0.weight (ours: stage2/block1/conv0/kernel)' in str(
    caught.value
  )
  assert 'has more than the model: extra.weight' in str(caught.value)


def test_files_that_are_missing_damaged_or_unknown(tmp_path, keras_file):
  model = mobilenet()
  with pytest.raises(UsageError, match='no such file; weights are not downloaded'):
    pretrained.load(model, tmp_path / 'none.h5')
  (tmp_path / 'w.ckpt').write_bytes(b'')
  with pytest.raises(UsageError, match=r'weights come as .h5, .safetensors, .pth or .pt'):
    pretrained.load(model, tmp_path / 'w.ckpt')
  (tmp_path / 'cut.weights.h5').write_bytes(keras_file.read_bytes()[:5000])
  with pytest.raises(DataError, match='damaged, or no HDF5 file'):
    pretrained.load(model, tmp_path / 'cut.weights.h5')
  with h5py.File(tmp_path / 'other.h5', 'w') as file:
    file['x'] = 1
  with pytest.raises(DataError, match='neither Keras 3 weights nor Keras 2'):
    pretrained.load(model, tmp_path / 'other.h5')
  write_safetensors(tmp_path / 'w.safetensors', {'a': np.ones([4, 4])})
  whole = (tmp_path / 'w.safetensors').read_bytes()
  for size in (0, 4, 20, len(whole) - 3):
    (tmp_path / 'cut.safetensors').write_bytes(whole[:size])
    with pytest.raises(DataError, match='damaged, or no safetensors file'):
      pretrained.read_state_dict(tmp_path / 'cut.safetensors')


def test_pth_without_torch_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  (tmp_path / 'w.pth').write_bytes(b'')
  with pytest.raises(UsageError, match='pip install torch'):
    pretrained.read_state_dict(tmp_path / 'w.pth')


def test_keras_refuses_what_its_layers_cannot_hold(keras_model):
  model = mobilenet(num_classes=7)
  with pytest.raises(DataError, match=r"layer 'predictions' has shapes .*\(1280, 10\)"):
    pretrained.to_keras(model, *model.init(), keras_model)
