"""JSON schemas as expressions over characters.

A schema is regular if its depth is bounded: a ``$ref`` within itself and values of any kind have a limited number of
levels, beyond which only alternatives without them are left. Values are written as by `json.dumps`, each separator with
or without a space; properties come in the order of the schema, and others are not written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from itertools import combinations
from types import MappingProxyType
from typing import Any

from config.serving.server import DEFAULT_SCHEMA_DEPTH
from diffusionlm.inference.constraints.disjoint_schemas import DisjointSchemas
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
from diffusionlm.inference.constraints.json_scalars import (
    FORMATS,
    FREE_FORMATS,
    INTEGER,
    MAX_DIGITS,
    MAX_FORMAT_LENGTH,
    NUM_PLACES,
    NUMBER,
    number_between,
)

MAX_NESTED_PARTS = 48
MAX_PARTS = 4096
"""Schemas within a schema, each ``$ref`` counted with what it refers to."""
MAX_CHARACTERS = 1 << 18
"""Of all names, values and regular expressions in these parts together."""

Schema = Mapping[str, Any]

_SCHEMA_KEYS = ("$schema", "$id", "$comment", "$defs", "definitions")
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
_IGNORED_KEYS = frozenset((*_SCHEMA_KEYS, *_ANNOTATIONS))
_ESCAPED: CodePoints = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_NUMBER_KEYS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_DICTIONARY_KEYS = frozenset(("patternProperties", "propertyNames"))
"""Keys of an object without ``properties``."""
_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_TYPES: Mapping[str, tuple[tuple[type, ...], frozenset[str]]] = MappingProxyType(
    {
        "object": ((dict,), frozenset(("properties", "required", "additionalProperties")) | _DICTIONARY_KEYS),
        "array": ((list,), frozenset(("prefixItems", "items", "minItems", "maxItems"))),
        "string": ((str,), frozenset(("minLength", "maxLength", "pattern", "format"))),
        "number": ((int, float), _NUMBER_KEYS),
        "integer": ((int,), _NUMBER_KEYS),
        "boolean": ((bool,), frozenset()),
        "null": ((type(None),), frozenset()),
    }
)
"""Type -> Python's types of its values, and keys that describe it."""
_COMMA = parse_regex(", ?")
_COLON = parse_regex(": ?")
_CHARACTER = parse_regex(r'[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEFef][0-9a-fA-F]|[Dd][0-7])[0-9a-fA-F]{2})')
"""A character of a string, written as itself or as an escape. Surrogates are no characters of their own."""


class EndlessSchemaError(ValueError):
    """A part of a schema contains itself, and there are no levels left for it."""


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

    def error(self, problem: str, kind: type[ValueError] = ValueError) -> ValueError:
        return kind(f"{self.path if len(self.path) <= 200 else '...' + self.path[-200:]}: {problem}")


class SchemaCompiler:
    """Compiles schemas, whose sizes are limited together.

    Args:
        max_depth: levels of a ``$ref`` within itself, and of objects and arrays in a value of any kind.
    """

    def __init__(self, max_depth: int = DEFAULT_SCHEMA_DEPTH) -> None:
        self._max_depth = max_depth
        self._root: Schema | bool = True
        self._num_parts = self._num_characters = 0
        self._disjoint_schemas = DisjointSchemas(partial(self._resolve, place=_Place("oneOf")))

    def compile_root(self, schema: Schema | bool) -> Expression:
        """The texts of the values of a schema.

        Raises:
            ValueError: a part of the schema is wrong or not supported; names it.
        """
        self._root = schema
        return self._compile(schema, _Place("the schema"))

    def _compile(self, schema: Any, place: _Place, tag: str | None = None) -> Expression:
        """The texts of the values of a part; ``tag`` is one more property that it requires."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS or place.depth > MAX_NESTED_PARTS:
            raise place.error(f"the schema is too large: use at most {MAX_PARTS} parts, {MAX_NESTED_PARTS} deep")
        if isinstance(schema, bool):
            if not schema:
                raise place.error("is false, which no value fits: remove it")
            return _any_value(self._max_depth)
        if not isinstance(schema, Mapping):
            raise place.error(f"is {_shorten(schema)}: expected an object, true or false")
        key = next((key for key in _COMBINATIONS if key in schema), None)
        match key:
            case None:
                if tag is not None and isinstance(required := schema.get("required", []), list):
                    schema = {**schema, "required": [*required, tag]}
                return self._compile_types(schema, place)
            case "$ref":
                _check_keys(schema, {key}, place)
                return self._compile_reference(schema[key], place, tag)
            case "enum" | "const":
                _check_keys(schema, {key, "type"}, place)
                return self._compile_values(schema, key, place)
        _check_keys(schema, {key}, place)
        options = _read_list(schema, key, place)
        if key == "allOf" and len(options) > 1:
            raise place.error(f"allOf has {len(options)} schemas: only one is supported; join them")
        tag, tag_schemas = self._find_tags(schema, options, place)
        expression = _alternate(
            partial(self._compile, item, place.child(key, i), tag) for i, item in enumerate(options)
        )
        if key == "oneOf":
            self._check_disjoint(tag_schemas or options, place)
        return expression

    def _find_tags(self, schema: Schema, options: Sequence[Any], place: _Place) -> tuple[str | None, list[Any]]:
        """The property that tells options apart (pydantic's and OpenAPI's ``discriminator``), which each requires even
        if its schema does not say so, and its schemas; None and none without one."""
        discriminator = schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        schemas = []
        for option in options:
            part = self._resolve(option["$ref"], place) if isinstance(option, Mapping) and "$ref" in option else option
            properties = part.get("properties") if isinstance(part, Mapping) and part.get("type") == "object" else None
            if not (isinstance(tag, str) and isinstance(properties, Mapping) and tag in properties):
                return None, []
            schemas.append(properties[tag])
        return tag, schemas

    def _check_disjoint(self, options: Sequence[Any], place: _Place) -> None:
        """Check that ``oneOf`` means the same as ``anyOf``."""
        for (left, first), (right, second) in combinations(enumerate(options), 2):
            if not self._disjoint_schemas.are_disjoint(first, second):
                raise place.error(
                    f"oneOf: it is not certain that no value fits both schema {left} and schema {right}: use anyOf, or "
                    "let them differ in their types, or in a const of a required property"
                )

    def _compile_types(self, schema: Schema, place: _Place) -> Expression:
        # Without "type" those that the other keys describe: a value of another type would be valid, but is not meant.
        described = [name for name, (_, keys) in _TYPES.items() if keys & schema.keys()]
        types = _read_types(schema, described or list(_TYPES), place)
        _check_keys(schema, {"type"}.union(*(_TYPES[name][1] for name in types)), place)
        return _alternate(partial(self._compile_type, name, schema, place) for name in types)

    def _compile_type(self, name: str, schema: Schema, place: _Place) -> Expression:
        match name:
            case "object":
                return self._compile_object(schema, place)
            case "array":
                return self._compile_array(schema, place)
            case "string":
                return self._compile_string(schema, place)
            case "integer" | "number":
                return self._compile_number(schema, place, is_integer=name == "integer")
            case "boolean":
                return Alternation((literal("true"), literal("false")))
        return literal("null")

    def _compile_object(self, schema: Schema, place: _Place) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise place.error(f"properties is {_shorten(properties)}: expected an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise place.error(f"required is {_shorten(required)}: expected a list of names")
        required_names = dict.fromkeys(required)  # a set in the order of the schema
        for name in required_names:
            if name not in properties:
                raise place.error(f"required {_shorten(name)} is not among the properties: add it there")
        if not properties and (schema.get("additionalProperties") is not False or "patternProperties" in schema):
            return self._compile_dictionary(schema, place)
        _check_keys(schema, {*schema} - _DICTIONARY_KEYS, place)
        items = []
        for name, value in properties.items():
            try:
                expression = self._compile(value, place.child("properties", name))
            except EndlessSchemaError:
                if name in required_names:
                    raise
                continue
            pair = Concatenation((self._compile_value(name, place), _COLON, expression))
            items.append((pair, name in required_names))
        return _enclose("{", OptionalItems(tuple(items), _COMMA), "}")

    def _compile_dictionary(self, schema: Schema, place: _Place) -> Expression:
        """An object whose schema does not list its names."""
        names, values = schema.get("propertyNames", {}), schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        if not isinstance(patterns, Mapping) or len(patterns) + bool(names) > 1:
            raise place.error("patternProperties: only one pattern is supported, and no propertyNames beside it")
        for pattern, value in patterns.items():
            names, values = {"pattern": pattern}, value
        if isinstance(names, Mapping) and "$ref" in names:
            names = self._resolve(names["$ref"], place)
        if not isinstance(names, Mapping) or names.get("type", "string") != "string":
            raise place.error(f"propertyNames is {_shorten(names)}: expected an object that describes texts")
        name = self._compile({"type": "string", **names}, place.child("propertyNames"))
        return _enclose(
            "{",
            self._repeat(
                values,
                place.child("patternProperties" if patterns else "additionalProperties"),
                (0, None),
                (name, _COLON),
            ),
            "}",
        )

    def _compile_array(self, schema: Schema, place: _Place) -> Expression:
        minimum, maximum = _read_bounds(schema, "minItems", "maxItems", place)
        prefix = _read_list(schema, "prefixItems", place)[:maximum] if "prefixItems" in schema else []
        items, part = schema.get("items", not prefix), place.child("items")  # behind a prefix only what is described
        if not prefix:
            return _enclose("[", self._repeat(items, part, (minimum, maximum)), "]")
        fixed = [self._compile(item, place.child("prefixItems", index)) for index, item in enumerate(prefix)]
        parts = [piece for item in fixed for piece in (_COMMA, item)][1:]
        options = [parts[: max(0, 2 * count - 1)] for count in range(minimum, len(fixed))]
        if items is False and minimum > len(fixed):
            raise place.error(f"minItems = {minimum} is more than its {len(fixed)} prefixItems: lower it")
        if items is not False:
            rest = max(0, minimum - len(fixed)), None if maximum is None else maximum - len(fixed)
            parts.append(self._repeat(items, part, rest, (_COMMA,)))
        return _enclose("[", Alternation(tuple(Concatenation(tuple(option)) for option in (*options, parts))), "]")

    def _repeat(
        self, schema: Any, place: _Place, bounds: tuple[int, int | None], before: tuple[Expression, ...] = ()
    ) -> Expression:
        """Values of a schema, with commas between them; no value if it contains itself too deeply."""
        try:
            value = _any_value(self._max_depth - 1) if schema is True else self._compile(schema, place)
        except EndlessSchemaError:
            if bounds[0]:
                raise
            return Concatenation(())
        return Repetition(Concatenation((*before, value)), *bounds, Concatenation(()) if _COMMA in before else _COMMA)

    def _resolve(self, reference: Any, place: _Place) -> Any:
        """The part of the schema that a ``$ref`` names."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise place.error(f"$ref is {_shorten(reference)}: only #/... within the schema is supported")
        part: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(part, Mapping) or key not in part:
                raise place.error(f"$ref {_shorten(reference)} does not exist in the schema: correct it")
            part = part[key]
        return part

    def _compile_reference(self, reference: Any, place: _Place, tag: str | None) -> Expression:
        part = self._resolve(reference, place)
        if place.references.count(reference) >= self._max_depth:
            raise place.error(
                f"$ref {_shorten(reference)} contains itself in every value of {self._max_depth} levels: add an "
                "alternative without it, or raise the limit of levels (serve.max_schema_depth)",
                EndlessSchemaError,
            )
        return self._compile(part, replace(place.child(), references=(*place.references, reference)), tag)

    def _compile_values(self, schema: Schema, key: str, place: _Place) -> Expression:
        values = [schema["const"]] if key == "const" else _read_list(schema, "enum", place)
        types = _read_types(schema, list(_TYPES), place)
        for value in values:
            if not any(_has_type(value, name) for name in types):
                raise place.error(
                    f"{key} has {_shorten(value)}, which is not of type {_shorten(schema.get('type'))}: remove it"
                )
        return Alternation(tuple(self._compile_value(value, place) for value in values))

    def _compile_value(self, value: Any, place: _Place) -> Expression:
        return literal(self._count(_dump(value), place))

    def _count(self, text: str, place: _Place) -> str:
        """The text, whose characters are counted."""
        self._num_characters += len(text)
        if self._num_characters > MAX_CHARACTERS:
            raise place.error(
                f"the schema is too large: use at most {MAX_CHARACTERS} characters in all values together"
            )
        return text

    def _compile_string(self, schema: Schema, place: _Place) -> Expression:
        minimum, maximum = _read_bounds(schema, "minLength", "maxLength", place)
        keys = [key for key in ("pattern", "format") if key in schema]
        if not keys or (keys == ["format"] and schema["format"] in FREE_FORMATS):
            return _string(minimum, maximum)
        fits_formats = "format" in keys and minimum <= 1 and (maximum is None or maximum >= MAX_FORMAT_LENGTH)
        if len(keys) > 1 or ({"minLength", "maxLength"} & schema.keys() and not fits_formats):
            raise place.error("pattern, format and lengths together are not supported: keep one of them")
        value = schema[keys[0]]
        if not isinstance(value, str):
            raise place.error(f"{keys[0]} is {_shorten(value)}: expected a text")
        if keys == ["format"]:
            if value not in FORMATS:
                names = ", ".join((*FORMATS, *FREE_FORMATS))
                raise place.error(f"format {_shorten(value)} is not supported: use {names} or a pattern")
            return _enclose('"', parse_regex(self._count(FORMATS[value], place)), '"')
        self._count(value, place)
        try:
            pattern = parse_regex(value, is_search=True)
        except ValueError as error:
            raise place.error(f"pattern: {error}") from None
        return _enclose('"', _escape(pattern), '"')

    def _compile_number(self, schema: Schema, place: _Place, *, is_integer: bool) -> Expression:
        if not schema.keys() & _NUMBER_KEYS:
            return INTEGER if is_integer else NUMBER
        num_places = 0 if is_integer else NUM_PLACES
        high = 10**MAX_DIGITS - 1
        low = -high
        for key in sorted(_NUMBER_KEYS & schema.keys()):
            value = schema[key]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value != value or abs(value) == math.inf:
                raise place.error(f"{key} is {_shorten(value)}: expected a number")
            bound = Decimal(str(value)).scaleb(num_places)
            if key in ("minimum", "exclusiveMinimum"):
                low = max(low, math.ceil(bound) if key == "minimum" else math.floor(bound) + 1)
            else:
                high = min(high, math.floor(bound) if key == "maximum" else math.ceil(bound) - 1)
        if low > high:
            raise place.error(
                f"no number of at most {MAX_DIGITS - num_places} digits and {num_places} decimal places is within the "
                "bounds: widen them"
            )
        return parse_regex(self._count(number_between(low, high, num_places), place))


def _alternate(compilers: Iterable[Callable[[], Expression]]) -> Expression:
    """One of several expressions, without those that contain themselves too deeply."""
    options, endless = [], None
    for compile_option in compilers:
        try:
            options.append(compile_option())
        except EndlessSchemaError as error:
            endless = error
    if endless is not None and not options:
        raise endless
    return Alternation(tuple(options))


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
            raise place.error(f"{_shorten(key, quoted=False)} is not supported here: remove it")


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


@lru_cache
def _any_value(depth: int) -> Expression:
    """Any value; objects and arrays with at most ``depth`` levels."""
    simple = (_string(0, None), NUMBER, *map(literal, ("true", "false", "null")))
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
