"""``response_format`` and ``structured_outputs`` of a request, as constraints on its answers."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from tokenizer import Tokenizer

_FORMAT_KEYS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
"""Type of a ``response_format`` -> its keys."""
_SCHEMA_KEYS = {"schema", "name", "description", "strict"}


class StructuredOutputs:
    """Compiles the constraints of requests. Threads may share it.

    Args:
        max_constraints: different ones of a request.
        max_states: of the automaton of each, and of the automata of these together.
    """

    def __init__(self, tokenizer: Tokenizer, max_constraints: int, max_states: int) -> None:
        self._tokenizer, self._max_constraints, self._max_states = tokenizer, max_constraints, max_states

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        """Made at the first request that needs it: it takes a fraction of a second."""
        return ConstraintCompiler(self._tokenizer, self._max_states)

    def compile(
        self, response_format: Any, structured_outputs: Any, num_spans: int | None
    ) -> list[TokenConstraint | None]:
        """Constraints of an answer, one for each masked span; empty: any text.

        Args:
            response_format: of OpenAI; None: absent.
            structured_outputs: of vLLM, or a list of such ones, one for each masked span; None: absent.
            num_spans: None: the answer continues a text, and has one constraint.

        Raises:
            ValueError: one is wrong, or they are too many or too large together; the message begins with its name.
        """
        if response_format is not None:
            if structured_outputs is not None:
                raise ValueError("structured_outputs and response_format exclude each other: send one")
            value = _convert_response_format(response_format)
            return [] if value is None else [self._compile_one(value, "response_format")] * (num_spans or 1)
        if structured_outputs is None:
            return []
        if num_spans is None or not isinstance(structured_outputs, list):
            return [self._compile_one(structured_outputs, "structured_outputs")] * (num_spans or 1)
        if len(structured_outputs) != num_spans:
            raise ValueError(f"structured_outputs has {len(structured_outputs)} entries for {num_spans} masked spans")
        return self._compile_spans(structured_outputs)

    def _compile_spans(self, values: list[Any]) -> list[TokenConstraint | None]:
        """Constraints of masked spans; equal ones are compiled once."""
        keys = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
        different = {key: value for key, value in zip(keys, values, strict=True) if key is not None}
        if len(different) > self._max_constraints:
            raise ValueError(
                f"structured_outputs has {len(different)} different constraints: this server allows at most "
                f"{self._max_constraints} (serve.max_constraints)"
            )
        constraints: dict[str | None, TokenConstraint] = {}
        num_states = 0
        for key, value in different.items():
            constraints[key] = self._compile_one(value, "structured_outputs")
            num_states += constraints[key].num_states
            if num_states > self._max_states:
                raise ValueError(
                    f"structured_outputs: the constraints of all masked spans together are too large, {num_states} "
                    f"states or more: this server allows at most {self._max_states} (serve.max_constraint_states)"
                )
        return [constraints.get(key) for key in keys]

    def _compile_one(self, value: Any, field: str) -> TokenConstraint:
        try:
            return self._compiler.compile_structured_outputs(value)
        except ValueError as error:
            hint = " (serve.max_constraint_states)" if f"more than {self._max_states:,} states" in str(error) else ""
            raise ValueError(f"{field}: {error}{hint}") from None


def _convert_response_format(value: Any) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` in the form of ``structured_outputs``; None: any text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise ValueError("response_format: type must be text, json_object or json_schema")
    _check_keys(value, _FORMAT_KEYS[kind], "")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise ValueError("response_format: json_schema must be an object with a schema")
    _check_keys(described, _SCHEMA_KEYS, "json_schema.")
    return {"json": described["schema"]}


def _check_keys(value: dict[str, Any], known: set[str], path: str) -> None:
    for key in value.keys() - known:
        raise ValueError(f"response_format: {path}{key[:60]} is not supported: remove it")
