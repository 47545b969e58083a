"""Weights that other libraries trained, moved into our models, and ours into Keras.

  model = hpm.models.create('resnet50', variant='keras')
  params, state = pretrained.load(model, 'resnet50.weights.h5')

Sources are keras.applications (weight files of Keras 3 and of Keras 2, or a model in memory) and
torchvision and timm (state dicts as `.safetensors` or `.pth`). What a layer is called there stands
beside each family, in its functions `keras_layer`, `torch_layer` and, where timm has names of its
own, `timm_layer`. Where a library's form of a network differs from ours,
the model must have been created in that form (`variant`). Nothing is downloaded.

Keras gives the convolutions of ResNet v1 biases in front of batch norm. They change nothing but the
moving mean, and are subtracted from it; back in Keras they are zero.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import importlib
import math
import os
from pathlib import Path
import re
import struct
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import errors, json_file
from hpm.errors import DataError, UsageError
from hpm.models import MODELS
from hpm.models.builder import Model

__all__ = ['load', 'read_state_dict', 'to_keras']

Values = dict[str, np.ndarray]

# Our leaf names, in the order in which Keras keeps a layer's arrays, with torch's names.
_TORCH_LEAVES = {
  'kernel': 'weight',
  'depthwise_kernel': 'weight',
  'bias': 'bias',
  'scale': 'weight',
  'offset': 'bias',
  'moving_mean': 'running_mean',
  'moving_variance': 'running_var',
}
_BATCH_NORM = ('scale', 'offset', 'moving_mean', 'moving_variance')


def load(
  model: Model, source: Any, *, fresh: Sequence[str] = (), seed: int = 0
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
  """Parameters and state of a model from another library's weights.

  Args:
    model: one of `hpm.models.create`, in the source's variant.
    source: a path that ends in `.h5` (Keras), `.safetensors`, `.pth` or `.pt` (torch); or a
      `keras.Model`; or a state dict, name -> array.
    fresh: layers that keep their initial values, such as `('logits',)` for another number of
      classes; what the source has for them isn't looked at.
    seed: of those initial values.

  Returns:
    params and state as of `model.init`, float32, on the CPU.

  Raises:
    UsageError: model and source don't go together.
    DataError: values are missing, left over or of another shape; named.
  """
  weights: Any
  if isinstance(source, Mapping):
    kind, where, weights = 'torch', 'the state dict', dict(source)
  elif hasattr(source, 'layers') and hasattr(source, 'get_layer'):
    kind, where, weights = 'keras', f'Keras model {source.name}', _layers_of(source)
  else:
    where = os.fspath(source)
    kind = 'keras' if where.endswith('.h5') else 'torch'
    _exists(where)
    weights = _read_h5(where) if kind == 'keras' else read_state_dict(where)
  family = _family(model, kind, where)
  _check_fresh(model, fresh)
  convert: Any = _from_keras if kind == 'keras' else _from_torch
  values = convert(model, family, weights, where, tuple(fresh))
  with tf.device('/CPU:0'):
    params, state = model.init(seed) if fresh else ({}, {})
    for target, specs in ((params, model.param_specs), (state, model.state_specs)):
      for name in specs:
        if name in values:
          target[name] = tf.constant(values[name], tf.float32)
  return params, state


def to_keras(
  model: Model, params: Mapping[str, Any], state: Mapping[str, Any], target: Any
) -> None:
  """Sets the weights of a keras.applications model, which Keras can then save.

  Args:
    model: one of `hpm.models.create`, in the 'keras' variant where it has one.
    params, state: its values, as tensors or arrays.
    target: the `keras.Model` of the same network, built with `weights=None`.

  Raises:
    UsageError: model and target don't go together.
    DataError: the target lacks a layer, or can't hold a layer's values.
  """
  where = f'Keras model {target.name}'
  family = _family(model, 'keras', where)
  values = {name: np.asarray(value) for name, value in {**params, **state}.items()}
  layers = {key: layer for layer, key in _keys_of(target, _by_position(model, family))}
  for layer, leaves in _layers(model):
    name = family.keras_layer(model.name, layer)
    if name not in layers:
      raise DataError(f'{where} has no layer {name!r} for {layer} of {model.name}')
    arrays = [values[f'{layer}/{leaf}'] for leaf in leaves]
    old = layers[name].get_weights()
    if leaves == _BATCH_NORM and len(old) == 3:  # without a scale
      if not np.all(arrays[0] == 1.0):
        raise DataError(f'{where}: layer {name!r} has no scale, and {layer}/scale is not all ones')
      arrays = arrays[1:]
    elif leaves == ('kernel',) and len(old) == 2:
      arrays.append(np.zeros_like(old[1]))
    if [a.shape for a in arrays] != [a.shape for a in old]:
      raise DataError(
        f'{where}: layer {name!r} has shapes {[a.shape for a in old]}, {layer} of {model.name} has '
        f'{[a.shape for a in arrays]}'
      )
    layers[name].set_weights(arrays)


def read_state_dict(path: str | Path) -> Values:
  """Name -> array of a `.safetensors` file, or of a `.pth` or `.pt` file with weights only.

  Raises:
    UsageError: no such kind of file, or torch is wanted and not installed.
    DataError: the file is damaged.
  """
  path = os.fspath(path)
  _exists(path)
  if path.endswith('.safetensors'):
    return _read_safetensors(path)
  if not path.endswith(('.pth', '.pt')):
    raise UsageError(f'{path}: weights come as .h5, .safetensors, .pth or .pt')
  try:
    import torch
  except ImportError as error:
    raise UsageError(f'{path}: reading it needs torch, pip install torch') from error
  try:
    tensors = dict(torch.load(path, map_location='cpu', weights_only=True))
  except Exception as error:
    raise DataError(f'{path}: not a state dict: {str(error).splitlines()[0]}') from error
  for name, tensor in tensors.items():
    if not isinstance(tensor, torch.Tensor):
      raise DataError(
        f'{path}: not a state dict: {name!r} is a {type(tensor).__name__}, no tensor: save '
        'model.state_dict() alone'
      )
  # NumPy has no bfloat16.
  return {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in tensors.items()}


def _family(model: Model, kind: str, where: str) -> ModuleType:
  """The module that has the names, once model and source are known to go together."""
  module = MODELS.get(model.name, '').partition(':')[0]
  family = importlib.import_module(module) if module else None
  if family is None or not hasattr(family, f'{kind}_layer'):
    library = 'keras.applications' if kind == 'keras' else 'torchvision or timm'
    raise UsageError(f'{where}: no model {model.name!r} is known of {library}')
  wanted = kind if kind in model.variants else ''
  if model.variant != wanted:
    raise UsageError(
      f'{where}: its {model.name} differs from variant {model.variant!r}, '
      f'use hpm.models.create({model.name!r}, variant={wanted!r})'
    )
  return family


def _layers(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
  """Each layer with the names of its values, batch norm's state included."""
  layers: dict[str, list[str]] = {}
  for name in (*model.param_specs, *model.state_specs):
    layer, _, leaf = name.rpartition('/')
    layers.setdefault(layer, []).append(leaf)
  yield from ((layer, tuple(leaves)) for layer, leaves in layers.items())


def _check_fresh(model: Model, fresh: Sequence[str]) -> None:
  if isinstance(fresh, str):
    raise UsageError(f'fresh={fresh!r}: a sequence of layers is needed, such as ({fresh!r},)')
  layers = [layer for layer, _ in _layers(model)]
  for name in fresh:
    if not any(_is_fresh(layer, (name,)) for layer in layers):
      raise errors.unknown(f'layer of {model.name} in fresh', name, layers)


def _is_fresh(layer: str, fresh: Sequence[str]) -> bool:
  return any(layer == name or layer.startswith(f'{name}/') for name in fresh)


def _from_keras(
  model: Model,
  family: ModuleType,
  weights: list[tuple[str, str, list[np.ndarray]]],
  where: str,
  fresh: Sequence[str],
) -> Values:
  by_position = _by_position(model, family)
  theirs = {position if by_position else name: arrays for position, name, arrays in weights}
  found: dict[str, tuple[str, np.ndarray]] = {}
  biases: Values = {}
  missing = []
  for layer, leaves in _layers(model):
    name = family.keras_layer(model.name, layer)
    arrays = theirs.pop(name, None)
    if _is_fresh(layer, fresh):
      continue
    if arrays is None:
      missing.append(f'{name} (ours: {layer})')
      continue
    if leaves == _BATCH_NORM and len(arrays) == 3:  # without a scale
      arrays = [np.ones_like(arrays[0]), *arrays]
    elif leaves == ('kernel',) and len(arrays) == 2:
      biases[layer] = arrays.pop()
    if len(arrays) != len(leaves):
      raise DataError(
        f'{where}: layer {name!r} has {len(arrays)} arrays, {layer} of {model.name} needs '
        f'{len(leaves)} ({", ".join(leaves)})'
      )
    for leaf, array in zip(leaves, arrays, strict=True):
      found[f'{layer}/{leaf}'] = (name, array)
  values = _fit(model, where, found, missing, theirs)
  for layer, bias in biases.items():
    scope, slash, part = layer.rpartition('/')
    mean = f'{scope}{slash}{part.replace("conv", "bn")}/moving_mean'
    if mean not in values:
      raise DataError(f'{where}: {layer} of {model.name} has no bias, and no batch norm takes it')
    values[mean] = values[mean] - bias
  return values


def _from_torch(
  model: Model,
  family: ModuleType,
  weights: Mapping[str, Any],
  where: str,
  fresh: Sequence[str],
) -> Values:
  theirs = {n: np.asarray(v) for n, v in weights.items() if not n.endswith('num_batches_tracked')}
  flattened = getattr(family, 'FLATTENED', {})
  found: dict[str, tuple[str, np.ndarray]] = {}
  missing = []
  prefixes = _torch_prefixes(model, family, theirs)
  for layer, leaves in _layers(model):
    prefix = prefixes[layer]
    for leaf in leaves:
      name = f'{prefix}.{_TORCH_LEAVES[leaf]}'
      array = theirs.pop(name, None)
      if _is_fresh(layer, fresh):
        continue
      if array is None:
        missing.append(f'{name} (ours: {layer}/{leaf})')
        continue
      if leaf.endswith('kernel'):
        rank = len(model.param_specs[f'{layer}/{leaf}'].shape)
        array = _torch_kernel(array, leaf, rank, flattened.get(layer, 0))
      found[f'{layer}/{leaf}'] = (name, array)
  return _fit(model, where, found, missing, theirs)


def _torch_prefixes(model: Model, family: ModuleType, theirs: Mapping[str, Any]) -> dict[str, str]:
  """Our layer -> theirs, by torchvision's names or timm's, whichever there are more of."""
  prefixes = {name.rpartition('.')[0] for name in theirs}

  def named(layer_name: Any) -> dict[str, str]:
    return {layer: layer_name(model.name, layer) for layer, _ in _layers(model)}

  namings = [named(family.torch_layer)]
  if hasattr(family, 'timm_layer'):
    namings.append(named(family.timm_layer))
  return max(namings, key=lambda naming: len(prefixes.intersection(naming.values())))


def _torch_kernel(array: np.ndarray, leaf: str, rank: int, channels: int) -> np.ndarray:
  """torch's [out, in, height, width] or [out, in] in our order, for a kernel of ours of a rank."""
  if array.ndim == 4:
    array = array.transpose((2, 3, 0, 1) if leaf == 'depthwise_kernel' else (2, 3, 1, 0))
    # timm has convolutions over whole images where we flatten them.
    return array.reshape(-1, array.shape[-1]) if rank == 2 else array
  if channels and array.shape[1] % channels == 0:
    # Behind a flattened image: torch has the channels first there, we have them last.
    side = math.isqrt(array.shape[1] // channels)
    if side * side * channels == array.shape[1]:
      array = array.reshape(-1, channels, side, side).transpose(0, 2, 3, 1)
      array = array.reshape(len(array), -1)
  return array.transpose()


def _fit(
  model: Model,
  where: str,
  found: Mapping[str, tuple[str, np.ndarray]],
  missing: Sequence[str],
  unused: Iterable[str],
) -> Values:
  """Our name -> value, from our name -> (their name, value), once nothing is wrong with it."""
  problems = []
  for verb, names in (('lacks', list(missing)), ('has more than the model:', list(unused))):
    if names:
      more = f' and {len(names) - 5} more' if len(names) > 5 else ''
      problems.append(f'{verb} {", ".join(names[:5])}{more}')
  if problems:
    raise DataError(f'{where} does not fit {model.name}: it {"; it ".join(problems)}')
  specs = {**model.param_specs, **model.state_specs}
  for name, (theirs, array) in found.items():
    if array.shape != specs[name].shape:
      raise DataError(
        f'{where}: {theirs!r} gives {name} the shape {array.shape}, {model.name} needs '
        f"{specs[name].shape}: create the model with the source's num_classes and image_size, or "
        'pass the layer in `fresh`'
      )
  return {name: np.asarray(array, np.float32) for name, (_, array) in found.items()}


def _exists(path: str) -> None:
  if not os.path.isfile(path):
    raise UsageError(f'{path}: no such file; weights are not downloaded')


# Keras: layers as (position, name, arrays), the position being 'conv2d_3' for the fourth Conv2D.


def _by_position(model: Model, family: ModuleType) -> bool:
  return model.name in getattr(family, 'KERAS_BY_POSITION', ())


def _position(kind: str, counts: dict[str, int]) -> str:
  index = counts[kind] = counts.get(kind, -1) + 1
  return f'{kind}_{index}' if index else kind


def _keys_of(keras_model: Any, by_position: bool) -> Iterator[tuple[Any, str]]:
  counts: dict[str, int] = {}
  for layer in keras_model.layers:
    kind = re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', type(layer).__name__).lower()
    kind = kind.replace('conv2_d', 'conv2d')
    position = _position(kind, counts)
    yield layer, position if by_position else layer.name


def _layers_of(keras_model: Any) -> list[tuple[str, str, list[np.ndarray]]]:
  return [
    (position, layer.name, layer.get_weights())
    for layer, position in _keys_of(keras_model, by_position=True)
    if layer.weights
  ]


def _read_h5(path: str) -> list[tuple[str, str, list[np.ndarray]]]:
  import h5py  # comes with Keras

  try:
    with h5py.File(path, 'r') as file:
      if 'layers' in file:
        return list(_read_keras_3(file['layers']))
      if 'layer_names' in file.attrs:
        return list(_read_keras_2(file))
  except OSError as error:
    raise DataError(f'{path}: damaged, or no HDF5 file: {error}') from error
  raise DataError(f'{path}: neither Keras 3 weights nor Keras 2 weights (save_weights of a model)')


def _read_keras_3(layers: Any) -> Iterator[tuple[str, str, list[np.ndarray]]]:
  for position, group in layers.items():
    if len(group.get('vars', ())):
      arrays = group['vars']
      name = arrays.attrs.get('name', position)
      yield position, str(name), [arrays[str(i)][()] for i in range(len(arrays))]


def _read_keras_2(file: Any) -> Iterator[tuple[str, str, list[np.ndarray]]]:
  counts: dict[str, int] = {}
  for name in (_text(name) for name in file.attrs['layer_names']):
    position = _position(re.sub(r'_\d+$', '', name), counts)
    arrays = [file[name][_text(weight)][()] for weight in file[name].attrs['weight_names']]
    if arrays:
      yield position, name, arrays


def _text(name: str | bytes) -> str:
  return name.decode() if isinstance(name, bytes) else name


# safetensors: 8 bytes of length, a JSON header, the data (huggingface.co/docs/safetensors).

_SAFETENSORS_DTYPES = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': tf.bfloat16.as_numpy_dtype,
  'I64': np.int64,
  'I32': np.int32,
}


def _read_safetensors(path: str) -> Values:
  data = Path(path).read_bytes()
  values = {}
  try:
    (size,) = struct.unpack_from('<Q', data)
    header = json_file.parse(data[8 : 8 + size])
    body = memoryview(data)[8 + size :]
    for name, entry in header.items():
      if name != '__metadata__':
        begin, end = entry['data_offsets']
        array = np.frombuffer(body[begin:end], _SAFETENSORS_DTYPES[entry['dtype']])
        values[name] = array.reshape(entry['shape'])
  except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
    raise DataError(f'{path}: damaged, or no safetensors file: {error}') from error
  return values
