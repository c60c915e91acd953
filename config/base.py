"""The base class of every config section and the field types that sections share.

A config is a tree of `Section` classes. Sections are strict: a TOML value of the wrong type is
an error and never converted, with three exceptions that TOML needs: an integer is a valid float,
a string is a valid path and an array is a valid tuple.

Rules for those who write sections:

* TOML has no null, so a field that may be None must have None as its default. `to_toml` leaves
  such fields out, and loading its output puts the default back.
* A string literal under a field is its description in `--schema` and in editors.
* Use `TupleOf[Part]` for arrays (also arrays of tables), so that a config stays immutable.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

_Item = TypeVar("_Item")


class Section(BaseModel):
    """One table of a config file: immutable, strict, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        # Fields such as `model_type` are natural in a section; no method here clashes with them.
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Reject fields whose None could not be written to TOML and read back."""
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            if NoneType in alternatives(field.annotation) and field.get_default() is not None:
                raise TypeError(f"{cls.__name__}.{name} may be None, so None must be its default (TOML has no null)")


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
"""0 <= x <= 1."""

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
"""0 < x < 1."""

HalfOpenFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""0 <= x < 1, as for a dropout or a momentum that may be off."""

PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
"""0 < x <= 1, as for a share that may be everything but not nothing."""

NonEmptyStr = Annotated[str, Field(min_length=1)]

# `strict=False` below concerns the container alone: its items keep the strictness of the section.
ConfigPath = Annotated[Path, Field(strict=False)]
"""A path, written as a string in TOML."""

TupleOf = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A tuple, written as an array in TOML: `TupleOf[Part]` is an array of tables."""

StrTuple = Annotated[tuple[str, ...], Field(strict=False)]
IntTuple = Annotated[tuple[int, ...], Field(strict=False)]
FloatTuple = Annotated[tuple[float, ...], Field(strict=False)]


# ---- What a schema says ----


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without `Annotated` wrappers; any other type is its only alternative."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for member in get_args(annotation) for kind in alternatives(member))
    return (annotation,)


def is_section(kind: Any) -> bool:
    """Whether `kind` is a Section class."""
    return isinstance(kind, type) and issubclass(kind, Section)


def is_array(kind: Any) -> bool:
    """Whether `kind` is written as an array in TOML."""
    return (get_origin(kind) or kind) in (tuple, list, set, frozenset)


def is_dict(kind: Any) -> bool:
    """Whether `kind` is a table with free keys."""
    return (get_origin(kind) or kind) is dict


def child_kinds(kind: Any, key: str | int) -> tuple[Any, ...]:
    """The types that `key` may have in a value of type `kind`; empty where there is no such key."""
    args = get_args(kind)
    if is_section(kind):
        field = kind.model_fields.get(key)
        return alternatives(field.annotation) if field is not None else ()
    if is_dict(kind):
        return alternatives(args[1]) if len(args) == 2 else (Any,)
    if is_array(kind) and isinstance(key, int):
        if not args:
            return (Any,)
        if len(args) == 1 or args[-1] is Ellipsis:
            return alternatives(args[0])
        return alternatives(args[key]) if key < len(args) else ()
    return ()


def tag_values(section: type[Section], tag: str) -> tuple[Any, ...]:
    """The values that select `section` in a union discriminated by the field `tag`."""
    field = section.model_fields.get(tag)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def tag_name(sections: Sequence[type[Section]]) -> str | None:
    """The field whose literals tell the members of a union of sections apart, if there is one."""
    if len(sections) < 2:
        return None
    for name in sections[0].model_fields:
        values = [value for section in sections for value in tag_values(section, name)]
        if all(tag_values(section, name) for section in sections) and len(values) == len(set(values)):
            return name
    return None


def tables(section: type[Section], path: str = "", heading: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Every table below `section`, and itself: (dotted path, TOML heading, class)."""
    yield path, heading, section
    for name, field in section.model_fields.items():
        inner = f"{path}.{name}" if path else name
        for kind in alternatives(field.annotation):
            if is_section(kind):
                yield from tables(kind, inner, f"[{inner}]")
            elif is_array(kind):
                for item in child_kinds(kind, 0):
                    if is_section(item):
                        yield from tables(item, inner, f"[[{inner}]]")


def default_of(section: type[Section], name: str) -> Any:
    """The default of a field; None if it has none or one that depends on other fields."""
    info = section.model_fields[name]
    if info.is_required() or (info.default_factory is not None and info.default_factory_takes_validated_data):
        return None
    return info.get_default(call_default_factory=True)


def select_member(kinds: Sequence[Any], table: Any, default: Any) -> tuple[Any, ...]:
    """`kinds` without the members of a discriminated union that the tag, given or default, does not select."""
    sections = [kind for kind in kinds if is_section(kind)]
    tag = tag_name(sections)
    if tag is None or not isinstance(table, dict):
        return tuple(kinds)
    value = table.get(tag, getattr(default, tag, None))
    chosen = [kind for kind in sections if value in tag_values(kind, tag)]
    return tuple(kind for kind in kinds if kind not in sections or kind in (chosen or sections))


# ---- Texts typed by the schema ----

_SHORT_FLOAT = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
"""A number that every shell user writes and TOML does not know: `.5` and `1.`."""


def typed_value(text: str, kinds: Sequence[Any]) -> Any:
    """The value that `text` of a command line means where one of the types `kinds` is wanted.

    What fits none of them is returned for the validation to complain about.
    """
    word = text.strip()
    words = _literals(kinds)
    if word in words:
        return word
    if NoneType in kinds and word.lower() == "none":
        return None
    is_toml, value = _toml_value(word)
    if is_toml and any(_fits(value, kind) for kind in kinds):
        return value
    if any(kind in (str, Path) for kind in kinds) and not word.startswith("["):
        return text
    if float in kinds and not is_toml and _SHORT_FLOAT.fullmatch(word):
        return float(word)
    for kind in kinds:
        items = child_kinds(kind, 0) if is_array(kind) else ()
        if items and not any(is_section(item) for item in items) and not isinstance(value, dict):
            inside = word[1:-1] if word.startswith("[") and word.endswith("]") else word
            if "[" in inside:
                break
            entries = inside.split(",") if inside.strip() else []
            return [typed_value(entry.strip(), child_kinds(kind, index)) for index, entry in enumerate(entries)]
    wants_text = any(isinstance(value, str) for value in words) or any(kind in (str, Path) for kind in kinds)
    return value if is_toml and (isinstance(value, str) or not wants_text) else text


def _literals(kinds: Sequence[Any]) -> list[Any]:
    return [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _toml_value(text: str) -> tuple[bool, Any]:
    """Whether `text` is one TOML value, and that value."""
    try:
        table = tomllib.loads(f"v={text}")
    except (ValueError, RecursionError):
        return False, None
    return list(table) == ["v"], table["v"]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a TOML value has the type `kind`, leaving aside its bounds and the contents of tables."""
    if get_origin(kind) is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(kind))
    if isinstance(value, list):
        return is_array(kind) and all(
            any(_fits(item, inner) for inner in child_kinds(kind, index)) for index, item in enumerate(value)
        )
    if isinstance(value, dict):
        return is_section(kind) or is_dict(kind)
    return kind in (Any, type(value)) or (type(value), kind) in ((int, float), (str, Path))


# ---- Types and values in plain words ----

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
}


def describe(kinds: Sequence[Any]) -> str:
    """The types in plain words, as in `expected an integer or "auto"`."""
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [json.dumps(value, ensure_ascii=False) for value in get_args(kind)]
        elif is_array(kind):
            items = {_WORDS[item][1] if item in _WORDS else "" for item in child_kinds(kind, 0)}
            items |= {"tables" for item in child_kinds(kind, 0) if is_section(item)}
            known = " or ".join(sorted(items - {""}))
            words.append(f"an array of {known}" if known else "an array")
        elif is_section(kind) or is_dict(kind):
            words.append("a table")
        elif kind is not NoneType:
            words.append(_WORDS[kind][0] if kind in _WORDS else getattr(kind, "__name__", str(kind)))
    return join_words(list(dict.fromkeys(words)))


def join_words(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def got(value: Any) -> str:
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


def remedy(value: Any, kinds: Sequence[Any]) -> str:
    """In parentheses, how to write a value that is of none of the types `kinds`; empty if that is not clear."""
    words = _literals(kinds)
    if isinstance(value, str) and (hint := close_match(value, words)):
        return f" ({hint})"
    if isinstance(value, str):
        is_toml, meant = _toml_value(value.lower() if bool in kinds else value)
        if is_toml and not isinstance(meant, str) and any(_fits(meant, kind) for kind in kinds):
            return f" (write {value.lower() if bool in kinds else value} without quotes)"
    elif isinstance(value, float) and value.is_integer() and int in kinds:
        return f" (write {int(value)})"
    elif any(kind in (str, Path) for kind in kinds) and isinstance(value, (bool, int, float)):
        return f' (write "{json.dumps(value)}" with quotes)'
    elif any(_fits([value], kind) for kind in kinds):
        return f" (write [{json.dumps(value)}])" if isinstance(value, (bool, int, float)) else " (put it in [ ])"
    return ""


def close_match(word: Any, known: Sequence[Any], cutoff: float = 0.6, where: Mapping[str, str] | None = None) -> str:
    """`did you mean max_steps?` if one of the known words is like this one; `where` tells where each is."""
    names = [name for name in known if isinstance(name, str)]
    close = difflib.get_close_matches(word, names, 1, cutoff) if isinstance(word, str) else []
    place = f" {where[close[0]]}" if close and where else ""
    return f"did you mean {close[0]}{place}?" if close else ""
