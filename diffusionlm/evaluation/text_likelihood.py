"""One call of ``diffusionlm-eval``: a text, cut into rows, and its likelihood under a model.

Shapes: B rows, L positions.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from config.data import DataConfig, LocalFiles
from config.eval import EvalConfig, EvalDataConfig, NelboConfig, SamplerLikelihoodConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_configured_model, load_tokenizer
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader, open_components
from diffusionlm.data.reader import ReaderPosition
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.evaluate import bits_per_byte, count_row_bytes
from diffusionlm.evaluation.nelbo import NelboReport, nelbo
from diffusionlm.evaluation.sampler_likelihood import SamplerReport, sampler_likelihood
from diffusionlm.inference.blocks import block_causal_length
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

MAX_DEFAULT_ROW_LENGTH = 1_024
ROWS_PER_READ = 64

PROGRESS_DELAY_SECONDS = 3.0
"""What is over sooner shows none."""


@dataclass(frozen=True)
class LikelihoodResult:
    """What ``diffusionlm-eval`` says."""

    model: str
    method: str
    """What the numbers are, such as ``bound, blocks of 16`` or ``exact, next token``."""
    is_exact: bool
    """False: the true values are at most these."""
    block_length: int | None
    """Tokens of a block that sees those before it; None: bidirectional."""
    nats_per_token: float
    nats_per_token_standard_error: float
    perplexity: float
    """exp(nats_per_token)."""
    perplexity_standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    num_tokens: int
    """Tokens that are scored."""
    num_bytes: int
    """Bytes of text behind them."""
    num_unscored_tokens: int
    """Tokens of the text that nothing predicts: with shifted outputs the first of each document."""
    num_rows: int
    row_length: int
    num_forwards: int | None
    """Of the sampler, for all documents, one by one; None for a bound."""
    skipped_documents: dict[str, int]
    """Left out, counted by reason."""
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """(low, high, mean cross-entropy in nats of a masked token) for shares of masked tokens in (low, high]; empty where
    it is exact."""
    seconds: float

    def to_json(self) -> str:
        """One object on a line; null in place of numbers that are not finite."""
        values = {key: _null_if_not_finite(value) for key, value in asdict(self).items()}
        return json.dumps(values, allow_nan=False)

    def to_text(self) -> str:
        """A table for people."""
        sign = "" if self.is_exact else "<= "
        lines = [
            (
                self.method,
                f"{sign}{_format_with_error(self.nats_per_token, self.nats_per_token_standard_error)} nats per token",
            ),
            ("", f"{sign}{_format_with_error(self.perplexity, self.perplexity_standard_error)} perplexity"),
            ("", f"{sign}{_format_with_error(self.bits_per_byte, self.bits_per_byte_standard_error)} bits per byte"),
            ("scored", f"{self.num_tokens:,} tokens, {self.num_bytes:,} bytes"),
            ("rows", f"{self.num_rows:,} of up to {self.row_length:,} tokens"),
        ]
        if self.num_unscored_tokens:
            why = "nothing predicts the first one of a document"
            lines.append(("not scored", f"{self.num_unscored_tokens:,} tokens: {why}; see data.begin_with_eos"))
        if self.num_forwards is not None:
            each = self.num_tokens / self.num_forwards
            lines.append(("forwards", f"{self.num_forwards:,} of one document, {each:.2f} tokens each"))
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped_documents.items())
        lines.append(("documents skipped", reasons or "none"))
        if self.by_masked_fraction:
            unit = "row" if self.block_length is None else "block"
            lines.append(("cross-entropy by", f"masked share of the {unit}, nats per masked token"))
        lines += [(f"  {low:.0%} - {high:.0%}", f"{value:.3f}") for low, high, value in self.by_masked_fraction]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def evaluate_likelihood(config: EvalConfig) -> LikelihoodResult:
    """Load the model, read the rows and score them, with progress on standard error.

    Raises:
        ValueError: no model, tokenizer or text there, rows that do not fit the model, a kind of likelihood that the
            model does not have, or probabilities that are not finite; names the key or the file.
    """
    started = time.perf_counter()
    if config.model.path is None or config.data.source is None:
        raise ValueError("model.path and data.source are both needed")
    tokenizer = load_tokenizer(config.model.path)
    model = load_configured_model(config.model)
    layout, method = _resolve_layout(config.likelihood, model.config)
    recipe = _build_data_config(config.data, model.config)
    parts = open_components(recipe, "validation" if config.data.split == "validation" else "train")
    row_length = _resolve_row_length(config.data, model.config)
    rows = _read_rows(config.data, recipe, parts, tokenizer, model.config, row_length)
    batch = collate_rows(rows)
    maskable_BL = layout.maskable(batch)
    if not maskable_BL.any():
        raise ValueError(
            f"nothing to score in {len(rows)} rows of {row_length} tokens: shifted outputs do not predict the first "
            "token of a document; set data.begin_with_eos = true, or raise data.row_length"
        )
    report = _compute_report(config.likelihood, layout, model, batch)
    bytes_B = count_row_bytes(tokenizer, batch.tokens_BL.numpy(), maskable_BL)
    bits, bits_error = bits_per_byte(report.row_nats, bytes_B)
    perplexity = math.exp(report.nats_per_token) if report.nats_per_token < 700.0 else math.inf
    is_exact = isinstance(report, SamplerReport) or layout.block_length == 1
    return LikelihoodResult(
        model=str(config.model.path),
        method=method,
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
        num_unscored_tokens=int(batch.loss_mask_BL.sum()) - report.num_tokens,
        num_rows=len(rows),
        row_length=row_length,
        num_forwards=report.num_forwards if isinstance(report, SamplerReport) else None,
        skipped_documents=dict(parts[0].skipped),
        by_masked_fraction=() if isinstance(report, SamplerReport) or is_exact else report.by_masked_fraction,
        seconds=round(time.perf_counter() - started, 3),
    )


def _resolve_layout(config: NelboConfig | SamplerLikelihoodConfig, model: ModelConfig) -> tuple[InputLayout, str]:
    """How the model is asked, and what its answer is called.

    Raises:
        ValueError: an autoregressive model asked for anything else, or a model without a mask token.
    """
    match config:
        case SamplerLikelihoodConfig():
            key = "likelihood.generation"
            generation = fill_defaults(config.generation, model)
            block_length = block_causal_length(generation, model)
            name = f"exact, {generation.remasking_strategy} sampler"
        case NelboConfig():
            key = "likelihood"
            block_length = None if config.bidirectional else config.block_length or model.block_length
            name = "bound, bidirectional" if block_length is None else f"bound, blocks of {block_length}"
            if block_length == 1:
                name = f"exact, {'next token' if model.logit_alignment == 'shifted' else 'block length 1'}"
    if model.is_autoregressive and block_length != 1:
        wish = "bidirectional attention" if block_length is None else f"block_length = {block_length}"
        raise ValueError(
            f"{key}: {wish} is not for this autoregressive model, which predicts the next token (block_length 1 with "
            f"shifted logits): leave block_length and attention of [{key}] out"
        )
    return InputLayout.from_config(model, block_length), name


def _build_data_config(config: EvalDataConfig, model: ModelConfig) -> DataConfig:
    """The rows, as the data of a training run."""
    source = config.source
    if config.split == "all":
        assert isinstance(source, LocalFiles)
        # Where validation has files of its own, all of `paths` are for training.
        source = source.model_copy(update={"validation_paths": source.paths})
    return DataConfig(
        source=source,
        rows=config.rows,
        begin_with_eos=model.begin_with_eos if config.begin_with_eos is None else config.begin_with_eos,
        end_with_eos=config.end_with_eos,
        document_shuffle_window=config.shuffle_window,
        row_shuffle_window=0,
    )


def _resolve_row_length(config: EvalDataConfig, model: ModelConfig) -> int:
    context = model.max_position_embeddings
    if config.row_length is None:
        return min(context, MAX_DEFAULT_ROW_LENGTH)
    if config.row_length > context:
        raise ValueError(
            f"data.row_length = {config.row_length} is longer than the model's context, max_position_embeddings = "
            f"{context}: lower it"
        )
    return config.row_length


def _read_rows(
    config: EvalDataConfig,
    recipe: DataConfig,
    parts: list[MixtureComponent],
    tokenizer: Tokenizer,
    model: ModelConfig,
    row_length: int,
) -> list[Row]:
    """The rows that are evaluated.

    Raises:
        ValueError: there are none, or tokens that the model does not know.
    """
    reader = build_row_reader(parts, recipe, tokenizer, row_length, config.seed, repeat=False)
    rows: list[Row] = []
    position: ReaderPosition = None
    with _open_progress_bar("reading", config.max_rows or None, "row") as bar:
        while not config.max_rows or len(rows) < config.max_rows:
            limit = min(ROWS_PER_READ, config.max_rows - len(rows)) if config.max_rows else ROWS_PER_READ
            some, position = reader.read(0, position, limit)
            rows += some
            bar.update(len(some))
            if position is None:
                break
    if not rows:
        raise ValueError(f'data.source has no text for split = "{config.split}": name other files, or another split')
    highest = max(int(row.tokens_L.max()) for row in rows)
    if highest >= model.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {highest}, outside the model's vocabulary of {model.vocab_size} tokens; do "
            "tokenizer and model belong together?"
        )
    return rows


def _compute_report(
    config: NelboConfig | SamplerLikelihoodConfig, layout: InputLayout, model: Transformer, batch: CleanBatch
) -> NelboReport | SamplerReport:
    match config:
        case SamplerLikelihoodConfig():
            with _open_progress_bar("decoding", int(layout.maskable(batch).sum()), "token") as bar:
                return sampler_likelihood(
                    model,
                    batch.tokens_BL,
                    batch.loss_mask_BL,
                    config.generation,
                    document_BL=batch.document_BL,
                    batch_size=config.batch_size,
                    on_progress=lambda done, _: bar.update(done - bar.n),
                )
        case NelboConfig():
            draws = 1 if layout.block_length == 1 else config.num_mc_samples
            num_forwards = draws * math.ceil(len(batch.tokens_BL) / config.batch_size)
            with _open_progress_bar("scoring", num_forwards, "forward") as bar:
                counting = model.register_forward_hook(lambda *_: bar.update())
                try:
                    return nelbo(
                        model,
                        batch.tokens_BL,
                        batch.loss_mask_BL,
                        layout.block_length,
                        config.num_mc_samples,
                        config.seed,
                        document_BL=batch.document_BL,
                        batch_size=config.batch_size,
                    )
                finally:
                    counting.remove()


@contextmanager
def _open_progress_bar(what: str, total: int | None, unit: str) -> Iterator[Any]:
    """A bar on standard error for what takes long; now and then a line where no one watches."""
    style = {"mininterval": 0.2 if sys.stderr.isatty() else 30.0, "delay": PROGRESS_DELAY_SECONDS, "leave": False}
    with tqdm(desc=what, total=total, unit=unit, file=sys.stderr, **style) as bar:
        yield bar


def _format_with_error(value: float, error: float) -> str:
    return f"{value:.3f} (no error: a single row)" if math.isinf(error) else f"{value:.3f} +- {error:.3f}"


def _null_if_not_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
