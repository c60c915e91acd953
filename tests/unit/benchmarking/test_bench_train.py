"""The training benchmark: its config, its measurements, its report, its command."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarking import bench_train as module
from benchmarking.bench_train import (
    MATRIX_PRODUCTS,
    MEMORY_PARTS,
    OURS,
    TrainCase,
    bench_train,
    find_skipped_peers,
    measure_memory,
    measure_memory_in_process,
    select_device,
)
from config.bench_train import BenchShape, BenchTrainConfig, BenchTrainOutput, BenchTrainSection, Precision
from config.dump import to_toml
from config.load import ConfigError, load_config
from diffusionlm.models.transformer import Transformer

RESOURCES = Path(__file__).parents[3] / "config" / "resources"
RESOURCE = RESOURCES / "bench_train.toml"
GPU_RESOURCE = RESOURCES / "bench_train_gpu.toml"


def make_shape(**changes: Any) -> BenchShape:
    values: dict[str, Any] = {
        "name": "tiny",
        "vocab_size": 64,
        "batch_size": 4,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    return BenchShape(**(values | changes))


def make_case(shape: BenchShape, precision: Precision = "float32") -> TrainCase:
    return TrainCase(shape, precision, device="cpu", threads=1, seed=0)


def test_the_shipped_config_is_what_the_docs_say() -> None:
    config = load_config(BenchTrainConfig, RESOURCE)
    assert [shape.vocab_size for shape in config.shapes] == [4096, 32768]
    assert {shape.tokens for shape in config.shapes} == {4096}
    assert all(shape.tie_word_embeddings and shape.mask_token == shape.vocab_size - 1 for shape in config.shapes)
    first, second = (shape.model_dump(exclude={"shape", "name", "vocab_size"}) for shape in config.shapes)
    assert first == second
    assert config.bench.precisions == ("float32", "bfloat16")
    assert config.bench.objectives == ("masked_diffusion", "block_diffusion", "next_token")
    assert config.bench.peers == ("transformers",)
    assert config.shapes[0].to_model_config().mask_token_id == 4095


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.peers=[jax]", "jax"),
        ("bench.rounds=1", "2"),
        ("bench.precisions=[float16]", "float16"),
        ("bench.precisions=[float32,float32]", "bench.precisions: 'float32' is given twice"),
        ("shapes.1.name=vocabulary 4,096", "shapes.name: 'vocabulary 4,096' is given twice"),
        ("bench.objectives=[next_token,next_token]", "bench.objectives: 'next_token' is given twice"),
        ("bench.objectives=[diffusion]", "masked_diffusion"),
        ("bench.block_length=257", "bench.block_length = 257 is longer than the rows of the shape 'vocabulary 4,096'"),
        ("shapes.0.shape=qwen3-8b", "qwen3-8b"),
        ("shapes.0.num_key_value_heads=3", "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"),
        ("shapes.0.qk_norm=false", "qk_norm = true"),
        ("bench.steps=3", "unknown key"),
    ],
)
def test_config_errors_name_the_problem(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BenchTrainConfig, RESOURCE, [override])
    assert message in str(caught.value)


def test_config_errors_and_help_do_not_import_torch() -> None:
    code = (
        "import sys; from cli.bench_train import main\n"
        "sys.argv = ['diffusionlm-bench-train', '--config', 'missing.toml']\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "missing.toml: no such file" in done.stderr


def test_a_missing_peer_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    with pytest.raises(ValueError, match=r"transformers.*install the group bench.*bench.peers="):
        select_device(BenchTrainSection(peers=("transformers",)))
    assert select_device(BenchTrainSection(threads=3, device="cpu")) == ("cpu", 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        select_device(BenchTrainSection(device="cuda"))
    assert select_device(BenchTrainSection(device="auto"))[0] == "cpu"


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
    # The last two are Qwen's own, as their checkpoints have them.
    assert sizes == [123_588_864, 596_049_920, 1_720_574_976]
    assert config.bench.device == "cuda" and config.bench.peers == ("transformers", "liger")
    kept = tmp_path / "config.toml"
    kept.write_text(to_toml(config), encoding="utf-8")
    assert load_config(BenchTrainConfig, kept) == config


def test_a_preset_may_be_changed() -> None:
    shape = BenchShape(shape="124m", batch_size=2)
    assert (shape.name, shape.batch_size, shape.hidden_size) == ("124m", 2, 768)
    with pytest.raises(ValueError, match="shape = '7b' is none of the presets tiny, 124m"):
        BenchShape(shape="7b")


def test_a_peer_that_cannot_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BenchTrainSection(peers=("transformers", "liger"))
    monkeypatch.setattr(module, "is_installed", lambda package: True)
    assert find_skipped_peers(bench, "cuda") == {}
    assert find_skipped_peers(bench, "cpu") == {"liger": "left out: its kernels need CUDA"}
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    assert find_skipped_peers(bench, "cuda") == {"liger": "left out: liger-kernel is not installed"}
    assert find_skipped_peers(BenchTrainSection(peers=("transformers",)), "cpu") == {}


def test_memory_by_part() -> None:
    case = make_case(make_shape())
    memory = measure_memory_in_process(case, OURS)
    parameters = sum(parameter.numel() for parameter in Transformer(case.shape.to_model_config()).parameters())
    tensors = len(list(Transformer(case.shape.to_model_config()).parameters()))
    assert tuple(memory) == MEMORY_PARTS
    assert memory["weights"] == memory["gradients"] == 4 * parameters
    # Two moments, and a count of steps for each.
    assert memory["optimizer"] == 8 * parameters + 4 * tensors


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    case = make_case(make_shape(vocab_size=4096, hidden_size=128))
    memory = measure_memory(case, OURS)
    assert memory["peak"] > memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert memory["activations"] > 0


def fake_memory(case: TrainCase, name: str) -> dict[str, int]:
    return {part: (index + (10 if name == OURS else 20)) << 20 for index, part in enumerate(MEMORY_PARTS)}


def test_without_peers_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_memory", fake_memory)
    config = BenchTrainConfig(
        shapes=(make_shape(),),
        bench=BenchTrainSection(
            precisions=("float32",),
            objectives=("masked_diffusion", "block_diffusion", "next_token"),
            block_length=8,
            rounds=2,
            warmup=0,
            threads=1,
            device="cpu",
        ),
        output=BenchTrainOutput(directory=tmp_path / "out"),
    )
    text = bench_train(config)

    assert (tmp_path / "out" / "training_speed.md").read_text() == text + "\n"
    assert text.startswith("| shape | objective | precision | diffusionlm tok/s |\n| --- | ---: | ---: | ---: |")
    assert "transformers" not in text
    assert "threads: 1 of torch" in text and f"torch {torch.__version__}" in text
    for objective in ("masked diffusion", "block diffusion, 8", "next token"):
        # In the tables of speed, of products and of memory.
        assert text.count(f"| tiny | {objective} | float32 |") == 3
    assert text.count("| no peak known |") == 3
    output = capsys.readouterr()
    assert output.out == "" and "tiny, next token, float32: round 2/2: diffusionlm" in output.err
    lines = (tmp_path / "out" / "training_speed.jsonl").read_text().splitlines()
    raw = [json.loads(line) for line in lines]
    assert [each["contestant"] for each in raw] == [OURS, MATRIX_PRODUCTS] * 3
    assert [each["objective"]["kind"] for each in raw[::2]] == list(config.bench.objectives)
    assert all(len(each["seconds"]) == 2 and min(each["seconds"]) > 0 for each in raw)
    for ours, products in zip(raw[::2], raw[1::2], strict=True):
        assert ours["bytes"] == fake_memory(make_case(make_shape()), OURS)
        # What runs is what shape and draw ask for, and in so short a row all that nobody sees.
        assert ours["flops"] <= 1.01 * products["flops"] < 2 * ours["flops"]


def test_with_transformers_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(module, "measure_memory", fake_memory)
    config = BenchTrainConfig(
        shapes=(make_shape(),),
        bench=BenchTrainSection(peers=("transformers", "liger"), rounds=2, warmup=0, threads=1, device="cpu"),
    )
    text = bench_train(config)
    speeds, _, shares, _, memory, _, rest = text.split("\n\n")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in speeds.splitlines())
    assert header == [
        "shape",
        "objective",
        "precision",
        "diffusionlm tok/s",
        "transformers tok/s",
        "speedup over transformers",
        "in a round [quartiles]",
    ]
    assert [row[2] for row in rows] == ["float32", "bfloat16"]
    assert "share in a round [quartiles]" in shares.splitlines()[0] and len(shares.splitlines()) == 4
    parts = [line.split(" | ")[3:] for line in memory.splitlines()]
    assert parts[0] == ["contestant", "weights", "gradients", "optimizer", "activations", "peak |"]
    assert parts[2] == [OURS, "10 MiB", "11 MiB", "12 MiB", "13 MiB", "14 MiB |"]
    assert parts[3] == ["transformers", "20 MiB", "21 MiB", "22 MiB", "23 MiB", "24 MiB |"]
    assert "\n- liger: left out: " in rest


class DeadPool(ProcessPoolExecutor):
    """A pool whose process was killed."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise BrokenProcessPool


def test_a_killed_measurement_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarking.harness.ProcessPoolExecutor", DeadPool)
    with pytest.raises(ValueError, match=r"was killed .*lower shapes.batch_size"):
        measure_memory(make_case(make_shape()), OURS)
