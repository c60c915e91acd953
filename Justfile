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
    uv run shellcheck --external-sources .ci/run scripts/train.slurm scripts/gpu_check.sh scripts/remote/there.sh

# Check types.
types:
    uv run mypy

# The fast tests.
test *args:
    uv run pytest {{args}}

# All tests that this machine can run, including slow and gpu tests.
test-all *args:
    uv run pytest -m "" {{args}}

# Training speed and memory, compared with transformers.
bench *args:
    uv run --group bench diffusionlm-bench-train --config config/resources/bench_train.toml {{args}}

# Two ranks compared with torch's DistributedDataParallel and FSDP2: speed, sent bytes, losses.
bench-ddp *args:
    uv run python -m benchmarking.bench_ddp {{args}}

# Speed of the tokenizer, compared with tokenizers and tiktoken.
bench-tokenizer *args:
    uv run --group bench diffusionlm-bench-tokenizer --config config/resources/bench_tokenizer.toml {{args}}

# The fused head and loss, compared with other implementations: time, memory and error.
bench-kernels *args:
    uv run --group bench python -m benchmarking.bench_kernels {{args}}

# Decoding speed over a grid of strategies, block lengths and caches.
bench-infer *args:
    uv run diffusionlm-bench-infer --config config/resources/bench_infer.toml {{args}}

# The engine, compared with one request at a time, static batches and transformers.
compare-engine *args:
    uv run --group bench python -m benchmarking.serving.compare_engine {{args}}

# Load for a server that runs already: latencies, goodput and a check of the answers.
bench-serve *args:
    uv run diffusionlm-bench-serve --config config/resources/bench_serve.toml {{args}}

# Sources of known entropy: the bound of a trained model and the exact value (docs/results/truth.md).
truth:
    uv run diffusionlm-train --config config/resources/shidoku.toml
    uv run python -m tests.reference.decoding.shidoku_puzzles --model runs/shidoku
    uv run diffusionlm-train --config config/resources/markov.toml

# From next-token prediction to diffusion of the whole sequence, on one text with one budget.
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

# On a machine with GPUs: what only a GPU shows, the gravest first; prints and writes docs/results/gpu.md.
gpu-check *args:
    bash scripts/gpu_check.sh {{args}}

# Check this machine, and list what will be slow on it.
doctor *args:
    uv run diffusionlm-doctor {{args}}

# Compiled against plain gradients with other versions of torch, each in an environment of its own: gigabytes of packages.
check-torch-versions *versions="2.9.1 2.11.0 2.13.0":
    #!/usr/bin/env bash
    set -uo pipefail
    code=0
    for version in {{versions}}; do
        echo "torch $version"
        uv run --isolated --with "torch==$version" pytest -n 0 -q -m slow tests/unit/training/test_compiled_gradients.py || code=1
    done
    uv run pytest -n 0 -q -m slow tests/unit/training/test_compiled_gradients.py || code=1
    exit $code

# All checks that must pass before a commit lands.
check:
    bash .ci/run

# The quickstart: train a small model and infill with it.
quickstart:
    uv run diffusionlm-train --config config/resources/train.toml
    uv run diffusionlm-infer --model runs/quickstart --infill 'for i in [MASK:1](10):\n    print(i)\n'

# The quickstart on two ranks.
quickstart-ddp *args:
    uv run diffusionlm-train-ddp --config config/resources/train_ddp.toml {{args}}
