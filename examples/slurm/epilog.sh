#!/usr/bin/env bash
# Epilog of Slurm: keeps what the ranks of a job left on this node, before its memory and disk go to the next job.
# It runs as root once on each node. Where all ranks of a job ended in order, nothing is left, and no file is made.
#
#   Epilog=/etc/slurm/rcomm-epilog.sh            # in slurm.conf
#
# Rings are found by the name that rcomm-prolog.sh gives the job, or by one that ends with the job's number after another
# character than a digit, as in train-812.
set -uo pipefail

keep=${RCOMM_KEEP:-/shared/rcomm}
rings=/dev/shm/rcomm-$SLURM_JOB_UID
folders=() paths=()
for folder in /tmp/rcomm-dumps-"$SLURM_JOB_UID"/"$SLURM_JOB_ID".* \
    "$rings/$SLURM_JOB_ID".* "$rings"/*[!0-9]"$SLURM_JOB_ID"; do
    [ -d "$folder" ] || continue
    folders+=("$folder")
    [ -z "$(find "$folder/" -type f -print -quit)" ] || paths+=("$folder")
done
[ ${#folders[@]} -gt 0 ] || exit 0

# The folders are the user's, and may hold links to files that only root can read.
group=${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID")}
as_user() { setpriv --reuid "$SLURM_JOB_UID" --regid "$group" --clear-groups "$@"; }

# Slurm drains a node whose epilog fails, so this one has a time limit and always exits with 0.
if [ ${#paths[@]} -gt 0 ]; then
    mkdir -p "$keep/$SLURM_JOB_ID" && chown "$SLURM_JOB_UID" "$keep/$SLURM_JOB_ID"
    as_user timeout 60 rcomm-fr collect -o "$keep/$SLURM_JOB_ID/$SLURMD_NODENAME.rcap" "${paths[@]}" || true
fi
as_user rm -rf "${folders[@]}"
exit 0
