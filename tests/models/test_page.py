"""docs/models.md runs as it stands, and names every family's file."""

from pathlib import Path
import re

import numpy as np
import tensorflow as tf

import hpm

PAGE = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()


def test_the_page_runs_as_it_stands(cpu_devices, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  own, kerass, weights, training = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
  names = {}
  exec(own, names)
  assert names['model'].num_params == 3 * 3 * 3 * 16 + 2 * 16 + 17 * 10
  exec(kerass, names)
  assert names['model'].name == 'keras:MobileNetV3Small'
  exec(weights + training, names)
  images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
  exported = tf.saved_model.load('exported')
  served = exported.serve(tf.constant(images))['logits']
  theirs = names['theirs'](hpm.pipelines.normalize(images), training=False)
  np.testing.assert_allclose(served, theirs, rtol=1e-3, atol=1e-5)
  held = names['step'].snapshot()
  for name, value in names['params'].items():
    np.testing.assert_array_equal(held[f'params/{name}'], value)


def test_the_page_names_every_familys_file():
  for function in hpm.models.MODELS.values():
    assert f'`{function.partition(":")[0].rpartition(".")[2]}.py`' in PAGE
