#!/usr/bin/env bash
# Runs a program on several hosts under Open MPI.
#
#   examples/several-hosts/mpi.sh node1:4,node2:4 target/release/ddp
#   examples/several-hosts/mpi.sh imitate:2x2 target/release/ddp     # two hosts with two ranks each, imitated here
#
# The first host serves the job's store on port MASTER_PORT (29500). Ranks of different imitated hosts share no memory
# and reach each other over TCP, as on real hosts.
set -euo pipefail

hosts=${1:?hosts as mpirun takes them, or imitate:HOSTSxRANKS}
shift
: "${1:?the program}"

export MASTER_PORT=${MASTER_PORT:-29500}
# All ranks need the same secret: on each data connection, both sides prove that they know it.
RCOMM_JOB_SECRET=${RCOMM_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}
export RCOMM_JOB_SECRET

if [[ $hosts == imitate:* ]]; then
    count=${hosts#imitate:}
    export MASTER_ADDR=127.0.0.1 RANKS_PER_HOST=${count#*x}
    # Open MPI numbers the ranks. The ranks of one imitated host have consecutive numbers.
    exec mpirun --oversubscribe -n $((${count%x*} * RANKS_PER_HOST)) bash -c \
        'export RCOMM_HOST_ID=host$((OMPI_COMM_WORLD_RANK / RANKS_PER_HOST)); exec "$@"' host "$@"
fi
export MASTER_ADDR=${MASTER_ADDR:-${hosts%%[:,]*}}
exec mpirun --host "$hosts" -x MASTER_ADDR -x MASTER_PORT -x RCOMM_JOB_SECRET "$@"
