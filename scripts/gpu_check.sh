#!/usr/bin/env bash
# Try what only a GPU shows, the gravest first, and write what the commands print to docs/results/gpu.md.
# PYTHON names the interpreter, "uv run python" by default. A command that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
read -ra python <<<"${PYTHON:-uv run python}"
report=${1:-docs/results/gpu.md}
runs=$(mktemp -d)
code=0

check() {
    local title=$1 output
    shift
    echo "== $title"
    output=$(timeout 600 "${python[@]}" -m "$@" 2>&1)
    local status=$?
    ((status == 0)) || code=1
    tail -n 25 <<<"$output"
    {
        printf '\n## %s\n\n    python -m %s\n\nExit code %s:\n\n' "$title" "$*" "$status"
        tail -n 60 <<<"$output" | sed 's/^/    /'
    } >>"$report"
}

gpu_tests() {
    check "$1" pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -m gpu "${@:2}"
}

train=(--config config/resources/train.toml --set run.device=cuda --set training.max_steps=60 --set training.ema_decay=0.9
    --set checkpoint.every_steps=20 --set validation.every_steps=20 --set samples.every_steps=20)
adapter=(--set training.max_steps=50 --set 'optimizer={kind="adamw"}' --set lora.rank=8 --set lora.dropout=0.1)

printf '# Check of a GPU machine\n\n    just gpu-check\n' >"$report"
check "Machine" cli doctor
gpu_tests "Compiled against plain gradients, golden losses, the loss kernel" \
    tests/integration/test_step_runtime.py tests/golden tests/kernels/test_cross_entropy_gpu.py
gpu_tests "Attention, the guard of steps, recording" \
    tests/unit/models tests/unit/training/test_spike_guard.py tests/unit/profiling/test_recording.py
gpu_tests "CUDA graphs" tests/unit/inference/test_graphed_forward.py
check "Decoding with CUDA graphs" cli bench-infer --config config/resources/bench_infer_gpu.toml --set model.cuda_graphs=auto
check "Decoding without CUDA graphs" cli bench-infer --config config/resources/bench_infer_gpu.toml --set model.cuda_graphs=off
check "Training" cli train "${train[@]}" --set "run.directory=$runs/train"
for strategy in fsdp ddp; do
    check "Ranks with $strategy" cli train-ddp "${train[@]}" --set parallel.strategy=$strategy \
        --set parallel.timeout_seconds=120 --set "run.directory=$runs/$strategy"
done
check "Compiled adapters with dropout" cli train "${train[@]:0:4}" "${adapter[@]}" \
    --set "model={init_from=\"$runs/train\"}" --set "run.directory=$runs/adapter"
check "Head and loss" benchmarking.bench_kernels --rounds 5 --baseline-only
check "Speed of training" cli bench-train --config config/resources/bench_train_gpu.toml
rm -rf "$runs"
exit $code
