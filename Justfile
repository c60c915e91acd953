# Recipes for developers: `just` lists them.

import 'remote.just'

default:
    @just --list

# Install everything.
setup:
    uv sync

# Format.
fmt:
    uv run ruff format .
    uv run ruff check --fix .

# Format and lint, without changing anything.
lint:
    uv run ruff format --check .
    uv run ruff check .
    uv run shellcheck --external-sources .ci/run scripts/train.slurm scripts/remote/there/*.sh

# Check types.
types:
    uv run mypy

# The fast tests.
test *args:
    uv run pytest {{args}}

# All tests that this machine can run, slow and gpu ones too.
test-all *args:
    uv run pytest -m "" {{args}}

# Training speed, the share of matrix products, and memory, beside transformers'.
bench *args:
    uv run --group bench diffusionlm-bench-train --config config/resources/bench_train.toml {{args}}

# Two ranks beside torch's DistributedDataParallel and FSDP2: speed, bytes on the wire, the stall of a checkpoint.
bench-ddp *args:
    uv run python -m benchmarking.bench_ddp {{args}}

# Memory and time of a step on many GPUs, on paper.
scaling *args:
    uv run python -m profiling.scaling {{args}}

# The mixture of experts beside transformers'.
bench-moe *args:
    uv run --group bench python -m benchmarking.bench_moe {{args}}

# Loading a checkpoint beside transformers: time and memory.
bench-load *args:
    uv run --group bench python -m benchmarking.bench_load {{args}}

# The loader's speed: from text, with workers, from shards.
bench-data *args:
    uv run --group bench python -m benchmarking.bench_data {{args}}

# The tokenizer's speed beside tokenizers' and tiktoken's.
bench-tokenizer *args:
    uv run --group bench diffusionlm-bench-tokenizer --config config/resources/bench_tokenizer.toml {{args}}

# The fused head and loss: time, memory and error beside other ways.
bench-kernels *args:
    uv run --group bench python -m benchmarking.bench_kernels {{args}}

# Decoding: a grid of policies, block lengths and caches.
bench-infer *args:
    uv run diffusionlm-bench-infer --config config/resources/bench_infer.toml {{args}}

# Decoding beside recomputing everything, and beside transformers' next tokens.
bench-decoding-peers *args:
    uv run --group bench python -m benchmarking.bench_decoding_peers {{args}}

# Known entropies: the bound of a trained model beside the exact value (docs/results/truth.md).
truth:
    uv run diffusionlm-train --config config/resources/shidoku.toml
    uv run python -m benchmarking.eval_shidoku --model runs/shidoku
    uv run diffusionlm-train --config config/resources/markov.toml

# From next-token prediction to diffusion of the whole row, on one text with one budget.
block-lengths *args:
    #!/usr/bin/env bash
    set -euo pipefail
    train="uv run diffusionlm-train --config config/resources/block_lengths.toml"
    block="--set objective.kind=block_diffusion"
    $train --set run.directory=runs/blocks/next --set objective.kind=next_token --set model.logit_alignment=shifted {{args}}
    for length in 1 4 16; do
        $train --set run.directory=runs/blocks/$length $block --set objective.block_length=$length {{args}}
    done
    $train {{args}}

# A grid of runs: just sweep CONFIG --set optimizer.learning_rate=0.005,0.01
sweep config *args:
    uv run diffusionlm-sweep --config {{config}} {{args}}

# What this machine has, and what will be slow on it.
doctor *args:
    uv run diffusionlm-doctor {{args}}

# Everything that must be green before a commit lands.
check:
    bash .ci/run

# Train, fill, and look: the quickstart.
quickstart:
    uv run diffusionlm-train --config config/resources/train.toml
    uv run diffusionlm-infer --model runs/quickstart --infill 'def area(r):\n    return [MASK:6]\n'

# The quickstart on two ranks.
quickstart-ddp *args:
    uv run diffusionlm-train-ddp --config config/resources/train_ddp.toml {{args}}
