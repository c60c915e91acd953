"""Load a config: read the TOML file, apply `--set` overrides, validate, and report all problems at once.

Each problem is one line: the line of the file or the override, the key and its value, what was expected, and a remedy
if there is one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from config.base import Section, expand_kind
from config.dump import format_value, shorten_line
from config.schema import (
    child_types,
    child_value,
    describe_types,
    describe_value,
    discriminator_values,
    find_discriminator,
    find_types,
    is_array,
    is_section,
    iterate_tables,
    join_with_or,
    parse_override_value,
    section_fields,
    suggest_fix,
    suggest_name,
)
from config.spellings import explain_key, find_removed, find_renamed
from files.toml_text import KeyPath, parse_toml, read_toml

# Possessive repetitions (*+) keep no positions to return to: a match takes no memory for each character.
_STRING_OR_COMMENT = (
    r'"""(?:[^"\\]|\\.|"(?!""))*+"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:[^"\\\n]|\\.)*+"|' + r"'[^'\n]*'|#[^\n]*"
)
_TOKEN = re.compile(_STRING_OR_COMMENT + r"|[\[\]{}\n]", re.DOTALL)

T = TypeVar("T", bound=Section)

MAX_PROBLEMS = 100
"""Problems of values that an error lists."""


class ConfigError(ValueError):
    """A config is invalid. The message is complete and may have several lines."""


def load_config(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """Read and validate a config.

    Args:
        cls: class of the whole config.
        path: TOML file. None: the defaults and the overrides are the config.
        overrides: texts `section.key=value`; later ones win.

    Raises:
        ConfigError: the file cannot be read, or the config is invalid; lists all problems.
    """
    try:
        text, tree = read_toml(path) if path is not None else ("", {})
        return _validate(cls, _RawConfig(None if path is None else str(path), tree, find_key_lines(text)), overrides)
    except RecursionError:
        raise ConfigError(f"{path or 'the configuration'} is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def validate_config(cls: type[T], values: dict[str, Any], name: str) -> T:
    """Validate a config that was put together from several places.

    Args:
        name: of these places, in errors.

    Raises:
        ConfigError: it is invalid; lists all problems.
    """
    return _validate(cls, _RawConfig(name, copy.deepcopy(values), {}), ())


def _validate(cls: type[T], source: _RawConfig, overrides: Sequence[str]) -> T:
    problems: list[_Problem] = []
    for _ in range(2):  # an override may select the union member that has the key of an earlier one
        problems = [problem for override in overrides for problem in _apply_override(cls, source, override)]
    problems += _rename_keys(source)
    try:
        config = cls.model_validate(source.tree)
    except ValidationError as error:
        problems += _list_problems(cls, source, error)
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
            node = child_value(node, part)
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


def _rename_keys(source: _RawConfig) -> list[_Problem]:
    """Replace the keys of older versions. An override wins over the file, whichever spelling it has."""
    problems = []
    for name in find_removed(source.tree):
        removed = tuple(name.split("."))
        del source.value(removed[:-1])[removed[-1]]
    for old, new_values in list(find_renamed(source.tree)):
        for number, (new, value) in enumerate(new_values.items()):
            table: Any = source.tree
            for part in new[:-1]:
                table = table.setdefault(part, {}) if isinstance(table, dict) else child_value(table, part)
            if not isinstance(table, dict):
                message = f"is the old name of {_format_key(new)}: write {_format_key(new[:-1])} as a table that has it"
                problems.append(source.problem(old, _format_key(old), message))
                continue
            last = new[-1]
            if last not in table or (number == 0 and old in source.overrides and new not in source.overrides):
                table[last] = value
                for origins in (source.lines, source.overrides):
                    origins.update({new: origins[old]} if old in origins else {})  # type: ignore[dict-item]
            elif number == 0 and (old in source.overrides) == (new in source.overrides) and table[last] != value:
                message = f"is the old name of {_format_key(new)}: remove one of them"
                problems.append(source.problem(old, _format_key(old), message))
        del source.value(old[:-1])[old[-1]]
    return problems


def _apply_override(cls: type[Section], source: _RawConfig, override: str) -> list[_Problem]:
    """Put the value of `a.b=value` into the tree, converted to a type that the schema allows there."""
    name, equals, text = override.partition("=")
    parts = _parse_override_key(name)
    if not equals or not parts:
        return [_override_problem(override, "expected section.key=value")]
    node: Any = source.tree
    key: KeyPath = ()
    for number, part in enumerate(parts, 1):
        step: str | int = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) > len(node):
                message = f"has the entries 0 to {len(node) - 1}" if node else "has no entries in the file"
                next_key = _format_key((*key, len(node)))
                return [_override_problem(override, f"{_format_key(key)} {message}, the next one is {next_key}")]
            step = int(part)
            if step == len(node):
                node.append(None)
        elif not isinstance(node, dict):
            return [_override_problem(override, f"{_format_key(key)} is {describe_value(node)} and has no keys")]
        key += (step,)
        types = find_types(cls, source.tree, key)
        value = child_value(node, step)
        if number == len(parts):
            node[step] = parse_override_value(text, types)
        elif value is None and any(is_array(kind) and not any(map(is_section, child_types(kind, 0))) for kind in types):
            return [_override_problem(override, f"{_format_key(key)} is not in the file: set the whole array")]
        elif value is None:
            node[step] = [] if any(is_array(kind) for kind in types) else {}
        elif any(is_section(kind) for kind in types):
            node[step] = expand_kind(value)
        node = node[step]
    source.record_override(key, override)
    return []


def _parse_override_key(name: str) -> list[str]:
    """Split a dotted key as TOML does. Empty: it is not a key."""
    try:
        parts, value = _split_statement(f"{name.strip()} = 0")
    except ValueError:
        return []
    return parts if value == 0 else []


def _format_key(key: KeyPath) -> str:
    return ".".join(str(part) for part in key)


def _format_key_value(key: KeyPath, value: Any) -> str:
    """Format `section.key = value`, or `[section]` for a table."""
    if not key:
        return ""
    return f"[{_format_key(key)}]" if isinstance(value, dict) else f"{_format_key(key)} = {format_value(value)}"


def _list_problems(cls: type[Section], source: _RawConfig, error: ValidationError) -> list[_Problem]:
    """List the problems of a failed validation."""
    located = [(detail, _find_key(source.tree, detail)) for detail in error.errors(include_url=False)[:MAX_PROBLEMS]]
    # Of a value of a plain union, pydantic reports the errors of every member. If the value has the type of one
    # member, only its other errors help.
    better = {key[:size] for detail, key in located for size in range(len(key) + (not _is_type_error(detail)))}
    return [
        _convert_error(cls, source, detail, key)
        for detail, key in located
        if not (_is_type_error(detail) and key in better)
    ]


def _find_key(tree: dict[str, Any], error: ErrorDetails) -> KeyPath:
    """Return the key of an error: its location, without the names of union members that pydantic inserts into it."""
    key: KeyPath = ()
    node: Any = tree
    for part in error["loc"]:
        if child_value(node, part) is not None:
            key, node = (*key, part), child_value(node, part)
    return (*key, error["loc"][-1]) if error["type"] == "missing" else key


def _is_type_error(error: ErrorDetails) -> bool:
    return error["type"].endswith("_type") or error["type"] in ("literal_error", "is_instance_of", "enum")


def _convert_error(cls: type[Section], source: _RawConfig, error: ErrorDetails, key: KeyPath) -> _Problem:
    types, value = find_types(cls, source.tree, key), source.value(key)
    match error["type"]:
        case "extra_forbidden":
            message = explain_key(_format_key(key)) or _explain_unknown(cls, source, key)
        case "missing":
            return _explain_missing(source, key, types)
        case "union_tag_invalid" | "union_tag_not_found" | "model_attributes_type":
            return _explain_bad_discriminator(source, key, types)
        case "value_error":
            message = str(error["ctx"]["error"])
        case _ if _is_type_error(error):
            message = f"expected {describe_types(types)}, got {describe_value(value)}{suggest_fix(value, types)}"
        case "string_too_short" | "too_short" if error["ctx"]["min_length"] == 1:
            message = "must not be empty"
        case _:
            message = re.sub(r"^(Input|String|Tuple|List|Dictionary) should", "must", error["msg"])
            message = message.replace("greater than or equal to", "at least").replace(
                "less than or equal to", "at most"
            )
    return source.problem(key, _format_key_value(key, value), message)


def _explain_bad_discriminator(source: _RawConfig, key: KeyPath, types: Sequence[Any]) -> _Problem:
    value = source.value(key)
    sections = [kind for kind in types if is_section(kind)]
    tag = find_discriminator(sections) or "kind"
    words = [word for section in sections for word in discriminator_values(section, tag)]
    expected = join_with_or([format_value(word) for word in words])
    if not isinstance(value, dict):
        message = f"expected a table with {tag} = {expected}, got {describe_value(value)}"
        return source.problem(key, _format_key_value(key, value), message)
    key = (*key, tag)
    if tag not in value:
        return source.problem(key, _format_key(key), f"missing (choose {expected})")
    hint = suggest_name(value[tag], words)
    message = f"expected {expected}, got {describe_value(value[tag])}{hint and f' ({hint})'}"
    return source.problem(key, _format_key_value(key, value[tag]), message)


def _explain_missing(source: _RawConfig, key: KeyPath, types: Sequence[Any]) -> _Problem:
    sections = [kind for kind in types if is_section(kind)]
    name, label = key[-1], _format_key(key)
    if sections:
        required = [name for name, info in section_fields(sections[0]).items() if info.is_required()]
        hint = f" with {', '.join(required)}" if required and len(sections) == 1 else ""
        return source.problem(key, f"[{label}]", f"missing section (add [{label}]{hint})")
    if source.name is None:
        remedy = f"--set {label}=..."
    elif len(key) == 1:
        remedy = f"{name} = ... at the top of the file"
    elif isinstance(key[-2], int):
        remedy = f"{name} = ... to entry {key[-2]} of [[{_format_key(key[:-2])}]]"
    else:
        remedy = f"{name} = ... to [{_format_key(key[:-1])}]"
    return source.problem(key, label, f"missing (add {remedy}: {describe_types(types)})")


def _explain_unknown(cls: type[Section], source: _RawConfig, key: KeyPath) -> str:
    """Suggest the section of an unknown key, or a key with a similar name."""
    name = str(key[-1])
    here = next((kind for kind in find_types(cls, source.tree, key[:-1]) if is_section(kind)), cls)
    path = _format_key(tuple(part for part in key[:-1] if isinstance(part, str)))
    hints: dict[str, None] = {}
    elsewhere: dict[str, str] = {}
    for table, heading, section in iterate_tables(cls):
        location = f"in {heading}" if table else "at the top of the file"
        elsewhere = dict.fromkeys(section_fields(section), location) | elsewhere
        if section is here or name not in section_fields(section):
            continue
        if table == path:
            tag = find_discriminator([section, here]) or "kind"
            hints[f"{name} needs {tag} = {format_value(next(iter(discriminator_values(section, tag)), '...'))}"] = None
        elif any(is_section(kind) for kind in child_types(section, name)):
            hints[f"did you mean [{table}.{name}]?" if table else f"did you mean [{name}]?"] = None
        else:
            hints[f"{name} belongs {location}"] = None
    close = suggest_name(name, list(section_fields(here)))
    if not hints and not close:
        close = suggest_name(name, list(elsewhere), cutoff=0.75, locations=elsewhere)
    suggestions = [*list(hints)[:3], *([close] if close else [])]
    problem = "unknown section" if isinstance(source.value(key), dict) else "unknown key"
    return f"{problem} ({'; '.join(suggestions) or 'known keys: ' + ', '.join(section_fields(here))})"


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Find the lines of section headers and keys in valid TOML text; of an inline table only the first key."""
    lines: dict[KeyPath, int] = {}
    entries: dict[KeyPath, int] = {}
    section: KeyPath = ()
    for line, statement in _iterate_statements(text):
        is_header, is_entry = statement.startswith("["), statement.startswith("[[")
        parts, _ = _split_statement(statement)
        key = () if is_header else section
        for number, part in enumerate(parts, 1):
            key += (part,)
            lines.setdefault(key, line)
            if is_entry and number == len(parts):
                entries[key] = entries.get(key, 0) + 1
            if key in entries:
                key += (entries[key] - 1,)
        lines[key] = line
        section = key if is_header else section
    return lines


def _iterate_statements(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over line number and text of each header and each `key = value`."""
    depth, start, line = 0, 0, 1
    for token in _TOKEN.finditer(text + "\n"):
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        elif token[0] == "\n" and depth == 0:
            statement = text[start : token.start()].strip()
            if statement and not statement.startswith("#"):
                yield line, statement
            line += text.count("\n", start, token.end())
            start = token.end()


def _split_statement(statement: str) -> tuple[list[str], Any]:
    """Return the parts of the dotted key of a header or a `key = value`, and the value."""
    parts: list[str] = []
    value: Any = parse_toml(statement)
    while isinstance(value, dict) and value:
        part, value = next(iter(value.items()))
        parts.append(part)
    return parts, value
