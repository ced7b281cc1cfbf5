#!/usr/bin/env bash
# Epilog of Slurm: keeps what the ranks of a job left on this node, before its memory and disk go to the next job.
# It runs as root once on each node. Where all ranks of a job ended in order, nothing is left, and no file is made.
#
#   Epilog=/etc/slurm/rcomm-epilog.sh            # in slurm.conf
#
# Rings are found by the name that rcomm-prolog.sh gives the job, or by one that ends with the job's number after a
# character other than a letter, a digit or a dot, as in train-812: 811.812 is step 812 of another job, and an
# identifier such as 87b7b10a812 contains no number of a job.
set -uo pipefail

keep=${RCOMM_KEEP:-/shared/rcomm}
rings=/dev/shm/rcomm-$SLURM_JOB_UID

# The folders are the user's, and may hold links to files that only root can read, or lie on a disk that does not
# respond.
group=${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID")}
as_user() { setpriv --reuid "$SLURM_JOB_UID" --regid "$group" --clear-groups timeout 60 "$@"; }

folders=() paths=()
for folder in /tmp/rcomm-dumps-"$SLURM_JOB_UID"/"$SLURM_JOB_ID".* \
    "$rings/$SLURM_JOB_ID".* "$rings"/*[![:alnum:].]"$SLURM_JOB_ID"; do
    # A link is removed, and not followed.
    if [ -L "$folder" ]; then folders+=("$folder"); continue; fi
    [ -d "$folder" ] || continue
    folders+=("$folder")
    [ -z "$(as_user find "$folder" -type f -print -quit)" ] || paths+=("$folder")
done
[ ${#folders[@]} -gt 0 ] || exit 0

# Slurm drains a node whose epilog fails, so each step has a time limit, and the exit code is always 0.
if [ ${#paths[@]} -gt 0 ]; then
    archive=$keep/$SLURM_JOB_ID/$SLURMD_NODENAME.rcap
    mkdir -p "${archive%/*}" && chown "$SLURM_JOB_UID" "${archive%/*}"
    as_user rcomm-fr collect -o "$archive" "${paths[@]}" || true
    if ! as_user test -s "$archive"; then
        echo "rcomm: no archive of job $SLURM_JOB_ID in $archive: its records stay in ${paths[*]}" >&2
        exit 0
    fi
fi
as_user rm -rf "${folders[@]}"
exit 0
