"""JSON schemas as expressions over characters.

A schema is regular if its depth is bounded: ``$ref`` may not refer to itself, and values of any kind have at most
`MAX_FREE_DEPTH` levels. Values are written as by `json.dumps`, each separator with or without a space; properties come
in the order of the schema, and others are not written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diffusionlm.inference.constraints.expressions import (
    MAX_REPETITIONS,
    Alternation,
    CharacterSet,
    CodePoints,
    Concatenation,
    Expression,
    OptionalItems,
    Repetition,
    complement,
    intersect,
    literal,
    parse_regex,
)

MAX_FREE_DEPTH = 4
"""Objects and arrays inside each other, where a schema does not say what a value is."""
MAX_SCHEMA_DEPTH = 24
MAX_PARTS = 4096
"""Schemas within a schema, each ``$ref`` counted with what it refers to."""
MAX_VALUES = 1 << 15
"""Entries of all ``enum`` of a schema together."""
MAX_INTEGERS = 1024
"""Of a range with bounds that are written out."""
MAX_DIGITS = 15
"""Of each part of a number: every one is exact in Python and in JavaScript."""

Schema = Mapping[str, Any]

_SCHEMA_KEYS = ("$schema", "$id", "$comment", "$defs", "definitions")
_IGNORED_KEYS = frozenset(
    (*_SCHEMA_KEYS, "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_ESCAPED: CodePoints = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_INTEGER_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_TYPES: Mapping[str, tuple[tuple[type, ...], frozenset[str]]] = MappingProxyType(
    {
        "object": ((dict,), frozenset(("properties", "required", "additionalProperties"))),
        "array": ((list,), frozenset(("items", "minItems", "maxItems"))),
        "string": ((str,), frozenset(("minLength", "maxLength", "pattern", "format"))),
        "number": ((int, float), frozenset()),
        "integer": ((int,), _INTEGER_BOUNDS),
        "boolean": ((bool,), frozenset()),
        "null": ((type(None),), frozenset()),
    }
)
"""Type -> Python's types of its values, and keys that describe it."""
_DATE = (
    r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
"""Dates that exist in every year: the 29th of February is not written."""
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_FORMATS: Mapping[str, str] = MappingProxyType(
    {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "uuid": _UUID}
)

_COMMA = parse_regex(", ?").expression
_COLON = parse_regex(": ?").expression
_NATURAL = rf"[1-9]\d{{0,{MAX_DIGITS - 1}}}"
_NUMBER = parse_regex(rf"-?(?:0|{_NATURAL})(?:\.\d{{1,{MAX_DIGITS}}})?(?:[eE][+-]?\d{{1,2}})?").expression
_CHARACTER = parse_regex(
    r'[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEFef][0-9a-fA-F]|[Dd][0-7])[0-9a-fA-F]{2})'
).expression
"""A character of a string, written as itself or as an escape. Surrogates are no characters of their own."""


def compile_json_schema(schema: Schema | bool) -> Expression:
    """The texts of the values of a schema.

    Raises:
        ValueError: a part of the schema is wrong or not supported; names it.
    """
    return _SchemaCompiler(schema).compile(schema, _Place("the schema"))


@dataclass(frozen=True)
class _Place:
    """A part of a schema."""

    path: str
    """Where the part stands in the schema; errors name it."""
    depth: int = 0
    references: tuple[str, ...] = ()
    """What is being resolved."""

    def child(self, *names: object) -> _Place:
        return replace(self, path=".".join((self.path, *map(str, names))), depth=self.depth + 1)

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path if len(self.path) <= 200 else '...' + self.path[-200:]}: {problem}")


@dataclass
class _SchemaCompiler:
    """Compiles the parts of a schema."""

    root: Schema | bool
    num_parts: int = 0
    num_values: int = 0

    def compile(self, schema: Any, place: _Place) -> Expression:
        """The texts of the values of a part."""
        self.num_parts += 1
        if self.num_parts > MAX_PARTS or place.depth > MAX_SCHEMA_DEPTH:
            raise place.error(f"the schema is too large: use at most {MAX_PARTS} parts, {MAX_SCHEMA_DEPTH} deep")
        if isinstance(schema, bool):
            if not schema:
                raise place.error("is false, which no value fits: remove it")
            return _any_value(MAX_FREE_DEPTH)
        if not isinstance(schema, Mapping):
            raise place.error(f"is {_shorten(schema)}: expected an object, true or false")
        key = next((key for key in ("$ref", "allOf", "anyOf", "enum", "const") if key in schema), None)
        if key is None:
            return self._compile_types(schema, place)
        _check_keys(schema, {key, "type"} if key in ("enum", "const") else {key}, place)
        match key:
            case "$ref":
                return self._compile_reference(schema[key], place)
            case "enum" | "const":
                return self._compile_values(schema, key, place)
        options = _read_list(schema, key, place)
        if key == "allOf" and len(options) > 1:
            raise place.error(f"allOf has {len(options)} schemas: only one is supported; join them")
        return Alternation(tuple(self.compile(option, place.child(key, index)) for index, option in enumerate(options)))

    def _compile_types(self, schema: Schema, place: _Place) -> Expression:
        # Without "type" those that the other keys describe: a value of another type would be valid, but is not meant.
        described = [name for name, (_, keys) in _TYPES.items() if keys & schema.keys()]
        types = _read_types(schema, described or list(_TYPES), place)
        _check_keys(schema, {"type"}.union(*(_TYPES[name][1] for name in types)), place)
        options: list[Expression] = []
        for name in types:
            match name:
                case "object":
                    options.append(self._compile_object(schema, place))
                case "array":
                    options.append(self._compile_array(schema, place))
                case "string":
                    options.append(_compile_string(schema, place))
                case "integer" | "number":
                    options.append(_compile_integer(schema, place) if name == "integer" else _NUMBER)
                case "boolean":
                    options += [literal("true"), literal("false")]
                case _:
                    options.append(literal("null"))
        return Alternation(tuple(options))

    def _compile_object(self, schema: Schema, place: _Place) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise place.error(f"properties is {_shorten(properties)}: expected an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise place.error(f"required is {_shorten(required)}: expected a list of names")
        additional, required_names = schema.get("additionalProperties", True), frozenset(required)
        for name in required:
            if name not in properties:
                raise place.error(f"required {_shorten(name)} is not among the properties: add it there")
        if not properties and additional is not False:
            part = place.child("additionalProperties")
            is_free = additional is True
            value = _any_value(MAX_FREE_DEPTH - 1) if is_free else self.compile(additional, part)
            pair = Concatenation((_string(0, None), _COLON, value))
            return _enclose("{", Repetition(pair, 0, None, _COMMA), "}")
        items = []
        for name, value in properties.items():
            expression = self.compile(value, place.child("properties", name))
            pair = Concatenation((literal(_dump(name)), _COLON, expression))
            items.append((pair, name in required_names))
        return _enclose("{", OptionalItems(tuple(items), _COMMA), "}")

    def _compile_array(self, schema: Schema, place: _Place) -> Expression:
        minimum, maximum = _read_bounds(schema, "minItems", "maxItems", place)
        items = schema.get("items", True)
        is_free = items is True
        item = _any_value(MAX_FREE_DEPTH - 1) if is_free else self.compile(items, place.child("items"))
        return _enclose("[", Repetition(item, minimum, maximum, _COMMA), "]")

    def _compile_reference(self, reference: Any, place: _Place) -> Expression:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise place.error(f"$ref is {_shorten(reference)}: only #/... within the schema is supported")
        if reference in place.references:
            raise place.error(f"$ref {_shorten(reference)} contains itself: recursion is not supported")
        part: Any = self.root
        for name in reference.removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(part, Mapping) or key not in part:
                raise place.error(f"$ref {_shorten(reference)} does not exist in the schema: correct it")
            part = part[key]
        return self.compile(part, replace(place.child(), references=(*place.references, reference)))

    def _compile_values(self, schema: Schema, key: str, place: _Place) -> Expression:
        values = [schema["const"]] if key == "const" else _read_list(schema, "enum", place)
        self.num_values += len(values)
        if self.num_values > MAX_VALUES:
            raise place.error(f"the schema is too large: use at most {MAX_VALUES} values in all enum together")
        types = _read_types(schema, list(_TYPES), place)
        for value in values:
            if not any(_has_type(value, name) for name in types):
                raise place.error(
                    f"{key} has {_shorten(value)}, which is not of type {_shorten(schema.get('type'))}: remove it"
                )
        return Alternation(tuple(literal(_dump(value)) for value in values))


def _has_type(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name][0]) and (name == "boolean" or not isinstance(value, bool))


def _read_types(schema: Schema, default: list[str], place: _Place) -> list[str]:
    types = schema.get("type", default)
    types = [types] if isinstance(types, str) else types
    if (
        not isinstance(types, list)
        or not 1 <= len(types) <= len(_TYPES)
        or not set(map(repr, types)) <= set(map(repr, _TYPES))
    ):
        raise place.error(f"type is {_shorten(types)}: expected {', '.join(_TYPES)}, or a list of these")
    return types


def _check_keys(schema: Schema, supported: set[str], place: _Place) -> None:
    for key in schema:
        if key not in supported and key not in _IGNORED_KEYS:
            remedy = "use anyOf" if key == "oneOf" else "remove it"
            raise place.error(f"{_shorten(key, quoted=False)} is not supported here: {remedy}")


def _read_list(schema: Schema, key: str, place: _Place) -> list[Any]:
    values = schema[key]
    if not isinstance(values, list) or not values:
        raise place.error(f"{key} is {_shorten(values)}: expected a list with at least one entry")
    return values


def _read_bounds(schema: Schema, min_key: str, max_key: str, place: _Place) -> tuple[int, int | None]:
    minimum, maximum = schema.get(min_key, 0), schema.get(max_key)
    for key, value in ((min_key, minimum), (max_key, 0 if maximum is None else maximum)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_REPETITIONS:
            raise place.error(f"{key} is {_shorten(value)}: expected a whole number from 0 to {MAX_REPETITIONS}")
    if maximum is not None and maximum < minimum:
        raise place.error(f"{max_key} = {maximum} is below {min_key} = {minimum}: exchange them")
    return minimum, maximum


def _compile_string(schema: Schema, place: _Place) -> Expression:
    minimum, maximum = _read_bounds(schema, "minLength", "maxLength", place)
    has_length = "minLength" in schema or "maxLength" in schema
    keys = [key for key in ("pattern", "format") if key in schema]
    if len(keys) + has_length > 1:
        raise place.error("pattern, format and lengths together are not supported: keep one of them")
    if not keys:
        return _string(minimum, maximum)
    value = schema[keys[0]]
    if not isinstance(value, str):
        raise place.error(f"{keys[0]} is {_shorten(value)}: expected a text")
    if keys == ["format"]:
        if value not in _FORMATS:
            raise place.error(f"format {_shorten(value)} is not supported: use {', '.join(_FORMATS)} or a pattern")
        return _enclose('"', parse_regex(_FORMATS[value]).expression, '"')
    try:
        pattern = parse_regex(value)
    except ValueError as error:
        raise place.error(f"pattern: {error}") from None
    # A pattern may match anywhere in the string, unless it is anchored.
    anything = Repetition(_CHARACTER, 0, None)
    before = () if pattern.begins_anchored else (anything,)
    after = () if pattern.ends_anchored else (anything,)
    return _enclose('"', Concatenation((*before, _escape(pattern.expression), *after)), '"')


def _compile_integer(schema: Schema, place: _Place) -> Expression:
    """An integer: of a range that begins at 0 or 1, or of any with at most `MAX_INTEGERS` members."""
    bounds: dict[str, int] = {}
    for key in _INTEGER_BOUNDS & schema.keys():
        value = schema[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise place.error(f"{key} is {_shorten(value)}: expected a whole number")
        bounds[key] = value
    lows = [bounds[key] + add for key, add in (("minimum", 0), ("exclusiveMinimum", 1)) if key in bounds]
    highs = [bounds[key] - add for key, add in (("maximum", 0), ("exclusiveMaximum", 1)) if key in bounds]
    if lows and highs:
        numbers = range(max(lows), min(highs) + 1)
        if not numbers:
            raise place.error("no integer is within the bounds: correct them")
        if len(numbers) <= MAX_INTEGERS:
            return Alternation(tuple(literal(str(number)) for number in numbers))
    if highs or (lows and max(lows) not in (0, 1)):
        raise place.error(
            f"these bounds of an integer are not supported: use a range of at most {MAX_INTEGERS} numbers, a minimum "
            "of 0 or 1 alone, or none"
        )
    zero = "" if lows and max(lows) == 1 else "0|"
    return parse_regex(f"{'' if lows else '-?'}(?:{zero}{_NATURAL})").expression


@lru_cache
def _any_value(depth: int) -> Expression:
    """Any value; objects and arrays with at most ``depth`` levels."""
    simple = (
        _string(0, None),
        _NUMBER,
        *(literal(word) for word in ("true", "false", "null")),
    )
    if depth == 0:
        return Alternation(simple)
    value = _any_value(depth - 1)
    pair = Concatenation((_string(0, None), _COLON, value))
    array = _enclose("[", Repetition(value, 0, None, _COMMA), "]")
    return Alternation((*simple, array, _enclose("{", Repetition(pair, 0, None, _COMMA), "}")))


def _enclose(left: str, expression: Expression, right: str) -> Expression:
    return Concatenation((literal(left), expression, literal(right)))


def _string(minimum: int, maximum: int | None) -> Expression:
    return _enclose('"', Repetition(_CHARACTER, minimum, maximum), '"')


def _escape(expression: Expression) -> Expression:
    """The texts of an expression as they are written inside a JSON string."""
    match expression:
        case CharacterSet(code_points):
            special, plain = intersect(code_points, _ESCAPED), intersect(code_points, complement(_ESCAPED))
            written = [literal(_dump(chr(c))[1:-1]) for low, high in special for c in range(low, high + 1)]
            return Alternation((*([CharacterSet(plain)] if plain or not written else []), *written))
        case Concatenation(parts):
            return Concatenation(tuple(map(_escape, parts)))
        case Alternation(options):
            return Alternation(tuple(map(_escape, options)))
        case Repetition(part, minimum, maximum, separator):
            return Repetition(_escape(part), minimum, maximum, _escape(separator))
        case OptionalItems():
            raise AssertionError("regular expressions have none")


def _dump(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number: correct the schema")
    return json.dumps(value, ensure_ascii=False)


def _shorten(value: Any, *, quoted: bool = True) -> str:
    text = value if isinstance(value, str) and not quoted else json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
