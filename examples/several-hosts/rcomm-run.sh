#!/usr/bin/env bash
# Runs a program on several hosts under rcomm-run. Start this script on each host.
#
#   examples/several-hosts/rcomm-run.sh node1:29500 2 4 target/release/ddp    # on both hosts: 2 hosts, 4 ranks on each
#   examples/several-hosts/rcomm-run.sh imitate 2 2 target/release/ddp        # both hosts imitated on this one
#
# NODE_RANK is the number of this host, from 0; host 0 serves the job's store. RCOMM_JOB_SECRET must be the same on all
# hosts. With MIN:MAX as the number of hosts, the job goes on when one is lost (rcomm-run --help).
set -euo pipefail

store=${1:?HOST:PORT of the store, or imitate}
hosts=${2:?the number of hosts}
ranks=${3:?the number of ranks on each}
shift 3
: "${1:?the program}"

launcher() {
    "${RCOMM_RUN:-rcomm-run}" -n "$ranks" --nnodes "$hosts" --master-addr "${store%:*}" --master-port "${store##*:}" "$@"
}

if [[ $store != imitate ]]; then
    : "${RCOMM_JOB_SECRET:?the same on all hosts}"
    launcher ${NODE_RANK:+--node-rank "$NODE_RANK"} "$@"
    exit
fi
store=127.0.0.1:${MASTER_PORT:-29500}
RCOMM_JOB_SECRET=${RCOMM_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}
export RCOMM_JOB_SECRET
launchers=()
for ((host = 0; host < ${hosts##*:}; host++)); do
    RCOMM_HOST_ID=host$host launcher --node-rank "$host" "$@" &
    launchers+=($!)
done
failed=0
for launcher in "${launchers[@]}"; do
    wait "$launcher" || failed=$?
done
exit "$failed"
