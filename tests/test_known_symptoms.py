"""What is reported again and again of systems that do the same job, and what holds it here.

`HELD` has a line for each of 38 such faults: the symptom, and the tests that would fail if this
library had it. What no test elsewhere held has one in this file.
"""

import ast
from collections.abc import Iterator
import functools
import importlib
import io
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from benchmarks import run
from hpm import checkpoint, errors, pipelines
from hpm.pipelines import parity, records

ROOT = Path(__file__).parents[1]
END_S = 10.0  # from the last line of a step to the end of all processes

# Folders, to keep the lines below short.
BENCHMARKS, CLUSTER, PARITY = 'tests/benchmarks/', 'tests/cluster/', 'tests/parity/'
PIPELINES, PLACEMENT, TESTS = 'tests/pipelines/', 'tests/placement/', 'tests/'
HERE = TESTS + 'test_known_symptoms.py::'

# Number -> (symptom, what holds it).
HELD: dict[int, tuple[str, list[str]]] = {
  # Files, patterns, sharding
  1: (
    'missing or empty data looks like a hang',
    [
      PIPELINES + 'test_faults.py::test_missing_data_is_named_within_a_second',
      PIPELINES + 'test_faults.py::test_a_zero_byte_shard_is_named',
      PIPELINES + 'test_imagenet.py::test_few_records_are_repeated_to_fill_a_batch',
      BENCHMARKS + 'test_run.py::test_a_shard_of_zero_bytes',
    ],
  ),
  2: (
    'a data directory given, the run fails later for another reason',
    [HERE + 'test_a_length_in_batches_or_epochs_goes_with_data_and_both_are_refused'],
  ),
  3: (
    'workers read the same files, since they are shuffled before they are shared',
    [
      HERE + 'test_two_processes_share_files_and_records_whatever_the_seed',
      PIPELINES + 'test_properties.py::test_shards_partition_the_records',
    ],
  ),
  4: (
    'workers see the same records, since each shuffles before it takes its share',
    [
      HERE + 'test_two_processes_share_files_and_records_whatever_the_seed',
      PIPELINES + 'test_sources.py::test_workers_see_all_records_and_none_twice',
    ],
  ),
  5: (
    'fewer files than workers: one has nothing, or all wait',
    [
      HERE + 'test_three_files_give_five_workers_a_share_or_are_refused_with_both_numbers',
      PIPELINES + 'test_sources.py::test_a_worker_without_a_record_is_refused',
    ],
  ),
  6: (
    'a damaged record is not noticed, or not named',
    [
      PIPELINES + 'test_faults.py::test_a_damaged_record_is_found_by_its_checksum',
      PIPELINES + 'test_dali_faults.py::test_a_flipped_byte_is_named',
      PIPELINES
      + 'test_skips.py::test_just_the_damaged_record_of_a_shard_is_lost_if_the_next_can_be_found',
      BENCHMARKS + 'test_run.py::test_a_damaged_record_ends_the_run_with_its_file_and_number',
    ],
  ),
  7: (
    'a Git LFS pointer or a text is taken for a TFRecord',
    [
      PIPELINES + 'test_faults.py::test_a_git_lfs_pointer_is_no_tfrecord',
      PIPELINES + 'test_dali_faults.py::test_a_file_that_is_no_tfrecord_is_named_at_the_door',
      PIPELINES + 'test_records.py::test_files_that_are_no_tfrecords_are_recognised',
    ],
  ),
  8: (
    'indices of DALI that are missing, or of other files',
    [
      PIPELINES + 'test_index.py::test_an_index_that_is_not_of_this_shard_is_refused',
      PIPELINES + 'test_index.py::test_check_names_the_index_of_another_file_and_writes_nothing',
      PIPELINES + 'test_index.py::test_the_command_indexes_every_split_and_leaves_alone_what_fits',
    ],
  ),
  # Bytes to pixels
  9: (
    'JPEGs in CMYK',
    [
      PIPELINES + 'test_augment.py::test_cmyk_looks_like_the_original',
      PIPELINES + 'test_dali.py::test_dali_tensorflow_and_pil_decode_the_same_pixels',
    ],
  ),
  10: (
    'a PNG by the name of a JPEG ends the run',
    [
      PIPELINES + 'test_imagenet.py::test_unusual_images_pass',
      PIPELINES + 'test_dali.py::test_unusual_images_are_those_of_tfdata',
    ],
  ),
  11: (
    'one bad image ends the run, and nobody knows which',
    [
      PIPELINES + 'test_faults.py::test_an_undecodable_image_is_found_afterwards',
      PIPELINES + 'test_dali_faults.py::test_a_bad_record_in_the_middle_is_named',
      PIPELINES + 'test_skips.py::test_a_record_that_cannot_be_used_is_left_out_and_listed',
    ],
  ),
  12: (
    'decoded pixels are not those of PIL',
    [
      PIPELINES + 'test_augment.py::test_decoding_equals_pil',
      PIPELINES + 'test_dali.py::test_dali_tensorflow_and_pil_decode_the_same_pixels',
      PIPELINES + 'test_imagenet.py::test_evaluation_pixels_are_those_of_the_operations',
    ],
  ),
  13: (
    'pipelines resize differently',
    [
      HERE + 'test_a_checkerboard_shrinks_alike_in_every_pipeline_and_in_pil',
      PIPELINES + 'test_parity.py::test_tfdata_dali_and_pil_agree',
      PIPELINES + 'test_augment.py::test_a_one_pixel_checkerboard_turns_grey',
    ],
  ),
  # Labels and classes
  14: (
    'labels from 1 on with a head from 0 on: the last class has no loss',
    [
      PIPELINES + 'test_faults.py::test_a_label_outside_the_head_names_file_and_record',
      PIPELINES + 'test_imagenet.py::test_the_last_label_fits_both_kinds_of_heads',
    ],
  ),
  # Epochs and batches
  15: (
    'a last batch that is smaller than the devices are many gives NaN',
    [
      PARITY + 'test_partial_batches.py::test_the_end_of_the_data_agrees_with_the_simulation',
      TESTS + 'test_losses.py::test_no_samples_have_no_loss',
    ],
  ),
  16: (
    'evaluation leaves out the last samples',  # of several workers, the chief evaluates all
    [
      TESTS + 'test_step.py::test_evaluation_counts_every_sample_once',
      PIPELINES + 'test_imagenet.py::test_evaluation_counts_every_sample_once_in_a_fixed_order',
      CLUSTER + 'test_modes.py::test_two_workers_with_two_parameter_servers_are_as_one_process',
    ],
  ),
  17: (
    'DALI fills up the last batch',
    [
      PIPELINES + 'test_dali.py::test_every_sample_comes_once_an_epoch_and_no_padding',
      PIPELINES + 'test_dali.py::test_evaluation_gives_the_batches_of_tfdata',
    ],
  ),
  18: (
    'evaluation never ends, since its data repeat',
    [
      BENCHMARKS + 'test_run.py::test_evaluation_counts_every_image_once',
      TESTS + 'test_step.py::test_evaluating_an_endless_data_set_is_refused',
    ],
  ),
  19: (
    'the total of several workers is that of one, multiplied',
    [
      CLUSTER + 'test_member.py::test_the_total_is_over_the_time_from_the_first_to_the_last',
      CLUSTER + 'test_driver.py::test_lines_total_and_results_of_all_workers',
    ],
  ),
  # Order, seeds, resuming
  20: (
    'a seed gives another order with several threads',
    [
      PIPELINES + 'test_imagenet.py::test_the_order_does_not_depend_on_the_number_of_threads',
      PIPELINES + 'test_dali.py::test_threads_change_nothing',
    ],
  ),
  21: (
    'a resumed training begins its data anew',
    [
      PIPELINES + 'test_imagenet.py::test_resuming_goes_on_exactly_where_it_stopped',
      PIPELINES + 'test_dali.py::test_resuming_goes_on_exactly_where_it_stopped',
      BENCHMARKS + 'test_ledger.py::test_each_sample_is_trained_once_an_epoch_by_tfdata',
    ],
  ),
  22: (
    'a resumed training has lost its step, learning rate or momentum',
    [
      TESTS + 'test_checkpoint.py::test_resuming_in_the_same_mode_is_bit_equal_with_batch_norm',
      BENCHMARKS
      + 'test_resume.py::test_stopped_and_started_again_a_training_ends_with_the_same_bits',
    ],
  ),
  23: (
    'a checkpoint can not be read in another mode',
    [
      HERE + 'test_a_checkpoint_of_any_mode_goes_on_in_any_other',
      TESTS + 'test_checkpoint.py::test_any_mode_goes_on_where_any_other_stopped',
      TESTS + 'test_checkpoint.py::test_independent_keeps_its_replicas_and_other_modes_drop_them',
    ],
  ),
  # Staging, prefetching, the end of the data
  24: (
    'a staging area blocks for ever',
    [
      TESTS + 'test_staging.py::test_less_data_than_is_staged_ahead',
      TESTS + 'test_staging.py::test_what_the_producer_raises_the_step_raises_at_once',
      TESTS + 'test_staging.py::test_a_consumer_that_stops_early_goes_on_with_a_new_run',
    ],
  ),
  25: (
    'a hang at the end of the data, or no second epoch',
    [HERE + 'test_two_epochs_end_and_go_on_being_ended'],
  ),
  26: (
    'a later stage undoes the prefetching to a device',
    [
      PLACEMENT + 'test_staging.py::test_each_batch_is_copied_from_the_host_to_its_gpu_once',
      PLACEMENT + 'test_staging.py::test_optimized_graph_takes_each_batch_straight_to_its_device',
    ],
  ),
  27: (
    'memory grows with the epochs',
    [
      PIPELINES + 'test_memory.py::test_many_short_epochs_take_no_more_memory_than_a_few',
      HERE + 'test_fifty_short_epochs_take_no_more_memory_than_five',
    ],
  ),
  # Modes, collectives, the end
  28: (
    'parameter servers never end',
    [HERE + 'test_three_steps_of_two_workers_are_three_and_every_process_ends'],
  ),
  29: (
    'distributed_replicated fails when it ends',
    [
      HERE + 'test_three_steps_of_two_workers_are_three_and_every_process_ends',
      CLUSTER + 'test_driver.py::test_lines_total_and_results_of_all_workers',
    ],
  ),
  30: (
    'a worker that has finished ends or hangs the others',
    [
      # Its third and fourth case over servers end at different times.
      CLUSTER + 'test_modes.py::test_two_workers_with_two_parameter_servers_are_as_one_process',
      CLUSTER + 'test_modes.py::test_two_workers_with_collectives_are_as_one_process',
      CLUSTER + 'test_heartbeat.py::test_who_finishes_is_missed_by_nobody',
    ],
  ),
  31: (
    'each worker adds to the global step',
    [
      HERE + 'test_three_steps_of_two_workers_are_three_and_every_process_ends',
      PARITY + 'test_mutants.py::test_a_step_that_counts_as_two_is_found',
    ],
  ),
  32: (
    'NCCL without GPUs',
    [
      BENCHMARKS + 'test_flags.py::test_what_can_not_work_is_refused_in_one_line',
      TESTS + 'variable_mgr/test_allreduce.py::test_nccl_on_cpu_devices_is_refused',
    ],
  ),
  33: (
    'the modes do not train the same',
    [
      PARITY + 'test_modes.py::test_every_mode_agrees_with_the_simulation',
      PARITY + 'test_managers.py::test_equal_samples_end_with_equal_weights_on_1_2_4_and_8_devices',
    ],
  ),
  # Precision, devices, versions
  34: (
    'half precision gives NaN, or its loss is not scaled',
    [
      PARITY + 'test_step_options.py::test_an_overflow_changes_no_variable_and_halves_the_scale',
      PARITY + 'test_step_options.py::test_the_scale_stays_within_its_bounds',
      PARITY + 'test_step_options.py::test_fp16_underflows_without_a_scale_and_trains_with_one',
    ],
  ),
  35: (
    'Keras 3 has other calls for loss scaling',  # none of them is called here
    [
      HERE + 'test_every_name_of_tensorflow_is_there_and_the_unstable_ones_are_listed',
      BENCHMARKS + 'test_run.py::test_fp16_runs_on_the_cpu_and_says_what_that_is_worth',
    ],
  ),
  36: (
    'NCHW on CPUs fails in a convolution',
    [
      BENCHMARKS + 'test_flags.py::test_what_can_not_work_is_refused_in_one_line',
      HERE + 'test_the_layout_follows_the_device_and_nchw_is_refused_on_cpus',
    ],
  ),
  37: (
    'a new TensorFlow lacks what is imported',
    [
      HERE + 'test_every_module_is_imported_without_a_warning',
      HERE + 'test_every_name_of_tensorflow_is_there_and_the_unstable_ones_are_listed',
      TESTS + 'packaging/test_security.py::test_each_requirement_has_a_lower_and_an_upper_bound',
    ],
  ),
  38: (
    'DALI absent, of another TensorFlow, or without a GPU',
    [
      PIPELINES + 'test_dali.py::test_absent_dali_is_one_line_and_missed_by_nothing_else',
      PIPELINES + 'test_dali.py::test_training_gives_the_batches_of_tfdata',
      PIPELINES + 'test_dali.py::test_what_cannot_work_is_refused_at_the_door',
      PIPELINES + 'test_dali.py::test_without_the_plugin_batches_come_through_python',
    ],
  ),
}


@functools.cache
def kept_in(path: str) -> dict[str, bool]:
  """Name -> whether it is left out of the default set, of the tests of a file."""
  tree = ast.parse((ROOT / path).read_text(encoding='utf-8'))
  all_long = any(ast.unparse(n) == 'pytestmark = pytest.mark.long' for n in tree.body)
  return {
    node.name: all_long or 'pytest.mark.long' in map(ast.unparse, node.decorator_list)
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
  }


def test_every_symptom_is_held_by_tests_that_exist():
  assert list(HELD) == list(range(1, 39))
  assert len({symptom for symptom, _ in HELD.values()}) == len(HELD)
  for symptom, names in HELD.values():
    kept = [(name.split('::')[1], kept_in(name.split('::')[0])) for name in names]
    assert [name for name, tests in kept if name not in tests] == [], symptom
    assert not all(tests[name] for name, tests in kept), f'{symptom}: none in the default set'


def test_every_test_of_this_file_holds_a_symptom():
  held = {name for _, names in HELD.values() for name in names}
  own = {HERE + name for name in kept_in(HERE.removesuffix('::'))}
  assert own - held == {
    HERE + 'test_every_symptom_is_held_by_tests_that_exist',
    HERE + 'test_every_test_of_this_file_holds_a_symptom',
  }


# Files, patterns, sharding


def png(pixels: np.ndarray) -> bytes:
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, 'PNG')
  return buffer.getvalue()


def write(directory: Path, num_files: int, num_records: int, split: str = 'train') -> Path:
  """Shards of small images, as many records in each of them."""
  directory.mkdir(exist_ok=True)
  pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
  features = {
    'image/encoded': png(pixels),
    'image/class/label': 1,
    'image/filename': b'n01440764_7.JPEG',
  }
  example = records.encode_example(features)
  for index in range(num_files):
    path = directory / f'{split}-{index:05d}-of-{num_files:05d}'
    records.write_records(str(path), [example] * num_records)
  return directory


@pytest.mark.parametrize('length', ['', '--num_batches=3', '--num_epochs=2', 'both'])
def test_a_length_in_batches_or_epochs_goes_with_data_and_both_are_refused(length, tmp_path, capfd):
  directory = write(tmp_path / 'data', 2, 4)
  lengths = ['--num_batches=3', '--num_epochs=2'] if length == 'both' else length.split()
  flags = ['--device=cpu', '--model=lenet', '--num_gpus=1', '--batch_size=2']
  code = run.main([*flags, '--num_warmup_batches=1', f'--data_dir={directory}', *lengths])
  said = capfd.readouterr()
  if length == 'both':
    assert code == 2
    assert said.err.count('\n') == 1
    assert '--num_batches=3 and --num_epochs=2 exclude each other' in said.err
  else:
    assert code == 0, said.err
    assert 'total images/sec' in said.out


def shares(directory: Path, shard_by: str, seed: int, worker: int) -> list[int]:
  """The ids that one of two workers gets in an epoch."""
  pipeline = pipelines.create(
    'imagenet',
    **{'data_dir': str(directory), 'batch_size': 50, 'image_size': 8, 'num_classes': 1000},
    **{'num_shards': 2, 'shard_index': worker, 'shard_by': shard_by},
    **{'seed': seed, 'num_epochs': 1, 'with_ids': True},
  )
  return [i for _, _, ids in pipeline.dataset() for i in ids.numpy().tolist()]


def test_two_processes_share_files_and_records_whatever_the_seed(tmp_path):
  files = write(tmp_path / 'files', 16, 1)
  many = write(tmp_path / 'records', 4, 75)
  cases = [(files, 'file', seed) for seed in range(4)] + [(many, 'record', seed) for seed in (0, 1)]
  program = (
    'import json, sys; from pathlib import Path; from tests.test_known_symptoms import shares; '
    'cases, worker = json.loads(sys.argv[1]); '
    'print(json.dumps([shares(Path(d), by, seed, worker) for d, by, seed in cases]))'
  )
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', program, json.dumps([cases, worker], default=str)],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      text=True,
    )
    for worker in (0, 1)
  ]
  seen = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
  orders = set()
  for (directory, _, _), first, second in zip(cases, *seen, strict=True):
    num_files, num_records = (16, 1) if directory == files else (4, 75)
    whole = [(file << 32) | record for file in range(num_files) for record in range(num_records)]
    assert len(first) == len(second) == len(whole) / 2
    assert sorted(first + second) == whole
    orders.add(tuple(first))
  assert len(orders) > 3  # a seed shuffles


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_three_files_give_five_workers_a_share_or_are_refused_with_both_numbers(split, tmp_path):
  directory = write(tmp_path / 'data', 3, 3, split)
  options = {'data_dir': str(directory), 'split': split, 'num_epochs': 1, 'with_ids': True}
  options |= {'batch_size': 2, 'image_size': 8, 'num_classes': 1000, 'num_shards': 5}
  seen = []
  for worker in range(5):
    pipeline = pipelines.create('imagenet', shard_index=worker, **options)
    own = [i for _, _, ids in pipeline.dataset() for i in ids.numpy().tolist()]
    assert len(own) == pipeline.epoch_size in (1, 2)
    seen += own
  assert sorted(seen) == [(file << 32) | record for file in range(3) for record in range(3)]
  for worker in range(5):
    with pytest.raises(errors.UsageError, match='5 workers .* but 3 files'):
      pipelines.create('imagenet', shard_index=worker, shard_by='file', **options)


# Bytes to pixels


def test_a_checkerboard_shrinks_alike_in_every_pipeline_and_in_pil(tmp_path):
  pytest.importorskip('nvidia.dali')
  board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
  features = {'image/encoded': png(np.stack([board] * 3, 2)), 'image/class/label': 1}
  path = tmp_path / 'train-00000-of-00001'
  records.write_records(str(path), [records.encode_example(features)])
  training, evaluation = parity.compare(
    'imagenet', num_images=1, data_dir=str(tmp_path), image_size=16
  )
  assert training.agrees and evaluation.agrees
  # The training of either takes single pixels; so does what it is compared with.
  assert training.differences['tfdata-pil'][1] <= 1
  assert evaluation.differences['tfdata-pil'][1] <= 1
  assert evaluation.differences['dali-pil'][1] <= 1
  grey = evaluation.images['tfdata']
  assert grey.min() > 64 and grey.max() < 192  # without antialiasing: 0 and 255


# The end of the data


@pytest.mark.parametrize('kind', ['tfdata', 'dali'])
def test_two_epochs_end_and_go_on_being_ended(kind, tmp_path):
  if kind == 'dali':
    pytest.importorskip('nvidia.dali')
  pipeline = pipelines.create(
    'imagenet',
    **{'data_dir': str(write(tmp_path / 'data', 2, 5)), 'pipeline': kind, 'with_ids': True},
    **{'batch_size': 4, 'image_size': 8, 'num_classes': 1000, 'num_epochs': 2},
  )
  iterator = iter(pipeline.dataset())
  ids = [i for _, _, batch in iterator for i in batch.numpy().tolist()]
  whole = [(file << 32) | record for file in range(2) for record in range(5)]
  assert sorted(ids[:10]) == sorted(ids[10:]) == whole
  for _ in range(2):
    with pytest.raises(StopIteration):
      next(iterator)


def test_fifty_short_epochs_take_no_more_memory_than_five(tmp_path):
  pipeline = pipelines.create(
    'imagenet',
    **{'data_dir': str(write(tmp_path / 'data', 2, 40)), 'training': False},
    **{'split': 'train', 'batch_size': 16, 'image_size': 112, 'num_classes': 1000},
  )
  dataset = pipeline.dataset()
  resident = []
  for _ in range(50):
    assert sum(len(labels) for _, labels in dataset) == 80
    pages = int(Path('/proc/self/statm').read_text(encoding='ascii').split()[1])
    resident.append(pages * os.sysconf('SC_PAGE_SIZE'))
  # The batches of the 45 epochs in between are 130 MiB, should something keep them.
  assert resident[-1] < 1.05 * resident[4]


# Modes, collectives, the end

SERVERS = ('parameter_server', 'distributed_replicated')
LENET = ['--model=lenet', '--device=cpu', '--batch_size=2']
TRAINING = ['--num_warmup_batches=1', '--display_every=1']


def trained(*arguments: str) -> tuple[list[str], float]:
  """What the driver says in a process of its own, and the seconds from its last step to its end."""
  process = subprocess.Popen(
    [sys.executable, 'benchmarks/run.py', *LENET, *arguments],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  stop = threading.Timer(120, process.kill)
  stop.start()
  lines, last = [], time.monotonic()
  for line in process.stdout:
    lines.append(line.rstrip('\n'))
    if '\timages/sec' in line:
      last = time.monotonic()
  code = process.wait()
  stop.cancel()
  assert code == 0, '\n'.join(lines)  # the worst of all processes
  return lines, time.monotonic() - last


def of_mode(mode: str) -> list[str]:
  if mode in SERVERS:
    return [f'--variable_update={mode}', '--local_cluster=workers:2,ps:1', '--num_gpus=1']
  return [f'--variable_update={mode.removesuffix(" alone")}', '--num_gpus=2']


@pytest.mark.parametrize('mode', [SERVERS[0], pytest.param(SERVERS[1], marks=pytest.mark.long)])
def test_three_steps_of_two_workers_are_three_and_every_process_ends(mode, tmp_path):
  lines, seconds = trained(*of_mode(mode), *TRAINING, '--num_batches=2', f'--train_dir={tmp_path}')
  assert seconds < END_S
  text = '\n'.join(lines)
  for task in ('worker:0', 'worker:1', 'ps:0'):
    assert re.search(rf'^\[{task}\] Done', text, re.MULTILINE), text
  assert not re.search('traceback|error|closed session|exception', text, re.IGNORECASE), text
  values = checkpoint.read(checkpoint.latest(str(tmp_path)))[0]
  assert (values['step'], values['samples']) == (3, 3 * 2 * 2)


MODES = [*SERVERS, 'parameter_server alone', 'replicated', 'independent']


@pytest.mark.long
@pytest.mark.parametrize('writer', MODES)
def test_a_checkpoint_of_any_mode_goes_on_in_any_other(writer, tmp_path):
  """Of two devices or workers, on as many and on one, in training and evaluation.

  At a learning rate of 1e-30 parameters stay what they were, and momentum does not.
  """
  data = write(tmp_path / 'data', 2, 5, 'validation')
  written = tmp_path / 'written'
  trained(*of_mode(writer), *TRAINING, '--num_batches=2', f'--train_dir={written}')
  before = checkpoint.read(checkpoint.latest(str(written)))[0]
  momentum = 'slots/momentum/conv1/kernel'
  for reader in MODES:
    for devices in [[], ['--num_gpus=1']] if reader == 'replicated' else [[]]:
      directory = shutil.copytree(written, tmp_path / f'{reader}{len(devices)}')
      flags = [*of_mode(reader), *devices, f'--train_dir={directory}']
      rate = '--init_learning_rate=1e-30'
      lines, _ = trained(*flags, *TRAINING, '--num_batches=4', rate)
      share = 6 if reader in SERVERS else 12  # of a worker
      assert any(f'Going on after step 3, {share} images' in line for line in lines), lines
      after = checkpoint.read(checkpoint.latest(str(directory)))[0]
      assert after['step'] == 5
      for name, value in before.items():
        if name.startswith('params/'):
          np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-25, err_msg=name)
      assert not np.array_equal(after[momentum], before[momentum])
      if reader in ('parameter_server alone', 'replicated') and not devices:
        flags[-1] = f'--train_dir={written}'
        lines, _ = trained(*flags, '--eval', f'--data_dir={data}')
        assert any(line.endswith('[10 examples]') for line in lines)


# Devices, versions


def test_the_layout_follows_the_device_and_nchw_is_refused_on_cpus(capfd):
  flags = [*LENET, *TRAINING, '--num_gpus=1', '--num_batches=1']
  assert run.main(flags) == 0
  assert re.search(r'^Data format: NHWC$', capfd.readouterr().out, re.MULTILINE)
  assert run.main([*flags, '--data_format=NCHW']) == 2
  said = capfd.readouterr().err
  assert 'NCHW needs GPUs' in said and said.count('\n') == 1


# What TensorFlow does not promise to keep, and hpm uses.
UNSTABLE = {
  'tf.data.experimental.SHARD_HINT',
  'tf.data.experimental.assert_cardinality',
  'tf.data.experimental.copy_to_device',
  'tf.data.experimental.from_variant',
  'tf.data.experimental.service',
  'tf.data.experimental.to_variant',
  'tf.nn.experimental.stateless_dropout',
  'tf.random.experimental.stateless_shuffle',
}


def sources() -> Iterator[tuple[Path, ast.Module]]:
  for path in sorted(ROOT.glob('hpm/**/*.py')):
    yield path, ast.parse(path.read_text(encoding='utf-8'))


def used(tree: ast.Module) -> set[str]:
  """The longest names below tf in a module."""
  names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
  names = {name for name in names if re.fullmatch(r'tf(\.\w+)+', name)}
  return {n for n in names if not any(other.startswith(f'{n}.') for other in names)}


def test_every_name_of_tensorflow_is_there_and_the_unstable_ones_are_listed():
  found = set()
  for path, tree in sources():
    names = used(tree)
    for name in names:
      functools.reduce(getattr, name.split('.')[1:], tf)  # raises with the name that lacks
      assert not re.search('contrib|estimator|compat.v1.(layers|train)|LossScale', name), path
    found |= {name for name in names if 'experimental' in name}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and node.module.startswith('tensorflow.'):
        module = importlib.import_module(node.module)
        for alias in node.names:
          assert hasattr(module, alias.name) or importlib.import_module(
            f'{node.module}.{alias.name}'
          ), path
  assert found == UNSTABLE


def test_every_module_is_imported_without_a_warning():
  program = (
    'import hpm, importlib, pkgutil\n'
    'for module in pkgutil.walk_packages(hpm.__path__, "hpm."):\n'
    '  if not module.name.endswith("__main__"):\n'
    '    importlib.import_module(module.name)\n'
  )
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
