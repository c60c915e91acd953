"""Runs with objective.kind = "preference": what they read, the first loss, what they learn, resuming, and mistakes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from config.load import ConfigError
from config.train import TrainConfig
from config.training.objective import MaskedDiffusionConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.data.loader import LoaderSpec
from diffusionlm.data.pipeline import count_skipped
from diffusionlm.diffusion.preference import PreferenceLoss
from diffusionlm.training import run as run_module
from diffusionlm.training.loop import train
from profiling.estimate import estimate_run
from tests.conftest import MakeModel
from tests.preference_run import PREFERENCE_ROW_LENGTH, configure_preferences, write_preferences
from tests.tiny_run import read_steps
from tests.unit.data.chat_cases import chat_tokenizer

Configure = Callable[..., TrainConfig]


@pytest.fixture
def configure(tmp_path: Path, tiny_model: MakeModel) -> Configure:
    """``configure(name, **sections)``: a run of six steps on preferences for "yes"."""
    write_preferences(tmp_path, tiny_model)
    return partial(configure_preferences, tmp_path)


def metrics(config: TrainConfig, name: str) -> list[float]:
    return [step[name] for step in read_steps(config)]


def test_rows_have_the_chosen_and_the_rejected_conversation(configure: Configure) -> None:
    """A pair that does not fit in half a row each is left out and counted."""
    config, tokenizer = configure("rows"), chat_tokenizer()
    model = config.model.to_model_config(
        vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, eos_token_id=tokenizer.eos_token_id
    )
    loader = LoaderSpec(config.data, tokenizer, PREFERENCE_ROW_LENGTH, config.objective, model, 4, 4, 0).open()
    rows, _ = loader.rows.read(0, None, 100)
    for row in rows:
        for document, answer in enumerate(("yes", "no")):
            part = row.document_ids_L == document
            assert row.segment_ids_L is not None and set(row.segment_ids_L[part]) == {document}
            text = tokenizer.decode(row.tokens_L[part & row.loss_mask_L].tolist())
            assert text.startswith(answer) and part.sum() <= PREFERENCE_ROW_LENGTH // 2
            assert "user\nq" in tokenizer.decode(row.tokens_L[part & ~row.loss_mask_L].tolist())
    assert count_skipped(loader.components) == {"longer than a row": 1} and 40 < len(rows) < 60


@pytest.mark.parametrize(
    "lora", [None, {"rank": 2, "targets": "all-linear", "dropout": 0.1}, {"rank": 2, "modules_to_save": ["lm_head"]}]
)
def test_training_starts_at_ln_2_and_learns(lora: dict[str, Any] | None, configure: Configure) -> None:
    """Dropout of the adapter is on in the model and off in the reference, so the first loss differs with it."""
    sections = {} if lora is None else {"lora": lora, "optimizer": {"learning_rate": 2e-2}}
    config = configure("run", **sections)
    result = train(config)
    losses, accuracies = metrics(config, "loss"), metrics(config, "preference_accuracy")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] - 0.05 and accuracies[-1] == 1.0
    assert metrics(config, "preference_margin")[-1] > 0.1
    assert result.summary is not None and result.summary.evaluation.num_tokens > 0


@pytest.mark.parametrize("loss", [{"kind": "ipo"}, {"kind": "simpo", "gamma_beta_ratio": 5.0}, {"kind": "orpo"}])
def test_other_losses_of_pairs_learn(loss: dict[str, Any], configure: Configure) -> None:
    """A reference is built for those that have one only. ORPO learns the answers first, which both begin alike."""
    config = configure("run", objective={"loss": loss}, training={"max_steps": 8})
    with patch.object(run_module, "PreferenceLoss", wraps=PreferenceLoss) as build:
        train(config)
    assert (build.call_args.args[1] is None) == (loss["kind"] in ("simpo", "orpo"))
    assert metrics(config, "loss")[-1] < metrics(config, "loss")[0] - 0.01
    assert loss["kind"] == "orpo" or metrics(config, "preference_margin")[-1] > metrics(config, "preference_margin")[0]
    margins = [metrics(config, f"preference_{name}_reward")[-1] for name in ("chosen", "rejected")]
    assert metrics(config, "preference_margin")[-1] == pytest.approx(margins[0] - margins[1], abs=1e-6)


def test_labeled_answers_are_learned_alike_in_any_micro_batches(configure: Configure) -> None:
    """KTO's reference point is a mean over the step. At the start the model is its reference, so each loss is 1/2."""
    sections: dict[str, Any] = {"objective": {"loss": "kto", "num_draws": 2}}
    sections["training"] = {"max_steps": 8, "precision": "float32"}
    weights, runs = [], []
    for name, size in (("whole", 4), ("parts", 1)):
        sections["training"] = sections["training"] | {"micro_batch_size": size}
        config = configure(name, **sections)
        train(config)
        runs.append(config)
        weights.append(load_file(config.run.directory / "checkpoints/latest/model.safetensors"))
    assert metrics(runs[0], "loss") == pytest.approx(metrics(runs[1], "loss"), rel=1e-4)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)
    assert metrics(runs[0], "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert metrics(runs[0], "loss")[-1] < 0.49
    last = {name: step for step in read_steps(runs[0]) for name in step if name.startswith("preference_")}
    assert last.keys() == {"preference_chosen_reward", "preference_rejected_reward"}


def test_the_reference_has_the_dtype_of_products(configure: Configure) -> None:
    """It computes the same bits as the model, and takes half the memory."""
    config = configure("run", training={"precision": "bfloat16", "max_steps": 1})
    built: list[Any] = []
    build = run_module.build_reference

    def build_and_keep(*args: Any) -> Any:
        built.append(build(*args))
        return built[-1]

    with patch.object(run_module, "build_reference", build_and_keep):
        train(config)
    [reference] = built
    dtypes = {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == dtypes["model.layers.1.self_attn.q_proj.weight"]
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.layers.0.input_layernorm.weight"] == torch.float32
    assert metrics(config, "preference_margin")[0] == 0.0
    plain = estimate_run(config.model_copy(update={"objective": MaskedDiffusionConfig()}))
    estimate = estimate_run(config)
    saved = 2 * (plain.parameters - plain.embedding_parameters)
    assert estimate.bytes_weights == 2 * plain.bytes_weights - saved


def check_resumed_run(parts: TrainConfig, whole: TrainConfig, weights: str) -> bytes:
    """Resume ``parts`` without its last checkpoint: numbers and weights are those of ``whole``. Returns the weights."""
    checkpoints = parts.run.directory / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    (checkpoints / "latest").unlink()
    (parts.run.directory / "summary.json").unlink()
    train(parts)
    assert metrics(parts, "loss")[-3:] == metrics(whole, "loss")[-3:]
    content = (whole.run.directory / "checkpoints" / "latest" / weights).read_bytes()
    assert (checkpoints / "latest" / weights).read_bytes() == content
    return content


def test_resuming_refuses_another_reference(configure: Configure, tmp_path: Path) -> None:
    steps = {"max_steps": 1}
    config = configure("run", training=steps)
    train(config)
    reference = load_model(tmp_path / "base")
    with torch.no_grad():
        reference.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 1] += 1e-6
    save_model(reference, tmp_path / "base")
    message = r"step-00000001 was .*base: model.layers.1.mlp.up_proj.weight has other values. Restore them"
    with pytest.raises(ValueError, match=message):
        train(config)
    train(configure("run", training=steps, checkpoint={"config_change": "accept"}))


LORA = {"lora": {"rank": 2}, "optimizer": {"learning_rate": 2e-2}}


@pytest.fixture
def adapter(configure: Configure, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Sections of a run that goes on with the adapter of a finished run."""
    lora = {"rank": 2, **getattr(request, "param", {})}
    first = configure("first", **LORA | {"lora": lora})
    train(first)
    return LORA | {"lora": lora | {"init_from": str(first.run.directory)}}


@pytest.mark.parametrize("adapter", [{}, {"modules_to_save": ["embed_tokens"], "bias": "all"}], indirect=True)
def test_training_starts_at_ln_2_from_an_adapter(adapter: dict[str, Any], configure: Configure) -> None:
    """The reference is the start of the run, not the bare base, from which the adapter is 0.1 away and more."""
    config = configure("second", **adapter)
    train(config)
    assert metrics(config, "preference_margin")[0] == 0.0
    assert metrics(config, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(config, "preference_margin")[-1] > 0.1


def test_a_resumed_run_has_the_start_of_its_adapter_as_reference(
    adapter: dict[str, Any], configure: Configure, tmp_path: Path
) -> None:
    """Bit for bit; another adapter in its place is refused."""
    whole, parts = configure("whole", **adapter), configure("parts", **adapter)
    for config in (whole, parts):
        train(config)
    weights = check_resumed_run(parts, whole, "adapter_model.safetensors")
    (tmp_path / "first" / "checkpoints" / "latest" / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"lora\.init_from = .*first: .*q_proj.start_lora_A has other"):
        train(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "python-stdlib"}}, "needs rows with a chosen and a rejected answer"),
        (
            {"data": {"source": {"kind": "chat_tasks", "chat": {"eos_padding": "batch_max"}}, "rows": "padded"}},
            'set chat.eos_padding = "length:N" or "none"',
        ),
        ({"objective": {"num_draws": 3}}, "num_draws = 3 must be 1 or even"),
        (
            {"objective": {"loss": "kto"}, "training": {"batch_size": 1, "micro_batch_size": 1}},
            "training.batch_size = 1: objective.loss.kind",
        ),
        ({"training": {"neftune_alpha": 5.0}}, "neftune_alpha = 5.0 is for supervised training"),
        ({"objective": {"beta": 0.0}}, "objective.loss.beta = 0.0: must be greater than 0"),
    ],
)
def test_mistakes_in_the_config(changes: dict[str, dict[str, Any]], message: str, configure: Configure) -> None:
    with pytest.raises(ConfigError) as caught:
        configure("wrong", **changes)
    assert message in str(caught.value)


def test_rows_without_a_rejected_answer_are_named(configure: Configure, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index}", "completion": "yes"} for index in range(50)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"kind": "files", "paths": [str(tmp_path / "chats.jsonl")], "chat": {}, "validation_fraction": 0.2}
    with pytest.raises(ValueError, match=r"chats\.jsonl, line \d+: the conversation has no rejected answer"):
        train(configure("chats", data={"source": source}))
