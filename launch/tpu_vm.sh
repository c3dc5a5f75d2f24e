#!/usr/bin/env bash
# Runs one training on a Cloud TPU VM or slice: the same command on every worker.
#
#   export TPU_NAME=my-tpu ZONE=us-central2-b HSVIT_REPO=https://.../hsvit_jax.git
#   launch/tpu_vm.sh install
#   launch/tpu_vm.sh run --config=configs/c4a8.py:cifar100 --workdir=gs://my-bucket/runs/a
#   launch/tpu_vm.sh stop
#
# install  clones HSVIT_REPO (at HSVIT_REF, if set) on every worker and installs it with libtpu, gcsfs
# run      starts hsvit_jax.main on every worker and shows its output; the flags follow
# stop     SIGTERM to worker 0's process: all workers save the same step and end with 42
#
# The TPU must exist (gcloud compute tpus tpu-vm create). PROJECT overrides gcloud's project,
# HSVIT_PYTHON the workers' interpreter (default python3; 3.11 or newer). Workers share no disk, so
# --workdir is in a bucket.
set -euo pipefail

usage() {
  sed -n '/^#   /s/^#   //p' "$0" >&2
  echo "tpu_vm.sh: $1" >&2
  exit 2
}

[[ -n ${TPU_NAME:-} ]] || usage 'set TPU_NAME'
[[ -n ${ZONE:-} ]] || usage 'set ZONE'

on_workers() { # 'all' or a number, command
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"} \
    --worker="$1" --command="$2"
}

case ${1:-} in
  install)
    [[ -n ${HSVIT_REPO:-} ]] || usage 'set HSVIT_REPO to the address of the git repository'
    python=$(printf '%q' "${HSVIT_PYTHON:-python3}")
    on_workers all "set -e
      $python -c 'import sys; sys.exit(sys.version_info < (3, 11) and \"hsvit_jax needs Python 3.11 or newer; name one with HSVIT_PYTHON\")'
      test -d hsvit_jax || git clone $(printf '%q' "$HSVIT_REPO") hsvit_jax
      cd hsvit_jax
      git fetch --quiet origin $(printf '%q' "${HSVIT_REF:-HEAD}")
      git checkout --quiet FETCH_HEAD
      $python -m venv .venv
      .venv/bin/pip install --quiet --editable '.[tpu,gcs]'"
    ;;
  run)
    shift
    (($#)) || usage 'run needs the flags of hsvit_jax.main'
    # exec: the number kept in run.pid is that of the training itself.
    on_workers all "cd hsvit_jax && echo \$\$ > run.pid && exec .venv/bin/python -m hsvit_jax.main$(printf ' %q' "$@")"
    ;;
  stop)
    # shellcheck disable=SC2016  # expanded on the worker
    on_workers 0 'pid=$(cat hsvit_jax/run.pid) && grep -q hsvit_jax "/proc/$pid/cmdline" && kill -TERM "$pid"'
    ;;
  *) usage "expected install, run or stop, got '${1:-}'" ;;
esac
