"""The training benchmark: its config, its contestants, its command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarking import bench_train as module
from benchmarking.bench_train import BUILDERS, OURS, Case, bench_train, check_machine, count_parameters, measure_peak
from config.bench_train import BenchSection, BenchTrainConfig, OutputSection, Precision, Shape
from config.load import ConfigError, load_config

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "bench_train.toml"


def make_shape(**changes: Any) -> Shape:
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
    return Shape(**(values | changes))


def make_case(shape: Shape, precision: Precision = "float32") -> Case:
    return Case(shape, precision, device="cpu", threads=1, seed=0)


def test_the_shipped_config_is_what_the_docs_say() -> None:
    config = load_config(BenchTrainConfig, RESOURCE)
    assert [shape.vocab_size for shape in config.shapes] == [4096, 32768]
    assert {shape.tokens for shape in config.shapes} == {4096}
    assert all(shape.tie_word_embeddings and shape.mask_token == shape.vocab_size - 1 for shape in config.shapes)
    assert config.bench.precisions == ("float32", "bfloat16")
    assert config.bench.peers == ("transformers",)
    assert config.shapes[0].complete().mask_token_id == 4095


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.peers=[jax]", "jax"),
        ("bench.rounds=1", "2"),
        ("bench.precisions=[float16]", "float16"),
        ("bench.precisions=[float32,float32]", "bench.precisions: 'float32' is given twice"),
        ("shapes.1.name=vocabulary 4,096", "shapes.name: 'vocabulary 4,096' is given twice"),
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
    assert "missing.toml: there is no such file" in done.stderr


def test_a_missing_peer_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    with pytest.raises(ValueError, match=r"transformers.*install the group bench.*bench.peers="):
        check_machine(BenchSection(peers=("transformers",)))
    assert check_machine(BenchSection(threads=3, device="cpu")) == ("cpu", 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        check_machine(BenchSection(device="cuda"))
    assert check_machine(BenchSection(device="auto"))[0] == "cpu"


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_trains(name: str, precision: Precision) -> None:
    if name != OURS:
        pytest.importorskip(name)
    contestant = BUILDERS[name](make_case(make_shape(), precision))
    before = {key: parameter.detach().clone() for key, parameter in contestant.model.named_parameters()}
    losses = [contestant.step().item() for _ in range(2)]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    for key, parameter in contestant.model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is None
        assert not torch.equal(parameter, before[key]), key


def test_the_loss_starts_at_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    contestant = BUILDERS[OURS](make_case(make_shape(batch_size=32)))
    assert contestant.step().item() == pytest.approx(math.log(63), rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_contestants_have_the_same_parameters(tied: bool) -> None:
    pytest.importorskip("transformers")
    case = make_case(make_shape(tie_word_embeddings=tied, num_hidden_layers=2))
    ours, theirs = (BUILDERS[name](case).model for name in (OURS, "transformers"))
    assert count_parameters(ours) == count_parameters(theirs)
    shapes = [{key: value.shape for key, value in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_all_contestants_get_the_same_tokens() -> None:
    case = make_case(make_shape())
    assert torch.equal(case.tokens(), case.tokens())
    assert case.tokens().shape == (4, 32) and int(case.tokens().max()) < case.shape.mask_token


def test_without_peers_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchTrainConfig(
        shapes=(make_shape(vocab_size=4096, hidden_size=128),),
        bench=BenchSection(precisions=("float32",), rounds=2, warmup=1, threads=1, device="cpu"),
        output=OutputSection(directory=tmp_path / "out"),
    )
    text = bench_train(config)

    assert (tmp_path / "out" / "training_speed.md").read_text() == text + "\n"
    assert text.startswith("| shape | precision | diffusionlm tok/s | diffusionlm peak |\n| --- | ---: | ---: | ---: |")
    assert "transformers" not in text
    assert "threads: 1 of torch" in text and f"torch {torch.__version__}" in text
    output = capsys.readouterr()
    assert output.out == "" and "tiny, float32: round 2/2: diffusionlm" in output.err
    [line] = (tmp_path / "out" / "training_speed.jsonl").read_text().splitlines()
    raw = json.loads(line)
    assert raw["contestant"] == OURS and len(raw["seconds"]) == 2 and min(raw["seconds"]) > 0
    # Weights, gradients and both moments at least.
    assert raw["peak_bytes"] > 4 * 4 * raw["parameters"]


def test_with_transformers_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    peaks = {OURS: 100 << 20, "transformers": 250 << 20}
    monkeypatch.setattr(module, "measure_peak", lambda case, name: peaks[name])
    config = BenchTrainConfig(
        shapes=(make_shape(),),
        bench=BenchSection(peers=("transformers",), rounds=2, warmup=0, threads=1, device="cpu"),
    )
    lines = bench_train(config).splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert header == [
        "shape",
        "precision",
        "diffusionlm tok/s",
        "transformers tok/s",
        "speedup over transformers",
        "in a round [quartiles]",
        "diffusionlm peak",
        "transformers peak",
    ]
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["float32", "bfloat16"]
    assert all(line.endswith("100 MiB | 250 MiB |") for line in lines[2:4])


class DeadPool(ProcessPoolExecutor):
    """A pool whose process was killed."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise BrokenProcessPool


def test_a_killed_measurement_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", DeadPool)
    with pytest.raises(ValueError, match=r"was killed .*lower shapes.batch_size"):
        measure_peak(make_case(make_shape()), OURS)
