"""The table of strategies in docs/decoding.md is derived from the strategy classes.

``python tests/unit/inference/test_strategy_docs.py`` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from diffusionlm.inference.strategies import STRATEGIES

PAGE = Path(__file__).parents[3] / "docs" / "decoding.md"
BEGIN, END = "<!-- strategies: begin -->\n", "<!-- strategies: end -->\n"
HEADER = ("`remasking_strategy`", "family", "positions committed in a step", "options", "forwards per block")


def strategy_table() -> str:
    rows = [HEADER, ("---",) * len(HEADER)]
    for name, strategy in STRATEGIES.items():
        source = f" ({strategy.source})" if strategy.source else ""
        options = ", ".join(f"`{key}`" for key in strategy.model_fields) or "none"
        rows.append((f"`{name}`", strategy.family.name, strategy.summary() + source, options, strategy.forwards))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    without_steps = [f"`{name}`" for name, strategy in STRATEGIES.items() if not strategy.uses_steps]
    without_confidences = [f"`{name}`" for name, strategy in STRATEGIES.items() if strategy.measure is None]
    sources = {strategy.family.name: strategy.family.source for strategy in STRATEGIES.values()}
    return (
        f"{table}\n`steps` and `denoising_steps` set S, for all but {', '.join(without_steps)}. `confidence_from` and "
        f"`defer_token_ids` are for all but {', '.join(without_confidences)}.\n\n"
        f"Sources: {'; '.join(f'{name}: {source}' for name, source in sources.items())}.\n"
    )


def test_the_table_is_up_to_date() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert table == strategy_table(), f"run python {__file__}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        text.partition(BEGIN)[0] + BEGIN + strategy_table() + END + text.partition(END)[2], encoding="utf-8"
    )
