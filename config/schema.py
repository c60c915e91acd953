"""Inspect the types of a config's fields, and describe types and values in error messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from config.base import Section, union_members
from config.dump import format_value
from files.toml_text import parse_toml


def is_section(kind: Any) -> bool:
    """Return whether a type is a Section class."""
    return isinstance(kind, type) and issubclass(kind, Section)


def is_array(kind: Any) -> bool:
    """Return whether values of a type are TOML arrays."""
    return (get_origin(kind) or kind) in (tuple, list)


def is_dict(kind: Any) -> bool:
    """Return whether values of a type are TOML tables with any keys."""
    return (get_origin(kind) or kind) in (dict, Mapping)


def section_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of a section by key. A key that is a word of Python, such as `from`, is the field's alias."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def child_types(kind: Any, key: str | int) -> tuple[Any, ...]:
    """Return the types that `key` may have in a value of type `kind`. Empty: there is no such key."""
    args = get_args(kind)
    if is_section(kind):
        field = section_fields(kind).get(str(key))
        return union_members(field.annotation) if field is not None else ()
    if is_dict(kind):
        return union_members(args[1]) if len(args) == 2 else (Any,)
    if is_array(kind) and isinstance(key, int):
        if not args:
            return (Any,)
        if len(args) == 1 or args[-1] is Ellipsis:
            return union_members(args[0])
        return union_members(args[key]) if key < len(args) else ()
    return ()


def discriminator_values(section: type[Section], tag: str) -> tuple[Any, ...]:
    """Return the values of the field `tag` that select `section` in a discriminated union."""
    field = section_fields(section).get(tag)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def find_discriminator(sections: Sequence[type[Section]]) -> str | None:
    """Return the field whose literal values differ between all members of a union of sections, if there is one."""
    if len(sections) < 2:
        return None
    for name in section_fields(sections[0]):
        values = [value for section in sections for value in discriminator_values(section, name)]
        if all(discriminator_values(section, name) for section in sections) and len(values) == len(set(values)):
            return name
    return None


def iterate_tables(
    section: type[Section], path: str = "", heading: str = ""
) -> Iterator[tuple[str, str, type[Section]]]:
    """Iterate over `section` and all tables in it: (dotted path, TOML heading, class)."""
    yield path, heading, section
    for name, field in section_fields(section).items():
        inner = f"{path}.{name}" if path else name
        for kind in union_members(field.annotation):
            if is_section(kind):
                yield from iterate_tables(kind, inner, f"[{inner}]")
            elif is_array(kind):
                for item in child_types(kind, 0):
                    if is_section(item):
                        yield from iterate_tables(item, inner, f"[[{inner}]]")


def child_value(node: Any, step: str | int) -> Any:
    """Return an entry of a table or an array. None: there is none."""
    if isinstance(node, dict):
        return node.get(step)
    return node[step] if isinstance(node, list) and isinstance(step, int) and step < len(node) else None


def find_types(cls: type[Section], tree: Any, key: Sequence[str | int]) -> tuple[Any, ...]:
    """Return the types that a key of a config may have, given the tables that are there: of the sections of a
    discriminated union, the one that the table's tag, or the default's, selects."""
    types: tuple[Any, ...] = (cls,)
    for step in key:
        defaults = [kind.default_tags[step] for kind in types if is_section(kind) and step in kind.default_tags]
        types = tuple(dict.fromkeys(inner for kind in types for inner in child_types(kind, step)))
        tree = child_value(tree, step)
        sections = [kind for kind in types if is_section(kind)]
        tag = find_discriminator(sections)
        if tag is not None and (tree is None or isinstance(tree, dict)):
            value = (tree or {}).get(tag, defaults[0][1] if defaults else None)
            selected = [kind for kind in sections if value in discriminator_values(kind, tag)]
            types = tuple(kind for kind in types if kind not in sections or kind in (selected or sections))
    return types


def parse_override_value(text: str, types: Sequence[Any]) -> Any:
    """Convert the text of an override to the first of its readings that has one of the types.

    The readings are TOML, an array without brackets, the text itself, and an array of texts without quotes. If none has
    a type, it is returned as TOML or else as text for validation to reject.
    """
    word = text.strip()
    if NoneType in types and word.lower() == "none" and word not in _literal_values(types):
        return None
    is_array_text = word[:1] + word[-1:] == "[]"
    inside = word[1:-1] if is_array_text else word
    texts = [part.strip() for part in inside.split(",")] if inside.strip() else []
    number = f"0{word}" if word.startswith(".") else f"{word}0" if word.endswith(".") else word  # not valid in TOML
    readings = [_parse_toml_value(number), _parse_toml_value(f"[{word}]")]
    values: list[Any] = [value for is_toml, value in readings if is_toml]
    rejected = values[0] if readings[0][0] else text
    values += [text] if "[" in inside else [texts, text] if is_array_text else [text, texts]
    return next((value for value in values if any(_matches_type(value, kind) for kind in types)), rejected)


def _literal_values(types: Sequence[Any]) -> list[Any]:
    return [value for kind in types if get_origin(kind) is Literal for value in get_args(kind)]


def _parse_toml_value(text: str) -> tuple[bool, Any]:
    """Return whether a text is one TOML value, and the value."""
    try:
        table = parse_toml(f"v={text}")
    except ValueError:
        return False, None
    return list(table) == ["v"], table["v"]


def _matches_type(value: Any, kind: Any) -> bool:
    """Return whether a TOML value has a type, without checking bounds or the contents of tables."""
    if get_origin(kind) is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(kind))
    if isinstance(value, list):
        return is_array(kind) and all(
            any(_matches_type(item, inner) for inner in child_types(kind, index)) for index, item in enumerate(value)
        )
    if isinstance(value, dict):
        return is_section(kind) or is_dict(kind)
    return kind in (Any, type(value)) or (type(value), kind) in ((int, float), (str, Path))


_TYPE_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
}


def describe_types(types: Sequence[Any]) -> str:
    """Describe types for a message, as in `an integer or "auto"`."""
    words: list[str] = []
    for kind in types:
        if get_origin(kind) is Literal:
            words += [json.dumps(value, ensure_ascii=False) for value in get_args(kind)]
        elif is_array(kind):
            items = {_TYPE_NAMES[item][1] if item in _TYPE_NAMES else "" for item in child_types(kind, 0)}
            items |= {"tables" for item in child_types(kind, 0) if is_section(item)}
            names = " or ".join(sorted(items - {""}))
            words.append(f"an array of {names}" if names else "an array")
        elif is_section(kind) or is_dict(kind):
            words.append("a table")
        elif kind is not NoneType:
            words.append(_TYPE_NAMES[kind][0] if kind in _TYPE_NAMES else getattr(kind, "__name__", str(kind)))
    return join_with_or(list(dict.fromkeys(words)))


def join_with_or(words: Sequence[str]) -> str:
    """Join words as in `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def describe_value(value: Any) -> str:
    """Describe a TOML value for a message, as in `the string "5"`."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "an array"
    if value is None:
        return "none"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return f"the {name} {format_value(value, limit=200)}"
    return f"the date or time {value}"


def suggest_fix(value: Any, types: Sequence[Any]) -> str:
    """Suggest, in parentheses, how to write a value so that it has one of the types. Empty: it is not clear."""
    words = _literal_values(types)
    if isinstance(value, str) and (hint := suggest_name(value, words)):
        return f" ({hint})"
    if isinstance(value, str):
        is_toml, parsed = _parse_toml_value(value.lower() if bool in types else value)
        if is_toml and not isinstance(parsed, str) and any(_matches_type(parsed, kind) for kind in types):
            return f" (write {value.lower() if bool in types else value} without quotes)"
    elif isinstance(value, float) and value.is_integer() and int in types:
        return f" (write {int(value)})"
    elif any(kind in (str, Path) for kind in types) and isinstance(value, (bool, int, float)):
        return f' (write "{json.dumps(value)}" with quotes)'
    elif any(_matches_type([value], kind) for kind in types):
        return f" (write [{json.dumps(value)}])" if isinstance(value, (bool, int, float)) else " (put it in [ ])"
    return ""


def suggest_name(
    word: Any, candidates: Sequence[Any], cutoff: float = 0.6, locations: Mapping[str, str] | None = None
) -> str:
    """Return `did you mean max_steps?` if a candidate is similar; with `locations`, `did you mean seed in [run]?`."""
    names = [name for name in candidates if isinstance(name, str)]
    is_name = isinstance(word, str) and len(word) < 100
    matches = difflib.get_close_matches(word, names, 1, cutoff) if is_name else []
    if not matches:
        return ""
    return f"did you mean {matches[0]}{f' {locations[matches[0]]}' if locations else ''}?"
