"""What the schema of a config says of its keys: their types, tables and values, in plain words.

`load.py` reads overrides and explains mistakes with it.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from config.base import Section, union_members


def is_section(kind: Any) -> bool:
    """Whether `kind` is a Section class."""
    return isinstance(kind, type) and issubclass(kind, Section)


def is_array(kind: Any) -> bool:
    """Whether `kind` is written as an array in TOML."""
    return (get_origin(kind) or kind) in (tuple, list, set, frozenset)


def is_dict(kind: Any) -> bool:
    """Whether `kind` is a table with free keys."""
    return (get_origin(kind) or kind) is dict


def child_types(kind: Any, key: str | int) -> tuple[Any, ...]:
    """The types that `key` may have in a value of type `kind`; empty where there is no such key."""
    args = get_args(kind)
    if is_section(kind):
        field = kind.model_fields.get(key)
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
    """The values that select `section` in a union discriminated by the field `tag`."""
    field = section.model_fields.get(tag)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def find_discriminator(sections: Sequence[type[Section]]) -> str | None:
    """The field whose literals tell the members of a union of sections apart, if there is one."""
    if len(sections) < 2:
        return None
    for name in sections[0].model_fields:
        values = [value for section in sections for value in discriminator_values(section, name)]
        if all(discriminator_values(section, name) for section in sections) and len(values) == len(set(values)):
            return name
    return None


def iterate_tables(
    section: type[Section], path: str = "", heading: str = ""
) -> Iterator[tuple[str, str, type[Section]]]:
    """Every table below `section`, and itself: (dotted path, TOML heading, class)."""
    yield path, heading, section
    for name, field in section.model_fields.items():
        inner = f"{path}.{name}" if path else name
        for kind in union_members(field.annotation):
            if is_section(kind):
                yield from iterate_tables(kind, inner, f"[{inner}]")
            elif is_array(kind):
                for item in child_types(kind, 0):
                    if is_section(item):
                        yield from iterate_tables(item, inner, f"[[{inner}]]")


def field_default(section: type[Section], name: str) -> Any:
    """The default of a field; None if it has none or one that depends on other fields."""
    info = section.model_fields[name]
    if info.is_required() or (info.default_factory is not None and info.default_factory_takes_validated_data):
        return None
    return info.get_default(call_default_factory=True)


def select_union_members(types: Sequence[Any], table: Any, default: Any) -> tuple[Any, ...]:
    """`kinds` without the members of a discriminated union that the tag, given or default, does not select."""
    sections = [kind for kind in types if is_section(kind)]
    tag = find_discriminator(sections)
    if tag is None or not isinstance(table, dict):
        return tuple(types)
    value = table.get(tag, getattr(default, tag, None))
    chosen = [kind for kind in sections if value in discriminator_values(kind, tag)]
    return tuple(kind for kind in types if kind not in sections or kind in (chosen or sections))


_SHORT_FLOAT = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
"""A number that every shell user writes and TOML does not know: `.5` and `1.`."""


def parse_override_value(text: str, types: Sequence[Any]) -> Any:
    """The value that `text` of a command line means where one of the types `kinds` is wanted.

    What fits none of them is returned for the validation to complain about.
    """
    word = text.strip()
    words = _literal_values(types)
    if word in words:
        return word
    if NoneType in types and word.lower() == "none":
        return None
    is_toml, value = _parse_toml_value(word)
    if is_toml and any(_matches_type(value, kind) for kind in types):
        return value
    if any(kind in (str, Path) for kind in types) and not word.startswith("["):
        return text
    if float in types and not is_toml and _SHORT_FLOAT.fullmatch(word):
        return float(word)
    for kind in types:
        items = child_types(kind, 0) if is_array(kind) else ()
        if items and not any(is_section(item) for item in items) and not isinstance(value, dict):
            inside = word[1:-1] if word.startswith("[") and word.endswith("]") else word
            if "[" in inside:
                break
            entries = inside.split(",") if inside.strip() else []
            return [
                parse_override_value(entry.strip(), child_types(kind, index)) for index, entry in enumerate(entries)
            ]
    wants_text = any(isinstance(value, str) for value in words) or any(kind in (str, Path) for kind in types)
    return value if is_toml and (isinstance(value, str) or not wants_text) else text


def _literal_values(types: Sequence[Any]) -> list[Any]:
    return [value for kind in types if get_origin(kind) is Literal for value in get_args(kind)]


def _parse_toml_value(text: str) -> tuple[bool, Any]:
    """Whether `text` is one TOML value, and that value."""
    try:
        table = tomllib.loads(f"v={text}")
    except (ValueError, RecursionError):
        return False, None
    return list(table) == ["v"], table["v"]


def _matches_type(value: Any, kind: Any) -> bool:
    """Whether a TOML value has the type `kind`, leaving aside its bounds and the contents of tables."""
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
    """The types in plain words, as in `expected an integer or "auto"`."""
    words: list[str] = []
    for kind in types:
        if get_origin(kind) is Literal:
            words += [json.dumps(value, ensure_ascii=False) for value in get_args(kind)]
        elif is_array(kind):
            items = {_TYPE_NAMES[item][1] if item in _TYPE_NAMES else "" for item in child_types(kind, 0)}
            items |= {"tables" for item in child_types(kind, 0) if is_section(item)}
            known = " or ".join(sorted(items - {""}))
            words.append(f"an array of {known}" if known else "an array")
        elif is_section(kind) or is_dict(kind):
            words.append("a table")
        elif kind is not NoneType:
            words.append(_TYPE_NAMES[kind][0] if kind in _TYPE_NAMES else getattr(kind, "__name__", str(kind)))
    return join_with_or(list(dict.fromkeys(words)))


def join_with_or(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def describe_value(value: Any) -> str:
    """A TOML value in plain words, as in `got the string "5"`."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "an array"
    if value is None:
        return "none"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return f"the {name} {json.dumps(value, ensure_ascii=False)}"
    return f"the date or time {value}"


def suggest_fix(value: Any, types: Sequence[Any]) -> str:
    """In parentheses, how to write a value that is of none of the types `kinds`; empty if that is not clear."""
    words = _literal_values(types)
    if isinstance(value, str) and (hint := suggest_name(value, words)):
        return f" ({hint})"
    if isinstance(value, str):
        is_toml, meant = _parse_toml_value(value.lower() if bool in types else value)
        if is_toml and not isinstance(meant, str) and any(_matches_type(meant, kind) for kind in types):
            return f" (write {value.lower() if bool in types else value} without quotes)"
    elif isinstance(value, float) and value.is_integer() and int in types:
        return f" (write {int(value)})"
    elif any(kind in (str, Path) for kind in types) and isinstance(value, (bool, int, float)):
        return f' (write "{json.dumps(value)}" with quotes)'
    elif any(_matches_type([value], kind) for kind in types):
        return f" (write [{json.dumps(value)}])" if isinstance(value, (bool, int, float)) else " (put it in [ ])"
    return ""


def suggest_name(word: Any, known: Sequence[Any], cutoff: float = 0.6, where: Mapping[str, str] | None = None) -> str:
    """`did you mean max_steps?` if one of the known words is like this one; `where` tells where each is."""
    names = [name for name in known if isinstance(name, str)]
    close = difflib.get_close_matches(word, names, 1, cutoff) if isinstance(word, str) else []
    place = f" {where[close[0]]}" if close and where else ""
    return f"did you mean {close[0]}{place}?" if close else ""
