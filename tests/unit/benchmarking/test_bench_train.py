"""The training benchmark: its config, its measurements, its report, its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarking import bench_train as module
from benchmarking.bench_train import (
    MEMORY_PARTS,
    bench_train,
    measure_memory_in_process,
)
from benchmarking.implementations.training import OURS, TrainCase
from config.bench.training import BenchOutputSection, BenchTrainConfig, BenchTrainSection, Peer
from config.dump import to_toml
from config.load import ConfigError, load_config
from diffusionlm.models.transformer import Transformer
from logger.pages.markdown import render_markdown
from tests.unit.benchmarking.cases import make_case, make_shape, read_facts, read_tables

RESOURCES = Path(__file__).parents[3] / "config" / "resources"
RESOURCE = RESOURCES / "bench_train.toml"
GPU_RESOURCE = RESOURCES / "bench_train_gpu.toml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shapes.0.qk_norm=false", "qk_norm = true"),
        ("bench.peers=[liger]", "bench.peers has \"liger\", which has no experts, but the shape 'mixture of experts'"),
    ],
)
def test_config_errors_name_the_problem(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BenchTrainConfig, RESOURCE, [override])
    assert message in str(caught.value)


def test_presets_have_their_sizes(tmp_path: Path) -> None:
    config = load_config(BenchTrainConfig, GPU_RESOURCE)
    assert [(shape.name, shape.max_position_embeddings) for shape in config.shapes] == [
        ("124m", 1_024),
        ("qwen3-0.6b", 2_048),
        ("qwen3-1.7b", 4_096),
    ]
    sizes = []
    for shape in config.shapes:
        with torch.device("meta"):
            sizes.append(sum(parameter.numel() for parameter in Transformer(shape.to_model_config()).parameters()))
    # The sizes of the last two are those of Qwen's checkpoints.
    assert sizes == [123_588_864, 596_049_920, 1_720_574_976]
    assert config.bench.device == "cuda" and config.bench.peers == ("transformers", "liger")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(BenchTrainConfig, path) == config


@pytest.mark.slow
def test_memory_by_part() -> None:
    case = make_case()
    memory = measure_memory_in_process(case, OURS)
    parameters = sum(parameter.numel() for parameter in Transformer(case.shape.to_model_config()).parameters())
    tensors = len(list(Transformer(case.shape.to_model_config()).parameters()))
    assert tuple(memory) == MEMORY_PARTS
    assert memory["weights"] == memory["gradients"] == 4 * parameters
    # Two moments, and a count of steps for each.
    assert memory["optimizer"] == 8 * parameters + 4 * tensors


def fake_memory(case: TrainCase, name: str) -> dict[str, int]:
    return {part: (index + (10 if name == OURS else 20)) << 20 for index, part in enumerate(MEMORY_PARTS)}


@pytest.mark.slow
@pytest.mark.parametrize("peers", [(), ("transformers", "liger")])
def test_end_to_end(
    peers: tuple[Peer, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if peers:
        pytest.importorskip("transformers")
    monkeypatch.setattr(module, "measure_memory", fake_memory)
    bench = BenchTrainSection(
        precisions=("float32",),
        objectives=("masked_diffusion", "block_diffusion", "next_token"),
        block_length=8,
        peers=peers,
        rounds=2,
        warmup=0,
        threads=1,
        device="cpu",
    )
    output = BenchOutputSection(directory=tmp_path / "out")
    report = bench_train(BenchTrainConfig(shapes=(make_shape(),), bench=bench, output=output))
    assert (tmp_path / "out" / "training_speed.md").read_text() == render_markdown(report)
    (speed, rates, memory), facts = read_tables(report), read_facts(report)
    assert list(speed)[3:6] == [
        "diffusionlm tok/s",
        *(("transformers tok/s", "speedup over transformers") if peers else ()),
    ]
    assert speed["objective"] == rates["objective"] == ["masked diffusion", "block diffusion, 8", "next token"]
    assert rates["MFU"] == ["unknown peak"] * 3 and facts["threads"].startswith("1 of torch")
    names = [OURS, *peers[:1]]
    assert memory["implementation"] == names * 3
    assert memory["peak"][: len(names)] == ["14 MiB", "24 MiB"][: len(names)]
    assert not peers or facts["liger"].startswith("left out: ")
    printed = capsys.readouterr()
    assert printed.out == "" and "tiny, next token, float32: round 2/2" in printed.err
    lines = (tmp_path / "out" / "training_speed.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["implementation"] for record in records] == names * 3
    assert all(len(record["seconds"]) == 2 and min(record["seconds"]) > 0 for record in records)
    assert all(record["flops"] > 0 for record in records[:: len(names)])
