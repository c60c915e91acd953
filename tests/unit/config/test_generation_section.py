"""[generation]: the keys of strategies are derived; keys without an effect and contradictions are errors."""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from config.dump import to_toml
from config.generation import STRATEGY_KEYS, GenerationConfig
from config.infer import InferConfig
from config.load import load_config
from diffusionlm.inference.strategies import STRATEGIES

COMMON_KEYS = {key for key in vars(GenerationConfig)["__annotations__"] if key in GenerationConfig.model_fields}
VALUES: dict[str, Any] = {
    "denoising_steps": 3,
    "steps": 4,
    "confidence_from": "filtered",
    "confidence_of": "most_probable",
    "defer_token_ids": [2],
}
"""Key that has no effect with some strategy -> a value that is not the default."""


def other_value(option: FieldInfo) -> Any:
    """A valid value of an option that is not its default."""
    members = get_args(option.annotation)
    candidates = members if members else (option.default * 0.9, option.default + 1, 0.5)
    for value in candidates:
        with contextlib.suppress(ValidationError):
            if TypeAdapter(option.rebuild_annotation()).validate_python(value, strict=True) != option.default:
                return value
    raise AssertionError(f"no value for {option}: add a candidate")


VALUES |= {
    key: other_value(option) for strategy in STRATEGIES.values() for key, option in strategy.model_fields.items()
}


def message_of(values: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        GenerationConfig.model_validate(values)
    return str(caught.value)


def test_the_keys_of_strategies_are_derived() -> None:
    fields = GenerationConfig.model_fields
    assert set(STRATEGY_KEYS) == VALUES.keys()
    for name, strategy in STRATEGIES.items():
        assert not COMMON_KEYS & strategy.model_fields.keys(), "an option would hide a common key"
        assert set(strategy.option_keys()) <= fields.keys()
        assert f"{name} ({strategy.family.name}): " in (fields["remasking_strategy"].description or "")
    assert fields["confidence_threshold"].description == (
        "low_confidence_dynamic (None: 0.85), threshold (None: 0.9): Threshold on the token's probability."
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_keys_without_effect_are_errors(name: str) -> None:
    for key, value in VALUES.items():
        values = {"remasking_strategy": name, key: value}
        if key in STRATEGIES[name].option_keys():
            accepted = getattr(GenerationConfig.model_validate(values), key)
            assert accepted == (tuple(value) if isinstance(value, list) else value)
        else:
            toml_value = f'"{value}"' if isinstance(value, str) else value
            assert f'{key} = {toml_value} has no effect with remasking_strategy = "{name}": remove' in message_of(
                values
            )


def test_every_form_of_a_config_accepts_the_flat_keys(tmp_path: Path) -> None:
    expected = GenerationConfig(remasking_strategy="threshold", confidence_threshold=0.5)
    assert GenerationConfig.model_validate_json(expected.model_dump_json()) == expected
    path = tmp_path / "c.toml"
    path.write_text('[generation]\nremasking_strategy = "threshold"\nconfidence_threshold = 0.5\n')
    assert load_config(InferConfig, path).generation == expected
    overrides = ["generation.remasking_strategy=threshold", "generation.confidence_threshold=0.5"]
    config = load_config(InferConfig, None, overrides)
    assert config.generation == expected
    path.write_text(to_toml(config))
    assert load_config(InferConfig, path) == config
    with pytest.raises(ValueError, match=r"generation.confidence_treshold=1.*confidence_threshold"):
        load_config(InferConfig, None, ["generation.confidence_treshold=1"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 4, "denoising_steps": 2}, ["steps = 4", "denoising_steps = 2", "remove one"]),
        ({"max_new_tokens": 4, "total_length": 9}, ["max_new_tokens = 4", "total_length = 9", "remove one"]),
        (
            {"remasking_strategy": "low_confidence_dynamic", "threshold_fallback": "one", "denoising_steps": 2},
            ["denoising_steps = 2", 'threshold_fallback = "one"', "remove one"],
        ),
        (
            {"remasking_strategy": "remdm_loop", "remdm_t_on": 0.05},
            ["remdm_t_on = 0.05", "more than remdm_t_off = 0.05", "time runs"],
        ),
        (
            {"remasking_strategy": "remdm_loop", "remdm_eta": 0.2},
            ["remdm_eta = 0.2", "0.1111", "remdm_alpha_on = 0.9", "lower one"],
        ),
        ({"attention": "block_causal", "cache": "prefix"}, ['cache = "prefix"', "block_causal", '"block"']),
        ({"draft_length": 3}, ["draft_length = 3", "without speculation", '"two_forwards"']),
        ({"acceptance": "rejection"}, ['acceptance = "rejection"', "without speculation", '"two_forwards"']),
        ({"speculation": "one_forward", "block_length": 8}, ["block_length = 8", 'speculation = "one_forward"']),
        ({"speculation": "two_forwards", "cfg_scale": 1.0}, ["cfg_scale = 1.0", 'speculation = "two_forwards"']),
        ({"speculation": "two_forwards", "remasking_strategy": "p2"}, ['remasking_strategy = "p2"', "remove one"]),
        ({"attention": "bidirectional", "cache": "block"}, ['cache = "block"', "block-causal", '"prefix"']),
        ({"remasking_strategy": "best"}, ["remasking_strategy", "low_confidence", "remdm_loop"]),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], words: list[str]) -> None:
    message = message_of(values)
    assert all(word in message for word in words), message


def test_what_the_resource_shows_is_valid() -> None:
    """Each option that is commented out, with the strategy that is shown above it or the one that is set."""
    path = Path(__file__).parents[3] / "config" / "resources" / "infer.toml"
    text = path.read_text(encoding="utf-8").partition("[generation]\n")[2].partition("\n[output]")[0]
    options = tomllib.loads(text)
    instead = {"total_length": "max_new_tokens"}
    keys, strategy = set(options), options["remasking_strategy"]
    for line in re.findall(r"^# (\w+ = .+)", text, flags=re.MULTILINE):
        [(key, value)] = tomllib.loads(line).items()
        strategy = value if key == "remasking_strategy" else strategy
        if key in ("speculation", "draft_length", "acceptance"):
            GenerationConfig.model_validate({"speculation": "one_forward", key: value})
            keys.add(key)
            continue
        rest = {name: value for name, value in options.items() if name != instead.get(key)}
        GenerationConfig.model_validate({**rest, "remasking_strategy": strategy, key: value})
        keys.add(key)
    assert COMMON_KEYS <= keys <= GenerationConfig.model_fields.keys()
