"""The benchmark of fine-tuning, with a tiny model and a few conversations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarking.finetune import bench_finetune
from benchmarking.finetune.bench_finetune import BENCHMARK, build_shape, check_arguments, compare_rows, run
from benchmarking.harness import Settings

TINY = {"hidden": 64, "layers": 1, "vocab": 300, "length": 128, "batch": 2, "precision": "float32"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) for i in range(400)]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def settings(data: Path | None) -> Settings:
    return Settings(rounds=2, warmup=1, options=argparse.Namespace(**TINY, data=data), clock=BENCHMARK.clock)


def test_report_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_finetune, "is_installed", lambda package: False)
    monkeypatch.setattr(bench_finetune, "keep_freed_memory", lambda: None)
    report = run(settings(None))
    [trained] = report.tables
    assert trained.column("trained") == ["all weights", "LoRA, rank 8"]
    assert "not installed" in report.facts["peft"]


@pytest.mark.slow
def test_best_fit_has_less_padding(data: Path) -> None:
    table = compare_rows(data, build_shape(settings(data).options), settings(data))
    assert table.column("rows") == ["padded", "best_fit"]
    padding = [int(cell.rstrip("%")) for cell in table.column("padding")]
    assert padding[1] < padding[0]


@pytest.mark.slow
def test_losses_are_those_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself checks that both have the same loss in each round."""
    pytest.importorskip("peft")
    monkeypatch.setattr(bench_finetune, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(bench_finetune, "run_in_fresh_process", lambda *arguments, **options: 1 << 20)
    report = run(settings(None))
    assert report.tables[1].column("") == ["diffusionlm", "peft"]


def test_arguments() -> None:
    options = argparse.Namespace(**(TINY | {"batch": 0}), data=None)
    assert check_arguments(options) == "--batch 0 must be at least 1"
    options = argparse.Namespace(**TINY, data=Path("missing.jsonl"))
    assert check_arguments(options) == "--data missing.jsonl: there is no such file"
