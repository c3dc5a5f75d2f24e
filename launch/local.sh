#!/usr/bin/env bash
# Starts N processes of one training on this machine; they meet over loopback.
#
#   launch/local.sh [-n N] [--devices D] [--cpu] [--port P] [--] FLAGS OF hsvit_jax.main
#   launch/local.sh -n 2 --devices 2 -- --config=configs/c2a2.py:digits,tiny --config.mesh.group=4
#
# -n N         processes (default 2, or one per GPU with several)
# --devices D  D simulated CPU devices in each process (implies --cpu)
# --cpu        use the CPU even if there is an accelerator
# --port P     the port of process 0 (default: a free one)
#
# CUDA_VISIBLE_DEVICES chooses the GPUs; PYTHON names the interpreter; HSVIT_GRACE the seconds that
# the others have to end by themselves once a process has failed (default 15). With --recoverable a
# process other than 0 that is killed ends none, and the exit code is that of the others.
#
# Every line of output begins with its process's number. SIGTERM goes to one process, which stops the
# others; Ctrl-C goes to all. A second signal, at least two seconds later, ends everything at once; a
# closing terminal sends two together. The exit code is that of the first process that fails.
set -euo pipefail

usage() {
  sed -n '/^#   /s/^#   //p' "$0" >&2
  echo "local.sh: $1" >&2
  exit 2
}

n='' devices='' port='' cpu=0
while (($#)); do
  case $1 in
    -n | --devices | --port)
      (($# > 1)) || usage "$1 needs a value"
      [[ $2 =~ ^[1-9][0-9]*$ ]] || usage "$1 must be a whole number from 1, got '$2'"
      case $1 in
        -n) n=$2 ;;
        --devices) devices=$2 ;;
        --port) port=$2 ;;
      esac
      shift 2
      ;;
    --cpu) cpu=1 && shift ;;
    -h | --help) usage 'see above' ;;
    --) shift && break ;;
    *) break ;;
  esac
done
(($#)) || usage 'no flags for hsvit_jax.main, for example --config=configs/c2a2.py:digits,tiny'
recoverable=0
for word; do # as hsvit reads them: one dash or two, true, True, t or 1
  case ${word/#--/-} in
    -recoverable | -recoverable=[Tt1]*) recoverable=1 ;;
    -norecoverable | -recoverable=[Ff0]*) recoverable=0 ;;
    -distributed | -distributed=*) usage 'leave --distributed out: this script sets it' ;;
  esac
done

[[ ${HSVIT_GRACE:=15} =~ ^[0-9]+$ ]] || usage "HSVIT_GRACE must be whole seconds, got '$HSVIT_GRACE'"
PYTHON=${PYTHON:-$(command -v python || echo python3)}

# Find the devices and each process's share.
gpus=0 names=()
if ((!cpu)) && [[ ${JAX_PLATFORMS:-} != cpu && -z $devices ]]; then
  if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
    for ((i = 0; i < gpus; i++)); do names+=("$i"); done
    if ((gpus)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # others are somebody else's
      names=()
      IFS=, read -ra listed <<<"$CUDA_VISIBLE_DEVICES"
      for name in "${listed[@]}"; do # CUDA reads the list up to the first that is no device
        if [[ ! $name =~ ^([0-9]+|(GPU|MIG)-.+)$ ]]; then break; fi
        names+=("$name")
      done
      gpus=${#names[@]}
    fi
  fi
  for chip in /dev/accel[0-9]* /dev/vfio/[0-9]*; do
    if [[ -e $chip ]]; then
      usage 'one process drives all TPU chips of a machine: start hsvit_jax.main itself, or add --cpu'
    fi
  done
fi
if [[ -z $n ]]; then n=$((gpus > 1 ? gpus : 2)); fi
if ((gpus && gpus % n)); then usage "$n processes cannot share $gpus GPUs evenly; add --cpu or -n"; fi
if ((!gpus)); then
  if ((cpu)) || [[ -n $devices ]]; then JAX_PLATFORMS=cpu; fi
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  if [[ -n $devices ]]; then export JAX_NUM_CPU_DEVICES=$devices; fi
  # Collectives of several CPU devices wait for each other in a pool of NPROC threads.
  export NPROC=${NPROC:-$((2 * ${devices:-1}))}
fi

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
if [[ -z $port ]]; then
  port=$((20000 + RANDOM % 12000))
  while listening "$port"; do port=$((20000 + RANDOM % 12000)); done
fi

pipes=$(mktemp -d)
pids=() readers=()
end_all() { # each process leads a group, so its own children end with it
  for pid in ${pids[@]+"${pids[@]}"}; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap 'end_all; rm -rf "$pipes"' EXIT

number_lines() { # process, pipe
  local line
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done <"$2"
}

run() { # process, flags
  local i=$1
  shift
  if ((gpus)); then
    local each=$((gpus / n))
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${names[*]:i*each:each}")
    export CUDA_VISIBLE_DEVICES
  fi
  exec "$PYTHON" -m hsvit_jax.main "$@" --distributed="127.0.0.1:$port,$n,$i"
}

code=0 asked='' deadline='' running=()

# shellcheck disable=SC2317  # called by the traps
pass_on() { # signal, exit code of a second one
  local i
  if [[ $asked ]]; then
    if ((SECONDS > asked + 1)); then exit "$2"; fi
    return 0 # alone, it gives the status of before the trap
  fi
  asked=$SECONDS
  for i in ${running[@]+"${running[@]}"}; do
    kill "-$1" "${pids[i]}" 2>/dev/null || true
    if [[ $1 == TERM ]]; then break; fi
  done
}
trap 'pass_on TERM 143' TERM HUP
trap 'pass_on INT 130' INT

# With job control every process is in a group of its own: Ctrl-C reaches it once, through here.
set -m
for ((i = 0; i < n; i++)); do
  mkfifo "$pipes/$i.out" "$pipes/$i.err"
  number_lines "$i" "$pipes/$i.out" &
  readers+=($!)
  number_lines "$i" "$pipes/$i.err" >&2 &
  readers+=($!)
  run "$i" "$@" >"$pipes/$i.out" 2>"$pipes/$i.err" </dev/null &
  pids+=($!)
  running+=("$i")
done
set +m

rank() { # of codes seen at the same moment, the one that says most; consequences say least
  case $1 in
    3) echo 7 ;;
    2) echo 6 ;;
    75) echo 5 ;;
    1) echo 4 ;;
    42) echo 3 ;;
    130) echo 2 ;;
    0) echo 0 ;;
    *) echo 1 ;;
  esac
}

while ((${#running[@]})); do
  left=() first=0
  for i in "${running[@]}"; do
    if kill -0 "${pids[i]}" 2>/dev/null; then
      left+=("$i")
      continue
    fi
    ended=0
    wait "${pids[i]}" || ended=$?
    if ((ended != 0)); then echo "local.sh: process $i ended with code $ended" >&2; fi
    # --recoverable is for a process that is killed, unless it is process 0.
    if ((recoverable && i && ended > 128)); then continue; fi
    if (($(rank "$ended") > $(rank "$first"))); then first=$ended; fi
  done
  if ((code == 0 && first != 0)); then
    code=$first
    # After a save all end almost together; after a failure none can continue.
    case $code in
      42 | 130) deadline=$((SECONDS + 8 * HSVIT_GRACE)) ;;
      *) deadline=$((SECONDS + HSVIT_GRACE)) ;;
    esac
  fi
  running=(${left[@]+"${left[@]}"})
  if ((${#running[@]} == 0)); then break; fi
  if [[ -n $deadline ]] && ((SECONDS >= deadline)); then
    echo "local.sh: ending process ${running[*]}, which did not end by itself" >&2
    break
  fi
  sleep 0.1 &
  wait $! || true
done

end_all
wait "${pids[@]}" "${readers[@]}" 2>/dev/null || true
exit "$code"
