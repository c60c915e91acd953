"""Likelihood of a text under a model: read the text into rows, score them, compute per-byte numbers.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from config.evaluation.text import EvalDataConfig, NelboConfig, SamplerLikelihoodConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_configured_model
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.data.reader import ReaderPosition, ResumableReader
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.nelbo import NelboEstimator, NelboReport
from diffusionlm.evaluation.plan import EvaluationPlan
from diffusionlm.evaluation.prompt_gap import PromptGap, compute_prompt_gap, exchange_prompts
from diffusionlm.evaluation.sampler_likelihood import SamplerReport, sampler_likelihood
from diffusionlm.evaluation.statistics import bits_per_byte, count_row_bytes
from diffusionlm.models.transformer import Transformer

ROWS_PER_READ = 64

OnProgress = Callable[[str, int, int | None], None]
"""Called with the phase (``reading`` rows, ``scoring`` forwards or ``decoding`` tokens), and how many of how many are
done; None: unknown."""


@dataclass(frozen=True)
class LikelihoodResult:
    """Result of ``diffusionlm-eval``; the fields are the keys of its JSON."""

    model: str
    method: str
    """Kind of the numbers, such as ``bound, blocks of 16`` or ``exact, next token``."""
    is_exact: bool
    """False: the numbers are upper bounds."""
    block_length: int | None
    """Tokens per block of block-causal attention; None: bidirectional."""
    nats_per_token: float
    nats_per_token_standard_error: float
    perplexity: float
    """exp(nats_per_token)."""
    perplexity_standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    num_tokens: int
    """Number of scored tokens."""
    num_bytes: int
    """Bytes of text in the scored tokens."""
    num_unscored_tokens: int
    """Tokens of the text that the model cannot predict: with shifted outputs the first of each document."""
    num_rows: int
    row_length: int
    num_forwards: int | None
    """Forwards of the sampler, summed over documents; None for a bound."""
    skipped_documents: dict[str, int]
    """Number of skipped documents by reason."""
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """See `NelboReport`; empty if the likelihood is exact."""
    fill_nats_per_token: float | None
    """See `NelboReport`; None also for the likelihood of a sampler, which scores fill like answers."""
    seconds: float
    prompt_gap: PromptGap | None = None
    """None: not measured."""


def evaluate_likelihood(
    plan: EvaluationPlan, on_progress: OnProgress | None = None, model: Transformer | None = None
) -> LikelihoodResult:
    """Read the rows and score them.

    Args:
        model: None: it is loaded.

    Raises:
        ValueError: the weights do not fit, there is no text, or the model's probabilities are not finite.
    """
    started_at = time.perf_counter()
    config, row_length = plan.config, plan.row_length
    model = load_configured_model(config.model) if model is None else model
    layout = InputLayout.from_config(model.config, plan.block_length)
    rows = _read_rows(config.data, plan.reader, on_progress)
    _check_vocabulary(rows, model.config)
    batch = collate_rows(rows)
    maskable_BL = layout.maskable(batch)
    if not maskable_BL.any():
        raise ValueError(
            f"nothing to score in {len(rows)} rows of {row_length} tokens: shifted outputs do not predict the first "
            "token of a document; set data.begin_with_eos = true, or raise data.row_length"
        )
    report = _score(config.likelihood, layout, model, batch, on_progress)
    bytes_B = count_row_bytes(plan.model.tokenizer, batch.tokens_BL.numpy(), maskable_BL)
    bits, bits_error = bits_per_byte(report.row_nats, bytes_B)
    perplexity = math.exp(report.nats_per_token) if report.nats_per_token < 700.0 else math.inf
    is_exact = isinstance(report, SamplerReport) or layout.block_length == 1
    return LikelihoodResult(
        model=str(config.model.path),
        method=plan.method,
        is_exact=is_exact,
        block_length=layout.block_length,
        nats_per_token=report.nats_per_token,
        nats_per_token_standard_error=report.standard_error,
        perplexity=perplexity,
        perplexity_standard_error=perplexity * report.standard_error,
        bits_per_byte=bits,
        bits_per_byte_standard_error=bits_error,
        num_tokens=report.num_tokens,
        num_bytes=int(bytes_B.sum()),
        num_unscored_tokens=int(batch.loss_mask_BL.sum()) - int(maskable_BL.sum()),
        num_rows=len(rows),
        row_length=row_length,
        num_forwards=report.num_forwards if isinstance(report, SamplerReport) else None,
        skipped_documents=dict(plan.components[0].skipped),
        by_masked_fraction=() if isinstance(report, SamplerReport) or is_exact else report.by_masked_fraction,
        fill_nats_per_token=None if isinstance(report, SamplerReport) else report.fill_nats_per_token,
        prompt_gap=_measure_prompt_gap(config.likelihood, layout, model, rows, report, on_progress),
        seconds=round(time.perf_counter() - started_at, 3),
    )


def _measure_prompt_gap(
    config: NelboConfig | SamplerLikelihoodConfig,
    layout: InputLayout,
    model: Transformer,
    rows: list[Row],
    report: NelboReport | SamplerReport,
    on_progress: OnProgress | None,
) -> PromptGap | None:
    """Score the rows with the prompts of others. None: the config does not ask for it."""
    if isinstance(config, SamplerLikelihoodConfig) or isinstance(report, SamplerReport) or not config.prompt_gap:
        return None
    exchanged_rows, num_exchanged = exchange_prompts(rows)
    exchanged = _score(config, layout, model, collate_rows(exchanged_rows), on_progress)
    assert isinstance(exchanged, NelboReport)
    batch = collate_rows(rows)
    is_scored_BL = layout.maskable(batch)
    if batch.is_fill_BL is not None:
        is_scored_BL = is_scored_BL & ~batch.is_fill_BL.numpy()
    return compute_prompt_gap(report, exchanged, is_scored_BL.sum(axis=1), num_exchanged)


def _read_rows(config: EvalDataConfig, reader: ResumableReader[Row], on_progress: OnProgress | None) -> list[Row]:
    """Read at most ``max_rows`` rows.

    Raises:
        ValueError: there are none.
    """
    rows: list[Row] = []
    position: ReaderPosition = None
    while not config.max_rows or len(rows) < config.max_rows:
        limit = min(ROWS_PER_READ, config.max_rows - len(rows)) if config.max_rows else ROWS_PER_READ
        new_rows, position = reader.read(0, position, limit)
        rows += new_rows
        if on_progress is not None:
            on_progress("reading", len(rows), config.max_rows or None)
        if position is None:
            break
    if not rows:
        raise ValueError(f'data.source has no text for split = "{config.split}": name other files or another split')
    return rows


def _check_vocabulary(rows: list[Row], model: ModelConfig) -> None:
    max_token = max(int(row.tokens_L.max()) for row in rows)
    if max_token >= model.vocab_size:
        raise ValueError(
            f"the tokenizer produced token {max_token}, outside the model's vocabulary of {model.vocab_size} "
            "tokens: use the model's own tokenizer"
        )


def _score(
    config: NelboConfig | SamplerLikelihoodConfig,
    layout: InputLayout,
    model: Transformer,
    batch: CleanBatch,
    on_progress: OnProgress | None,
) -> NelboReport | SamplerReport:
    if isinstance(config, SamplerLikelihoodConfig):
        return sampler_likelihood(
            model,
            batch.tokens_BL,
            batch.loss_mask_BL,
            config.generation,
            document_BL=batch.document_BL,
            batch_size=config.batch_size,
            on_progress=None if on_progress is None else lambda done, total: on_progress("decoding", done, total),
        )
    estimator = NelboEstimator.from_batch(layout, batch, config.num_mc_samples, config.seed, config.batch_size)
    forward_sums = []
    for index in range(estimator.num_forwards):
        forward_sums.append(estimator.run_forward(model, index))
        if on_progress is not None:
            on_progress("scoring", index + 1, estimator.num_forwards)
    return estimator.build_report(forward_sums)
