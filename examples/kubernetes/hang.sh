#!/usr/bin/env bash
# Reports which rank of a PyTorch job hangs, while it hangs: by `kubectl exec` in every pod of the job.
#
#   examples/kubernetes/hang.sh SELECTOR [CONTAINER]     # SELECTOR as in training.kubeflow.org/job-name=train
#
# The container needs the program rcomm-fr: the wheel has it, and so has the sidecar of sidecar.yaml. The job goes on.
# The report names a pod that does not answer within two minutes as missing.
set -uo pipefail

selector=${1:?the label selector of the pods}
container=${2:-}
pods=$(kubectl get pods -l "$selector" -o name | sed 's,^pod/,,')
[ -n "$pods" ] || { echo "no pod has the labels $selector" >&2; exit 2; }

archive=hang-$(date +%s).rcap
rcomm-fr collect -o "$archive" --timeout 120s --hosts-from <(printf '%s\n' "$pods") \
    --command "kubectl exec {host} ${container:+-c $container} -- rcomm-fr collect --ask --wait 30s -o -"

exec rcomm-fr analyze --as-of now "$archive"
