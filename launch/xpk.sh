#!/usr/bin/env bash
# Runs one training as an xpk workload on a GKE cluster that xpk created.
#
#   export HSVIT_CLUSTER=my-cluster HSVIT_TPU_TYPE=v5litepod-16 HSVIT_IMAGE=.../hsvit:1
#   launch/xpk.sh my-run --config=configs/c4a8.py:cifar100 --workdir=gs://my-bucket/runs/a
#
# The first word names the workload; the flags of hsvit_jax.main follow. HSVIT_IMAGE is an image from
# launch/Dockerfile, HSVIT_SLICES the number of slices (default 1), and HSVIT_MAX_RESTARTS the maximum
# number of restarts (default 20, preemptions included). Pods share no disk, so --workdir is in a
# bucket.
set -euo pipefail

usage() {
  sed -n '/^#   /s/^#   //p' "$0" >&2
  echo "xpk.sh: $1" >&2
  exit 2
}

for name in HSVIT_CLUSTER HSVIT_TPU_TYPE HSVIT_IMAGE; do
  [[ -n ${!name:-} ]] || usage "set $name"
done
(($# > 1)) || usage 'a name for the workload and the flags of hsvit_jax.main are needed'
workload=$1
shift

# xpk restarts on 42 and on 127-255 by itself; 75, a stalled run, is added.
exec xpk workload create \
  --workload="$workload" \
  --cluster="$HSVIT_CLUSTER" \
  --tpu-type="$HSVIT_TPU_TYPE" \
  --num-slices="${HSVIT_SLICES:-1}" \
  --docker-image="$HSVIT_IMAGE" \
  --max-restarts="${HSVIT_MAX_RESTARTS:-20}" \
  --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=180 \
  --command="python -m hsvit_jax.main$(printf ' %q' "$@")"
