#!/usr/bin/env bash
# Runs a program on several hosts under torchrun, which takes programs in any language. Start this script on each host.
#
#   examples/several-hosts/torchrun.sh node1:29500 2 4 target/release/ddp     # on both hosts: 2 hosts, 4 ranks on each
#   examples/several-hosts/torchrun.sh imitate 2 2 target/release/ddp         # both hosts imitated on this one
#
# RCOMM_JOB_SECRET must be the same on all hosts. PYTHON names a Python with torch (python3).
set -euo pipefail

endpoint=${1:?HOST:PORT of the rendezvous, or imitate}
hosts=${2:?the number of hosts}
ranks=${3:?the number of ranks on each}
shift 3
: "${1:?the program}"

agent() {
    "${PYTHON:-python3}" -m torch.distributed.run --no-python --rdzv-backend c10d \
        --rdzv-endpoint "$endpoint" --rdzv-id "${JOB:-ddp}" --nnodes "$hosts" --nproc-per-node "$ranks" "$@"
}

if [[ $endpoint != imitate ]]; then
    : "${RCOMM_JOB_SECRET:?the same on all hosts}"
    agent "$@"
    exit
fi
endpoint=127.0.0.1:${MASTER_PORT:-29500}
RCOMM_JOB_SECRET=${RCOMM_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}
export RCOMM_JOB_SECRET
agents=()
for host in $(seq "$hosts"); do
    RCOMM_HOST_ID=host$host agent "$@" &
    agents+=($!)
done
failed=0
for agent in "${agents[@]}"; do
    wait "$agent" || failed=$?
done
exit "$failed"
