"""The card of a run's checkpoints."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.checkpoints.manifest import verify_directory
from diffusionlm.training.loop import train, train_remaining_steps
from diffusionlm.training.run_checkpoint import resume_run
from diffusionlm.training.signals import StopRequest
from logger import LoggerGroup
from tests.tiny_run import build_changed_run, change_config, read_records


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_model_cards_have_the_last_validation(config: TrainConfig) -> None:
    config = change_config(config, validation={"every_steps": 6, "rows": 8}, checkpoint={"keep_last": 3})
    result = train(config)
    assert result.summary is not None
    store = config.run.directory / "checkpoints"
    assert sorted(path.name for path in store.glob("step-*")) == ["step-00000004", "step-00000006", "step-00000008"]
    assert "| validation | unknown |" in card_of(store / "step-00000004")
    metrics = next(record["metrics"] for record in read_records(config) if "val_nats_per_token" in record["metrics"])
    assert (
        f"| validation | at most {metrics['val_nats_per_token']:.3f} ± {metrics['val_standard_error']:.3f} nats per "
        "token, at step 6 |"
    ) in card_of(store / "step-00000006")
    final, last = result.summary.evaluation, store / "step-00000008"
    bound = f"at most {final.nats_per_token:.3f} ± {final.standard_error:.3f} nats per token, at step 8"
    assert f"| validation | {bound} |" in card_of(last)
    verify_directory(last, must_have_manifest=True)
    state = json.loads((last / "state.json").read_text())
    for part in (
        "# run, 6,192 parameters",
        "| steps | 8 of 8, with 4 sequences of up to 16 tokens |",
        f"| tokens seen | {state['progress']['tokens_seen']:,} |",
        f"| tokenizer | {state['tokenizer_fingerprint']} |",
        f"| {state['data_identity']} | 100.0% |",
    ):
        assert part in card_of(last), part
    objective = card_of(last).split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(objective)["kind"] == "masked_diffusion"


@pytest.mark.slow
def test_model_cards_name_no_folder_of_the_machine(config: TrainConfig, tmp_path: Path) -> None:
    """Of neither the data nor the model that training starts from; the identity of the data stays the same."""
    start = config.run.directory.with_name("start")
    train(change_config(config, start))
    dataset = tmp_path / "stories"
    dataset.mkdir()
    (dataset / "train-0.jsonl").write_text("".join(json.dumps({"text": f"some words {i}"}) + "\n" for i in range(99)))
    values = config.model_dump(exclude_unset=True)
    values["model"] = {"init_from": start}
    values["tokenizer"] = {}
    values["data"]["source"] = {"kind": "hub", "dataset": str(dataset), "validation_fraction": 0.2}
    config = TrainConfig.model_validate(values)
    train(config)
    for directory, parts in ((start, ["a.txt |"]), (config.run.directory, ["| started from | start |", "| stories, "])):
        checkpoint = directory / "checkpoints/latest"
        card = card_of(checkpoint)
        assert str(tmp_path) not in card and not re.search(r"(?<![\w.:])/\w", card)
        assert all(part in card for part in parts)
    assert (
        "datasets:" not in card
        and f"hub/{dataset}/" in json.loads((checkpoint / "state.json").read_text())["data_identity"]
    )


@pytest.mark.slow
def test_resumed_run_restores_the_last_validation(config: TrainConfig) -> None:
    """The one of step 2, at step 3."""
    sections: dict[str, Any] = {"validation": {"every_steps": 2, "rows": 8}, "checkpoint": {"every_steps": 1}}
    run, resumed = (build_changed_run(config, config.run.directory, **sections) for _ in range(2))
    run.settings = replace(run.settings, max_steps=3)
    with StopRequest() as stop:
        train_remaining_steps(run, LoggerGroup(), stop)
    resume_run(resumed)
    assert resumed.progress.step == 3 and resumed.last_validation == run.last_validation
    assert run.last_validation is not None and run.last_validation.step == 2
