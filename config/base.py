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

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

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
            if NoneType in union_members(field.annotation) and field.get_default() is not None:
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


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without `Annotated` wrappers; any other type is its only alternative."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for member in get_args(annotation) for kind in union_members(member))
    return (annotation,)
