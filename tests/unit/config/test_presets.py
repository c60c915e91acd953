"""Published protocols: each is a valid task, fits its family, and shows what was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from config.evaluation.lm_eval import LmEvalConfig
from config.evaluation.presets import apply_preset, get_preset, load_presets
from config.evaluation.tasks import TaskConfig
from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.settings import resolve_settings
from tests.conftest import MakeConfig

TASK: TypeAdapter[Any] = TypeAdapter(TaskConfig)


@pytest.fixture(scope="session")
def families(make_config: MakeConfig) -> dict[str, ModelConfig]:
    """The vocabulary, mask and blocks of each family; the context is long enough for all canvases."""
    common: dict[str, Any] = {"max_position_embeddings": 8192, "hidden_size": 8, "head_dim": 2, "num_hidden_layers": 1}
    llada = {"vocab_size": 126464, "mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081}
    dream = {"vocab_size": 152064, "mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643}
    sdar = {**dream, "vocab_size": 151936, "mask_token_id": 151669, "block_length": 4}
    return {
        "llada": make_config(**common, **llada),
        "Dream": make_config(**common, **dream, logit_alignment="shifted"),
        "sdar": make_config(**common, **sdar),
    }


def task_values(name: str, **changes: Any) -> dict[str, Any]:
    """A task as a user writes it."""
    preset = get_preset(name)
    values: dict[str, Any] = {"kind": preset.kind, "preset": name, "data": "items.jsonl", **changes}
    if preset.values["prompt"].get("shots"):
        values["prompt"] = {"shots_data": "shots.jsonl", **values.get("prompt", {})}
    return values


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_is_a_task_of_its_family(name: str, families: dict[str, ModelConfig]) -> None:
    preset = get_preset(name)
    if preset.kind is not None:
        task = TASK.validate_python(task_values(name))
        assert task.kind == preset.kind and task.data == Path("items.jsonl") and task.deviations == []
        again = TASK.validate_python(task.model_dump(exclude_unset=True))
        assert again == task
    if "generation" in preset.values:
        settings = resolve_settings(GenerationConfig(**preset.values["generation"]), families[preset.family])
        # Scores but for that of Fast-dLLM are published with a forward for each token.
        assert settings.config.steps in (None, settings.config.max_new_tokens)
    assert preset.source and (preset.score is None) <= (name == "sdar-chat/gsm8k-dynamic")
    config = LmEvalConfig.model_validate({"preset": name})
    assert config.deviations == []
    for section in ("generation", "likelihood"):
        dumped = getattr(config, section).model_dump(exclude_unset=True, mode="json")
        assert dumped == preset.values.get(section, {})


def test_changes_are_shown() -> None:
    name = "llada-instruct/gsm8k"
    changes = {"generation": {"denoising_steps": 2, "cfg_scale": 0.5}, "prompt": {"shots": 2, "format": "text"}}
    task = TASK.validate_python(task_values(name, **changes, extraction=["strict", "flexible"], seed=3))
    assert task.deviations == [
        'prompt.format = "text" (published: "chat")',
        "prompt.shots = 2 (published: 4)",
        "generation.steps = the default (published: 512)",
        "generation.denoising_steps = 2 (published: the default)",
        "generation.cfg_scale = 0.5 (published: the default)",
        'extraction = ["strict", "flexible"] (published: ["flexible"])',
    ]


def test_options_of_another_strategy_give_way() -> None:
    values = apply_preset("fast-dllm/gsm8k", {"generation": {"remasking_strategy": "factor"}})
    assert "confidence_threshold" not in values["generation"] and values["generation"]["cache"] == "prefix"
    kept = apply_preset("fast-dllm/gsm8k", {"generation": {"confidence_threshold": 0.8}})
    assert kept["generation"]["confidence_threshold"] == 0.8
    assert load_presets()["fast-dllm/gsm8k"].values["generation"]["confidence_threshold"] == 0.9


def test_unknown_presets() -> None:
    for name, kind in (("llada-base/math", "gsm8k"), ("llada-base/mmlu", "gsm8k")):
        with pytest.raises(ValueError, match="it is for"):
            TASK.validate_python({"kind": kind, "preset": name, "data": "items.jsonl"})
    with pytest.raises(ValueError, match="dream-base/gsm8k"):
        get_preset("dream-base/gsm9k")
    with pytest.raises(ValueError, match="llada-base/gsm8k"):
        LmEvalConfig.model_validate({"preset": "gsm8k"})
