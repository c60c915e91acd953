"""Predicted rounds of decoding on a GPU, against counts on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.bench.inference import BenchInferConfig
from config.load import load_config
from profiling.roofline.decoding import main
from profiling.roofline.gpus import GPUS
from profiling.roofline.operators import Operator
from profiling.roofline.round_predictions import DecodingPrediction
from profiling.roofline.rounds import RecordedDecoding, record_decoding

B, PROMPT, ANSWER, BLOCK = 3, 8, 12, 4
D, F, V, LAYERS, HEADS, HEAD_DIM = 32, 48, 64, 2, 2, 16
CONFIG = f"""
[model]
device = "cpu"
dtype = "bfloat16"
[model.shape]
hidden_size = {D}
num_hidden_layers = {LAYERS}
num_attention_heads = {HEADS}
num_key_value_heads = {HEADS}
head_dim = {HEAD_DIM}
intermediate_size = {F}
max_position_embeddings = 64
vocab_size = {V}
block_length = {BLOCK}
[bench]
prompt_length = {PROMPT}
new_tokens = {ANSWER}
[grid]
batch_sizes = [{B}]
caches = ["block"]
[[strategies]]
name = "static"
[strategies.generation]
remasking_strategy = "low_confidence_static"
denoising_steps = 2
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoding") / "bench.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def prediction(path: Path) -> DecodingPrediction:
    config = load_config(BenchInferConfig, path, [])
    [cell] = config.cells()
    return DecodingPrediction(cell, record_decoding(config, cell))


def flops_of(operators: list[Operator] | tuple[Operator, ...], part: str) -> int:
    return sum(operator.flops for operator in operators if operator.part == part)


def test_rounds_of_a_call(prediction: DecodingPrediction) -> None:
    """Three blocks of two forwards each."""
    decoding = prediction.decoding
    assert (len(decoding.first_rounds), len(decoding.block_rounds), decoding.num_later_blocks) == (2, 2, 2)
    assert decoding.num_rounds == 6 and decoding.new_tokens == B * ANSWER


def test_products_of_a_round(prediction: DecodingPrediction) -> None:
    """The second forward of a block in the middle: its rows, of which two of four are masked, and all keys before."""
    operators = tuple(prediction.decoding.block_rounds[1])
    rows, scored, width = B * BLOCK, B * 2, HEADS * HEAD_DIM
    keys = PROMPT + ANSWER // BLOCK // 2 * BLOCK + BLOCK
    key_products = 2 * 2 * rows * D * width * LAYERS
    query_products = 2 * 2 * D * width * (rows * (LAYERS - 1) + scored)
    assert flops_of(operators, "projections") == key_products + query_products
    assert flops_of(operators, "feed-forward") == 3 * 2 * D * F * (rows * (LAYERS - 1) + scored)
    assert flops_of(operators, "head and loss") == 2 * scored * D * V
    assert flops_of(operators, "attention") == LAYERS * 2 * 2 * rows * keys * width


def test_bytes_of_the_cache(prediction: DecodingPrediction) -> None:
    """Keys and values of all positions are gathered in each layer: read and written in bfloat16."""
    operators = prediction.decoding.block_rounds[1]
    keys = PROMPT + ANSWER // BLOCK // 2 * BLOCK + BLOCK
    copied = 2 * 2 * B * keys * HEADS * HEAD_DIM
    gathers = [op for op in operators if op.name == "index" and op.layer == 0 and op.num_bytes >= copied]
    assert [op.writes[0].num_bytes for op in gathers] == [copied // 2] * 2


def test_time_of_a_call(prediction: DecodingPrediction) -> None:
    """Tiny kernels take a launch of the GPU each, and without graphs one of the host, which is longer."""
    decoding: RecordedDecoding = prediction.decoding
    gpu = GPUS["h200"]
    rounds = [*decoding.first_rounds, *decoding.block_rounds, *decoding.block_rounds]
    launches = sum(len(operators) for operators in rounds)
    assert prediction.seconds(gpu, has_graphs=True) == pytest.approx(2e-6 * launches)
    assert prediction.seconds(gpu, has_graphs=False) == pytest.approx(5e-6 * launches)
    assert prediction.tokens_per_second(gpu, has_graphs=True) == pytest.approx(B * ANSWER / (2e-6 * launches))


def test_tables(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    main(["--config", str(path), "--device", "b200", "--output", str(page)])
    text = capsys.readouterr().out
    assert text.strip() in page.read_text(encoding="utf-8")
    assert "| sampling |" in text and "2 rounds, B200" in text


@pytest.mark.parametrize("setting", ["model.dtype=float32", "model.path=runs/none", "grid.batch_sizes=[0]"])
def test_errors(setting: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(path), "--set", setting])
    assert ended.value.code == 2
    assert setting.partition("=")[0] in capsys.readouterr().err
