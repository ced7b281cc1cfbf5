#!/usr/bin/env bash
# TaskProlog of Slurm: settings by which every PyTorch job leaves records. Slurm adds the lines `export NAME=VALUE` that
# this script prints to the environment of the task.
#
#   TaskProlog=/etc/slurm/rcomm-prolog.sh        # in slurm.conf
set -euo pipefail

attempt=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID.${SLURM_STEP_ID:-0}

# With the package `rcomm` in the job's environment: rings of every rank, in the node's memory.
echo "export RCOMM_RECORD=1"
echo "export RCOMM_JOB=$job"
# Without it: dumps of NCCL's operations, on request and at a time-out, in a folder for each attempt.
dumps=/tmp/rcomm-dumps-$(id -u)/$job.$attempt
mkdir -p "$dumps"
echo "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=$dumps/pipe-"
echo "export TORCH_FR_DUMP_TEMP_FILE=$dumps/rank_"
echo "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$dumps/rank_"
echo "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000"
