"""Texts of JSON schemas: what the automaton writes is read by `json` and valid, and what is valid is accepted."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import jsonschema
import numpy as np
import pytest

from diffusionlm.inference.constraints.json_schema import SchemaCompiler
from tests.schema_texts import accepts, compile_schema, write_text

PERSON = {
    "$defs": {"tag": {"type": "string", "pattern": '^[a-z"\\\\]+$'}},
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        'nick "é"': {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "role": {"enum": ["admin", "user", 3, None, [1, {"a": 2}]]},
    },
    "required": ["age", "tags"],
}
SCHEMAS: list[Any] = [
    PERSON,
    {"anyOf": [{"const": "x\n"}, {"type": "integer"}, {"type": "object", "additionalProperties": False}]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "string", "pattern": "b+"},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
    {"allOf": [{"type": "string", "maxLength": 2}]},
    {"type": "array", "minItems": 1, "items": {"type": "integer"}},
    True,
]  # fmt: skip


def is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_types_without_a_name_are_those_that_are_described() -> None:
    for schema, name in (({"minItems": 1, "items": {"type": "integer"}}, "array"), ({"properties": {}}, "object")):
        automaton, other = compile_schema(schema), compile_schema({"type": name, **schema})
        np.testing.assert_array_equal(automaton.transitions_SC, other.transitions_SC)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_texts_are_valid(schema: Any) -> None:
    automaton, rng = compile_schema(schema), np.random.default_rng(0)
    texts = {write_text(automaton, rng) for _ in range(40)} - {""}
    assert texts
    for text in texts:
        value = json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert is_valid(value, schema), text
        json.dumps(value, allow_nan=False)
        text.encode()


VALUES: list[Any] = [
    {"age": 7, "tags": ["a\"b\\"]}, {"name": "éé", "age": 0, "tags": ["x", "y"], "role": None}, {"age": 7},
    {"age": 100, "tags": ["a"]}, {"age": 1, "tags": ["A"]}, {"age": 1, "tags": ["a"], "role": [1, {"a": 2}]},
    {"name": "", "age": 1, "tags": ["a"]}, {"name": "abcd", "age": 1, "tags": ["a"]},
    {"age": 1, "nick \"é\"": None, "tags": ["a"]}, {}, {"a": 1, "b": 0}, {"a": 1}, {"a": None}, {"b": None},
    {"a": None, "b": None}, "x\n", "x", 12, -4, 0, -2, 2, 3, 1.5, 1e-7, -0.25, [], [1], [1, 2.5], [1, 2, 3],
    [True, False], [True, False, True], "abbc", "é\u2028\t\"", "2024-02-28T10:00:00Z", "2024-12-31T23:59:59.5+01:00",
    None, True, [[1], {"x": [{"y": "z"}]}], "\x7f\u0001",
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_accepts_what_is_valid(schema: Any) -> None:
    """Both of `json.dumps`'s styles, with and without escapes."""
    automaton = compile_schema(schema)
    for value in VALUES:
        is_expected = is_valid(value, schema)
        for ensure_ascii in (False, True):
            if schema is PERSON and ensure_ascii:
                continue  # names of properties and enumerated texts are written as they are
            text = json.dumps(value, ensure_ascii=ensure_ascii)
            if '"pattern"' not in json.dumps(schema) or not ensure_ascii:
                assert accepts(automaton, text.encode()) == is_expected, text
        compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if is_expected and not (isinstance(value, dict) and "role" in value):
            assert accepts(automaton, compact.encode()), compact


def test_objects_of_any_kind_have_a_limited_depth() -> None:
    automaton = compile_schema({"type": "object"})
    assert accepts(automaton, b'{"a": {"b": [{"c": "\\u00e9\\n"}, [], 1e5, null]}}')
    nested = '{"a": ' * 4 + "1" + "}" * 4
    assert accepts(automaton, nested.encode())
    assert not accepts(automaton, f'{{"b": {nested}}}'.encode())
    wrong = ["[{}]", '{"a": 01}', '{"a": "\\ud800"}', '{"a": 1e999}', '{"a" 1}', '{"a": 1,}', "{a: 1}", '{"a": "\n"}']
    for text in wrong:
        assert not accepts(automaton, text.encode()), text


def test_every_day_of_a_year_but_the_leap_day() -> None:
    automaton = compile_schema({"type": "string", "format": "date"})
    days = {date.fromordinal(date(2023, 1, 1).toordinal() + day).isoformat() for day in range(365)}
    for month in range(14):
        for day in range(33):
            text = f"2023-{month:02}-{day:02}"
            assert accepts(automaton, f'"{text}"'.encode()) == (text in days)
    assert not accepts(automaton, b'"0000-01-01"')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": True}, "the schema: not is not supported here: remove it"),
        ({"type": "array", "items": {"type": "string", "uniqueItems": True}}, "the schema.items: uniqueItems is not"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf is not supported here"),
        ({"type": "integer", "minimum": "5"}, "minimum is .5.: expected a number"),
        ({"type": "number", "maximum": float("inf")}, "maximum is Infinity: expected a number"),
        ({"properties": {"a": True}, "propertyNames": {}}, "propertyNames is not supported here"),
        ({"patternProperties": {"a": True, "b": True}}, "only one pattern is supported"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "expected an object that describes texts"),
        ({"prefixItems": [True], "items": False, "minItems": 2}, "is more than its 1 prefixItems"),
        ({"prefixItems": 3}, "prefixItems is 3: expected a list"),
        ({"anyOf": [True], "type": "object"}, "type is not supported here"),
        ({"type": "object", "properties": 3}, "properties is 3: expected an object"),
        ({"type": "object", "required": "a"}, "required is .a.: expected a list"),
        ({"type": "object", "required": ["a"]}, 'the schema: required "a" is not among the properties'),
        ({"$ref": "#/$defs/a"}, "does not exist in the schema"),
        ({"$ref": "http://x"}, "only #/... within the schema"),
        ({"allOf": [True, True]}, "allOf has 2 schemas"),
        ({"anyOf": []}, "anyOf is ..: expected a list with at least one entry"),
        ({"enum": [1], "type": "string"}, 'enum has 1, which is not of type "string"'),
        ({"type": "string", "pattern": "(?=a)"}, "the schema: pattern: the regular expression has a construct"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern, format and lengths together"),
        ({"type": "string", "format": "regex"}, 'format "regex" is not supported'),
        ({"type": "string", "format": "uuid", "minLength": 36}, "pattern, format and lengths together"),
        ({"type": "string", "format": []}, "format is ..: expected a text"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength = 2 is below minLength = 3"),
        ({"type": "array", "items": 5}, "the schema.items: is 5: expected an object, true or false"),
        ({"properties": {"a": False}}, "the schema.properties.a: is false, which no value fits"),
        ({"enum": [1], "type": [[]]}, r"the schema: type is \[\[\]\]: expected object"),
        ({"type": ["null"] * 8}, "expected object, array"),
        ({"const": float("nan")}, "nan is no JSON number"),
        pytest.param({"type": "string", "maxLength": 60000}, "too large", marks=pytest.mark.slow),
        ({"const": "\ud800"}, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_errors_name_the_part(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_schema(schema)


@pytest.mark.slow
def test_hostile_schemas_end_in_an_error() -> None:
    deep: Any = {"type": "null"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="too large"):
        compile_schema(deep)
    wide: dict[str, Any] = {"a0": {"type": "null"}}
    for level in range(1, 20):
        wide[f"a{level}"] = {"anyOf": [{"$ref": f"#/$defs/a{level - 1}"}] * 5}
    with pytest.raises(ValueError, match="too large"):
        compile_schema({"$defs": wide, "$ref": "#/$defs/a19"})
    number = {"type": "number", "minimum": -123456.789012345, "maximum": 987654321.123456}
    for part in ({"const": "x" * 1000}, {"type": "string", "pattern": "ab" * 500}, number):
        properties = {f"p{index}": {"$ref": "#/$defs/part"} for index in range(1000)}
        with pytest.raises(ValueError, match=r"at most \d+ characters in all values together"):
            SchemaCompiler().compile_root({"type": "object", "properties": properties, "$defs": {"part": part}})
    names = [f"name {number}" for number in range(4000)]
    SchemaCompiler().compile_root(
        {"properties": dict.fromkeys(names, True), "required": names * 20}
    )  # within the limit of tests
