"""The printed likelihood of a text: a table, or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cli.tables import make_table
from logger.pages import Part

if TYPE_CHECKING:
    from diffusionlm.evaluation.text_likelihood import LikelihoodResult


def format_json(result: LikelihoodResult) -> str:
    """Format as one JSON object on one line; numbers that are not finite are null."""
    return json.dumps(_replace_not_finite(asdict(result)), allow_nan=False)


def _replace_not_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_not_finite(item) for key, item in value.items()}
    return [_replace_not_finite(item) for item in value] if isinstance(value, list | tuple) else value


def format_table(result: LikelihoodResult) -> Part:
    sign = "" if result.is_exact else "<= "
    nats = _format_with_error(result.nats_per_token, result.nats_per_token_standard_error)
    perplexity = _format_with_error(result.perplexity, result.perplexity_standard_error)
    bits = _format_with_error(result.bits_per_byte, result.bits_per_byte_standard_error)
    lines = [
        (result.method, f"{sign}{nats} nats per token"),
        ("", f"{sign}{perplexity} perplexity"),
        ("", f"{sign}{bits} bits per byte"),
        ("scored", f"{result.num_tokens:,} tokens, {result.num_bytes:,} bytes"),
        ("rows", f"{result.num_rows:,} of up to {result.row_length:,} tokens"),
    ]
    if result.prompt_gap is not None:
        gap = _format_with_error(result.prompt_gap.nats_per_token, result.prompt_gap.standard_error)
        lines.append(("prompts", f"{gap} nats per token more with the prompts of other conversations"))
    if result.num_unscored_tokens:
        why = "the model cannot predict the first token of a document"
        lines.append(("not scored", f"{result.num_unscored_tokens:,} tokens: {why}; see data.begin_with_eos"))
    if result.num_forwards is not None:
        tokens_per_forward = result.num_tokens / result.num_forwards
        lines.append(("forwards", f"{result.num_forwards:,} of one document, {tokens_per_forward:.2f} tokens each"))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in result.skipped_documents.items())
    lines.append(("documents skipped", reasons or "none"))
    if result.by_masked_fraction:
        group = "row" if result.block_length is None else "block"
        lines.append(("cross-entropy by", f"masked fraction of the {group}, nats per masked token"))
    lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in result.by_masked_fraction]
    return make_table(lines)


def _format_with_error(value: float, error: float) -> str:
    return f"{value:.3f} (no error: a single row)" if math.isinf(error) else f"{value:.3f} +- {error:.3f}"
