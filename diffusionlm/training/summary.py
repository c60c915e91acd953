"""The end of a run, for people: a short table and the next command."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusionlm.evaluation.evaluate import EvaluationResult, FillAccuracy
from logger.report.reading import RENAMED_METRICS


@dataclass(frozen=True)
class Summary:
    """What summary.json holds."""

    evaluation: EvaluationResult
    other_block_lengths: tuple[EvaluationResult, ...]
    """The same rows under the other block lengths that the model was trained with."""
    source_entropy: float | None
    """Exact entropy of a document in nats, where the source knows it and each row is one document."""
    ngrams: dict[str, float]
    """Cross-entropy of n-gram models of the training tokens on the validation rows, nats per token, by name."""
    parameters: int
    step: int
    tokens_seen: int
    seconds: float
    padding_share: float
    """Share of the places of the training rows that held padding."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Summary:
        """From its file.

        Raises:
            ValueError: it is damaged; names it and the remedy.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): remove it, and the same command makes the final evaluation again"
            ) from error

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Summary:
        """What `to_json` gave."""
        others = tuple(_read_evaluation(each) for each in values["other_block_lengths"])
        return cls(**{**values, "evaluation": _read_evaluation(values["evaluation"]), "other_block_lengths": others})


def _read_evaluation(values: dict[str, Any]) -> EvaluationResult:
    fills = tuple(
        FillAccuracy(**{RENAMED_METRICS.get(key, key): fill[key] for key in fill}) for fill in values["fills"]
    )
    curve = tuple(tuple(entry) for entry in values["by_masked_fraction"])
    return EvaluationResult(**{**values, "fills": fills, "by_masked_fraction": curve})


def format_summary(summary: Summary, directory: Path, infill: str | None = None) -> str:
    """The table, and the next command, which fills the holes of ``infill``."""
    result = summary.evaluation
    lines = [
        (
            f"validation {_describe_bound(result)}",
            f"{result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token",
        ),
        ("", f"{result.bits_per_byte:.3f} +- {result.bits_per_byte_standard_error:.3f} bits per byte"),
    ]
    for other in summary.other_block_lengths:
        value = f"{other.nats_per_token:.3f} +- {other.standard_error:.3f} nats per token"
        lines.append((f"  {_describe_bound(other)}", value))
    if summary.source_entropy is not None:
        lines.append(("entropy of the source", _compare_with_entropy(result, summary.source_entropy)))
    lines += [
        ("unigram entropy", f"{result.unigram_entropy:.3f} nats per token (same {result.num_tokens:,} tokens)"),
    ]
    lines += [(name, f"{value:.3f} nats per token") for name, value in summary.ngrams.items()]
    for fill in result.fills:
        baseline = "" if fill.majority_baseline is None else f"; majority baseline {fill.majority_baseline:.1%}"
        lines.append(
            (
                f"{fill.fraction:.0%} masked, filled",
                f"top-1 accuracy {fill.top1_accuracy:.1%}, top-5 {fill.top5_accuracy:.1%}{baseline}",
            )
        )
    if result.block_length != 1:
        unit = "row" if result.block_length is None else "block"
        lines.append(("cross-entropy by", f"masked share of the {unit}, nats per masked token"))
        lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in result.by_masked_fraction]
    lines += [
        ("parameters", f"{summary.parameters:,}"),
        ("tokens seen", f"{summary.tokens_seen:,} in {summary.step:,} steps{_format_padding(summary.padding_share)}"),
        ("time", f"{summary.seconds:,.0f} s"),
    ]
    width = max(len(name) for name, _ in lines)
    table = "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
    return f"{table}\n\nnext: {suggest_next_command(directory, infill)}"


def _describe_bound(result: EvaluationResult) -> str:
    """What the number is: a bound, or exact."""
    if result.block_length is None:
        return "bound"
    return "loss, token by token" if result.block_length == 1 else f"bound, blocks of {result.block_length}"


def _compare_with_entropy(result: EvaluationResult, entropy: float) -> str:
    tokens = result.num_tokens / result.num_rows
    value, error = result.nats_per_token * tokens, result.standard_error * tokens
    return f"{entropy:.3f} nats per document; the model's {value:.3f} +- {error:.3f} is {value - entropy:.3f} above"


def _format_padding(share: float) -> str:
    return f"; {share:.1%} of the rows was padding" if share >= 0.0005 else ""


def suggest_next_command(directory: Path, infill: str | None) -> str:
    """What to type next."""
    command = f"uv run diffusionlm-infer --model {shlex.quote(str(directory))}"
    if infill is None:
        return f"{command} --prompt ''"
    return f"{command} --infill {_quote_for_shell(infill)}"


def _quote_for_shell(text: str) -> str:
    """For a shell; the command reads \\n as a line break."""
    return shlex.quote(text.replace("\\", "\\\\").replace("\n", "\\n"))
