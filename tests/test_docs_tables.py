"""Tables of the documentation are derived from the classes that they list.

``python tests/test_docs_tables.py`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from config.base import Section
from config.evaluation.tasks import AnyItemTask
from config.finetune.preference import PreferenceLossConfig
from config.finetune.rl import LogprobConfig
from diffusionlm.diffusion.schedules import NoiseSchedule
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.rl.rewards import RewardConfig

DOCS = Path(__file__).parents[1] / "docs"
STRATEGY_HEADER = ("`remasking_strategy`", "family", "positions committed in a step", "options", "forwards per block")


def strategy_table() -> str:
    rows = [STRATEGY_HEADER, ("---",) * len(STRATEGY_HEADER)]
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


def kind_table(head: str, classes: tuple[type[Section], ...], *, has_options: bool) -> str:
    """The kinds of a union: the first paragraph of each class, and its options."""
    lines = [f"| `kind` | {head} |{' options |' * has_options}", f"|---|---|{'---|' * has_options}"]
    for cls in classes:
        fields: dict[str, Any] = dict(cls.model_fields)
        summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        options = ", ".join(f"`{key}` ({field.default})" for key, field in fields.items() if key != "kind")
        lines.append(f"| `{fields['kind'].default}` | {summary} |" + f" {options} |" * has_options)
    return "\n".join(lines) + "\n"


def schedule_table() -> str:
    return kind_table("alpha(t), weight, source", get_args(get_args(NoiseSchedule)[0]), has_options=True)


def preference_table() -> str:
    return kind_table(
        "loss, source, what the bounds change", get_args(get_args(PreferenceLossConfig)[0]), has_options=True
    )


def task_table() -> str:
    return kind_table("items and what is measured", (*get_args(AnyItemTask), PerplexityTask), has_options=False)


def reward_table() -> str:
    return kind_table("score of an answer", get_args(get_args(RewardConfig)[0]), has_options=False)


def logprob_table() -> str:
    return kind_table("log-probability of an answer", get_args(get_args(LogprobConfig)[0]), has_options=True)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "strategies": ("decoding.md", strategy_table),
    "schedules": ("objectives.md", schedule_table),
    "preferences": ("objectives.md", preference_table),
    "tasks": ("evaluation.md", task_table),
    "rewards": ("evaluation.md", reward_table),
    "logprobs": ("rl.md", logprob_table),
}


def divide(name: str) -> tuple[Path, str, str, str]:
    """A page, and its text before, in and after a table."""
    page = DOCS / TABLES[name][0]
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: begin -->\n")
    table, end, after = rest.partition(f"<!-- {name}: end -->\n")
    return page, before + begin, table, end + after


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_up_to_date(name: str) -> None:
    assert divide(name)[2] == TABLES[name][1](), f"run python {__file__}"


if __name__ == "__main__":
    for name, (_, build) in TABLES.items():
        page, before, _, after = divide(name)
        page.write_text(before + build() + after, encoding="utf-8")
