"""Load a config: read the TOML file, apply `--set` overrides, validate, and report all problems at once.

Each problem is one line: the line of the file or the override, the key and its value, what was expected, and a remedy
if there is one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from config.base import Section
from config.dump import format_value, shorten_line
from config.schema import (
    child_types,
    describe_types,
    describe_value,
    discriminator_values,
    field_default,
    find_discriminator,
    is_array,
    is_dict,
    is_section,
    iterate_tables,
    join_with_or,
    parse_override_value,
    section_fields,
    select_union_members,
    suggest_fix,
    suggest_name,
)
from files.toml_text import KeyPath, find_key_lines, parse_toml, read_toml

T = TypeVar("T", bound=Section)

MAX_PROBLEMS = 100
"""Problems of values that an error lists."""


class ConfigError(ValueError):
    """A config is invalid. The message is complete and may have several lines."""


def load_config(
    cls: type[T],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    key_hints: Mapping[str, str] | None = None,
) -> T:
    """Read and validate a config.

    Args:
        cls: class of the whole config.
        path: TOML file. None: the defaults and the overrides are the config.
        overrides: texts `section.key=value`; later ones win.
        key_hints: unknown key (`section.key` or `*.key`) -> advice, reported instead of a guess.

    Raises:
        ConfigError: the file cannot be read, or the config is invalid; lists all problems.
    """
    try:
        return _load_config(cls, path, overrides, key_hints or {})
    except RecursionError:
        raise ConfigError(f"{path or 'the configuration'} is nested too deeply") from None


def _load_config(cls: type[T], path: Path | None, overrides: Sequence[str], key_hints: Mapping[str, str]) -> T:
    try:
        text, tree = read_toml(path) if path is not None else ("", {})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _validate(
        cls, _RawConfig(None if path is None else str(path), tree, find_key_lines(text)), overrides, key_hints
    )


def validate_config(cls: type[T], values: dict[str, Any], name: str, key_hints: Mapping[str, str] | None = None) -> T:
    """Validate a config that was put together from several places.

    Args:
        name: of these places, in errors.

    Raises:
        ConfigError: it is invalid; lists all problems.
    """
    return _validate(cls, _RawConfig(name, copy.deepcopy(values), {}), (), key_hints or {})


def _validate(cls: type[T], source: _RawConfig, overrides: Sequence[str], key_hints: Mapping[str, str]) -> T:
    problems: list[_Problem] = []
    # Twice: an override may select the union member that has the key of an earlier override.
    for _ in range(2):
        problems = [problem for override in overrides for problem in _apply_override(cls, source, override)]
        _add_default_discriminators((cls,), source.tree, None)
    try:
        config = cls.model_validate(source.tree)
    except ValidationError as error:
        problems += _ErrorReport(cls, source, key_hints).problems(error)
    else:
        if not problems:
            return config
    problems.sort(key=lambda problem: problem.sort_key)
    lines = list(dict.fromkeys(shorten_line(problem.text) for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    lines += ["further problems are not listed"] if len(problems) >= MAX_PROBLEMS else []
    raise ConfigError(
        "\n".join([f"{source.name or 'the configuration'} is not a valid {cls.__name__}: {count}", *lines])
    )


def json_schema(cls: type[Section]) -> str:
    """Return the JSON schema of a config, for editors that check and complete TOML files."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class _Problem:
    """One line of the error message."""

    sort_key: tuple[int, int]
    """Problems of the file come first, by line; then those of overrides."""
    text: str


@dataclass
class _RawConfig:
    """Values before validation, and the line or override that each comes from."""

    name: str | None
    """The file, or a description of it."""
    tree: dict[str, Any]
    lines: dict[KeyPath, int]
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def value(self, key: KeyPath) -> Any:
        node: Any = self.tree
        for part in key:
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                return None
        return node

    def record_override(self, key: KeyPath, override: str) -> None:
        """Record that the value of `key`, with everything in it, comes from this override."""
        size = len(key)
        self.overrides = {other_key: text for other_key, text in self.overrides.items() if other_key[:size] != key}
        self.overrides[key] = override
        self.lines = {other_key: line for other_key, line in self.lines.items() if other_key[:size] != key}

    def problem(self, key: KeyPath, label: str, message: str) -> _Problem:
        """Build the problem of `key`: `label`, if any, and message, after the line or override of the key.

        A key without a line of its own (one that is missing) takes that of its table.
        """
        text = f"{label}: {message}" if label else message
        for size in range(len(key), -1, -1):
            parent = key[:size]
            if parent in self.overrides:
                return _override_problem(self.overrides[parent], message if parent == key else text)
            if parent in self.lines:
                return _Problem((0, self.lines[parent]), f"{self.name}:{self.lines[parent]}: {text}")
            inner = [override for other_key, override in self.overrides.items() if size and other_key[:size] == parent]
            if inner:
                return _override_problem(inner[-1], text)
        return _Problem((0, 0), text if self.name is None else f"{self.name}: {text}")


def _override_problem(override: str, message: str) -> _Problem:
    return _Problem((1, 0), f"--set {override}: {message}")


def _apply_override(cls: type[Section], source: _RawConfig, override: str) -> list[_Problem]:
    """Put the value of `a.b=value` into the tree, converted to a type that the schema allows there."""
    name, equals, text = override.partition("=")
    parts = _parse_override_key(name)
    if not equals or not parts:
        return [_override_problem(override, "expected section.key=value")]
    node: Any = source.tree
    types: tuple[Any, ...] = (cls,)
    default: Any = None
    key: KeyPath = ()
    for number, part in enumerate(parts, 1):
        step: str | int = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) > len(node):
                message = (
                    f"{_format_key(key)} has the entries 0 to {len(node) - 1}"
                    if node
                    else f"{_format_key(key)} is empty"
                )
                return [_override_problem(override, f"{message}, the next one is {_format_key((*key, len(node)))}")]
            step = int(part)
            if step == len(node):
                node.append(None)
        elif not isinstance(node, dict):
            return [_override_problem(override, f"{_format_key(key)} is {describe_value(node)} and has no keys")]
        types, default = _child_types_and_default(types, node, default, step)
        key += (step,)
        if number == len(parts):
            node[step] = parse_override_value(text, types)
        elif (node.get(step) if isinstance(node, dict) else node[step]) is None:
            node[step] = _new_container(types, default)
        elif isinstance(node[step], str):
            node[step] = _expand_discriminator(types, node[step])
        node = node[step]
    source.record_override(key, override)
    return []


def _parse_override_key(name: str) -> list[str]:
    """Split a dotted key as TOML does. Empty: it is not a key."""
    try:
        node: Any = parse_toml(f"{name.strip()} = 0")
    except ValueError:
        return []
    parts: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        [(part, node)] = node.items()
        parts.append(part)
    return parts if node == 0 else []


def _child_types_and_default(
    types: Sequence[Any], node: Any, default: Any, step: str | int
) -> tuple[tuple[Any, ...], Any]:
    """Return the types that entry `step` of `node` may have, and its default. `node` is of one of `types`."""
    members = select_union_members(types, node, default)
    inner_types = dict.fromkeys(inner for kind in members for inner in child_types(kind, step))
    owners = [kind for kind in members if is_section(kind) and step in section_fields(kind)]
    defaults = [field_default(kind, str(step)) for kind in owners]
    return tuple(inner_types), defaults[0] if defaults else None


def _new_container(types: Sequence[Any], default: Any) -> Any:
    """Return the empty table, or the array of default entries, that an override of a missing value changes."""
    if any(is_array(kind) for kind in types):
        return [item.model_dump() if isinstance(item, Section) else item for item in default or ()]
    return {}


def _expand_discriminator(types: Sequence[Any], value: str) -> Any:
    """Expand a tag alone, as in `source = "hub"`, to a table with the tag, where a discriminated union is expected."""
    sections = [kind for kind in types if is_section(kind)]
    tag = find_discriminator(sections)
    if tag is not None and any(value in discriminator_values(section, tag) for section in sections):
        return {tag: value}
    return value


def _add_default_discriminators(types: Sequence[Any], node: Any, default: Any) -> None:
    """Add the default's tag to each table of a discriminated union that has no tag.

    Pydantic requires the tag in every such table; for users it is a key with a default, as others are.
    """
    items: list[tuple[Any, Any]] = []
    if isinstance(node, dict):
        tag = find_discriminator([kind for kind in types if is_section(kind)])
        if tag is not None and tag not in node and hasattr(default, tag):
            node[tag] = getattr(default, tag)
        items = list(node.items())
    elif isinstance(node, list):
        items = list(enumerate(node))
    for step, item in items:
        if not isinstance(item, dict | list):
            continue
        inner, inner_default = _child_types_and_default(types, node, default, step)
        _add_default_discriminators(inner, item, inner_default)


_BOUNDS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} entries, has {actual_length}",
    "too_long": "must have at most {max_length} entries, has {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}


def _format_key(key: KeyPath) -> str:
    return ".".join(str(part) for part in key)


def _format_key_value(key: KeyPath, value: Any) -> str:
    """Format `section.key = value`, or `[section]` for a table."""
    if not key:
        return ""
    return f"[{_format_key(key)}]" if isinstance(value, dict) else f"{_format_key(key)} = {format_value(value)}"


@dataclass(frozen=True)
class _ErrorLocation:
    """A pydantic error location, without the names of union members that pydantic inserts into it."""

    key: KeyPath
    types: tuple[Any, ...]
    """Types that the key may have."""
    owner: tuple[Any, ...]
    """Type of the table or array that the key is in."""
    union: KeyPath | None
    """Key of the value of a plain union that the location is in. None: there is none."""
    member: str
    """Label of the union member that pydantic tried."""


def _resolve_location(cls: type[Section], loc: Sequence[str | int]) -> _ErrorLocation:
    key: KeyPath = ()
    types: tuple[Any, ...] = (cls,)
    owner: tuple[Any, ...] = ()
    union: KeyPath | None = None
    member = ""
    candidates = list(types)
    for part in loc:
        if len(candidates) > 1:
            tag = find_discriminator([kind for kind in candidates if is_section(kind)])
            candidates = [kind for kind in candidates if _is_tried_member(kind, str(part), tag)][:1]
            if tag is None:
                union, member = key, str(part)
            continue
        owner = tuple(candidates)
        types = tuple(inner for kind in owner for inner in child_types(kind, part))
        candidates = [kind for kind in types if kind is not NoneType]
        key += (part,)
    return _ErrorLocation(key, types, owner, union, member)


def _is_tried_member(kind: Any, label: str, tag: str | None) -> bool:
    """Return whether `label` is pydantic's label of this union member."""
    if is_section(kind):
        return label in map(str, discriminator_values(kind, tag)) if tag else kind.__name__ in label
    name = getattr(get_origin(kind) or kind, "__name__", str(kind)).lower()
    return f"{name}[" in label if is_array(kind) or is_dict(kind) else name in label.partition("[")[0]


def _is_type_error(error: ErrorDetails) -> bool:
    return error["type"].endswith("_type") or error["type"] in ("literal_error", "is_instance_of", "enum")


@dataclass
class _ErrorReport:
    cls: type[Section]
    source: _RawConfig
    key_hints: Mapping[str, str]

    def problems(self, error: ValidationError) -> list[_Problem]:
        """List the problems of a failed validation."""
        details = error.errors(include_url=False)[:MAX_PROBLEMS]
        located = [(detail, _resolve_location(self.cls, detail["loc"])) for detail in details]
        # For a value of a plain union, pydantic reports the errors of every member. If the value has the type of one
        # member, only the errors of that member help.
        wrong_members = {
            (location.union, location.member) for detail, location in located if _is_wrong_member(detail, location)
        }
        right_unions = {
            location.union for _, location in located if (location.union, location.member) not in wrong_members
        }
        problems: list[_Problem] = []
        for detail, location in located:
            if (
                location.union is None
                or location.union not in right_unions
                or (location.union, location.member) not in wrong_members
            ):
                problems += self._convert_error(detail, location)
        return problems

    def _convert_error(self, error: ErrorDetails, location: _ErrorLocation) -> list[_Problem]:
        key, types, value = location.key, location.types, self.source.value(location.key)
        context = error.get("ctx", {})
        kind = error["type"]
        if kind == "extra_forbidden":
            return self._explain_unknown(key, value, location.owner)
        if kind == "missing":
            return [self._explain_missing(key, types)]
        if kind in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type"):
            return [self._explain_bad_discriminator(key, value, types)]
        if kind in _BOUNDS:
            bounds = {name: str(bound).removesuffix(".0") for name, bound in context.items()}
            message = "must not be empty" if bounds.get("min_length") == "1" else _BOUNDS[kind].format(**bounds)
        elif _is_type_error(error):
            message = f"expected {describe_types(types)}, got {describe_value(value)}{suggest_fix(value, types)}"
        elif kind in ("value_error", "assertion_error"):
            message = str(context["error"])
        else:
            message = error["msg"].replace("Input should", "should")
        return [self.source.problem(key, _format_key_value(key, value), message)]

    def _explain_bad_discriminator(self, key: KeyPath, value: Any, types: Sequence[Any]) -> _Problem:
        sections = [kind for kind in types if is_section(kind)]
        tag = find_discriminator(sections) or "kind"
        words = [word for section in sections for word in discriminator_values(section, tag)]
        expected = join_with_or([format_value(word) for word in words])
        inner = (*key, tag)
        if not isinstance(value, dict):
            return self.source.problem(
                key,
                _format_key_value(key, value),
                f"expected a table with {tag} = {expected}, got {describe_value(value)}",
            )
        if tag not in value:
            return self.source.problem(inner, _format_key(inner), f"missing (choose {expected})")
        hint = suggest_name(value[tag], words)
        message = f"expected {expected}, got {describe_value(value[tag])}{hint and f' ({hint})'}"
        return self.source.problem(inner, _format_key_value(inner, value[tag]), message)

    def _explain_missing(self, key: KeyPath, types: Sequence[Any]) -> _Problem:
        sections = [kind for kind in types if is_section(kind)]
        name, label = key[-1], _format_key(key)
        if sections:
            required = [name for name, info in section_fields(sections[0]).items() if info.is_required()]
            hint = f" with {', '.join(required)}" if required and len(sections) == 1 else ""
            return self.source.problem(key, f"[{label}]", f"missing section (add [{label}]{hint})")
        if self.source.name is None:
            remedy = f"--set {label}=..."
        elif len(key) == 1:
            remedy = f"{name} = ... at the top of the file"
        elif isinstance(key[-2], int):
            remedy = f"{name} = ... to entry {key[-2]} of [[{_format_key(key[:-2])}]]"
        else:
            remedy = f"{name} = ... to [{_format_key(key[:-1])}]"
        return self.source.problem(key, label, f"missing (add {remedy}: {describe_types(types)})")

    def _explain_unknown(self, key: KeyPath, value: Any, owner: Sequence[Any]) -> list[_Problem]:
        # Pydantic does not report the keys of an unknown section, but there may be advice on them.
        inside = {name: self._find_key_hint((*key, name)) for name in value} if isinstance(value, dict) else {}
        problems = [
            self.source.problem((*key, name), _format_key_value((*key, name), value[name]), text)
            for name, text in inside.items()
            if text is not None
        ]
        if not problems or None in inside.values():
            problem = "unknown section" if isinstance(value, dict) else "unknown key"
            hint = self._find_key_hint(key) or f"{problem} ({self._suggest_key(str(key[-1]), key, owner)})"
            problems.append(self.source.problem(key, _format_key_value(key, value), hint))
        return problems

    def _find_key_hint(self, key: KeyPath) -> str | None:
        names = [part for part in key if isinstance(part, str)]
        candidates = (_format_key(key), ".".join(names), f"*.{names[-1]}")
        return next((self.key_hints[name] for name in candidates if name in self.key_hints), None)

    def _suggest_key(self, name: str, key: KeyPath, owner: Sequence[Any]) -> str:
        """Suggest the section of a key of this name, or a key with a similar name."""
        here = next((kind for kind in owner if is_section(kind)), self.cls)
        path = _format_key(tuple(part for part in key[:-1] if isinstance(part, str)))
        homes: list[str] = []
        elsewhere: dict[str, str] = {}
        for table, heading, section in iterate_tables(self.cls):
            location = f"in {heading}" if table else "at the top of the file"
            elsewhere = dict.fromkeys(section_fields(section), location) | elsewhere
            if section is here or name not in section_fields(section):
                continue
            if table == path:
                homes.append(f"{name} needs {_format_discriminator(section, here)}")
            elif any(is_section(kind) for kind in child_types(section, name)):
                homes.append(f"did you mean [{table}.{name}]?" if table else f"did you mean [{name}]?")
            else:
                homes.append(f"{name} belongs {location}")
        hints = list(dict.fromkeys(homes))[:3]
        close = suggest_name(name, list(section_fields(here)))
        if not hints and not close:
            close = suggest_name(name, list(elsewhere), cutoff=0.75, locations=elsewhere)
        hints += [close] if close else []
        return "; ".join(hints) or f"known keys: {', '.join(section_fields(here))}"


def _is_wrong_member(error: ErrorDetails, location: _ErrorLocation) -> bool:
    """Return whether the value does not have the type of the union member that pydantic tried."""
    return location.union == location.key and _is_type_error(error)


def _format_discriminator(section: type[Section], alternative: type[Section]) -> str:
    """Format the tag that selects `section` and not `alternative`, as in `kind = "adam"`."""
    tag = find_discriminator([section, alternative])
    return f"{tag} = {format_value(discriminator_values(section, tag)[0])}" if tag else section.__name__
