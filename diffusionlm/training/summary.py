"""The end of a run, for people: a short table and the next command."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusionlm.training.evaluate import Evaluation, Fill


@dataclass(frozen=True)
class Summary:
    """What summary.json holds."""

    evaluation: Evaluation
    ngrams: dict[str, float]
    """Cross-entropy of n-gram models of the training tokens on the validation rows, nats per token, by name."""
    parameters: int
    step: int
    tokens_seen: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Summary:
        """What `to_json` gave."""
        evaluation = dict(values["evaluation"])
        evaluation["fills"] = tuple(Fill(**fill) for fill in evaluation["fills"])
        evaluation["by_masked_fraction"] = tuple(tuple(entry) for entry in evaluation["by_masked_fraction"])
        return cls(**{**values, "evaluation": Evaluation(**evaluation)})


def render_summary(summary: Summary, directory: Path) -> str:
    """The table."""
    result = summary.evaluation
    lines = [
        ("validation bound", f"{result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token"),
        ("", f"{result.bits_per_byte:.3f} +- {result.bits_per_byte_standard_error:.3f} bits per byte"),
        ("unigram entropy", f"{result.unigram_entropy:.3f} nats per token (same {result.num_tokens:,} tokens)"),
    ]
    lines += [(name, f"{value:.3f} nats per token") for name, value in summary.ngrams.items()]
    for fill in result.fills:
        common = "" if fill.commonest is None else f"; always the commonest token {fill.commonest:.1%}"
        lines.append(
            (
                f"{fill.fraction:.0%} masked, filled",
                f"first guess {fill.first_guess:.1%}, first five {fill.first_five:.1%}{common}",
            )
        )
    lines.append(("cross-entropy by", "masked share of the row, nats per masked token"))
    lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in result.by_masked_fraction]
    lines += [
        ("parameters", f"{summary.parameters:,}"),
        ("tokens seen", f"{summary.tokens_seen:,} in {summary.step:,} steps"),
        ("time", f"{summary.seconds:,.0f} s"),
    ]
    width = max(len(name) for name, _ in lines)
    table = "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
    return f"{table}\n\nnext: {next_command(directory)}"


def next_command(directory: Path) -> str:
    """What to type next."""
    hole = "'for i in[MASK:1](10):\\n    print(i)\\n'"
    return f"uv run diffusionlm-infer --model {shlex.quote(str(directory))} --infill {hole}"
