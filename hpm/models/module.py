"""A model with variables of its own, for eager use, `tf.train.Checkpoint` and SavedModel."""

from collections.abc import Callable, Mapping
import os
from typing import Any

import tensorflow as tf

from hpm.errors import UsageError
from hpm.models.builder import Model

__all__ = ['Module']


class Module(tf.Module):
  """Binds a model to variables.

    module = hpm.models.Module(model, params, state, preprocess=hpm.pipelines.normalize)
    logits = module(images)
    module.save('exported')       # tf.saved_model.load('exported').serve(images)['logits']

  Training over several devices needs none: a variable manager owns the variables there.

  Args:
    model: the network.
    params, state: name -> value, as from `model.init`, a pretrained source or a checkpoint; left
      out, they are initialised from `seed`.
    preprocess: (images, dtype, data_format) -> images, in front of the network; with
      `hpm.pipelines.normalize` the module takes uint8 images [b, H, W, 3]. Without, it takes what
      `model.apply` does.
    seed: of the initial values.

  Attributes:
    params, state: name -> variable; those of `params` are trainable.
    serve: a `tf.function` of images, any number of them, to 'logits' and 'probabilities', float32
      [b, num_classes].
  """

  def __init__(
    self,
    model: Model,
    params: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    *,
    preprocess: Callable[[tf.Tensor, str, str], tf.Tensor] | None = None,
    seed: int = 0,
  ):
    super().__init__(name=model.name.replace('.', '_').replace(':', '_'))
    if (params is None) != (state is None):
      raise UsageError('params and state belong together: pass both or neither')
    if params is None or state is None:
      params, state = model.init(seed)
    for kind, given, specs in (
      ('parameter', params, model.param_specs),
      ('state', state, model.state_specs),
    ):
      odd = sorted(set(given).symmetric_difference(specs))
      if odd:
        raise UsageError(f'{kind} {odd[0]!r} is only in one of model {model.name} and the values')
    self.model = model
    self.params = {n: tf.Variable(params[n], name=_name(n)) for n in model.param_specs}
    self.state = {
      n: tf.Variable(state[n], name=_name(n), trainable=False) for n in model.state_specs
    }
    self._preprocess = preprocess
    self.serve = tf.function(self._serve, input_signature=[self._signature()], autograph=False)

  def __call__(
    self, images: tf.Tensor, training: bool = False, rng: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Logits, float32 [b, num_classes]; training updates `state`. See `Model.forward`."""
    if self._preprocess is not None:
      images = self._preprocess(images, self.model.dtype, self.model.data_format)
    logits, new_state = self.model.apply(
      {name: variable.read_value() for name, variable in self.params.items()},
      {name: variable.read_value() for name, variable in self.state.items()},
      images,
      training,
      rng,
    )
    if training:
      for name, variable in self.state.items():
        variable.assign(new_state[name])
    return logits

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a SavedModel whose default signature is `serve`."""
    tf.saved_model.save(self, os.fspath(path), signatures=self.serve)

  def _serve(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
    logits = self(images)
    return {'logits': logits, 'probabilities': tf.nn.softmax(logits)}

  def _signature(self) -> tf.TensorSpec:
    height, width, channels = self.model.image_shape
    if self._preprocess is not None:
      return tf.TensorSpec((None, height, width, channels), tf.uint8, 'images')
    nhwc = self.model.data_format == 'NHWC'
    shape = (height, width, channels) if nhwc else (channels, height, width)
    return tf.TensorSpec((None, *shape), tf.as_dtype(self.model.dtype), 'images')


def _name(name: str) -> str:
  return name.replace(':', '_')
