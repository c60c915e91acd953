"""The losses of twenty training steps, to the last bit where torch and processor are those that made them.

A change that means to keep every number keeps these. One that means to change them makes them anew, and says so:

    OMP_NUM_THREADS=1 python tests/golden/test_loss_traces.py
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.run import build_run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step

TRACES = Path(__file__).with_name("loss_traces.json")
STEPS = 20
TOLERANCE = 1e-5
"""Relative, for another torch or processor: kernels sum in another order, and steps make that larger. Kernels without
AVX-512, without any vectors, and MKL's for all processors differ by 2e-7."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked diffusion": {"kind": "masked_diffusion"},
    "block diffusion": {"kind": "block_diffusion", "block_length": 4},
    "next token": {"kind": "next_token"},
}


def config_of(objective: dict[str, Any], directory: Path, device: str = "cpu") -> TrainConfig:
    """A tiny run of fp32 on one thread. AdamW with a large eps: it answers rounding with rounding, where Muon, whose
    products are bfloat16, and an eps near zero would not."""
    is_autoregressive = objective["kind"] == "next_token"
    text = "\n\n".join(f"the cat {i} sat on the mat {i * i}" for i in range(200))
    directory.mkdir(parents=True)
    (directory / "corpus.txt").write_text(text, encoding="utf-8")
    source = {"kind": "files", "paths": [str(directory / "corpus.txt")], "sample_by": "paragraph"}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return TrainConfig.model_validate(
        {
            "runtime": {"compile": "none"},
            "run": {"directory": str(directory / "run"), "device": device, "threads": 1, "seed": 3},
            "model": {
                **shape,
                "head_dim": 16,
                "intermediate_size": 48,
                "max_position_embeddings": 32,
                "logit_alignment": "shifted" if is_autoregressive else "same_position",
            },
            "tokenizer": {"vocab_size": 300},
            "data": {"source": {**source, "validation_fraction": 0.2}, "begin_with_eos": is_autoregressive},
            "objective": objective,
            "optimizer": {"kind": "adamw", "learning_rate": 3e-3, "eps": 1e-4},
            "training": {"batch_size": 8, "micro_batch_size": 4, "max_steps": STEPS, "precision": "float32"},
            "validation": {"every_steps": 0, "ngrams": False},
        }
    )


def trace(objective: dict[str, Any], directory: Path, device: str = "cpu") -> list[float]:
    """Losses, as Python writes fp32 numbers: nothing is lost."""
    config = config_of(objective, directory, device)
    with open_run_directory(config) as opened:
        run = build_run(config, opened)
        losses = []
        for step in range(STEPS):
            batch = load_step_batch(run.loader, step, run.world, StopRequest())
            metrics = train_step(run.state, run.loader, batch, run.settings, run.monitor)
            losses.append(float(metrics.loss))
        return losses


def maker() -> dict[str, str]:
    """What the last bits depend on."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
    }


def processor() -> str:
    """Its name and generation, where the system tells: libraries choose kernels by them."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8").partition("\n\n")[0] if path.is_file() else ""
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    return ", ".join(entries.get(key, "") for key in ("model name", "cpu family", "model"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_those_of_the_record(name: str, tmp_path: Path) -> None:
    record = json.loads(TRACES.read_text(encoding="utf-8"))
    losses = trace(OBJECTIVES[name], tmp_path / "golden")
    assert losses[-1] < losses[0] - 0.3, "nothing was learnt"
    if record["maker"] == maker():
        assert losses == record["losses"][name]
    else:
        assert losses == pytest.approx(record["losses"][name], rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_on_a_gpu_are_those_of_the_record(name: str, tmp_path: Path) -> None:
    record = json.loads(TRACES.read_text(encoding="utf-8"))
    assert trace(OBJECTIVES[name], tmp_path / "golden", "cuda") == pytest.approx(record["losses"][name], rel=1e-3)


def remake() -> None:
    """Write the record anew."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: trace(objective, Path(folder) / name) for name, objective in OBJECTIVES.items()}
    TRACES.write_text(json.dumps({"maker": maker(), "losses": losses}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: threads change the last bits"
    remake()
