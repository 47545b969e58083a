"""tf_cnn_benchmarks' flags: each of the 138 is accepted, or answered in one line."""

import pytest

from benchmarks import flags
from benchmarks.flags import document, predecessor
from hpm.errors import UsageError
from tests.benchmarks.conftest import ROOT

# All of them, as its own --help lists them.
LISTED = """
model eval eval_interval_secs eval_during_training_every_n_steps
eval_during_training_every_n_epochs eval_during_training_at_specified_steps
eval_during_training_at_specified_epochs stop_at_top_1_accuracy collect_eval_results_async
forward_only freeze_when_forward_only print_training_accuracy batch_size eval_batch_size
batch_group_size num_batches num_epochs num_eval_batches num_eval_epochs num_warmup_batches
autotune_threshold display_every display_perf_ewma tf_random_seed
device data_format num_gpus gpu_indices local_parameter_device gpu_thread_mode
per_gpu_thread_count num_intra_threads num_inter_threads use_numa_affinity mkl kmp_blocktime
kmp_affinity kmp_settings gpu_memory_frac_for_testing use_unified_memory allow_growth
force_gpu_compatible timestamped_allocator gpu_kt_max_interval gpu_kt_max_bytes
gpu_kt_max_pending winograd_nonfused batchnorm_persistent sync_on_finish
xla xla_compile enable_optimizations rewriter_config use_tf_layers use_resource_vars
single_l2_loss_op loss_type_to_report compute_lr_on_cpu sparse_to_dense_grads trt_mode
trt_max_workspace_size_bytes
optimizer init_learning_rate piecewise_learning_rate_schedule num_epochs_per_decay
learning_rate_decay_factor minimum_learning_rate num_learning_rate_warmup_epochs resnet_base_lr
momentum rmsprop_decay rmsprop_momentum rmsprop_epsilon adam_beta1 adam_beta2 adam_epsilon
gradient_clip weight_decay use_fp16 fp16_vars fp16_loss_scale fp16_enable_auto_loss_scale
fp16_inc_loss_scale_every_n
variable_update all_reduce_spec staged_vars variable_consistency gradient_repacking
compact_gradient_transfer hierarchical_copy network_topology agg_small_grads_max_bytes
agg_small_grads_max_group allreduce_merge_scope
job_name ps_hosts worker_hosts controller_host task_index server_protocol cross_replica_sync
use_python32_barrier horovod_device
data_dir data_name input_preprocessor resize_method distortions distort_color_in_yiq
fuse_decode_and_crop ml_perf use_datasets datasets_use_prefetch datasets_prefetch_buffer_size
multi_device_iterator_max_buffer_size datasets_num_private_threads datasets_use_caching
datasets_repeat_cached_sample datasets_parallel_interleave_cycle_length
datasets_parallel_interleave_prefetch datasets_sloppy_parallel_interleave
train_dir eval_dir save_model_secs save_model_steps max_ckpts_to_keep backbone_model_path
summary_verbosity save_summaries_steps trace_file use_chrome_trace_format tfprof_file graph_file
partitioned_graph_file_prefix debugger benchmark_log_dir benchmark_test_id
ml_perf_compliance_logging
"""
NAMES = LISTED.split()


def test_each_of_the_138_has_its_place():
  assert len(set(NAMES)) == len(NAMES) == 138
  assert set(NAMES) == {*predecessor.ACCEPTED, *predecessor.ANSWERS}
  assert not set(predecessor.ACCEPTED) & set(predecessor.ANSWERS)


def test_accepted_flags_are_defined_and_answered_ones_are_not():
  defined = set(flags.parse([]).values())
  lacking = set(predecessor.ACCEPTED) - defined
  assert not lacking
  here = set(predecessor.ANSWERS) & defined
  assert not here, 'a flag now: move its line in flags/predecessor.py from ANSWERS to ACCEPTED'


@pytest.mark.parametrize('name', predecessor.ANSWERS)
def test_the_others_are_answered_in_one_line(name):
  with pytest.raises(UsageError) as refusal:
    flags.parse(['--model=lenet', f'--{name}=1'])
  message = str(refusal.value)
  assert message == f'--{name} {predecessor.ANSWERS[name]} (a flag of tf_cnn_benchmarks)'
  assert '\n' not in message


def test_a_flag_that_is_turned_off_is_answered_too():
  with pytest.raises(UsageError, match='--nouse_datasets does not exist: input is always tf.data'):
    flags.parse(['--nouse_datasets'])


def test_flags_of_neither_get_the_nearest_names():
  with pytest.raises(UsageError, match='did you mean --piecewise_learning_rate_schedule'):
    flags.parse(['--piecewise_learning_rate=1'])


def test_the_page_agrees_with_the_flags():
  page = (ROOT / 'docs' / 'flags.md').read_text()
  assert page == document.markdown(), 'python -m benchmarks.flags > docs/flags.md'
  for name in [*flags.parse([]).values(), *NAMES]:
    assert f'| `--{name}` |' in page
