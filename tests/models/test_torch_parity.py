"""Our networks against torchvision's and timm's with the same weights: batch norm as in torch.

Runs where torch, torchvision, safetensors and, for its cases, timm are installed, in this Python or
in the one that the environment variable TORCH_PYTHON names. As in test_keras_parity, whatever
starts as zeros and ones is drawn at random first, and gradients are compared with smooth functions
in the place of ReLU and max pooling.
"""

import functools
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import hpm
from hpm.models import pretrained

_INSTALL = (
  'pip install torch torchvision safetensors timm (or set TORCH_PYTHON to a Python that has them)'
)


class Case(NamedTuple):
  torchvision_name: str
  name: str
  image_size: int
  torch_options: dict = {}
  options: dict = {}  # of ours


CASES = [
  Case('alexnet', 'alexnet', 224, {}, {'dropout': 0.0}),
  Case('googlenet', 'googlenet', 64, {'aux_logits': False, 'init_weights': True}, {'dropout': 0.0}),
  Case('resnet50', 'resnet50_v1.5', 64),
  Case('resnet18', 'resnet18', 64),
  Case('vgg11_bn', 'vgg11_bn', 224, {}, {'dropout': 0.0}),
  Case('densenet121', 'densenet121', 64),
  Case('mobilenet_v2', 'mobilenet_v2', 64, {}, {'dropout': 0.0, 'variant': 'torch'}),
  Case(
    'inception_v3',
    'inception3',
    139,
    {'aux_logits': False, 'init_weights': True},
    {'dropout': 0.0, 'variant': 'torch', 'auxiliary': False},
  ),
  Case('timm:vgg11', 'vgg11', 224, {}, {'dropout': 0.0}),
  Case('timm:mobilenetv2_100', 'mobilenet_v2', 64, {}, {'dropout': 0.0, 'variant': 'torch'}),
]
_TOLERANCE = 1e-4  # of the tensor's largest value
_TRAINING_TOLERANCE = 5e-3  # rounding grows in training on small images, see test_keras_parity


@functools.cache
def _python(timm: bool = False) -> str | None:
  """The Python that has torch, if there is one."""
  python = os.environ.get('TORCH_PYTHON', sys.executable)
  imports = 'import importlib.util as u; assert all(map(u.find_spec, %r))'
  needed = ('torch', 'torchvision', 'safetensors', *(['timm'] if timm else []))
  found = subprocess.run([python, '-c', imports % (needed,)], capture_output=True, check=False)
  return python if found.returncode == 0 else None


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(case, id=case.torchvision_name, marks=pytest.mark.long if i > 2 else [])
    for i, case in enumerate(CASES)
  ],
)
def reference(request, tmp_path_factory) -> tuple[Case, Path]:
  """A case and the folder of what torch computed for it."""
  case = request.param
  if _python(case.torchvision_name.startswith('timm')) is None:
    pytest.skip(_INSTALL)
  folder = tmp_path_factory.mktemp('torch')
  script = Path(__file__).with_name('torch_reference.py')
  options = json.dumps(case.torch_options)
  command = [_python(), script, case.torchvision_name, str(case.image_size), options, folder]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return case, folder


@pytest.mark.parametrize('mode', ['inference', 'training'])
@pytest.mark.parametrize('activation', ['relu', 'smooth'])
def test_logits_input_gradients_and_statistics_equal_torchs(
  reference, mode, activation, monkeypatch
):
  case, folder = reference
  if activation == 'smooth':
    monkeypatch.setattr(tf.nn, 'relu', tf.nn.softplus)
    monkeypatch.setattr(tf.nn, 'relu6', tf.nn.softplus)
    monkeypatch.setattr(hpm.models.Builder, 'max_pool', hpm.models.Builder.average_pool)
  model = hpm.models.create(case.name, num_classes=10, image_size=case.image_size, **case.options)
  params, state = pretrained.load(model, folder / 'weights.safetensors')
  given = np.load(folder / 'images.npz')
  expected = dict(np.load(folder / f'{mode}_{activation}.npz'))

  @tf.function(autograph=False)
  def run(images):
    with tf.GradientTape() as tape:
      tape.watch(images)
      logits, new_state = model.apply(params, state, images, mode == 'training')
      loss = tf.reduce_sum(logits * given['weights'])
    return logits, tape.gradient(loss, images), new_state

  logits, gradient, new_state = run(tf.constant(given['images']))
  differences = {'logits': _difference(logits, expected['logits'])}
  if activation == 'smooth':
    differences['gradient'] = _difference(gradient, expected['gradient'])
  after = {name[6:]: value for name, value in expected.items() if name.startswith('state/')}
  _, expected_state = pretrained.load(model, after)
  for name, value in expected_state.items():
    differences[name] = _difference(new_state[name], value)
  worst = max(differences, key=differences.get)
  print(f'largest difference: {differences[worst]:.1e} of {worst}')
  loose = mode == 'training' and activation == 'relu'
  assert differences[worst] < (_TRAINING_TOLERANCE if loose else _TOLERANCE), worst


def _difference(actual, expected) -> float:
  expected = np.asarray(expected)
  return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


def test_pth_and_safetensors_give_the_same_values(reference):
  pytest.importorskip('torch', reason='pip install torch')
  _, folder = reference
  pickled = pretrained.read_state_dict(folder / 'weights.pth')
  plain = pretrained.read_state_dict(folder / 'weights.safetensors')
  assert pickled.keys() == plain.keys()
  for name, value in pickled.items():
    np.testing.assert_array_equal(plain[name], value)


def test_pth_files_of_half_precision_and_of_more_than_weights(tmp_path):
  torch = pytest.importorskip('torch', reason='pip install torch')
  path = tmp_path / 'w.pth'
  for dtype in (torch.bfloat16, torch.float16):
    torch.save({'a': torch.tensor([1.5, -2.0], dtype=dtype), 'n': torch.tensor(3)}, path)
    read = pretrained.read_state_dict(path)
    assert (read['a'].dtype, read['a'].tolist(), int(read['n'])) == (np.float32, [1.5, -2.0], 3)
  torch.save({'state_dict': {'a': torch.zeros(2)}, 'epoch': 3}, path)
  with pytest.raises(
    hpm.errors.DataError, match="'state_dict' is a dict, no tensor: save model.st"
  ):
    pretrained.read_state_dict(path)
  path.write_bytes(b'garbage')
  with pytest.raises(hpm.errors.DataError, match='w.pth: not a state dict'):
    pretrained.read_state_dict(path)
