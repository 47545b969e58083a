"""The header of a run: what is about to be measured, in tf_cnn_benchmarks' labels."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import flags, machine

__all__ = ['lines']


def lines(
  options: flags.Options,
  devices: Sequence[str],
  data_format: str,
  epoch_size: int | None,
  versions: Mapping[str, Any],
) -> list[str]:
  """One line a fact.

  Args:
    options: complete.
    devices: device strings.
    data_format: layout of the model.
    epoch_size: images a pass over the data; None if they weren't counted.
    versions: from `machine.describe`, and the names of the GPUs.
  """
  on_cpu = options.device == 'cpu'
  synthetic = options.data_dir is None
  facts = [
    ('TensorFlow', '.'.join(versions['tensorflow'].split('.')[:2])),
    ('Model', options.model),
    ('Dataset', 'imagenet (synthetic)' if synthetic else f'{options.data_name} {options.data_dir}'),
    ('Mode', flags.mode.title(options)),
    ('Batch size', f'{options.batch_size * len(devices)} global'),
    ('', f'{options.batch_size} per device'),
  ]
  if options.num_warmup_batches is not None:
    note = ': the first timed step traces and compiles' if not options.num_warmup_batches else ''
    facts.append(('Warm-up', f'{options.num_warmup_batches} batches{note}'))
  if options.num_batches is not None:
    facts.append(('Num batches', f'{options.num_batches}'))
  elif options.eval:
    facts.append(('Num batches', 'all validation files'))
  if options.num_epochs is not None:
    facts.append(('Num epochs', f'{options.num_epochs:.2f} of {epoch_size} images'))
  elif options.num_batches is not None and epoch_size is not None:
    epochs = options.num_batches * options.batch_size * len(devices) / epoch_size
    facts.append(('Num epochs', f'{epochs:.2f} of {epoch_size} images'))
  facts += [
    ('Devices', f'{list(devices)}'),
    ('Processor', f'{versions["cpu"]}, {versions["cores"]} cores'),
    *[('GPU', name) for name in dict.fromkeys(versions['gpus'])],
    ('Data format', data_format),
    ('Precision', _precision(options.use_fp16, on_cpu)),
  ]
  if options.optimizer is not None:
    facts += [
      ('Optimizer', options.optimizer),
      ('Learn. rate', f'{options.init_learning_rate:g}{_rate_note(options)}'),
    ]
  place = options.local_parameter_device
  where = {None: '', 'cpu': ', on the CPU', 'gpu': ', on the compute devices'}[place]
  facts.append(('Variables', options.variable_update + where))
  if options.all_reduce_spec is not None:
    facts.append(('AllReduce', options.all_reduce_spec))
  facts.append(
    ('oneDNN', {'default': "TensorFlow's default"}.get(machine.onednn(), machine.onednn()))
  )
  chosen = options.chosen()
  facts.append(('Chosen', ' '.join(options.spelled(name) for name in chosen) or 'nothing'))
  return [f'{label + ":" if label else "":<12} {text}' for label, text in facts]


def _rate_note(options: flags.Options) -> str:
  """How the learning rate was chosen, if it was."""
  if 'init_learning_rate' in options.given or options.optimizer not in flags.optimizer.LINEAR:
    return ''
  return f' (0.1 * {flags.optimizer.batch(options)} / 256)'


def _precision(use_fp16: bool, on_cpu: bool) -> str:
  if not use_fp16:
    return 'float32'
  return 'float16' + (
    ' (on CPU many times slower than float32: for correctness only)' if on_cpu else ''
  )
