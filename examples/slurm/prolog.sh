#!/usr/bin/env bash
# TaskProlog of Slurm: settings by which every PyTorch job leaves records. Slurm adds the lines `export NAME=VALUE` that
# this script prints to the environment of the task.
#
#   TaskProlog=/etc/slurm/rcomm-prolog.sh        # in slurm.conf
#
# Slurm starts no task whose prolog fails, so this one always exits with 0.
set -uo pipefail

# Prints a setting, unless the task has one of its own.
offer() { [ -n "${!1+set}" ] || echo "export $1=$2"; }

attempt=${SLURM_RESTART_COUNT:-0}
job=${SLURM_JOB_ID:-}.${SLURM_STEP_ID:-0}

# With the package `rcomm` in the job's environment: rings of every rank, in the node's memory.
offer RCOMM_RECORD 1
offer RCOMM_JOB "$job"
# Without it: dumps of NCCL's operations, on request and at a time-out, in a folder for each attempt. Anyone may have
# taken the folder's name, or filled the disk. Up to about 2.6, PyTorch kept no operations unless told how many; newer
# versions print a warning that the name of that setting is old.
dumps=/tmp/rcomm-dumps-$(id -u)/$job.$attempt
if mkdir -p "$dumps" 2>/dev/null && [ -O "$dumps" ] && [ -O "${dumps%/*}" ]; then
    offer TORCH_NCCL_DEBUG_INFO_PIPE_FILE "$dumps/pipe-"
    offer TORCH_FR_DUMP_TEMP_FILE "$dumps/rank_"
    offer TORCH_NCCL_DEBUG_INFO_TEMP_FILE "$dumps/rank_"
    offer TORCH_NCCL_TRACE_BUFFER_SIZE 2000
fi
exit 0
