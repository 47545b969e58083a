"""Losses against their formulas in NumPy."""

import numpy as np
import pytest

import hpm


def by_hand(labels, logits, smoothing):
  logits = logits.astype(np.float64)
  log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  targets = np.full(logits.shape, smoothing / logits.shape[1])
  targets[np.arange(len(labels)), labels] += 1.0 - smoothing
  return -(targets * log_probabilities).sum(1)


@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.9])
@pytest.mark.parametrize('dtype', [np.int32, np.int64])
def test_cross_entropy_is_one_value_a_sample(smoothing, dtype):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(6, 7)).astype(np.float32)
  labels = rng.integers(0, 7, 6).astype(dtype)
  loss = hpm.losses.softmax_cross_entropy(smoothing)(labels, logits)
  assert loss.dtype == 'float32' and loss.shape == (6,)
  np.testing.assert_allclose(loss, by_hand(labels, logits, smoothing), rtol=1e-5)


def test_half_precision_logits_give_a_float32_loss():
  logits = np.array([[1.0, 2.0, 3.0]], np.float16)
  loss = hpm.losses.softmax_cross_entropy()(np.array([0]), logits)
  assert loss.dtype == 'float32'
  np.testing.assert_allclose(loss, by_hand([0], logits, 0.0), rtol=1e-6)


def test_no_samples_have_no_loss():
  loss = hpm.losses.softmax_cross_entropy(0.1)(np.zeros(0, np.int64), np.zeros((0, 5), np.float32))
  assert loss.shape == (0,)


@pytest.mark.parametrize('smoothing', [-0.1, 1.0, float('nan')])
def test_smoothing_outside_its_range_is_refused(smoothing):
  with pytest.raises(hpm.errors.UsageError, match='label_smoothing .* from 0 to below 1'):
    hpm.losses.softmax_cross_entropy(smoothing)
