"""The snippets of docs/tour.md are one program: it prints the numbers of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
SNIPPET = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+")
TRAINED_TOLERANCE = 0.03
"""Numbers of the trained model differ by rounding between machines, which grows over its steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the program has run, with its output in ``output.txt``."""
    folder = tmp_path_factory.mktemp("tour")
    program = "".join(f"{code}print('---')\n" for code, _ in SNIPPET.findall(TOUR))
    # One thread: those of several processes wait for each other at every operator of so small a model.
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    (folder / "output.txt").write_text(result.stdout, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_snippets_print_the_numbers_of_the_page(folder: Path) -> None:
    outputs = (folder / "output.txt").read_text(encoding="utf-8").split("---\n")[:-1]
    expected = [text for _, text in SNIPPET.findall(TOUR)]
    assert len(outputs) == len(expected) >= 9
    for output, text in zip(outputs, expected, strict=True):
        assert NUMBER.sub("#", output) == NUMBER.sub("#", text)
        numbers, expected_numbers = (list(map(float, NUMBER.findall(part))) for part in (output, text))
        assert numbers == pytest.approx(expected_numbers, abs=TRAINED_TOLERANCE)
    assert outputs[0] == expected[0]  # the entropy is exact
    assert outputs[1] == expected[1]  # so are the masks, and the weights n / k
