"""JSON numbers within bounds, and strings of the common formats, as expressions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from diffusionlm.inference.constraints.expressions import parse_regex

MAX_DIGITS = 15
"""Of each part of a number, and of a number with bounds in all: decimals of 15 digits have the order of their doubles,
so that bounds hold for every reader."""
NUM_PLACES = 6
"""Of these the decimal places of a number with bounds."""

_POINT = r"\."
_NATURAL = rf"[1-9]\d{{0,{MAX_DIGITS - 1}}}"
INTEGER = parse_regex(f"-?(?:0|{_NATURAL})")
NUMBER = parse_regex(rf"-?(?:0|{_NATURAL})(?:\.\d{{1,{MAX_DIGITS}}})?(?:[eE][+-]?\d{{1,2}})?")


def number_between(low: int, high: int, num_places: int) -> str:
    """A regular expression of the numbers between two bounds, which are in units of the last decimal place."""
    unit, options = 10**num_places, []
    for sign, first, last in (("-", max(1, -high), -low), ("", max(0, low), high)):
        start, end = -(-first // unit), (last + 1) // unit  # whole numbers with any decimal places
        wholes = []
        for length in range(1, MAX_DIGITS + 1):
            smallest, largest = max(start, 10 ** (length - 1) if length > 1 else 0), min(end, 10**length) - 1
            if smallest <= largest:
                wholes.append(_digits(str(smallest), str(largest)))
        if wholes:
            options.append(f"{sign}(?:{'|'.join(wholes)}){_digits('0' * num_places, '9' * num_places, _POINT)}")
        ends = sorted({first // unit, last // unit}) if first <= last else []
        for whole in (number for number in ends if not start <= number < end):  # those with some decimal places
            lowest, highest = max(first - whole * unit, 0), min(last - whole * unit, unit - 1)
            options.append(f"{sign}{whole}{_digits(f'{lowest:0{num_places}}', f'{highest:0{num_places}}', _POINT)}")
    return "|".join(options)


def _digits(low: str, high: str, point: str | None = None) -> str:
    """A regular expression of the digits between two bounds of equal length; with a point of decimal places, where
    zeros at the end may be left out."""
    following = None if point is None else ""
    if not low.strip("0") and not high.strip("9"):  # any digits
        return rf"\d{{{len(low)}}}" if point is None else rf"(?:{point}\d{{1,{len(low)}}})?" if low else ""
    first, last, zeros, nines = int(low[0]), int(high[0]), "0" * (len(low) - 1), "9" * (len(low) - 1)
    branches = [(low[0], low[1:], high[1:] if first == last else nines)]
    branches += [(f"[{first + 1}-{last - 1}]", zeros, nines)] if last > first + 1 else []
    branches += [(high[0], zeros, high[1:])] if last > first else []
    options = [f"{point or ''}{digit}{_digits(smallest, largest, following)}" for digit, smallest, largest in branches]
    if point is not None and not low.strip("0"):
        options.append("")
    return f"(?:{'|'.join(options)})"


_DATE = (
    r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
"""Dates that exist in every year: the 29th of February is not written."""
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_MINUTES = r"\d{1,2}M(?:\d{1,2}S)?"
_HOURS = rf"T(?:\d{{1,2}}H(?:{_MINUTES})?|{_MINUTES}|\d{{1,2}}S)"
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20})?"
_DOMAIN = rf"(?:{_LABEL}\.){{1,2}}[A-Za-z]{{2,20}}"
_LOCAL = "[A-Za-z0-9_+-]{1,20}"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9a-f]{1,4}"


def _groups(minimum: int, maximum: int) -> str:
    """Groups of an IPv6 address, with a colon between two."""
    groups = rf"{_HEX}(?::{_HEX}){{{max(minimum, 1) - 1},{maximum - 1}}}"
    return groups if minimum else f"(?:{groups})?"


_COMPRESSED = "|".join(f"{_groups(left, left) if left else ''}::{_groups(0, 7 - left)}" for left in range(7))
_IN_PATH, _IN_QUERY = ("[A-Za-z0-9._~!$&'()*+,;=:@/-]{0,60}", "[A-Za-z0-9._~!$&'()*+,;=:@/?-]{0,30}")

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": rf"P(?:\d{{1,4}}D(?:{_HOURS})?|{_HOURS})",
        "email": rf"{_LOCAL}(?:\.{_LOCAL})?@{_DOMAIN}",
        "hostname": rf"(?:{_LABEL}\.){{0,2}}[A-Za-z]{{2,20}}",
        "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
        "ipv6": f"{_groups(8, 8)}|{_groups(7, 7)}::|{_COMPRESSED}",
        "uri": rf"https?://{_DOMAIN}(?::[1-9]\d{{0,3}})?(?:/{_IN_PATH})?(?:\?{_IN_QUERY})?(?:#{_IN_QUERY})?",
        "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        "uuid4": "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    }
)
"""Regular expressions of the strings that are written: all are valid, and they are not all that are."""
MAX_FORMAT_LENGTH = 250
"""No string of a format is longer."""
FREE_FORMATS = ("binary", "password", "path")
"""Formats of any string."""
