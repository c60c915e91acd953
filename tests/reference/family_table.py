"""Print what was compared, and how far apart it is, as a Markdown table:

    python -m tests.reference.family_table

Tests hold each of its numbers to a bound, and the copy in docs/checkpoints.md to its rows.
"""

from __future__ import annotations

import sys

from benchmarking.harness import markdown_table
from tests.reference.family_cases import ATTENTIONS, CASES, ROWS, SIDES, Row, measure

HEADER = ["family", "beside", "weights", "dtype", *ATTENTIONS, "with a cache", *(f"padded {side}" for side in SIDES)]
HEADER += ["values changed", "other experts"]


def keys(name: str) -> list[tuple[str, str, str]]:
    """What the lines of a case begin with: family, direction and dtype."""
    return [(CASES[name].title, direction, dtype) for direction, dtype in ROWS]


def cells(row: Row) -> list[str]:
    """The measured part of a line."""
    numbers = [*(row.logits[each] for each in ATTENTIONS), row.cached, *(row.padded.get(side) for side in SIDES)]
    others, choices = row.other_experts
    return [
        *("-" if number is None else f"{number:.1e}" for number in numbers),
        str(row.changed),
        f"{others} of {choices}" if choices else "-",
    ]


def table(names: list[str]) -> str:
    """The lines of these cases."""
    lines = []
    for name in names:
        measured = measure(name)
        for (title, direction, dtype), row in zip(keys(name), measured.rows.values(), strict=True):
            lines.append([title, measured.label, direction, dtype, *cells(row)])
    return markdown_table(HEADER, lines)


def main() -> None:
    """Measure all, print."""
    import torch
    import transformers

    if sys.argv[1:]:
        sys.exit("python -m tests.reference.family_table takes no arguments")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(table(list(CASES)))


if __name__ == "__main__":
    main()
