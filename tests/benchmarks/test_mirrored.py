"""`replicated` beside MirroredStrategy: the same training on both sides, a run in miniature."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import mirrored


def test_both_contenders_train_the_same(cpu_devices):
  import keras

  def build():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 4, 3))
    x = keras.layers.Dense(7, activation='tanh')(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(mirrored.NUM_CLASSES)(x))

  rng = np.random.default_rng(0)
  batches = [
    (
      tf.constant(rng.integers(0, 256, (4, 4, 4, 3)).astype(np.uint8)),
      tf.constant(rng.integers(0, mirrored.NUM_CLASSES, 4)),
    )
    for _ in range(2)
  ]
  losses = {}
  for name, contender in mirrored.CONTENDERS.items():
    step = contender(build, cpu_devices[:2], batches)
    losses[name] = [step() for _ in range(20)]
  assert losses['hpm'][-1] < losses['hpm'][0]
  np.testing.assert_allclose(losses['hpm'], losses['tf.distribute'], rtol=1e-5)


def test_rounds_turn_and_ratios_are_taken_within_a_round():
  calls = []
  steps = {name: (lambda name=name: calls.append(name)) for name in 'ab'}
  figures = mirrored.measure(steps, 3)
  assert ''.join(calls) == 'ab' + 'abbaab'
  assert {len(values) for one in figures.values() for values in one.values()} == {3}
  low, middle, high = mirrored.ratios([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
  assert (middle, low <= middle <= high) == (1.0, True)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [(['--rounds=0'], 'rounds'), (['fast'], "unexpected 'fast'"), (['--device=tpu'], 'device')],
)
def test_what_can_not_work_is_exit_code_2(arguments, message, capsys):
  assert mirrored.main(arguments) == 2
  assert message in capsys.readouterr().err
