"""[generation]: options that do nothing or contradict each other are errors that say so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from config.generation import STRATEGIES, STRATEGY_OPTION_KEYS, GenerationConfig, RemaskingStrategy

VALUES: dict[str, object] = {
    "denoising_steps": 3,
    "steps": 4,
    "confidence_threshold": 0.5,
    "threshold_comparison": ">",
    "threshold_fallback": "leftmost",
    "factor": 2.0,
    "entropy_bound": 0.1,
    "alg_temp": 0.3,
    "remdm_eta": 0.05,
    "remdm_t_on": 0.5,
    "remdm_t_off": 0.1,
    "remdm_alpha_on": 0.8,
    "confidence_from": "filtered",
    "defer_token_ids": [2],
}


def message_of(values: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        GenerationConfig.model_validate(values)
    return str(caught.value)


def test_the_table_has_every_strategy_and_every_option_a_taker() -> None:
    assert tuple(STRATEGIES) == get_args(RemaskingStrategy)
    assert set(STRATEGY_OPTION_KEYS) == VALUES.keys()
    for strategy in STRATEGIES.values():
        assert set(strategy.keys) <= GenerationConfig.model_fields.keys()
        assert len(set(strategy.keys)) == len(strategy.keys)
        assert (strategy.confidence_from is not None) == ("confidence_from" in strategy.keys)
        assert (strategy.confidence_threshold is not None) == ("confidence_threshold" in strategy.keys)
        assert (strategy.threshold_comparison is not None) == ("threshold_comparison" in strategy.keys)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_without_effect_are_refused_and_the_others_taken(strategy: RemaskingStrategy) -> None:
    for key, value in VALUES.items():
        values = {"remasking_strategy": strategy, key: value}
        if key in STRATEGIES[strategy].keys:
            taken = getattr(GenerationConfig.model_validate(values), key)
            assert taken == (tuple(value) if isinstance(value, list) else value)
            continue
        message = message_of(values)
        shown = f'"{value}"' if isinstance(value, str) else value
        assert f'{key} = {shown} has no effect with remasking_strategy = "{strategy}": remove it' in message


def test_the_remedy_names_strategies_where_they_are_few() -> None:
    message = message_of({"remasking_strategy": "random", "confidence_threshold": 0.5})
    assert "or choose one that takes it: low_confidence_dynamic, threshold" in message
    assert "or choose another strategy" in message_of({"remasking_strategy": "factor", "steps": 5})


def test_without_a_strategy_nothing_is_known_yet() -> None:
    GenerationConfig.model_validate({key: value for key, value in VALUES.items() if key != "steps"})


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
        ({"remdm_alpha_on": 1.0}, ["remdm_alpha_on", "less than 1"]),
        ({"top_p": 0.0}, ["top_p", "greater than 0"]),
        ({"temperature": -1.0}, ["temperature"]),
        ({"cfg_scale": -0.5}, ["cfg_scale"]),
        ({"factor": 0.0}, ["factor"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids"]),
        ({"remasking_strategy": "best"}, ["remasking_strategy", "low_confidence", "remdm_loop"]),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], words: list[str]) -> None:
    message = message_of(values)
    assert all(word in message for word in words), message


def test_the_greatest_eta_that_alpha_on_allows() -> None:
    GenerationConfig(remasking_strategy="remdm_loop", remdm_eta=1.0, remdm_alpha_on=0.5)
    GenerationConfig(remasking_strategy="remdm_loop", remdm_eta=0.25, remdm_alpha_on=0.8)


def test_what_the_resource_shows_is_valid() -> None:
    """Each option that is commented out, with the strategy that is shown above it or the one that is set."""
    path = Path(__file__).parents[3] / "config" / "resources" / "infer.toml"
    text = path.read_text(encoding="utf-8").partition("[generation]\n")[2].partition("\n[output]")[0]
    given = tomllib.loads(text)
    instead = {"total_length": "max_new_tokens"}
    shown, strategy = set(given), given["remasking_strategy"]
    for line in re.findall(r"^# (\w+ = .+)", text, flags=re.MULTILINE):
        [(key, value)] = tomllib.loads(line).items()
        strategy = value if key == "remasking_strategy" else strategy
        rest = {name: each for name, each in given.items() if name != instead.get(key)}
        GenerationConfig.model_validate({**rest, "remasking_strategy": strategy, key: value})
        shown.add(key)
    assert shown == GenerationConfig.model_fields.keys()
