"""Going on with a run whose data or tokenizer is another one now."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.training.checkpointing import staging
from diffusionlm.training.loop import train
from tokenizer import save_tokenizer, train_bpe


@pytest.fixture
def older_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints store a former key of the loader's state."""
    stage = staging.stage_checkpoint

    def stage_older(step: int, write_model: Any, state: dict[str, Any], *arguments: Any) -> Any:
        loader = {"places" if key == "num_positions" else key: value for key, value in state["loader"].items()}
        return stage(step, write_model, state | {"loader": loader}, *arguments)

    monkeypatch.setattr("diffusionlm.training.run_checkpoint.stage_checkpoint", stage_older)


@pytest.mark.usefixtures("older_state")
def test_other_data_and_another_tokenizer_are_refused(config: TrainConfig) -> None:
    short = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 2})})
    train(short)
    backup, tokenizer = config.run.directory / "kept", config.run.directory / "tokenizer"
    tokenizer.rename(backup)
    save_tokenizer(train_bpe(["other text"], vocab_size=260), tokenizer)
    with pytest.raises(ValueError, match=r"step-00000002 was made with tokenizer_fingerprint \w+, now it is \w+"):
        train(short)
    shutil.rmtree(tokenizer)
    backup.rename(tokenizer)
    text = config.run.directory.parent / "a.txt"
    text.write_text(text.read_text(encoding="utf-8") + "\n\nand one more", encoding="utf-8")
    with pytest.raises(ValueError, match=r"was made with data_identity .*checkpoint\.config_change = .accept"):
        train(short)
    accepting = config.checkpoint.model_copy(update={"config_change": "accept"})
    assert train(short.model_copy(update={"checkpoint": accepting})).step == 2
