#!/usr/bin/env bash
# Reports which rank of a PyTorch job hangs, while it hangs: from the login node, in the job's own allocation.
#
#   examples/slurm/hang.sh JOBID [FOLDER]        # the folder must be shared by the nodes; default ./hang-JOBID
#
# On every node the ranks are asked for their records (rings, worker servers, the pipes of PyTorch's NCCL backend) and
# for their stacks. The job goes on. The report names the ranks of a node that does not answer within two minutes as
# missing.
set -uo pipefail

job=${1:?the number of the job}
out=${2:-hang-$job}
mkdir -p "$out"
out=$(cd "$out" && pwd)

# --overlap: beside the job's own step, on the same processors. --mem=0 takes no memory from that step.
srun --jobid="$job" --overlap --mem=0 --ntasks-per-node=1 --kill-on-bad-exit=0 --time=2 bash -c \
    'rcomm-fr collect --ask --wait 30s -o "$1/$SLURMD_NODENAME.rcap"' collect "$out" ||
    echo "some nodes gave no record, or only some of their ranks did; the report names the ranks" >&2

exec rcomm-fr analyze --as-of now "$out"/*.rcap
