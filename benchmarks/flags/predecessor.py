"""tf_cnn_benchmarks' 138 flags: which are accepted here, and what answers the others.

When one of the others becomes a flag of this driver, its line moves from `ANSWERS` to `ACCEPTED`.
docs/flags.md is written from both (`python -m benchmarks.flags > docs/flags.md`).
"""

__all__ = ['ACCEPTED', 'ANSWERS', 'answer']

# Name -> what differs; nothing where the meaning is the same.
ACCEPTED = {
  'model': 'default resnet50, not trivial; more models, and `list`',
  'eval': '',
  'forward_only': 'step lines carry the real loss; accuracies with --print_training_accuracy',
  'print_training_accuracy': '',
  'batch_size': 'the default goes by the devices, and 0 is refused',
  'num_batches': 'with --train_dir in all, over interrupted runs; 0 is refused; 30 on CPU devices',
  'num_epochs': 'in all, over interrupted runs; ends on the last image',
  'num_warmup_batches': '2 on CPU devices',
  'display_every': '',
  'display_perf_ewma': 'the result file keeps the mean of all steps',
  'tf_random_seed': 'seeds the data as well; initial values do not depend on the number of devices',
  'autotune_threshold': 'the number of warm-up steps does not follow it',
  'device': 'default: gpu where there is one, otherwise cpu',
  'data_format': 'default NHWC; NCHW is refused on CPU devices',
  'num_gpus': 'default: all of them; more than there are is refused',
  'local_parameter_device': 'default cpu for parameter_server; gpu is also called spread; gpu:N',
  'gpu_thread_mode': '',
  'per_gpu_thread_count': '',
  'num_intra_threads': "default on GPUs: TensorFlow's choice, not 1",
  'num_inter_threads': "default on GPUs: TensorFlow's choice",
  'mkl': 'oneDNN of the ordinary wheel, on by default on CPU devices',
  'use_unified_memory': '',
  'allow_growth': '',
  'winograd_nonfused': '',
  'batchnorm_persistent': '',
  'sync_on_finish': '',
  'xla': 'compiles each tower as a whole, where tf_cnn_benchmarks let XLA choose clusters',
  'xla_compile': 'the same as --xla',
  'loss_type_to_report': '',
  'optimizer': 'momentum is plain momentum; nesterov is what tf_cnn_benchmarks calls momentum; '
  'default momentum, not sgd',
  'init_learning_rate': 'default 0.1 * global batch / 256, not a rule of the model',
  'piecewise_learning_rate_schedule': 'epochs may be fractions; goes with warm-up',
  'num_epochs_per_decay': 'does not need --init_learning_rate',
  'learning_rate_decay_factor': 'does not need --init_learning_rate',
  'minimum_learning_rate': 'also for polynomial and cosine',
  'num_learning_rate_warmup_epochs': 'the ramp starts one step above 0',
  'resnet_base_lr': "asks for the ResNets' rule, for any model; not divided by the number of GPUs, "
  'since gradients are means',
  'momentum': '',
  'rmsprop_decay': '',
  'rmsprop_momentum': '',
  'rmsprop_epsilon': '',
  'adam_beta1': '',
  'adam_beta2': '',
  'adam_epsilon': '',
  'gradient_clip': '',
  'weight_decay': 'on the kernels of convolutions and dense layers, not on all variables; added '
  'after clipping',
  'use_fp16': '',
  'fp16_loss_scale': 'default 128 for every model',
  'fp16_enable_auto_loss_scale': 'in every mode, decided on the aggregate',
  'fp16_inc_loss_scale_every_n': '',
  'variable_update': 'default replicated; gradients are means in every mode',
  'all_reduce_spec': 'several ranges also for replicated, their sizes in bytes; more algorithms; '
  'psgpu without #N has as many shards as devices; collective takes no #N',
  'staged_vars': '',
  'variable_consistency': 'also for parameter_server',
  'gradient_repacking': 'a bucket waits for its own gradients alone',
  'compact_gradient_transfer': 'default false; in any precision, with sums in float32 where the '
  'all-reduce allows',
  'hierarchical_copy': '',
  'network_topology': 'also a JSON file with a matrix of the links',
  'agg_small_grads_max_bytes': 'with any --all_reduce_spec; also with k, M',
  'agg_small_grads_max_group': '',
  'datasets_num_private_threads': "default on GPUs: TensorFlow's common threads",
  'data_dir': '',
  'data_name': 'default imagenet, not guessed from the directory',
  'train_dir': 'resuming is said; another model is refused; SIGTERM writes a checkpoint',
  'save_model_secs': '',
  'save_model_steps': '',
  'max_ckpts_to_keep': '',
  'trace_file': 'three warm-up steps, always a Chrome trace',
  'tfprof_file': 'three warm-up steps, a text table',
  'graph_file': '',
  'eval_during_training_every_n_steps': 'at the end as well',
  'eval_during_training_every_n_epochs': 'at the end as well; 0 for never',
  'eval_during_training_at_specified_steps': 'at the end as well',
  'eval_during_training_at_specified_epochs': 'at the end as well',
  'stop_at_top_1_accuracy': '',
  'num_eval_batches': 'during training; with --eval it is --num_batches',
  'job_name': 'worker or ps; there is no controller',
  'ps_hosts': 'ranges as in node[0-7]:2222 are expanded',
  'worker_hosts': 'ranges as in node[0-7]:2222 are expanded',
  'task_index': 'no default',
  'cross_replica_sync': 'one exact synchronous update a step; false for parameter_server alone',
}

# Name -> what follows '--name ' in the answer.
ANSWERS = {
  # Mode and amount of work
  'eval_interval_secs': 'does not exist: repeat the command with --eval, which takes the newest '
  'checkpoint each time',
  'collect_eval_results_async': 'does not exist: it served SSD alone, and there is no SSD here',
  'freeze_when_forward_only': 'does not exist: --forward_only reads variables once a step, which '
  'costs nothing',
  'eval_batch_size': 'does not exist: --eval is a run of its own, with its own --batch_size, and '
  'during training --batch_size holds',
  'batch_group_size': 'does not exist: it belonged to the queues that came before tf.data',
  'num_eval_epochs': 'does not exist: --eval goes over the validation files exactly once',
  # Devices and threads
  'gpu_indices': 'does not exist: the variable CUDA_VISIBLE_DEVICES chooses and orders GPUs',
  'use_numa_affinity': 'does not exist: start the program under numactl',
  'kmp_blocktime': 'does not exist: TensorFlow runs oneDNN in its own threads, not in OpenMP',
  'kmp_affinity': 'does not exist: TensorFlow runs oneDNN in its own threads, not in OpenMP',
  'kmp_settings': 'does not exist: TensorFlow runs oneDNN in its own threads, not in OpenMP',
  # GPU memory and cuDNN
  'gpu_memory_frac_for_testing': 'does not exist: TensorFlow 2 takes no share of the memory; use '
  '--allow_growth',
  'force_gpu_compatible': 'does not exist: TensorFlow 2 has no switch for it',
  'timestamped_allocator': 'does not exist: TensorFlow 2 has no switch for it',
  'gpu_kt_max_interval': 'does not exist: TensorFlow 2 has no switch for it',
  'gpu_kt_max_bytes': 'does not exist: TensorFlow 2 has no switch for it',
  'gpu_kt_max_pending': 'does not exist: TensorFlow 2 has no switch for it',
  # Graph, compiler
  'enable_optimizations': 'does not exist: a benchmark without graph optimisations measures '
  'something that nobody runs',
  'rewriter_config': 'does not exist: graph optimisations are those of TensorFlow',
  'use_tf_layers': 'does not exist: the models have layers of their own, tf.layers is gone',
  'use_resource_vars': 'does not exist: all variables are resource variables',
  'single_l2_loss_op': 'does not exist: weight decay is added to the gradients, without a loss op',
  'compute_lr_on_cpu': 'does not exist: the learning rate is always computed on the host',
  'sparse_to_dense_grads': 'does not exist: no model here has sparse gradients',
  'trt_mode': 'does not exist: TensorFlow 2.21 is built without TensorRT',
  'trt_max_workspace_size_bytes': 'does not exist: TensorFlow 2.21 is built without TensorRT',
  # fp16
  'fp16_vars': 'does not exist: variables are always float32; use --precision=fp16',
  # Variable management, all-reduce
  'allreduce_merge_scope': 'does not exist: merging is asked for by packing, not by name scopes',
  # Distributed
  'controller_host': 'does not exist: the workers of collective_all_reduce are all alike',
  'server_protocol': 'does not exist: gRPC is the only one left in TensorFlow 2',
  'use_python32_barrier': 'does not exist: it belonged to the queues that came before tf.data',
  'horovod_device': 'does not exist: --variable_update=replicated reduces without Horovod',
  # Input pipeline
  'input_preprocessor': 'does not exist: there is one preprocessing, described in '
  'hpm/pipelines/augment.py',
  'resize_method': 'does not exist: training resizes bilinearly',
  'distortions': 'is --distort_colors here, false by default; training always crops at random and '
  'flips',
  'distort_color_in_yiq': 'does not exist: --distort_colors works in RGB',
  'fuse_decode_and_crop': 'does not exist: training always decodes only what the crop needs',
  'ml_perf': 'does not exist: images are normalised in one way, hpm.pipelines.normalize',
  'use_datasets': 'does not exist: input is always tf.data',
  'datasets_use_prefetch': 'does not exist: the next batches are always staged on the devices',
  'datasets_prefetch_buffer_size': 'does not exist: the pipeline keeps four batches ready',
  'multi_device_iterator_max_buffer_size': 'does not exist: one batch a device is staged',
  'datasets_use_caching': 'does not exist: the operating system caches files in memory',
  'datasets_repeat_cached_sample': 'does not exist: leave --data_dir out for input at no cost',
  'datasets_parallel_interleave_cycle_length': 'does not exist: the order of records is fixed by '
  'the seed, for any number of threads',
  'datasets_parallel_interleave_prefetch': 'does not exist: the order of records is fixed by the '
  'seed, for any number of threads',
  'datasets_sloppy_parallel_interleave': 'does not exist: the order of records is fixed by the '
  'seed, for any number of threads',
  # Output, checkpoints, profiling
  'eval_dir': 'does not exist: --eval writes no event files; --result_json keeps the accuracy',
  'backbone_model_path': 'does not exist: it served SSD alone, and there is no SSD here',
  'summary_verbosity': 'does not exist: --result_json keeps losses and step times',
  'save_summaries_steps': 'does not exist: --result_json keeps losses and step times',
  'use_chrome_trace_format': 'does not exist: --trace_file is always a Chrome trace; --profile_dir '
  "has TensorFlow's own format",
  'partitioned_graph_file_prefix': 'does not exist: --graph_file has the device of every op',
  'debugger': 'does not exist: tfdbg is gone; tf.debugging.experimental.enable_dump_debug_info is '
  'its successor',
  'benchmark_log_dir': 'is --result_json here',
  'benchmark_test_id': 'does not exist: --result_json keeps the whole configuration',
  'ml_perf_compliance_logging': 'does not exist: it wrote the log of MLPerf 0.5; --result_json '
  'keeps what was measured',
}


def answer(flag: str) -> str | None:
  """One line for a flag of tf_cnn_benchmarks that is not here; None for any other name."""
  name = flag if flag in ANSWERS else flag.removeprefix('no')
  return f'--{flag} {ANSWERS[name]} (a flag of tf_cnn_benchmarks)' if name in ANSWERS else None
