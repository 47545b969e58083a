"""The header of a run: what is about to be measured, in tf_cnn_benchmarks' labels."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import flags, machine
from hpm.cluster.spec import Cluster

__all__ = ['lines']


def lines(
  options: flags.Options,
  devices: Sequence[str],
  epoch_size: int | None,
  versions: Mapping[str, Any],
) -> list[str]:
  """One line a fact.

  Args:
    options: complete.
    devices: device strings.
    epoch_size: images a pass over the data; None if they weren't counted.
    versions: from `machine.describe`, and the names of the GPUs.
  """
  synthetic = flags.data.synthetic(options)
  there = flags.cluster.cluster(options)
  together = flags.cluster.num_together(options)
  facts = [
    ('TensorFlow', '.'.join(versions['tensorflow'].split('.')[:2])),
    *flags.preset.facts(options),
    *flags.recipe.facts(options),
    ('Model', options.model),
    (
      'Dataset',
      'imagenet (synthetic)'
      if synthetic
      else f'{options.data_name} {options.data_dir or ""}'.rstrip(),
    ),
    ('Mode', flags.mode.title(options)),
    ('Batch size', f'{options.batch_size * len(devices) * together} global'),
    ('', f'{options.batch_size} per device'),
    *_steps(options, len(devices) * (there.num_workers if there else 1), epoch_size),
    ('Devices', f'{list(devices)}'),
    *([('Cluster', _cluster(there))] if there else []),
    ('Processor', f'{versions["cpu"]}, {versions["cores"]} cores'),
    *[('GPU', name) for name in dict.fromkeys(versions['gpus'])],
    ('Data format', options.data_format),
    ('Precision', _precision(options)),
  ]
  computed = _computed(options)
  if computed:
    facts.append(('Computed', ', '.join(computed)))
  if options.optimizer is not None:
    facts += [
      ('Optimizer', flags.optimizer.title(options)),
      ('Learn. rate', flags.schedule.title(options)),
    ]
  place = options.local_parameter_device
  devices_alike = ', on the compute devices'
  places = {None: '', 'cpu': ', on the CPU', 'gpu': devices_alike, 'spread': devices_alike}
  where = places.get(place, f', on compute device {place}')
  facts.append(('Variables', options.variable_update + where))
  if options.all_reduce_spec is not None:
    facts.append(('AllReduce', options.all_reduce_spec))
  facts.append(
    ('oneDNN', {'default': "TensorFlow's default"}.get(machine.onednn(), machine.onednn()))
  )
  set_here = flags.runtime.given(options)
  if set_here:
    facts.append(('Environment', ' '.join(set_here)))
  chosen = options.chosen()
  facts.append(('Chosen', ' '.join(options.spelled(name) for name in chosen) or 'nothing'))
  return [f'{label + ":" if label else "":<12} {text}' for label, text in facts]


def _steps(
  options: flags.Options, num_devices: int, epoch_size: int | None
) -> list[tuple[str, str]]:
  facts = []
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
    epochs = options.num_batches * options.batch_size * num_devices / epoch_size
    facts.append(('Num epochs', f'{epochs:.2f} of {epoch_size} images'))
  return facts


def _cluster(cluster: Cluster) -> str:
  counts = [f'{cluster.num_workers} worker', f'{cluster.num_ps} parameter server']
  words = [f'{count}s' if not count.startswith('1 ') else count for count in counts]
  return f'{cluster.task} of {", ".join(words[: 2 if cluster.num_ps else 1])}'


def _precision(options: flags.Options) -> str:
  names = {'fp32': 'float32', 'fp16': 'float16', 'bf16': 'bfloat16'}
  text = names.get(options.precision, options.precision)
  if options.use_fp16 and options.optimizer is not None:
    kind = 'loss scale from' if options.fp16_enable_auto_loss_scale else 'loss scale'
    text += f', {kind} {options.fp16_loss_scale:g}'
  if options.precision != 'fp32' and options.device == 'cpu':
    text += ' (on CPU many times slower than float32: for correctness only)'
  return text


def _computed(options: flags.Options) -> list[str]:
  words = []
  if options.xla:
    words.append('towers compiled by XLA')
  if options.stem_rewrite is not None:
    words.append(f'stem by {options.stem_rewrite}')
  if options.recompute:
    words.append('activations computed again')
  if (options.accumulate or 1) > 1:
    words.append(f'in {options.accumulate} parts a device')
  if options.steps_per_call > 1:
    words.append(f'{options.steps_per_call} steps a call')
  return words
