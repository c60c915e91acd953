"""docs/decoding.md says of every strategy what the code knows of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from config.generation import STRATEGIES, RemaskingStrategy

GUIDE = (Path(__file__).parents[3] / "docs" / "decoding.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in GUIDE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6 and cells[0].startswith("`")
}


def test_every_strategy_has_a_row() -> None:
    strategies = [name for name in ROWS if name != "remasking_strategy"]
    assert strategies == list(STRATEGIES) == list(get_args(RemaskingStrategy))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_row_is_true(name: RemaskingStrategy) -> None:
    family, source, _, options, _ = ROWS[name]
    known = STRATEGIES[name]
    assert family == known.family
    assert set(re.findall(r"`(\w+)`", options)) == set(known.keys)
    assert re.findall(r"arXiv [\d.]+\d", source) in (re.findall(r"arXiv [\d.]+\d", known.source), [])
