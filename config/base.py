"""The base class of config sections, and the field types that sections share.

A config is a tree of `Section` classes. Sections are strict: a TOML value of the wrong type is an error and is not
converted, with three exceptions that TOML needs: an integer is a valid float, a string is a valid path and an array is
a valid tuple.

To write a section:

* Give a field that may be None the default None. TOML has no null: `to_toml` omits such fields, and loading restores
  the default.
* Describe a field in a string literal below it; `--schema` and editors show it.
* Use `TupleOf[Entry]` for arrays, also for arrays of tables: a config is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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
        # Allow fields such as `model_type`.
        protected_namespaces=(),
    )

    default_tags: ClassVar[Mapping[str | int, tuple[str, Any]]] = {}
    """Fields that are a discriminated union with a default -> the name of the tag, and the default's tag."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Reject a field that may be None and has another default: TOML could not hold its None."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.default_tags = {
            name: (field.discriminator, getattr(field.default, field.discriminator))
            for name, field in cls.model_fields.items()
            if isinstance(field.discriminator, str) and hasattr(field.default, field.discriminator)
        }
        for name, field in cls.model_fields.items():
            if NoneType in union_members(field.annotation) and field.get_default() is not None:
                raise TypeError(f"{cls.__name__}.{name} may be None, so None must be its default (TOML has no null)")

    @model_validator(mode="before")
    @classmethod
    def _add_default_tags(cls, values: Any) -> Any:
        """Add the default's tag to a table without one: pydantic requires it, for users it is a key with a default."""
        for name, (tag, default) in cls.default_tags.items() if isinstance(values, dict) else ():
            if isinstance(values.get(name), dict) and tag not in values[name]:
                values = {**values, name: {tag: default, **values[name]}}
        return values


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
"""0 <= x <= 1."""

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
"""0 < x < 1."""

HalfOpenFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""0 <= x < 1, for example a momentum."""

PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
"""0 < x <= 1, for example a share that must not be empty."""


def _check_path_is_not_empty(value: Any) -> Any:
    """Reject the empty text, which `Path` takes for the working directory."""
    if isinstance(value, str) and not value.strip():
        raise ValueError('is empty: name a path; "." is the working directory')
    return value


def _check_has_no_nul(value: Any) -> Any:
    """Reject the character NUL, which no path of a system has."""
    if "\0" in str(value):
        raise ValueError("contains the character NUL (\\u0000): remove it")
    return value


NonEmptyStr = Annotated[str, Field(min_length=1), AfterValidator(_check_has_no_nul)]
"""A name or a path as text."""

# `strict=False` below applies to the container; its items are strict, as the section is.
ConfigPath = Annotated[
    Path, Field(strict=False), BeforeValidator(_check_path_is_not_empty), AfterValidator(_check_has_no_nul)
]
"""A path, written as a string in TOML."""

TupleOf = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A tuple, written as an array in TOML: `TupleOf[Entry]` is an array of tables."""


def check_distinct(lists: Mapping[str, Sequence[Any]]) -> None:
    """Check that no list, by key, contains a value twice.

    Raises:
        ValueError: one does; names its key and the value.
    """
    for key, values in lists.items():
        duplicate = next((value for value in values if values.count(value) > 1), None)
        if duplicate is not None:
            raise ValueError(f"{key}: {duplicate!r} is given twice; remove one of them")


def expand_kind(value: object) -> object:
    """Expand a ``kind`` alone, such as "linear", to a table that has it."""
    return {"kind": value} if isinstance(value, str) else value


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, without `Annotated`. The only member of any other type is the type itself."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for member in get_args(annotation) for kind in union_members(member))
    return (annotation,)
