"""From an autoregressive model to diffusion, against training from scratch: the bound after as many tokens.

    python -m benchmarking.finetune.adaptation

A small Qwen3 is trained as an autoregressive model on the Python standard library, converted, and adapted to diffusion:
all weights, and an adapter. The model from scratch has the same shape, tokenizer, rows and noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking.harness import Benchmark, Report, Settings, Table, main
from config.convert import ConvertConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.conversion_plan import plan_conversion
from diffusionlm.checkpoints.convert import convert
from diffusionlm.training.loop import train
from files.terminal_text import print_message

ROW_LENGTH, BATCH_SIZE = 128, 16
NUM_VALIDATIONS = 5

OBJECTIVES: dict[str, dict[str, Any]] = {
    "blocks": {"kind": "block_diffusion", "block_length": 4},
    "bidirectional": {"kind": "masked_diffusion"},
}
MUON = {"kind": "muon", "learning_rate": 0.01, "rest": {"kind": "adamw", "learning_rate": 6e-3, "betas": [0.9, 0.98]}}


@dataclass(frozen=True)
class Arm:
    """A way to a diffusion model."""

    name: str
    is_adapted: bool
    """Starts from the autoregressive model."""
    optimizer: Mapping[str, Any]
    lora: Mapping[str, Any] | None = None


ARMS = (
    Arm("from scratch", False, MUON),
    Arm(
        "adapted, all weights", True, {**MUON, "learning_rate": 0.003, "rest": {"kind": "adamw", "learning_rate": 2e-3}}
    ),
    Arm("adapted, LoRA", True, {"kind": "adamw", "learning_rate": 3e-3}, {"rank": 32, "alpha": 64.0}),
)


@dataclass(frozen=True)
class Bound:
    """Validation of a step, in nats per token."""

    step: int
    nats: float
    error: float


def build_config(options: argparse.Namespace, directory: Path, num_steps: int, **sections: Any) -> TrainConfig:
    """The config of a run of this benchmark, validated in ``NUM_VALIDATIONS`` of its steps."""
    width = options.hidden_size
    model = {
        "hidden_size": width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": max(1, width // 32),
        "num_key_value_heads": max(1, width // 64),
        "head_dim": 32,
        "intermediate_size": 3 * width,
        "max_position_embeddings": ROW_LENGTH,
        "rope_theta": 300.0,
        "tie_word_embeddings": True,
        "logit_alignment": "shifted",
    }
    values: dict[str, Any] = {
        "run": {"directory": directory, "device": "cpu", "threads": options.threads},
        "model": model,
        "data": {"source": {"kind": "python-stdlib"}, "rows": "packed"},
        "tokenizer": {"vocab_size": options.vocab_size},
        "training": {"batch_size": BATCH_SIZE, "max_steps": num_steps},
        "schedule": {"kind": "linear", "warmup_fraction": 0.1},
        "validation": {
            "every_steps": max(1, num_steps // NUM_VALIDATIONS),
            "rows": options.validation_rows,
            "final_rows": options.validation_rows,
            "ngrams": False,
        },
        "samples": {"infills": []},
        "checkpoint": {"every_steps": num_steps},
        "logging": {"progress": "none"},
    }
    values["model"] |= sections.pop("model", {})
    return TrainConfig.model_validate(values | sections)


def train_and_read_bounds(config: TrainConfig) -> list[Bound]:
    """Train, and return the validation bounds in order."""
    train(config)
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    bounds = []
    for record in map(json.loads, lines):
        for prefix in ("val", "final"):
            nats, error = (
                record.get("metrics", {}).get(f"{prefix}_{name}") for name in ("nats_per_token", "standard_error")
            )
            if nats is not None:
                bounds.append(Bound(record["step"], nats, error))
    return bounds


def run_arms(options: argparse.Namespace, folder: Path) -> tuple[Bound, dict[str, list[Bound]]]:
    """The loss of the autoregressive model, and the bounds of each arm by name."""
    source, base = folder / "autoregressive", folder / "base"
    print_message(f"training the autoregressive model, {options.pretraining_steps} steps")
    pretraining = {"objective": {"kind": "next_token"}, "optimizer": MUON}
    loss = train_and_read_bounds(build_config(options, source, options.pretraining_steps, **pretraining))[-1]
    objective = OBJECTIVES[options.objective]
    diffusion = {"block_length": objective.get("block_length"), "mask_row": "mean"}
    conversion = plan_conversion(
        ConvertConfig.model_validate({"source": source, "target": base, "diffusion": diffusion})
    )
    convert(conversion)
    bounds = {}
    for arm in ARMS:
        print_message(f"{arm.name}, {options.steps} steps")
        sections: dict[str, Any] = {"objective": objective, "optimizer": arm.optimizer}
        if arm.is_adapted:
            sections["model"] = {"init_from": str(base)}
        else:
            sections["tokenizer"] = {"path": str(base)}
        if arm.lora is not None:
            sections["lora"] = {**arm.lora, "trainable_tokens": [conversion.target_config.mask_token_id]}
        name = arm.name.replace(", ", "-").replace(" ", "-")
        bounds[arm.name] = train_and_read_bounds(build_config(options, folder / name, options.steps, **sections))
    return loss, bounds


def run(settings: Settings) -> Report:
    options = settings.options
    options.threads = settings.threads
    with tempfile.TemporaryDirectory() as folder:
        loss, bounds = run_arms(options, Path(folder))
    tokens_per_step = BATCH_SIZE * ROW_LENGTH
    rows = []
    for step_bounds in zip(*bounds.values(), strict=True):
        tokens = step_bounds[0].step * tokens_per_step
        rows.append([f"{tokens:,}", *(f"{bound.nats:.3f} +- {bound.error:.3f}" for bound in step_bounds)])
    facts = {
        "autoregressive model": f"{loss.nats:.3f} +- {loss.error:.3f} nats per token after "
        f"{options.pretraining_steps * tokens_per_step:,} tokens",
        "shape": f"hidden {options.hidden_size}, {options.layers} layers, vocabulary {options.vocab_size:,}, rows of "
        f"{ROW_LENGTH} tokens",
        "objective": options.objective,
    }
    return Report([Table(["tokens", *bounds], rows)], facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--objective", choices=tuple(OBJECTIVES), default="blocks", help="blocks of 4, or one of all")
    parser.add_argument("--pretraining-steps", type=int, default=1_000, help="of the autoregressive model")
    parser.add_argument("--steps", type=int, default=200, help="of each way to a diffusion model")
    parser.add_argument("--validation-rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=2_048)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)


def check_arguments(options: argparse.Namespace) -> str | None:
    if min(options.pretraining_steps, options.steps) < NUM_VALIDATIONS:
        return f"--pretraining-steps and --steps must be at least {NUM_VALIDATIONS}"
    return None if options.hidden_size % 32 == 0 and options.layers > 0 else "--hidden-size must be a multiple of 32"


BENCHMARK = Benchmark(
    "Compare adapting an autoregressive model with training a diffusion model from scratch.",
    run,
    rounds=None,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
