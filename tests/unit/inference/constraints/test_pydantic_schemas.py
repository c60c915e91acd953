"""Schemas as pydantic makes them: what is written is valid by jsonschema and by pydantic itself."""

from __future__ import annotations

import ipaddress
import json
import uuid
from datetime import date, datetime, time, timedelta
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr

from diffusionlm.inference.constraints.byte_automaton import compile_expression
from diffusionlm.inference.constraints.disjoint_schemas import DisjointSchemas
from diffusionlm.inference.constraints.json_schema import SchemaCompiler
from tests.schema_texts import accepts, compile_schema, write_text


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Mixed(Enum):
    ONE = 1
    TWO = "two"
    NONE = None


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"  # not required by the schema, but by the union with Dog
    lives: int = Field(default=9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float = Field(gt=0, le=99.5)


class Point(NamedTuple):
    x: int
    y: Annotated[float, Field(ge=-1, lt=1)] = 0.5


class Node(BaseModel):
    value: Annotated[int, Field(gt=-3, lt=12)]
    left: Node | None = None
    children: list[Node] = []


class Address(BaseModel):
    """Everything at once."""

    model_config = ConfigDict(extra="forbid")
    color: Color
    mixed: Mixed | None = None
    born: date | None = None
    seen: datetime | time = Field(description="when")
    ident: uuid.UUID
    host: ipaddress.IPv4Address
    wait: timedelta
    home: HttpUrl | None
    file: Path
    secret: SecretStr
    pair: tuple[int, Literal["a", 2]]
    point: Point
    counts: dict[Color, Annotated[int, Field(ge=1)]]
    codes: dict[Annotated[str, Field(pattern="^[a-z]{2}$")], bool]
    more: dict[str, Any]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.5


class Bag(BaseModel):
    rest: Annotated[list[Annotated[str, Field(min_length=1, max_length=3)]], Field(min_length=1, max_length=2)]
    tree: dict[str, Node] = {}
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


INSTANCES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Node, {"value": 11, "left": {"value": -2, "left": None, "children": []}, "children": [{"value": 0}]}),
    (Bag, {"rest": ["abc", "é"], "tree": {"a b": {"value": 1}}, "pets": [{"kind": "dog", "weight": 0.25}]}),
    (Address, {"color": "red", "mixed": "two", "born": "2023-02-28", "seen": "10:00:00Z",
               "ident": f"{uuid.UUID(int=5)}", "host": "10.0.0.1", "wait": "PT5M", "home": "https://a.example/x?y=1",
               "file": "/tmp/a", "secret": "s",
               "pair": [1, 2], "point": [3, -0.5], "counts": {"blue": 3}, "codes": {"de": True}, "more": {"a": [1, {}]},
               "pet": {"kind": "cat", "lives": 7}}),
]  # fmt: skip


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(("model", "values"), INSTANCES, ids=lambda item: getattr(item, "__name__", ""))
def test_what_is_written_is_valid(model: type[BaseModel], values: dict[str, Any], is_strict: bool) -> None:
    """Also of the schemas that OpenAI's client makes, in which all properties are required."""
    schema: Any = model.model_json_schema()
    if is_strict:
        schema = openai.pydantic_function_tool(model)["function"]["parameters"]
    automaton, rng = compile_schema(schema), np.random.default_rng(0)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = {write_text(automaton, rng, 1500) for _ in range(40)} - {""}
    assert len(texts) > 20
    for text in texts:
        validator.validate(json.loads(text))
        model.model_validate_json(text)
    for separators in ((", ", ": "), (",", ":")):
        text = json.dumps(values, ensure_ascii=False, separators=separators)
        model.model_validate_json(text)
        assert is_strict or accepts(automaton, text.encode()), text


LIST = {
    "type": "object",
    "properties": {"value": {"type": "null"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
TREE = {"type": ["array", "null"], "items": {"$ref": "#"}, "maxItems": 2}


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_recursion_ends_at_the_limit(depth: int) -> None:
    """Every value of at most so many levels within the first one, and none of more."""
    lists = compile_expression(SchemaCompiler(depth).compile_root(LIST))
    text = "null"
    for level in range(1, depth + 4):
        text = f'{{"value": null, "next": {text}}}'
        assert accepts(lists, text.encode()) == (level <= depth + 1), level
    trees = compile_expression(SchemaCompiler(depth).compile_root(TREE)) if depth < 8 else None
    for level in range(depth + 4 if trees is not None else 0):
        text = "[" * level + "[]" + ", null]" * level
        assert trees is not None and accepts(trees, text.encode()) == (level <= depth), level


def test_what_contains_itself_in_every_value_is_refused() -> None:
    for schema in (
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"items": {"$ref": "#"}, "minItems": 1},
    ):
        with pytest.raises(ValueError, match=r"contains itself in every value of 4 levels.*serve.max_schema_depth"):
            compile_schema(schema)


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, "", "a", "b", [], [1], ["a"], {}, {"k": "a"}, {"k": "b"}, {"k": 1},
    {"k": "a", "x": 1}, {"k": "b", "x": True}, {"x": 1}, {"y": 1}, {"k": {"k": "a"}}, {"k": {"k": "b"}},
]  # fmt: skip
SCHEMAS: list[Any] = [
    {"type": "integer"}, {"type": "number"}, {"type": ["string", "null"]}, {"type": "boolean"}, {"const": True},
    {"const": 1}, {"enum": ["a", 1]}, {"enum": ["b", None]}, {"type": "array"}, {"type": "object"}, {"minLength": 1},
    True,
    {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
    {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
    {"type": "object", "properties": {"k": {"const": "b"}}},
    {"type": "object", "properties": {"k": {"type": "integer"}, "x": {"const": 1}}, "required": ["x"]},
    {"type": "object", "properties": {"y": {}}, "additionalProperties": False, "required": ["y"]},
    {"type": "object", "properties": {"k": {"$ref": "#/$defs/nested"}}, "required": ["k"]},
    {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/nested"}]}, {"allOf": [{"type": "string"}]},
    {"$ref": "#/$defs/loop"},
]  # fmt: skip
DEFINITIONS = {
    "nested": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
}


def test_disjoint_schemas_share_no_value() -> None:
    """Of all pairs: no value fits both; and most pairs without a common value are recognized."""
    num_found = num_disjoint = 0
    for left in SCHEMAS:
        for right in SCHEMAS:
            is_disjoint = DisjointSchemas(lambda name: DEFINITIONS[name.split("/")[-1]]).are_disjoint(left, right)
            if {"$ref": "#/$defs/loop"} in (left, right):  # which validators do not end on
                continue
            validators = [
                jsonschema.Draft202012Validator({"$defs": DEFINITIONS, "allOf": [schema]}) for schema in (left, right)
            ]
            has_common = any(all(validator.is_valid(value) for validator in validators) for value in VALUES)
            assert not (is_disjoint and has_common), (left, right)
            num_found, num_disjoint = num_found + is_disjoint, num_disjoint + (not has_common)
    assert num_found > 0.9 * num_disjoint, (num_found, num_disjoint)


@pytest.mark.parametrize("key", ["oneOf", "anyOf"])
def test_discriminators_are_required(key: str) -> None:
    options = [{"type": "object", "properties": {"k": {"const": name}, "x": {"const": 1}}} for name in "ab"]
    schema = {key: options, "discriminator": {"propertyName": "k"}}
    automaton = compile_schema(schema)
    assert accepts(automaton, b'{"k": "b"}') and accepts(automaton, b'{"k":"a","x":1}')
    assert not accepts(automaton, b'{"x": 1}') and not accepts(automaton, b"{}")
    for part in ({"k": {"const": "b"}}, {"x": {"const": 2}}):
        other = {"type": "object", "properties": part}
        with pytest.raises(ValueError, match="oneOf: it is not certain"):
            compile_schema({"oneOf": [*options, other], "discriminator": {"propertyName": "k"}})
    nullable = [{**option, "type": ["object", "null"]} for option in options]
    with pytest.raises(ValueError, match="oneOf: it is not certain"):
        compile_schema({"oneOf": nullable, "discriminator": {"propertyName": "k"}})


def test_one_of_is_any_of_or_refused() -> None:
    schema = {"oneOf": SCHEMAS[12:14]}
    automaton, rng = compile_schema(schema), np.random.default_rng(0)
    for _ in range(20):
        jsonschema.validate(json.loads(write_text(automaton, rng)), schema)
    for options in (
        [SCHEMAS[0], SCHEMAS[1]],
        [SCHEMAS[12], SCHEMAS[14] | {"properties": {}}],
        [True, {"type": "null"}],
    ):
        with pytest.raises(ValueError, match="no value fits both schema 0 and schema 1: use anyOf"):
            compile_schema({"oneOf": options})
