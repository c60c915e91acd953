"""Requests of lm-evaluation-harness: repeats, padding, keys, and arguments of generation."""

from __future__ import annotations

from typing import Any

import pytest

from config.evaluation.lm_eval import LmEvalConfig, nest_arguments
from config.generation import GenerationConfig
from diffusionlm.evaluation.lm_eval.runner import GenerationArguments, UniqueRequest, find_unique_requests
from tests.unit.evaluation.lm_eval.fake_instance import FakeInstance


def parse(arguments: dict[str, Any], **defaults: Any) -> GenerationArguments:
    return GenerationArguments.parse(arguments, GenerationConfig(**defaults))


def test_repeats_are_numbered_and_padding_is_not() -> None:
    first, second = (FakeInstance((name, {}), {"q": name}, repeats=2) for name in "ab")
    # The harness appends the last request of a rank, with its repeats, as often as another rank has more.
    unique, places = find_unique_requests([first, first, second, second, second, second])
    assert [(request.instance.args[0], request.repeat) for request in unique] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert places == [0, 1, 2, 3, 2, 3]


def test_keys_are_of_the_document_and_the_repeat() -> None:
    options = [UniqueRequest(FakeInstance(("q", text), {"q": 1}, idx), 0) for idx, text in enumerate(("a", "b"))]
    assert options[0].document_key == options[1].document_key
    assert options[0].answer_seed(0) != options[1].answer_seed(0) != options[1].answer_seed(1)
    others = [
        UniqueRequest(options[0].instance, 1),
        UniqueRequest(FakeInstance(("q", "a"), {"q": 2}), 0),
        UniqueRequest(FakeInstance(("q", "a"), {"q": 1}, task_name="other"), 0),
        UniqueRequest(FakeInstance(("q", "a")), 0),  # without a document
        UniqueRequest(FakeInstance(("q", "b")), 0),
    ]
    assert len({request.document_key for request in [options[0], *others]}) == 6
    # The position in the task is no part of it: a subset draws the same.
    moved = UniqueRequest(FakeInstance(("q", "a"), {"q": 1}, doc_id=7), 0)
    assert moved.document_key == options[0].document_key == 4373528749710171147


@pytest.mark.parametrize("key", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_spellings_of_the_length(key: str) -> None:
    assert parse({key: 7}, max_new_tokens=99).config.max_new_tokens == 7


def test_lengths() -> None:
    assert parse({}).config.max_new_tokens == 256
    assert parse({}, max_new_tokens=99).config.max_new_tokens == 99
    assert parse({}, total_length=99).config == GenerationConfig(total_length=99)
    assert parse({"max_tokens": 7}, total_length=99).config == GenerationConfig(max_new_tokens=7)
    assert parse({"max_tokens": 7, "max_gen_toks": 7, "max_new_tokens": None}).config.max_new_tokens == 7
    with pytest.raises(ValueError, match="max_gen_toks = 8 and max_tokens = 7"):
        parse({"max_tokens": 7, "max_gen_toks": 8})
    for wrong in (0, -1, 1.5, True, "7"):
        with pytest.raises(ValueError, match="max_tokens"):
            parse({"max_tokens": wrong})


@pytest.mark.parametrize(
    ("until", "expected"),
    [("\n\n", ("\n\n",)), (["a", "b", "a", ""], ("a", "b")), (None, ()), ([], ()), ("", ())],
)
def test_until_is_a_text_or_a_list(until: Any, expected: tuple[str, ...]) -> None:
    assert parse({"until": until}).until == expected


def test_until_of_another_type() -> None:
    with pytest.raises(ValueError, match="until"):
        parse({"until": ["a", 1]})


def test_sampling() -> None:
    greedy = {"do_sample": False, "temperature": 0.0}
    assert parse(greedy).config.temperature == 0.0
    assert parse({"do_sample": False}).config.temperature == 0.0
    assert parse({}).config.temperature is None
    # Published settings of a model stay, unless sampling is asked for.
    assert parse(greedy, temperature=0.2, top_p=0.9).config.temperature == 0.2
    asked = parse({"do_sample": True, "temperature": 0.8, "top_k": 5}, temperature=0.2, top_p=0.9).config
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.8, 5, 0.9)
    assert parse({"top_k": 0}).config.top_k is None


def test_keys_of_generation_and_unknown_ones() -> None:
    config = parse({"block_length": 8, "num_beams": 1}, block_length=4, steps=64).config
    assert (config.block_length, config.steps) == (8, 64)
    for arguments in ({"num_beams": 4}, {"repetition_penalty": 1.2}, {"max_length": 5}, {"block_length": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            parse(arguments)


def test_arguments_of_the_command_line() -> None:
    tree = nest_arguments({"pretrained": "DIR", "dtype": "bfloat16", "generation.steps": 8, "likelihood": {"seed": 1}})
    config = LmEvalConfig.model_validate(tree)
    assert (str(config.model.path), config.model.dtype) == ("DIR", "bfloat16")
    assert (config.generation.steps, config.likelihood.seed, config.likelihood.racing) == (8, 1, False)
    for arguments in ({"path": "a", "pretrained": "b"}, {"generation": 1, "generation.steps": 2}):
        with pytest.raises(ValueError, match="once"):
            nest_arguments(arguments)
