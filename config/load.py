"""Loading a config: TOML file, then `--set` overrides, then validation with errors made for people.

Every problem is reported at once, one line each: the line of the file or the override that it comes
from, the value, what is wrong and, where that can be said, the remedy.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from config.base import Section
from config.dump import KeyPath, find_key_lines, format_value
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
    select_union_members,
    suggest_fix,
    suggest_name,
)

T = TypeVar("T", bound=Section)


class ConfigError(ValueError):
    """A config that cannot be used; the message is complete and may have several lines."""


def load_config(
    cls: type[T],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    key_hints: Mapping[str, str] | None = None,
) -> T:
    """Read and validate a config.

    `path` is the TOML file (None: defaults and overrides alone), `overrides` are `section.key=value`
    texts. `renamed` maps keys of older versions or other programs (`section.key` or `*.key`) to the
    advice that is given for them in place of a guess.
    """
    text = _read_text(path) if path is not None else ""
    source = _RawConfig(path, _parse_toml(path, text), find_key_lines(text))
    problems: list[_Problem] = []
    # Twice, because an override may choose the union member that the key of an earlier override is in.
    for _ in range(2):
        problems = [problem for override in overrides for problem in _apply_override(cls, source, override)]
        _add_default_discriminators((cls,), source.tree, None)
    try:
        config = cls.model_validate(source.tree)
    except ValidationError as error:
        problems += _ErrorReport(cls, source, key_hints or {}).problems(error)
    else:
        if not problems:
            return config
    lines = list(dict.fromkeys(problem.text for problem in sorted(problems, key=lambda problem: problem.sort_key)))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    raise ConfigError("\n".join([f"{path or 'the configuration'} is not a valid {cls.__name__}: {count}", *lines]))


def json_schema(cls: type[Section]) -> str:
    """The JSON schema of the config, for editors that check and complete TOML files."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None


def _parse_toml(path: Path | None, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as error:
        at = re.search(r"\(at line (\d+), column \d+\)", str(error))
        if at is None:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        shown = text.split("\n")[int(at[1]) - 1].strip()
        raise ConfigError(f"{path}:{at[1]}: not valid TOML: {error}: {shown}") from None


@dataclass(frozen=True)
class _Problem:
    """A line of the message; problems of the file are first, by line."""

    sort_key: tuple[int, int]
    text: str


@dataclass
class _RawConfig:
    """The values that are to be validated, and the line or override that each is from."""

    path: Path | None
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
        """Note that the value of `key` and all that is in it are from this override."""
        size = len(key)
        self.overrides = {other: text for other, text in self.overrides.items() if other[:size] != key}
        self.overrides[key] = override
        self.lines = {other: line for other, line in self.lines.items() if other[:size] != key}

    def problem(self, key: KeyPath, label: str, message: str) -> _Problem:
        """A problem with `key`, which `label` shows."""
        shown = f"{label}: {message}" if label else message
        for size in range(len(key), -1, -1):
            near = key[:size]
            if near in self.overrides:
                return _override_problem(self.overrides[near], message if near == key else shown)
            if near in self.lines:
                return _Problem((0, self.lines[near]), f"{self.path}:{self.lines[near]}: {shown}")
            inside = [text for other, text in self.overrides.items() if size and other[:size] == near]
            if inside:
                return _override_problem(inside[-1], shown)
        return _Problem((0, 0), shown if self.path is None else f"{self.path}: {shown}")


def _override_problem(override: str, message: str) -> _Problem:
    return _Problem((1, 0), f"--set {override}: {message}")


def _apply_override(cls: type[Section], source: _RawConfig, override: str) -> list[_Problem]:
    """Put one `a.b=value` into the tree, the value typed by the schema."""
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
    """The parts of a dotted key, read as TOML reads it; empty if it is none."""
    try:
        node: Any = tomllib.loads(f"{name.strip()} = 0")
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
    """The types that `step` of `node`, a value of one of `kinds`, may have, and its default."""
    members = select_union_members(types, node, default)
    found = dict.fromkeys(inner for kind in members for inner in child_types(kind, step))
    owners = [kind for kind in members if is_section(kind) and step in kind.model_fields]
    defaults = [field_default(kind, str(step)) for kind in owners]
    return tuple(found), defaults[0] if defaults else None


def _new_container(types: Sequence[Any], default: Any) -> Any:
    """What an override of a key in an absent value starts from; an array starts from its default entries."""
    if any(is_array(kind) for kind in types):
        return [item.model_dump() if isinstance(item, Section) else item for item in default or ()]
    return {}


def _expand_discriminator(types: Sequence[Any], value: str) -> Any:
    """The table that a string stands for, where a union's tag may be written alone: `source = "hub"`."""
    sections = [kind for kind in types if is_section(kind)]
    tag = find_discriminator(sections)
    if tag is not None and any(value in discriminator_values(section, tag) for section in sections):
        return {tag: value}
    return value


def _add_default_discriminators(types: Sequence[Any], node: Any, default: Any) -> None:
    """Give a table of a discriminated union that does not say which member it is the default's tag.

    Pydantic wants the tag in every such table; for a user it is one more key that has a default.
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
    """`section.key = value` or `[section]`."""
    if not key:
        return ""
    return f"[{_format_key(key)}]" if isinstance(value, dict) else f"{_format_key(key)} = {format_value(value)}"


@dataclass(frozen=True)
class _ErrorLocation:
    """What a location of pydantic means: there, the names of union members are among the keys."""

    key: KeyPath
    types: tuple[Any, ...]
    owner: tuple[Any, ...]
    union: KeyPath | None
    """The value of a plain union that the location is in, and the member that pydantic tried."""
    member: str


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
    """Whether pydantic means this member of a union by `label`."""
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
        """The problems that a failed validation found."""
        found = [(detail, _resolve_location(self.cls, detail["loc"])) for detail in error.errors(include_url=False)]
        # For a value of a plain union pydantic tells what each member has against it. If the value has
        # the type of one member, only the complaints of this member are of use.
        wrong = {(place.union, place.member) for detail, place in found if _is_wrong_member(detail, place)}
        right = {place.union for _, place in found if (place.union, place.member) not in wrong}
        problems: list[_Problem] = []
        for detail, place in found:
            if place.union is None or place.union not in right or (place.union, place.member) not in wrong:
                problems += self._convert_error(detail, place)
        return problems

    def _convert_error(self, error: ErrorDetails, place: _ErrorLocation) -> list[_Problem]:
        key, types, value = place.key, place.types, self.source.value(place.key)
        context = error.get("ctx", {})
        kind = error["type"]
        if kind == "extra_forbidden":
            return self._explain_unknown(key, value, place.owner)
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
        wanted = join_with_or([format_value(word) for word in words])
        inner = (*key, tag)
        if not isinstance(value, dict):
            return self.source.problem(
                key,
                _format_key_value(key, value),
                f"expected a table with {tag} = {wanted}, got {describe_value(value)}",
            )
        if tag not in value:
            return self.source.problem(inner, _format_key(inner), f"missing (choose {wanted})")
        hint = suggest_name(value[tag], words)
        message = f"expected {wanted}, got {describe_value(value[tag])}{hint and f' ({hint})'}"
        return self.source.problem(inner, _format_key_value(inner, value[tag]), message)

    def _explain_missing(self, key: KeyPath, types: Sequence[Any]) -> _Problem:
        sections = [kind for kind in types if is_section(kind)]
        name, label = key[-1], _format_key(key)
        if sections:
            needs = [name for name, info in sections[0].model_fields.items() if info.is_required()]
            hint = f" with {', '.join(needs)}" if needs and len(sections) == 1 else ""
            return self.source.problem(key, f"[{label}]", f"missing section (add [{label}]{hint})")
        if self.source.path is None:
            where = f"--set {label}=..."
        elif len(key) == 1:
            where = f"{name} = ... at the top of the file"
        elif isinstance(key[-2], int):
            where = f"{name} = ... to entry {key[-2]} of [[{_format_key(key[:-2])}]]"
        else:
            where = f"{name} = ... to [{_format_key(key[:-1])}]"
        return self.source.problem(key, label, f"missing (add {where}: {describe_types(types)})")

    def _explain_unknown(self, key: KeyPath, value: Any, owner: Sequence[Any]) -> list[_Problem]:
        # The keys of an unknown section are not validated, but there may be advice on them.
        inside = {name: self._find_key_hint((*key, name)) for name in value} if isinstance(value, dict) else {}
        problems = [
            self.source.problem((*key, name), _format_key_value((*key, name), value[name]), text)
            for name, text in inside.items()
            if text is not None
        ]
        if not problems or None in inside.values():
            what = "unknown section" if isinstance(value, dict) else "unknown key"
            hint = self._find_key_hint(key) or f"{what} ({self._suggest_key(str(key[-1]), key, owner)})"
            problems.append(self.source.problem(key, _format_key_value(key, value), hint))
        return problems

    def _find_key_hint(self, key: KeyPath) -> str | None:
        names = [part for part in key if isinstance(part, str)]
        candidates = (_format_key(key), ".".join(names), f"*.{names[-1]}")
        return next((self.key_hints[name] for name in candidates if name in self.key_hints), None)

    def _suggest_key(self, name: str, key: KeyPath, owner: Sequence[Any]) -> str:
        """What may have been meant by an unknown key: where it belongs, or a key with a similar name."""
        here = next((kind for kind in owner if is_section(kind)), self.cls)
        path = _format_key(tuple(part for part in key[:-1] if isinstance(part, str)))
        homes: list[str] = []
        elsewhere: dict[str, str] = {}
        for table, heading, section in iterate_tables(self.cls):
            place = f"in {heading}" if table else "at the top of the file"
            elsewhere = dict.fromkeys(section.model_fields, place) | elsewhere
            if section is here or name not in section.model_fields:
                continue
            if table == path:
                homes.append(f"{name} needs {_format_discriminator(section, here)}")
            elif any(is_section(kind) for kind in child_types(section, name)):
                homes.append(f"did you mean [{table}.{name}]?" if table else f"did you mean [{name}]?")
            else:
                homes.append(f"{name} belongs {place}")
        hints = list(dict.fromkeys(homes))[:3]
        close = suggest_name(name, list(here.model_fields))
        if not hints and not close:
            close = suggest_name(name, list(elsewhere), cutoff=0.75, where=elsewhere)
        hints += [close] if close else []
        return "; ".join(hints) or f"known here: {', '.join(here.model_fields)}"


def _is_wrong_member(error: ErrorDetails, place: _ErrorLocation) -> bool:
    """Whether the value is not even of the type of the union member that pydantic tried."""
    return place.union == place.key and _is_type_error(error)


def _format_discriminator(section: type[Section], other: type[Section]) -> str:
    """What selects `section` and not `other`, as in `kind = "adam"`."""
    tag = find_discriminator([section, other])
    return f"{tag} = {format_value(discriminator_values(section, tag)[0])}" if tag else section.__name__
