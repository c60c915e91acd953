"""Constraints of a real tokenizer, and in the form of vLLM."""

from __future__ import annotations

import re
from typing import Any

import pytest

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.constraints.byte_automaton import DEAD
from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from tests.conftest import MakeConfig
from tokenizer import Tokenizer, train_bpe
from tokenizer.tool_calls import TOOL_CALL_FORMATS

TEXT = 'the cat sat on the mat. yes, no and 2024-01-31: {"name": "cat"}\n' * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=320, special_tokens=["<mask>", "<eos>"], mask_token="<mask>", eos_token="<eos>")


@pytest.fixture(scope="module")
def settings(tokenizer: Tokenizer, make_config: MakeConfig) -> DecodingSettings:
    config: ModelConfig = make_config(
        vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )  # fmt: skip
    return resolve_settings(GenerationConfig(), config)


def accepts(constraint: TokenConstraint, settings: DecodingSettings, token_ids: list[int]) -> bool:
    automaton, state = constraint.token_automaton(settings, can_stop=True), 0
    for token in token_ids:
        state = automaton.next_state(state, token)
        if state == DEAD:
            return False
    return bool(automaton.is_accepting_S[state])


def test_texts_of_a_tokenizer(tokenizer: Tokenizer, settings: DecodingSettings) -> None:
    compiler = ConstraintCompiler(tokenizer)
    constraint = compiler.compile_choices(["yes, the cat", "no", " no"])
    eos = tokenizer.eos_token_id
    assert eos is not None
    for text, is_allowed in {"yes, the cat": True, "no": True, " no": True, "yes": False, "no no": False}.items():
        ids = tokenizer.encode(text)
        assert accepts(constraint, settings, ids) == is_allowed
        assert accepts(constraint, settings, [*ids, eos, 5, 6]) == is_allowed
        assert accepts(constraint.after(b"on"), settings, tokenizer.encode("on" + text)) == is_allowed
        single_bytes = [tokenizer.vocab[bytes([byte])] for byte in text.encode()]
        assert accepts(constraint, settings, single_bytes) == is_allowed
    assert compiler.compile_choices(["yes, the cat", "no", " no"]) is constraint, "constraints are kept"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"choice": ["a", "cat"], "regex": None, "disable_fallback": False}, "cat"),
        ({"regex": r"\d{4}-\d\d-\d\d"}, "2024-01-31"),
        ({"json": {"type": "object", "properties": {"name": {"const": "cat"}}}}, '{"name": "cat"}'),
        ({"json": '{"type": "string"}'}, '"yes"'),
        ({"json_object": True}, '{"name": ["cat", {}]}'),
    ],
)
def test_structured_outputs(tokenizer: Tokenizer, settings: DecodingSettings, value: Any, text: str) -> None:
    constraint = ConstraintCompiler(tokenizer).compile_structured_outputs(value)
    assert accepts(constraint, settings, tokenizer.encode(text))
    assert not accepts(constraint, settings, tokenizer.encode(text + "!"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "expected an object with one of choice, regex, json, json_object; it is something else"),
        ({"choice": ["a"], "regex": "a"}, "it has choice, regex"),
        ({"grammar": "a"}, "it has grammar"),
        ({"choice": "a"}, "choice: expected a list of texts"),
        ({"choice": []}, "choice: there are no choices"),
        ({"json": 5}, "json: expected a schema"),
        ({"json": "{"}, "json: Expecting"),
        ({"json": "[" * 100_000}, "json: "),
        ({"json": {"not": []}}, "json: the schema: not is not supported"),
    ],
)
def test_wrong_structured_outputs(tokenizer: Tokenizer, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ConstraintCompiler(tokenizer).compile_structured_outputs(value)


def test_schemas_of_tools_are_limited_together(tokenizer: Tokenizer) -> None:
    schemas = {f"f{index}": {"enum": ["x" * 1000]} for index in range(300)}
    with pytest.raises(ValueError, match=r"f2\d\d: .*at most \d+ characters in all values together"):
        ConstraintCompiler(tokenizer).compile_tool_calls(
            schemas, TOOL_CALL_FORMATS["hermes"], is_single=True, content=None
        )
