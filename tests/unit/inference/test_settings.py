"""Defaults of the model's family, and checks of a config against the model."""

from __future__ import annotations

from typing import Any

import pytest

from config.generation import STRATEGY_KEYS, GenerationConfig
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from tests.reference.enumeration import table_config


def resolve(values: dict[str, Any], **model: Any) -> GenerationConfig:
    return resolve_settings(GenerationConfig.model_validate(values), table_config(4, 64, **model)).config


def test_default_strategy() -> None:
    defaults = {None: "low_confidence", "llada": "low_confidence", "qwen3": "low_confidence", "Dream": "entropy"}
    defaults |= {"sdar": "low_confidence_dynamic", "sdar_moe": "low_confidence_dynamic"}
    for model_type, strategy in defaults.items():
        assert resolve({}, model_type=model_type).remasking_strategy == strategy
        assert resolve({"remasking_strategy": "random"}, model_type=model_type).remasking_strategy == "random"


def test_defaults_of_a_llada() -> None:
    assert resolve({}) == GenerationConfig(
        max_new_tokens=64,
        attention="bidirectional",
        cache="none",
        remasking_strategy="low_confidence",
        temperature=0.0,
        confidence_from="unfiltered",
    )


def test_defaults_of_an_sdar() -> None:
    assert resolve({"total_length": 20}, model_type="sdar", block_length=4) == GenerationConfig(
        total_length=20,
        attention="block_causal",
        cache="block",
        block_length=4,
        block_origin="text",
        remasking_strategy="low_confidence_dynamic",
        confidence_threshold=0.85,
        threshold_comparison=">",
        threshold_fallback="quota",
        temperature=0.0,
        confidence_from="filtered",
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_defaults_are_idempotent_valid_and_complete(strategy: str) -> None:
    config = resolve({"remasking_strategy": strategy}, block_length=4)
    assert resolve_settings(config, table_config(4, 64, block_length=4)).config == config
    assert GenerationConfig.model_validate(config.model_dump()) == config
    open_keys = {key for key in STRATEGY_KEYS if getattr(config, key) is None}
    assert open_keys & set(STRATEGIES[strategy].option_keys()) <= {"steps", "denoising_steps"}
    assert None not in (config.remasking_strategy, config.attention, config.cache, config.temperature)


def test_keys_that_are_set_stay() -> None:
    values = {"max_new_tokens": 5, "attention": "bidirectional", "cache": "dual", "block_length": 3, "temperature": 0.5}
    values |= {"remasking_strategy": "threshold", "confidence_threshold": 0.0, "threshold_comparison": ">"}
    values |= {"confidence_from": "filtered", "canvas": "growing"}
    assert resolve(values, model_type="sdar", block_length=4) == GenerationConfig.model_validate(values)
    assert resolve({"attention": "bidirectional"}, block_length=4).block_length is None
    assert resolve({"confidence_threshold": 0.5}, model_type="sdar").model_dump()["confidence_threshold"] == 0.5


@pytest.mark.parametrize(
    ("values", "model", "words"),
    [
        (
            {"confidence_threshold": 0.5},
            {},
            ["confidence_threshold = 0.5", '"low_confidence"', "remove it", "threshold", "default of the model"],
        ),
        ({"steps": 4, "threshold_fallback": "quota"}, {"model_type": "Dream"}, ['"quota"', '"entropy"']),
        ({"cache": "prefix"}, {"block_length": 4}, ['cache = "prefix"', "bidirectional", '"block"']),
        ({"cache": "block"}, {}, ['cache = "block"', "block-causal", '"prefix"', '"none"']),
        ({"canvas": "growing"}, {"block_length": 4}, ['canvas = "growing"', "remove it", '"bidirectional"']),
        ({"block_origin": "turn"}, {}, ['block_origin = "turn"', 'attention = "bidirectional"', "remove it"]),
        ({"attention": "block_causal"}, {}, ['attention = "block_causal"', "needs block_length"]),
        ({"cfg_scale": 1.5}, {"mask_token_id": None}, ["cfg_scale = 1.5", "mask_token_id", "remove it"]),
        ({"suppress_token_ids": (0, 1, 2, 3)}, {}, ["suppress_token_ids", "remove some"]),
        ({"stop_token_ids": (5,)}, {}, ["stop_token_ids", "token 5", "5 tokens"]),
        ({"stop_token_ids": (0, 1, 2, 3), "min_new_tokens": 1}, {}, ["min_new_tokens", "remove it"]),
        ({"block_length": 65}, {}, ["block_length = 65", "max_position_embeddings = 64", "lower it"]),
    ],
)
def test_configs_that_do_not_fit_the_model(values: dict[str, Any], model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_settings(GenerationConfig.model_validate(values), table_config(4, 64, **model))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "validation error" not in str(caught.value)


def test_spellings_of_no_limit() -> None:
    assert [GenerationConfig(top_k=value).top_k for value in (-1, 0, None, 3)] == [None, None, None, 3]


def test_stop_and_forbidden_tokens() -> None:
    def resolve_tokens(values: dict[str, Any], **model: Any) -> tuple[set[int], set[int]]:
        settings = resolve_settings(GenerationConfig.model_validate(values), table_config(4, 64, **model))
        return set(settings.stop_token_ids), set(settings.forbidden_token_ids)

    assert resolve_tokens({}) == (set(), {4})
    assert resolve_tokens({}, eos_token_id=3) == ({3}, {4})
    assert resolve_tokens({}, eos_token_id=3, stop_token_ids=(3, 2)) == ({3, 2}, {4})
    values = {"stop_token_ids": (0,), "suppress_token_ids": (1, 2)}
    assert resolve_tokens(values, eos_token_id=3, stop_token_ids=(3, 2)) == ({0}, {1, 2, 4})
    assert resolve_tokens({}, mask_token_id=None, block_length=1, logit_alignment="shifted") == (set(), set())
