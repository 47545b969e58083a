#!/bin/bash
# Two nodes, on each a worker with all GPUs and a parameter server: sbatch docs/examples/slurm.sh
#
# Roles go round the nodes (hpm.cluster.resolve.slurm): of two tasks a node the first is the worker.
# Without parameter servers: --ntasks-per-node=1, --variable_update=collective_all_reduce, and
# neither --num_ps nor --cluster_port.
#
#SBATCH --job-name=hpm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue

# SIGTERM comes 300 s before the time is over: the chief writes a checkpoint, all end, and the job
# that is queued again goes on from there. One task that dies ends the others by itself, within 15 s
# and with a line that names it; --kill-on-bad-exit would end them before they can say so.
srun --kill-on-bad-exit=0 --label \
  python benchmarks/run.py \
  --cluster_resolver=slurm \
  --num_ps=2 \
  --cluster_port=2222 \
  --variable_update=parameter_server \
  --model=resnet50 \
  --batch_size=64 \
  --data_dir="$DATA_DIR" \
  --train_dir="$TRAIN_DIR" \
  --num_epochs=90
