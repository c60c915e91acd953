"""Numbers within bounds, exactly, and strings of formats, by readers of the standard library and pydantic."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from pydantic import HttpUrl, TypeAdapter

from diffusionlm.inference.constraints.json_scalars import FORMATS, MAX_FORMAT_LENGTH
from tests.schema_texts import accepts, compile_schema, write_text

KEYS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def is_within(number: Any, bounds: dict[str, Any]) -> bool:
    return bounds.get("minimum", number) <= number <= bounds.get("maximum", number) and bounds.get(
        "exclusiveMinimum", number - 1
    ) < number < bounds.get("exclusiveMaximum", number + 1)


def draw_bounds(rng: np.random.Generator, values: Any) -> dict[str, Any]:
    low, high = sorted(rng.choice(values, 2, replace=False).tolist())
    bounds = {str(rng.choice(KEYS[:2])): low, str(rng.choice(KEYS[2:])): high}
    return {key: value for key, value in bounds.items() if rng.random() < 0.8}


def test_integers_are_those_within_the_bounds() -> None:
    rng = np.random.default_rng(0)
    numbers = range(-1200, 1201)
    for _ in range(40):
        bounds = draw_bounds(rng, np.array([-1000, -999, -101, -10, -9, -1, 0, 1, 7, 10, 99, 100, 305, 1111]))
        if rng.random() < 0.3:
            bounds = {key: value + 0.5 for key, value in bounds.items()}
        if not any(is_within(number, bounds) for number in numbers):
            continue
        automaton = compile_schema({"type": "integer", **bounds})
        for number in numbers:
            assert accepts(automaton, str(number).encode()) == is_within(number, bounds), (number, bounds)
        assert not accepts(automaton, b"-00") and not accepts(automaton, b"01")
    largest = compile_schema({"type": "integer", "minimum": 10**14 + 7, "maximum": 10**400})
    for number, is_expected in ((10**14 + 6, False), (10**14 + 7, True), (10**15 - 1, True), (10**15, False)):
        assert accepts(largest, str(number).encode()) == is_expected


def test_numbers_are_those_within_the_bounds() -> None:
    """All of few digits, those beside the bounds, and random ones that are written; as decimals and as doubles, as
    readers of JSON compare them."""
    rng = np.random.default_rng(0)
    values = np.array([-12.5, -1.0, -1e-7, 0.0, 0.1 + 0.2, 0.25, 0.999, 20.75, 99999.0, 1e8])
    places = ["", ".3", ".250", ".999", ".9990", ".000001", *(f".{number:02}" for number in range(0, 100, 5))]
    grid = [f"{sign}{whole}{place}" for sign in ("", "-") for whole in range(25) for place in places]
    for _ in range(25):
        bounds = draw_bounds(rng, values)
        if not bounds:
            continue
        exact = {key: Fraction(repr(value)) for key, value in bounds.items()}
        unit = Decimal("0.000001")
        beside = [f"{Decimal(repr(value)).quantize(unit) + step * unit:f}" for value in bounds.values()
                  for step in range(-3, 4)]  # fmt: skip
        automaton = compile_schema({"type": "number", **bounds})
        for text in (*grid, *beside, "0.0000001", "0.1234567", "999999999.999999", "1000000000"):
            if text.startswith("-") and not float(text):
                continue
            is_expected = is_within(Fraction(text), exact)
            is_written = len(text.partition(".")[2]) <= 6 and abs(float(text)) < 1e9
            assert accepts(automaton, text.encode()) == (is_expected and is_written), (text, bounds)
            assert not is_written or is_expected == is_within(float(text), bounds), (text, bounds)
        for _ in range(20):
            text = write_text(automaton, rng)
            assert is_within(json.loads(text), bounds) and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text)


def test_what_has_no_number() -> None:
    for bounds in ({"minimum": 5, "maximum": 4}, {"exclusiveMinimum": 0, "maximum": 0}, {"minimum": 10**15},
                   {"exclusiveMinimum": 0, "exclusiveMaximum": 1e-15}):  # fmt: skip
        with pytest.raises(ValueError, match="no number of at most"):
            compile_schema({"type": "number", **bounds})
    with pytest.raises(ValueError, match="no number of at most"):
        compile_schema({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4})


def check_email(text: str) -> None:
    local, domain = text.split("@")
    assert re.fullmatch(r"[\w+-]+(\.[\w+-]+)*", local, re.ASCII) and len(local) <= 64
    check_hostname(domain)
    assert "." in domain


def check_hostname(text: str) -> None:
    labels = text.split(".")
    assert len(text) <= 253 and all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in labels)


def check_uri(text: str) -> None:
    assert urlsplit(text).geturl() is not None and TypeAdapter(HttpUrl).validate_python(text)


READERS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat, "time": time.fromisoformat, "date-time": datetime.fromisoformat,
    "duration": TypeAdapter(timedelta).validate_python, "email": check_email, "hostname": check_hostname,
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "uri": check_uri, "uuid": uuid.UUID,
    "uuid4": lambda text: None if uuid.UUID(text).version == 4 else 1 / 0,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_are_valid(name: str) -> None:
    automaton, rng = compile_schema({"type": "string", "format": name}), np.random.default_rng(0)
    texts = {json.loads(text) for _ in range(300) if (text := write_text(automaton, rng))}
    assert len(texts) > 30
    for text in texts:
        READERS[name](text)
        assert 1 < len(text) <= MAX_FORMAT_LENGTH


ADDRESSES = ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "2001:db8::a:0:9"]
WRONG = ["1:2:3:4:5:6:7", "1::2::3", "1:2:3:4:5:6:7:8:9", "::2:3:4:5:6:7:8:9", ":1", "12345::"]


def test_common_strings_are_possible() -> None:
    for name, texts, wrong in (
        ("ipv6", ADDRESSES, WRONG), ("ipv4", ["0.0.0.0", "192.168.1.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
        ("email", ["ann.lee+x@mail.example.org"], ["a@b", "@b.de", "a..b@c.de"]), ("hostname", ["localhost"], ["-a"]),
        ("uri", ["https://example.org:8080/a/b.html?q=1&r=2#top"], ["example.org", "https://"]),
        ("duration", ["P3D", "PT1H30M", "P1DT5S"], ["P", "PT", "P1DT", "PT1H5S"]),
    ):  # fmt: skip
        automaton = compile_schema({"type": "string", "format": name, "minLength": 1, "maxLength": 2083})
        for text in texts:
            assert accepts(automaton, f'"{text}"'.encode()), text
        for text in wrong:
            assert not accepts(automaton, f'"{text}"'.encode()), text
