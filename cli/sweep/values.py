"""The ``--set key=a,b`` arguments of a sweep: lists and ranges of values, and the names of their runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from optuna.distributions import FloatDistribution, IntDistribution

from files.usage_error import UsageError

_NAME_LENGTH = 96
_UNSAFE = re.compile(r"[^a-z0-9_.+-]+", re.IGNORECASE)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"(log:)?{_NUMBER}\.\.{_NUMBER}(?::{_NUMBER})?")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')


class SweepError(UsageError):
    """The sweep cannot be run; the message may have several lines."""


@dataclass(frozen=True)
class Setting:
    """The key and values of one ``--set`` argument."""

    key: str
    values: tuple[str, ...]
    """Values as written, each the right side of an override of a config; of a range its two ends."""
    range: FloatDistribution | IntDistribution | None = None

    @property
    def is_axis(self) -> bool:
        return len(self.values) > 1


def format_values(values: Mapping[str, str]) -> str:
    """Format values as ``optimizer.learning_rate=1e-3, training.batch_size=16``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def read_settings(texts: Sequence[str], managed_keys: Collection[str]) -> list[Setting]:
    """Parse the ``--set`` arguments of a sweep.

    Args:
        texts: the arguments.
        managed_keys: keys that the sweep sets itself; a name that ends in a dot is a whole section.

    Raises:
        SweepError: an argument is malformed, a key is set twice or managed by the sweep, or no key has several values.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip()
        if not equals or not key:
            raise SweepError(f"--set {text}: expected section.key=value or section.key=value,value")
        if any(key == managed or (managed.endswith(".") and key.startswith(managed)) for managed in managed_keys):
            raise SweepError(f"--set {text}: the sweep sets the paths of its runs; use --directory")
        if key in settings:
            raise SweepError(f"--set {text}: {key} is set twice; write its values with commas: {key}=a,b")
        try:
            numbers = parse_range(value)
            values = split_values(value) if numbers is None else [repr(numbers.low), repr(numbers.high)]
        except ValueError as error:
            raise SweepError(f"--set {key}={error}") from None
        settings[key] = Setting(key, tuple(values), numbers)
    if not any(setting.is_axis for setting in settings.values()):
        raise SweepError("nothing to sweep: give a key several values, as in --set optimizer.learning_rate=1e-3,3e-3")
    return list(settings.values())


def split_values(text: str) -> list[str]:
    """Split at commas, except those inside quotes, brackets and braces.

    Raises:
        SweepError: a bracket or a quote is not closed, or a value is empty.
    """
    values: list[str] = []
    open_parts: list[str] = []
    for part in text.split(","):
        open_parts.append(part)
        value = ",".join(open_parts).strip()
        if _is_complete(value):
            values.append(value)
            open_parts = []
    if open_parts:
        raise SweepError(f"{text}: a quote or a bracket is not closed")
    if len(values) > 1 and "" in values:
        raise SweepError(f'{text}: a value between the commas is empty; write "" for an empty string')
    return values


def _is_complete(value: str) -> bool:
    """Return whether all quotes and brackets are closed; in a bare word they are ordinary letters."""
    if not value.startswith(('"', "'", "[", "{")):
        return True
    rest = _QUOTED.sub("", value)
    is_balanced = rest.count("[") == rest.count("]") and rest.count("{") == rest.count("}")
    return is_balanced and '"' not in rest and "'" not in rest


def parse_range(text: str) -> FloatDistribution | IntDistribution | None:
    """Parse ``LOW..HIGH``, ``LOW..HIGH:STEP`` or ``log:LOW..HIGH``; None: other text, which is a value.

    Raises:
        ValueError: the ends or the step are not those of a range.
    """
    parts = _RANGE.fullmatch(text.strip())
    if parts is None:
        if text.startswith("log:") and ".." in text:
            raise SweepError(f"{text}: expected log:LOW..HIGH, in numbers")
        return None
    is_log, numbers = parts[1] is not None, [number for number in parts.groups()[1:] if number is not None]
    is_integer = all(re.fullmatch(r"[-+]?\d+", number) for number in numbers)
    low, high, *steps = map(int if is_integer else float, numbers)
    if low >= high:
        raise SweepError(f"{text}: the lower end comes first: LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH")
    try:
        if is_integer:
            return IntDistribution(int(low), int(high), log=is_log, step=int(steps[0]) if steps else 1)
        return FloatDistribution(low, high, log=is_log, step=steps[0] if steps else None)
    except ValueError as error:
        raise SweepError(f"{text}: {error}") from None


def format_number(numbers: FloatDistribution | IntDistribution, value: float) -> str:
    """Format a number of a range; one without a step with four digits, but within the range."""
    if isinstance(numbers, IntDistribution):
        return str(int(value))
    if numbers.step is None:
        value = min(max(float(f"{value:.4g}"), numbers.low), numbers.high)
    return repr(float(f"{value:.12g}"))


def name_run(values: Mapping[str, str]) -> str:
    """Build a name of shortened keys and their values, with characters that every file system supports."""
    short = short_keys(values)
    parts = [f"{short[key]}-{value}" for key, value in values.items()]
    name = "_".join(_UNSAFE.sub("-", part).rstrip("-.") for part in parts)
    if name == "_".join(parts) and name == name.lower() and len(name) <= _NAME_LENGTH:
        return name
    return f"{name[:_NAME_LENGTH]}-{hashlib.sha256(format_values(values).encode()).hexdigest()[:6]}"


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Shorten dotted keys to the fewest last parts that are unambiguous."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return short


def parse_numbers(texts: Sequence[str]) -> list[float] | None:
    """Return values as numbers; None: one is something else."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def is_logarithmic(numbers: Sequence[float]) -> bool:
    """Return whether numbers are better spread on a logarithmic scale: they are positive, and differ by a decade."""
    return min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
