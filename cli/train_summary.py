"""The table at the end of a training run, and the command to try its model."""

from __future__ import annotations

import shlex
from pathlib import Path

from cli.tables import make_table
from diffusionlm.evaluation.evaluate import EvaluationResult
from diffusionlm.training.reporting import RunSummary
from logger.pages import Part


def format_summary(
    summary: RunSummary, directory: Path, example_input: str = "", *, is_chat: bool = False
) -> list[Part]:
    """The table, and the command that tries the model with ``example_input``; ``is_chat``: as a question of a chat."""
    result = summary.evaluation
    lines = [
        (f"validation {_describe_bound(result)}", _format_bound(result)),
        ("", f"{result.bits_per_byte:.3f} +- {result.bits_per_byte_standard_error:.3f} bits per byte"),
    ]
    lines += [
        (f"  {_describe_bound(evaluation)}", _format_bound(evaluation)) for evaluation in summary.other_block_lengths
    ]
    if result.fill_nats_per_token is not None:
        lines.append(("fill after answers", f"{result.fill_nats_per_token:.3f} nats per token, not in the bound above"))
    if summary.source_entropy is not None:
        lines.append(("entropy of the source", _compare_with_entropy(result, summary.source_entropy)))
    lines.append(
        ("unigram entropy", f"{result.unigram_entropy:.3f} nats per token (same {result.num_tokens:,} tokens)")
    )
    lines += [(name, f"{value:.3f} nats per token") for name, value in summary.ngrams.items()]
    for fill in result.fills:
        baseline = "" if fill.majority_baseline is None else f"; majority baseline {fill.majority_baseline:.1%}"
        accuracy = f"top-1 accuracy {fill.top1_accuracy:.1%}, top-5 {fill.top5_accuracy:.1%}{baseline}"
        lines.append((f"{fill.fraction:.0%} masked, filled", accuracy))
    if result.block_length != 1:
        unit = "row" if result.block_length is None else "block"
        lines.append(("cross-entropy by", f"masked share of the {unit}, nats per masked token"))
        lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in result.by_masked_fraction]
    lines += [
        ("parameters", f"{summary.parameters:,}"),
        ("tokens seen", f"{summary.tokens_seen:,} in {summary.step:,} steps{_format_padding(summary.padding_share)}"),
        ("time", f"{summary.seconds:,.0f} s"),
    ]
    notes = []
    if result.nats_per_token > result.unigram_entropy:
        notes = ["", "the model is not yet better than the frequencies of tokens: train longer (training.max_steps)"]
    return [make_table(lines), *notes, "", f"next: {suggest_next_command(directory, example_input, is_chat=is_chat)}"]


def suggest_next_command(directory: Path, example_input: str, *, is_chat: bool = False) -> str:
    """The command that answers a question, else fills the masked spans of a text, or continues it if it has none."""
    option = "--chat" if is_chat else "--infill" if "[MASK:" in example_input else "--prompt"
    separator = "=" if example_input.startswith("-") else " "  # else the text would be read as an option
    escaped_text = example_input.replace("\\", "\\\\").replace("\n", "\\n")  # the command reads \n as a line break
    return (
        f"uv run diffusionlm-infer --model {shlex.quote(str(directory))} {option}{separator}{shlex.quote(escaped_text)}"
    )


def _describe_bound(result: EvaluationResult) -> str:
    if result.block_length is None:
        return "bound"
    return "loss, token by token" if result.block_length == 1 else f"bound, blocks of {result.block_length}"


def _format_bound(result: EvaluationResult) -> str:
    return f"{result.nats_per_token:.3f} +- {result.standard_error:.3f} nats per token"


def _compare_with_entropy(result: EvaluationResult, entropy: float) -> str:
    tokens_per_document = result.num_tokens / result.num_rows
    value, error = result.nats_per_token * tokens_per_document, result.standard_error * tokens_per_document
    return f"{entropy:.3f} nats per document; the model's {value:.3f} +- {error:.3f} is {value - entropy:.3f} above"


def _format_padding(fraction: float) -> str:
    return f"; {fraction:.1%} of the rows was padding" if fraction >= 0.0005 else ""
