"""The recipe from an autoregressive Qwen3 to block diffusion, in small: convert, train on, where the loss starts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from config.convert import ConvertConfig
from config.load import load_config
from config.train import TrainConfig
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.training.loop import train
from tests.tiny_run import read_losses
from tokenizer import Tokenizer, save_tokenizer, train_bpe

RECIPE = Path(__file__).parents[2] / "config" / "resources" / "adapt_qwen3.toml"
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
ROWS = 288


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of transformers, with a tokenizer that has no mask token and fewer tokens than there are rows."""
    import transformers

    directory = tmp_path_factory.mktemp("qwen3")
    trained = train_bpe(["the cat sat on the mat"], vocab_size=270)
    special = {"<|endoftext|>": trained.special_tokens["<|endoftext|>"]}
    save_tokenizer(Tokenizer(trained.vocab, trained.merges, special, "qwen", eos_token="<|endoftext|>"), directory)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SHAPE,
        vocab_size=ROWS,
        max_position_embeddings=4_096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=special["<|endoftext|>"],
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def recipe(qwen3: Path, folder: Path, alignment: str, **objective: Any) -> TrainConfig:
    """The shipped recipe on the converted model and a little text."""
    diffusion = {"mask_token": "<|MASK|>", "block_length": 4, "logit_alignment": alignment, "untie_head": True}
    conversion = ConvertConfig(source=qwen3, target=folder / "mask", diffusion=diffusion)  # type: ignore[arg-type]
    convert(prepare_conversion(conversion))
    lines = [json.dumps({"text": f"the cat {index} sat on the mat {index * index}"}) for index in range(400)]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    changes = {
        "run.directory": folder / "run",
        "run.device": "cpu",
        "run.threads": 1,
        "model.init_from": folder / "mask",
        "data.row_length": 32,
        "model.logit_alignment": alignment,
        "data.source.paths": json.dumps([str(folder / "a.jsonl")]),
        "data.workers": 0,
        "training.batch_size": 8,
        "training.micro_batch_size": 4,
        "training.max_steps": 2,
        "training.precision": "float32",
        "schedule.warmup_steps": 1,
        "validation.final_rows": 16,
        "logging.every_steps": 1,
        "logging.progress": "none",
        **{f"objective.{name}": value for name, value in objective.items()},
    }
    return load_config(TrainConfig, RECIPE, [f"{key}={value}" for key, value in changes.items()])


def test_training_starts_from_the_converted_model(qwen3: Path, tmp_path: Path) -> None:
    config = recipe(qwen3, tmp_path, "same_position")
    summary = train(config).summary
    assert summary is not None and summary.evaluation.block_length == 4
    # What it has learnt is to predict the token behind; of the one in place of a mask it knows nothing yet.
    assert read_losses(config)[0] == pytest.approx(math.log(ROWS), rel=0.35)
    model = load_model(config.run.directory)
    assert (model.config.block_length, model.config.logit_alignment) == (4, "same_position")
    assert model.config.vocab_size == ROWS and model.config.mask_token_id is not None
    assert not model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 4_096 and model.config.rope_theta == 1e6, "as the source's"
    again = train(load_config(TrainConfig, config.run.directory / "config.toml"))
    assert again.summary is not None and again.summary.to_json() == summary.to_json(), "the run is the same one"


@pytest.mark.slow
def test_shifted_outputs_with_block_length_one_match_the_source_loss(qwen3: Path, tmp_path: Path) -> None:
    import transformers

    from diffusionlm.checkpoints.model_files import load_tokenizer
    from diffusionlm.data.pipeline import build_row_reader, open_components

    config = recipe(qwen3, tmp_path, "shifted", block_length=1)
    train(config)
    tokenizer = load_tokenizer(tmp_path / "mask")
    rows, _ = build_row_reader(open_components(config.data, "train"), config.data, tokenizer, 32, config.run.seed).read(
        0, None, 8
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    mask = load_model(tmp_path / "mask").config.required_mask_token_id
    nats, targets = 0.0, 0
    for row in rows:
        for number in range(int(row.document_ids_L.max()) + 1):
            ids = torch.from_numpy(row.tokens_L[row.document_ids_L == number]).long()
            with torch.no_grad():
                logits = peer(ids[None]).logits[0, :-1].double()
            logits[:, mask] = -math.inf  # never predicted here
            targets += len(ids) - 1
            nats += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    assert read_losses(config)[0] == pytest.approx(nats / targets, rel=1e-4)
