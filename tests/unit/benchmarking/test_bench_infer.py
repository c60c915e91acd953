"""The decoding benchmark: its config, what it counts, its report and its peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarking.bench_infer import bench_infer, random_model, random_prompts, read_prompts
from benchmarking.implementations import peers
from config.bench.inference import BenchInferConfig
from config.load import ConfigError, load_config
from config.model import ModelConfig
from diffusionlm.models.patterns import Causal
from diffusionlm.models.transformer import Transformer
from tests.unit.benchmarking.cases import SIZES, read_facts, read_tables
from tokenizer import Tokenizer
from tokenizer.files import save_tokenizer

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "bench_infer.toml"
SHAPE = {**SIZES, "max_position_embeddings": 32, "vocab_size": 48}


def make_config(**changes: Any) -> BenchInferConfig:
    generation = {"attention": "block_causal", "remasking_strategy": "low_confidence_static", "denoising_steps": 2}
    values: dict[str, Any] = {
        "model": {"shape": SHAPE, "device": "cpu", "threads": 1},
        "bench": {"prompt_length": 4, "new_tokens": 8, "rounds": 2, "warmup": 0, "memory": False},
        "grid": {"batch_sizes": [1, 2], "block_lengths": [4], "caches": ["none", "block"]},
        "strategies": [{"name": "static", "generation": generation}],
    }
    return BenchInferConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def model() -> Transformer:
    # In fp64 no rounding decides between two tokens or two positions.
    return random_model(ModelConfig(**SHAPE, mask_token_id=47, block_length=4), seed=0).double()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grid.caches=none,dual", 'cell "static, block 4, cache dual": cache = "dual" is for bidirectional'),
        ("strategies.0.generation.block_length=4", "generation.block_length = 4 is set by grid.block_lengths here"),
        ("bench.new_tokens=1000", "1064 tokens, more than model.shape.max_position_embeddings = 512"),
        ("validation.source=python-stdlib", "was removed; bound a likelihood with diffusionlm-eval"),
    ],
)
def test_config_errors_name_the_problem_and_the_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BenchInferConfig, RESOURCE, [override])
    assert message in str(caught.value)


def test_a_config_needs_a_model_that_its_peers_can_decode() -> None:
    with pytest.raises(ValueError, match=r"--model DIR.*\[model.shape\]"):
        make_config(model={})
    with pytest.raises(ConfigError, match="peers decode random weights"):
        load_config(BenchInferConfig, RESOURCE, ["model.path=runs/model", "bench.peers=[transformers]"])


def test_prompts_of_a_file_are_repeated(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_tokenizer(tokenizer, tmp_path)
    file, model = tmp_path / "prompts.jsonl", {"path": tmp_path}
    file.write_text('{"prompt": "the cat"}\n{"prompt": "a\\nb"}\n')
    config = make_config(model=model, bench={"prompts_file": file})
    expected = [tokenizer.encode(text) for text in ("the cat", "a\nb", "the cat")]
    assert read_prompts(config, ModelConfig(**SHAPE), 3) == expected
    for text, reason in (("", "is empty"), ('{"text": ""}', "write lines of"), ("the cat", "write lines of")):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"bench.prompts_file = .*prompts.jsonl.*{reason}"):
            read_prompts(config, ModelConfig(**SHAPE), 1)
    with pytest.raises(ValueError, match="needs the tokenizer of a trained model"):
        make_config(bench={"prompts_file": file})


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_infer(make_config(output={"path": tmp_path / "out" / "bench.json"}))
    [columns] = read_tables(report)
    assert (columns["cache"], columns["batch"]) == (["none", "block"] * 2, ["1", "1", "2", "2"])
    assert [cell == "1" for cell in columns["over the first"]] == [True, False, True, False]
    assert (columns["forwards"], columns["tok/forward"]) == (["4"] * 4, ["2.00"] * 4)
    facts = read_facts(report)
    assert facts["model"] == "random weights" and facts["threads"].startswith("1 of torch")
    output = capsys.readouterr()
    assert output.out == "" and "static, block 4, cache block, batch 2" in output.err
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["config"]["bench"]["new_tokens"] == 8 and "CPU" in record["environment"]
    assert [cell["request_forwards"] for cell in record["cells"]] == [[4], [4], [4, 4], [4, 4]]
    for cell in record["cells"]:
        assert len(cell["seconds"]) == 2 and min(cell["seconds"]) > 0
        assert cell["tokens_per_second"] == pytest.approx(2 * cell["forwards_per_second"] * cell["batch_size"])


def test_a_cell_that_the_model_cannot_decode_is_named() -> None:
    strategy = {"name": "few", "generation": {"remasking_strategy": "low_confidence", "steps": 1}}
    grid = {"block_lengths": [4]}
    with pytest.raises(ValueError, match=r'cell "few, block 4, cache none, batch 1": .*steps = 1'):
        bench_infer(make_config(strategies=[strategy], grid=grid))


@pytest.mark.slow
def test_the_causal_peer_is_the_same_model(model: Transformer) -> None:
    pytest.importorskip("transformers")
    prompts = random_prompts(model.config, 4, 2, seed=0)
    peer = peers.convert_to_qwen3(model).double()
    tokens_BL = torch.tensor(peers.build_autoregressive_call(peer, prompts, 3)())
    texts_BL = torch.tensor(prompts)
    for index in range(3):
        with torch.inference_mode():
            logits_BLV = model(texts_BL, pattern=Causal())
        assert torch.equal(logits_BLV[:, -1].argmax(dim=1), tokens_BL[:, index])
        texts_BL = torch.cat([texts_BL, tokens_BL[:, index : index + 1]], dim=1)
