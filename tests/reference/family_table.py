"""Print how far each model family is from its reference, as a Markdown table:

    python -m tests.reference.family_table

Tests hold each number to a bound; docs/checkpoints.md has a copy of the table.
"""

from __future__ import annotations

import sys

from benchmarking.harness import make_table
from logger.pages.markdown import render_table
from tests.reference.family_cases import CASES, Measured, Row, measure

HEADER = ["family", "compared with", "float32", "bfloat16", "values changed", "experts that differ"]


def largest_difference(row: Row) -> float:
    """Largest relative logit difference over all attention patterns, the cache and padding."""
    return max([*row.logits.values(), *row.padded.values(), row.cached or 0.0])


def format_case(name: str, measured: Measured) -> list[str]:
    """Build the line of a case: the largest values over both directions, by dtype."""
    by_dtype = {
        dtype: [row for (_, row_dtype), row in measured.rows.items() if row_dtype == dtype]
        for dtype in ("float32", "bfloat16")
    }
    experts = [max(row.other_experts for row in rows) for rows in by_dtype.values()]
    return [
        CASES[name].title,
        measured.label,
        *(f"{max(map(largest_difference, rows)):.1e}" for rows in by_dtype.values()),
        str(max(row.changed for row in measured.rows.values())),
        ", ".join(f"{others} of {choices}" for others, choices in experts) if experts[0][1] else "-",
    ]


def table(names: list[str]) -> str:
    """Measure these cases and build the table."""
    return render_table(make_table(HEADER, [format_case(name, measure(name)) for name in names]))


def main() -> None:
    """Measure all cases and print the table."""
    import torch
    import transformers

    if sys.argv[1:]:
        sys.exit("python -m tests.reference.family_table takes no arguments")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(table(list(CASES)))


if __name__ == "__main__":
    main()
