"""Constraints on the text of answers: choices, regular expressions and JSON schemas, compiled for a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType

from config.serving.server import DEFAULT_SCHEMA_DEPTH
from diffusionlm.inference.constraints.byte_automaton import MAX_STATES, ByteAutomaton, compile_expression
from diffusionlm.inference.constraints.expressions import (
    Alternation,
    Concatenation,
    Expression,
    Repetition,
    literal,
    nesting_error,
    parse_regex,
)
from diffusionlm.inference.constraints.json_schema import Schema, SchemaCompiler
from diffusionlm.inference.constraints.token_automaton import TokenAutomaton, TokenTrie
from diffusionlm.inference.settings import DecodingSettings
from tokenizer import Tokenizer
from tokenizer.tool_calls import ToolCallFormat

MAX_CACHED_CONSTRAINTS = 48
"""Each has some megabytes, with a large vocabulary."""
_KEPT_VARIANTS = 4
_STRUCTURED_OUTPUTS = MappingProxyType(
    {"choice": "a list of texts", "regex": "a text", "json": "a schema, or its JSON text", "json_object": "true"}
)


class TokenConstraint:
    """The texts that an answer, or a masked span, may be; made by `ConstraintCompiler`."""

    def __init__(self, automaton: ByteAutomaton, trie: TokenTrie) -> None:
        self._automaton = automaton
        self._compile = lru_cache(_KEPT_VARIANTS)(partial(TokenAutomaton, automaton, trie))
        self._prepend = lru_cache(_KEPT_VARIANTS)(lambda prefix: TokenConstraint(automaton.with_prefix(prefix), trie))

    @property
    def num_states(self) -> int:
        """States of the automaton over bytes, which its size depends on."""
        return self._automaton.num_states

    def after(self, prefix: bytes) -> TokenConstraint:
        """The same texts behind bytes that the first new token repeats (`RequestOptions.repeated_bytes`)."""
        return self._prepend(prefix) if prefix else self

    def token_automaton(self, settings: DecodingSettings, *, can_stop: bool) -> TokenAutomaton:
        """The automaton over tokens, for a model and its stop tokens.

        Args:
            can_stop: a stop token may end the text before the last position.

        Raises:
            ValueError: it is too large.
        """
        stop_token_ids = settings.stop_token_ids if can_stop else frozenset()
        return self._compile(settings.model.vocab_size, stop_token_ids, frozenset(settings.forbidden_token_ids))


class ConstraintCompiler:
    """Compiles constraints for the tokens of a tokenizer. Recent ones are kept, and its methods may be called from any
    thread.

    Args:
        max_states: of the automaton of a constraint, at most `MAX_STATES`.
        max_schema_depth: levels of a JSON schema within itself, and of objects and arrays in a value of any kind.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_states: int = MAX_STATES, max_schema_depth: int = DEFAULT_SCHEMA_DEPTH
    ) -> None:
        self._max_states, self._max_schema_depth = min(max_states, MAX_STATES), max_schema_depth
        self._find_trie = lru_cache(_KEPT_VARIANTS)(partial(TokenTrie.from_tokenizer, tokenizer))
        self._compile = lru_cache(MAX_CACHED_CONSTRAINTS)(self._compile_new)

    def compile_regex(self, pattern: str) -> TokenConstraint:
        """Texts that a regular expression matches from beginning to end (`expressions` has the syntax).

        Raises:
            ValueError: the expression is wrong, not supported, too large, or matches no text.
        """
        return self._compile(parse_regex, pattern)

    def compile_choices(self, choices: Sequence[str]) -> TokenConstraint:
        """Exactly one of these texts.

        Raises:
            ValueError: there is none, or they are too many.
        """
        return self._compile(_build_choices, tuple(choices))

    def compile_json_schema(self, schema: Schema | bool) -> TokenConstraint:
        """JSON values of a schema, on one line (`json_schema` has what is supported).

        Raises:
            ValueError: a part of the schema is wrong or not supported, or the automaton is too large.
        """
        return self._compile(self._build_value, json.dumps(schema))

    def compile_structured_outputs(self, value: object) -> TokenConstraint:
        """A constraint in the form of vLLM's ``structured_outputs``: an object with one of the keys choice (texts),
        regex, json (a schema, or its JSON text) and json_object (true). What is null or false counts as absent.

        Raises:
            ValueError: it is something else, or like the other methods; names the key.
        """
        items = value.items() if isinstance(value, dict) else ()
        used = {key: item for key, item in items if item is not None and item is not False}
        if len(used) != 1 or not used.keys() <= set(_STRUCTURED_OUTPUTS):
            found = f"has {', '.join(map(str, used))[:60]}" if used else "is something else"
            raise ValueError(f"expected an object with one of {', '.join(_STRUCTURED_OUTPUTS)}; it {found}")
        [(key, item)] = used.items()
        try:
            match key:
                case "choice" if isinstance(item, list) and all(isinstance(text, str) for text in item):
                    return self.compile_choices(item)
                case "regex" if isinstance(item, str):
                    return self.compile_regex(item)
                case "json" if isinstance(item, dict | bool):
                    return self.compile_json_schema(item)
                case "json" if isinstance(item, str):
                    return self.compile_json_schema(json.loads(item))
                case "json_object" if item is True:
                    return self.compile_json_schema({"type": "object"})
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{key}: {error}") from None
        raise ValueError(f"{key}: expected {_STRUCTURED_OUTPUTS[key]}")

    def compile_tool_calls(
        self, schemas: Mapping[str, Schema], call_format: ToolCallFormat, *, is_single: bool, content: Schema | None
    ) -> TokenConstraint:
        """One call of a tool or more, as a chat template writes them, also with special tokens of the tokenizer.

        Args:
            schemas: of the arguments, by the names of the tools.
            is_single: one call only.
            content: schema of a JSON value that the text may be instead. None: calls only.

        Raises:
            ValueError: like `compile_json_schema`.
        """
        source = json.dumps([schemas, content])
        return self._compile(
            self._build_calls, source, call_format, is_single, special=call_format.opening + call_format.closing
        )

    def _build_calls(self, source: str, call_format: ToolCallFormat, is_single: bool) -> Expression:
        schemas, content = json.loads(source)
        compiler, options = SchemaCompiler(self._max_schema_depth), []
        for name, schema in schemas.items():
            before, after = map(literal, call_format.enclose_arguments(name))
            try:
                options.append(Concatenation((before, compiler.compile_root(schema), after)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        separator = call_format.separator
        maximum = 1 if is_single or separator is None else None
        calls = Repetition(Alternation(tuple(options)), 1, maximum, literal(separator or ""))
        if content is None:
            return calls
        return Alternation((calls, compiler.compile_root(content)))

    def _build_value(self, source: str) -> Expression:
        return SchemaCompiler(self._max_schema_depth).compile_root(json.loads(source))

    def _compile_new(self, build: Callable[..., Expression], *source: object, special: str = "") -> TokenConstraint:
        """``build`` makes the expression of a source. Special tokens in a text stand for it."""
        trie = self._find_trie(special)
        try:
            return TokenConstraint(compile_expression(build(*source), self._max_states), trie)
        except RecursionError:
            raise nesting_error() from None


def _build_choices(choices: Sequence[str]) -> Expression:
    if not choices:
        raise ValueError("there are no choices: name at least one text")
    return Alternation(tuple(map(literal, choices)))
