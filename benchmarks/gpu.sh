#!/usr/bin/env bash
# Trains the networks of docs/results.md that need a GPU, and adds a line for each to $OUT/runs.csv.
#
#     FASHION=DIR JPEGS=DIR OUT=results benchmarks/gpu.sh paper-fashion strong-150
#
# FASHION holds FashionMNIST/raw, JPEGS the folders train and test of CIFAR-10. Runs named in one
# argument with commas share the GPU: `rate-5e-3-linear,rate-3e-3-linear`. `EXTRA` adds settings,
# so that EXTRA="--config.train.epochs=1 --config.data.fraction=0.01" tries the script on a CPU.
set -euo pipefail
: "${OUT:?set OUT to a folder for the results}"
mkdir -p "$OUT"
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)
commit=$(git rev-parse --short HEAD)
whole="--config.data.val_fraction=0 --config.train.select_on=last"

# Prints the settings of a run by its name; the seed comes after a colon, 0 by default.
settings() {
  local jpegs="folder=${JPEGS:-}"
  case $1 in
    paper-fashion) echo "--config=c2a2:fashion_mnist,paper $whole" ;;
    paper-12) echo "--config=c2a2:$jpegs,paper --config.train.epochs=12" ;;
    strong-150) echo "--config=c2a2:$jpegs,strong $whole --config.train.epochs=150 --config.eval.tta=shift" ;;
    c4a8-50) echo "--config=c4a8:$jpegs,strong $whole --config.train.epochs=50 --config.train.batch=256" \
      "--config.eval.tta=shift --config.model.dtype=bfloat16" ;;
    c4a8-fashion-paper) echo "--config=c4a8:fashion_mnist,paper $whole" ;;
    c4a8-fashion-strong) echo "--config=c4a8:fashion_mnist,strong $whole" ;;
    rate-*) IFS=- read -r _ mantissa exponent schedule <<<"$1"
      echo "--config=c2a2:$jpegs,strong --config.train.epochs=50 --config.optim.schedule=$schedule" \
        "--config.optim.learning_rate=$mantissa-$exponent" ;;
    *) echo "no run is named $1" >&2; return 2 ;;
  esac
}

# Trains one run and adds its line.
train() {
  local name=${1%:*} seed=0 command
  [[ $1 == *:* ]] && seed=${1#*:}
  command="hsvit train $(settings "$name") --config.seed=$seed ${EXTRA:-}"
  SECONDS=0
  # shellcheck disable=SC2086  # the settings are words
  HSVIT_DATA_DIR=${FASHION:-} python -m hsvit_jax.main ${command#hsvit } \
    --workdir="$OUT/$name-$seed" 2>&1 | tee "$OUT/$name-$seed.log"
  python - "$OUT/$name-$seed" "$commit" "$command" "${card:-CPU}" "$seed" "$SECONDS" >>"$OUT/runs.csv" <<'PY'
import csv, json, pathlib, sys

folder, commit, command, card, seed, seconds = sys.argv[1:]
epochs = json.loads(pathlib.Path(folder, "config.json").read_text())["train"]["epochs"]
lines = map(json.loads, pathlib.Path(folder, "metrics.jsonl").read_text().splitlines())
found = {line["split"]: f"{100 * line['accuracy']:.2f}" for line in lines if "split" in line}
words = [word.partition("=")[2] for word in command.split() if word.startswith("--config=")]
network, _, rest = words[0].partition(":")
row = [commit, network, rest, command, card, seed, epochs, found.get("val"), found["test"]]
row += [f"{seconds} s", pathlib.Path(folder).name]
csv.writer(sys.stdout, lineterminator="\n").writerow(row)
PY
}

for group in "$@"; do
  pids=()
  for run in ${group//,/ }; do
    train "$run" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
done
