#!/usr/bin/env bash
# Epilog of Slurm: keeps what the ranks of a job left on this node, before its memory and disk go to the next job.
# It runs as root once on each node. Where all ranks of a job ended in order, nothing is left, and no file is made.
#
#   Epilog=/etc/slurm/rcomm-epilog.sh            # in slurm.conf
set -uo pipefail

keep=${RCOMM_KEEP:-/shared/rcomm}
rings=/dev/shm/rcomm-$SLURM_JOB_UID
paths=()
for folder in /tmp/rcomm-dumps-"$SLURM_JOB_UID"/"$SLURM_JOB_ID".*; do
    [ -d "$folder" ] && paths+=("$folder")
done
for folder in "$rings/$SLURM_JOB_ID".*; do
    [ -d "$folder" ] && paths+=("$folder")
done
[ ${#paths[@]} -gt 0 ] || exit 0

mkdir -p "$keep/$SLURM_JOB_ID"
# Slurm drains a node whose epilog fails, so this one has a time limit and always exits with 0.
timeout 60 rcomm-fr collect -o "$keep/$SLURM_JOB_ID/$SLURMD_NODENAME.rcap" "${paths[@]}" || true
chown -R "$SLURM_JOB_UID" "$keep/$SLURM_JOB_ID" || true
rm -rf "${paths[@]}"
exit 0
