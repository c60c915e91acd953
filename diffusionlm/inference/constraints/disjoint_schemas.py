"""Whether a JSON value can fit two schemas: if none fits two options of ``oneOf``, it means the same as ``anyOf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_COMPARISONS = 1 << 19
"""Of schemas, and of the values in their ``enum``."""
MAX_COMPARISON_DEPTH = 32


class DisjointSchemas:
    """Compares pairs of schemas; ``resolve`` returns the part that a ``$ref`` names."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve, self._num_comparisons = resolve, 0

    def are_disjoint(self, left: Any, right: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value fits both schemas; not if that takes too many comparisons."""
        self._num_comparisons += 1
        is_too_much = depth > MAX_COMPARISON_DEPTH or self._num_comparisons > MAX_COMPARISONS
        if is_too_much or not (isinstance(left, Mapping) and isinstance(right, Mapping)):
            return False
        for one, other in ((left, right), (right, left)):
            if "$ref" in one:
                return self.are_disjoint(self._resolve(one["$ref"]), other, depth + 1)
            for key, combine in (("allOf", any), ("anyOf", all), ("oneOf", all)):
                if key in one:
                    return combine(self.are_disjoint(option, other, depth + 1) for option in one[key])
        for one, other in ((left, right), (right, left)):
            if "const" in one or "enum" in one:
                values = _list_values(one)
                self._num_comparisons += len(values)
                if "const" in other or "enum" in other:
                    return values.isdisjoint(_list_values(other))
                return not {name for name, _ in values} & _list_types(other)
        types = _list_types(left) & _list_types(right)
        return not types or (
            types == {"object"} and (self._have_property(left, right, depth) or self._have_property(right, left, depth))
        )

    def _have_property(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Whether a property that the first schema requires is impossible in the second one, or has other values."""
        own, others = one.get("properties", {}), other.get("properties", {})
        is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
        return any(
            is_closed if name not in others else self.are_disjoint(own.get(name), others[name], depth + 1)
            for name in one.get("required", ())
        )


def _list_types(schema: Mapping[str, Any]) -> set[str]:
    """Types of the values of a schema; an integer is a number."""
    types = schema.get("type", ["object", "array", "string", "number", "boolean", "null"])
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _list_values(schema: Mapping[str, Any]) -> set[tuple[str, Any]]:
    """Types and values of ``const`` or ``enum``; of arrays and objects the types alone."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return {(names.get(type(value), "null"), None if isinstance(value, list | dict) else value) for value in values}
