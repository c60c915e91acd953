"""Benchmarks on a GPU that computes nothing: they take the code of a GPU, and wait for it at the end of each call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarking import bench_infer, bench_kernels, bench_train
from benchmarking.implementations.training import OURS
from config.bench.inference import BenchInferConfig
from config.bench.training import BenchTrainSection
from config.load import load_config
from logger.pages import Page
from tests.fake_cuda import fake_cuda
from tests.unit.benchmarking.cases import make_case, read_facts, read_tables

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "bench_infer_gpu.toml"
BENCH = BenchTrainSection(rounds=2, warmup=0)


def test_head_and_loss() -> None:
    [case] = bench_kernels.build_cases("cuda", 1)
    case = replace(case, positions=64, masked=32, width=16, vocab=97)
    with fake_cuda() as record:
        inputs = bench_kernels.make_inputs(case)
        record.clear()
        bench_kernels.step(bench_kernels.fused_loss, inputs)
    assert dict(record.waits) == {"benchmarking/bench_kernels.py:step": 1}
    assert {launch.inputs[1].dtype for launch in record.launches if launch.is_product} == {torch.bfloat16}


def test_training() -> None:
    """Speed; memory is measured in another process."""
    memory = dict.fromkeys(bench_train.MEMORY_PARTS, 1 << 20)
    with (
        fake_cuda() as record,
        patch.object(bench_train, "measure_memory", lambda case, name: memory),
    ):
        case = replace(make_case("bfloat16"), device="cuda")
        measurement = bench_train.measure_case(case, [OURS], BENCH)
        parts = bench_train.build_parts([measurement])
    assert len(measurement.times.seconds[OURS]) == BENCH.rounds
    assert read_tables(Page("", {"Results": parts}))[1]["MFU"][0].endswith("%")
    assert record.waits["benchmarking/implementations/training.py:synchronize"] == BENCH.rounds


def test_decoding() -> None:
    settings = [
        "model.shape.hidden_size=32", "model.shape.num_hidden_layers=1", "model.shape.intermediate_size=32",
        "model.shape.num_attention_heads=2", "model.shape.num_key_value_heads=1", "model.shape.head_dim=16",
        "model.shape.vocab_size=64", "bench.prompt_length=8", "bench.new_tokens=4", "bench.rounds=2",
        "grid.batch_sizes=[2]",
    ]  # fmt: skip
    with fake_cuda() as record:
        report = bench_infer.bench_infer(load_config(BenchInferConfig, RESOURCE, settings))
    assert read_facts(report)["accelerator"] == "NVIDIA H200"
    assert read_tables(report)[0]["batch"] == ["2"]
    assert record.product_dtypes() == {torch.bfloat16}
