"""Likelihood of a text under a model: read the text into rows, score them, compute per-byte numbers.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from config.data import DataConfig, LocalFiles
from config.eval import EvalConfig
from config.evaluation.likelihood import EvalDataConfig, NelboConfig, SamplerLikelihoodConfig
from config.infer import InferModelConfig
from config.model import ModelConfig
from diffusionlm.checkpoints.adapter_config import read_adapter_config
from diffusionlm.checkpoints.model_files import ModelDescription, check_weight_files, read_model_description
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Document, Row, RowFormat
from diffusionlm.data.pipeline import build_row_reader, count_skipped, open_components
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.nelbo import NelboEstimator, NelboReport
from diffusionlm.evaluation.sampler_likelihood import SamplerReport, check_exact_likelihood, sampler_likelihood
from diffusionlm.evaluation.statistics import bits_per_byte, ratio_with_standard_error
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.images import PlacedImage
from diffusionlm.vision.processor import load_processor
from files.toml_text import read_toml

OnProgress = Callable[[str, str, int, int | None], None]
"""Called with the phase, such as ``scoring``, its unit, and how many of how many are done; None: unknown."""
MAX_DEFAULT_ROW_LENGTH = 1_024


def ignore_progress(phase: str, unit: str, done: int, total: int | None) -> None:
    """The default of `OnProgress`."""


@dataclass(frozen=True)
class PromptGap:
    """The gap of prompts. It is positive if the model reads them."""

    nats_per_token: float
    """Per answer token."""
    standard_error: float
    """Over rows, of the paired differences; infinite for a single row."""
    num_rows: int
    """Rows with another prompt. The others fit none, and count as 0."""


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
    num_bytes: int
    num_unscored_tokens: int
    """Tokens of the text that the model cannot predict: with shifted outputs the first of each document."""
    num_rows: int
    row_length: int
    num_forwards: int | None
    """Forwards of the sampler, summed over documents; None for a bound."""
    skipped_documents: dict[str, int]
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """See `NelboReport`; empty if the likelihood is exact."""
    eos_padding_nats_per_token: float | None
    """See `NelboReport`; None also for the likelihood of a sampler, which scores EOS padding like answers."""
    seconds: float
    prompt_gap: PromptGap | None = None
    """None: not measured."""


def describe_model(config: InferModelConfig) -> ModelDescription:
    """Read the config and the tokenizer of a model, and check that it and its adapter have their other files.

    Raises:
        ValueError: a file is missing or damaged; names it.
    """
    assert config.path is not None, "callers check that there is a model"
    model = read_model_description(config.path)
    check_weight_files(config.path)
    if config.adapter is not None:
        read_adapter_config(config.adapter)
    return model


class OpenedText:
    """A text in rows that fit the model."""

    def __init__(self, config: EvalConfig, model: ModelDescription | None = None) -> None:
        """Check the config against the model, and read the text.

        Raises:
            ValueError: the model, its tokenizer or the text is missing, the rows do not fit the model, or it does
                not support this kind of likelihood.
        """
        self.config, self.model = config, model or describe_model(config.model)
        for directory in (self.model.directory, config.model.adapter):
            check_trained_attention(directory)
        self.layout, self.method = resolve_method(config.likelihood, self.model.config)
        context = self.model.config.max_position_embeddings
        self.row_length = config.data.row_length or min(context, MAX_DEFAULT_ROW_LENGTH)
        if self.row_length > context:
            raise ValueError(
                f"data.row_length = {self.row_length} is longer than the model's context, max_position_embeddings = "
                f"{context}: lower it"
            )
        data_config = build_data_config(config.data, self.model.config)
        has_images = self.model.config.vision is not None and bool(data_config.chats)
        self.processor = load_processor(self.model.directory) if has_images else None
        split: Literal["train", "validation"] = "validation" if config.data.split == "validation" else "train"
        components = open_components(data_config, split, processor=self.processor)
        reader = build_row_reader(
            components,
            data_config,
            self.model.tokenizer,
            self.row_length,
            config.data.seed,
            repeat=False,
            block_length=self.layout.block_length,
        )
        self.rows, _ = reader.read(0, None, config.data.max_rows or sys.maxsize)
        if not self.rows:
            raise ValueError(
                f'data.source has no text for split = "{config.data.split}": name other files, another split, or the '
                "field of the text as source.text_field"
            )
        self.skipped_documents = count_skipped(components)


def check_trained_attention(directory: Path | None) -> None:
    """Check that a run trained its model with an attention that likelihoods are computed with.

    Args:
        directory: of a model or an adapter. Its config.toml, if there is one, is that of the run.

    Raises:
        ValueError: it was trained with another attention.
    """
    path = None if directory is None else directory / "config.toml"
    if path is None or not path.is_file():
        return
    objective = read_toml(path)[1].get("objective", {})
    for key, value in (("attention", "prompt_and_own_block"), ("attention_bias", objective.get("attention_bias"))):
        if value is not None and objective.get(key) == value:
            raise ValueError(
                f'{path}: the model was trained with objective.{key} = "{value}", and [likelihood] has no form for it: '
                'read the validation of the run, or measure answers with a task of kind = "exact_match"'
            )


def resolve_method(config: NelboConfig | SamplerLikelihoodConfig, model: ModelConfig) -> tuple[InputLayout, str]:
    """The layout of the forwards, and the name of the method.

    Raises:
        ValueError: the model is autoregressive and the config is not, or the model needs a mask token and has none.
    """
    match config:
        case SamplerLikelihoodConfig():
            key = "likelihood.generation"
            settings = resolve_settings(config.generation, model)
            check_exact_likelihood(settings)
            block_length = settings.block_causal_length
            method = f"exact, {settings.strategy.name} sampler"
        case NelboConfig():
            key = "likelihood"
            if config.next_token:
                if model.clean_alignment is None and not model.is_autoregressive:
                    raise ValueError(
                        "likelihood.next_token = true needs outputs that predict the next token of a causal text: the "
                        "model's config.json has no clean_alignment; remove next_token"
                    )
                return InputLayout.from_config(model, 1).next_token, "exact, next token"
            block_length = None if config.bidirectional else config.block_length or model.block_length
            method = "bound, bidirectional" if block_length is None else f"bound, blocks of {block_length}"
            if block_length == 1:
                method = f"exact, {'next token' if model.logit_alignment == 'shifted' else 'block length 1'}"
    if model.is_autoregressive and block_length != 1:
        problem = "bidirectional attention" if block_length is None else f"block_length = {block_length}"
        raise ValueError(
            f"{key}: {problem} does not fit an autoregressive model, which predicts the next token: remove "
            f"block_length and attention from [{key}]"
        )
    return InputLayout.from_config(model, block_length), method


def build_data_config(config: EvalDataConfig, model: ModelConfig) -> DataConfig:
    """The ``[data]`` section of a training run with these rows."""
    source = config.source
    if config.split == "all":
        assert isinstance(source, LocalFiles)
        # With validation files of its own, a source uses all of its `paths` for training.
        source = source.model_copy(update={"validation_paths": source.paths})
    return DataConfig(
        source=source,
        rows=config.rows,
        begin_with_eos=model.begin_with_eos if config.begin_with_eos is None else config.begin_with_eos,
        end_with_eos=config.end_with_eos,
        document_shuffle_window=config.shuffle_window,
        row_shuffle_window=0,
    )


def evaluate_likelihood(
    text: OpenedText, model: Transformer, on_progress: OnProgress = ignore_progress
) -> LikelihoodResult:
    """Score the rows of a text.

    Raises:
        ValueError: no token can be scored, or the model's probabilities are not finite.
    """
    started_at = time.perf_counter()
    config, row_length, layout, rows = text.config, text.row_length, text.layout, text.rows
    batch = collate_rows(rows, text.processor)
    maskable_BL = layout.maskable(batch)
    if not maskable_BL.any():
        raise ValueError(
            f"nothing to score in {len(rows)} rows of {row_length} tokens: shifted outputs do not predict the first "
            "token of a document; set data.begin_with_eos = true, or raise data.row_length"
        )
    report, gap = _score_rows(text, model, batch, on_progress)
    tokens_BL = batch.tokens_BL.numpy()
    bits, bits_error, num_bytes = bits_per_byte(text.model.tokenizer, tokens_BL, maskable_BL, report.row_nats)
    perplexity = math.exp(report.nats_per_token) if report.nats_per_token < 700.0 else math.inf
    is_exact = isinstance(report, SamplerReport) or layout.block_length == 1
    return LikelihoodResult(
        model=str(config.model.path),
        method=text.method,
        is_exact=is_exact,
        block_length=layout.block_length,
        nats_per_token=report.nats_per_token,
        nats_per_token_standard_error=report.standard_error,
        perplexity=perplexity,
        perplexity_standard_error=perplexity * report.standard_error,
        bits_per_byte=bits,
        bits_per_byte_standard_error=bits_error,
        num_tokens=report.num_tokens,
        num_bytes=num_bytes,
        num_unscored_tokens=int(batch.loss_mask_BL.sum()) - int(maskable_BL.sum()),
        num_rows=len(rows),
        row_length=row_length,
        num_forwards=report.num_forwards if isinstance(report, SamplerReport) else None,
        skipped_documents=text.skipped_documents,
        by_masked_fraction=() if isinstance(report, SamplerReport) or is_exact else report.by_masked_fraction,
        eos_padding_nats_per_token=None if isinstance(report, SamplerReport) else report.eos_padding_nats_per_token,
        prompt_gap=gap,
        seconds=round(time.perf_counter() - started_at, 3),
    )


def _score_rows(
    text: OpenedText, model: Transformer, batch: CleanBatch, on_progress: OnProgress
) -> tuple[NelboReport | SamplerReport, PromptGap | None]:
    config, layout = text.config.likelihood, text.layout
    if isinstance(config, SamplerLikelihoodConfig):
        report = sampler_likelihood(
            model,
            batch.tokens_BL,
            batch.loss_mask_BL,
            config.generation,
            document_BL=batch.document_BL,
            row_options=[RequestOptions(images=row.images, processor=text.processor) for row in text.rows],
            batch_size=config.batch_size,
            on_progress=partial(on_progress, "decoding", "tokens"),
        )
        return report, None
    bound = _estimate_bound(config, layout, model, batch, on_progress)
    if not config.prompt_gap:
        return bound, None
    exchanged_rows, num_exchanged = exchange_prompts(text.rows)
    exchanged_batch = collate_rows(exchanged_rows, text.processor)
    exchanged = _estimate_bound(config, layout, model, exchanged_batch, on_progress)
    differences_B = np.array(exchanged.row_nats) - np.array(bound.row_nats)
    return bound, PromptGap(*ratio_with_standard_error(differences_B, np.array(bound.row_tokens)), num_exchanged)


def _estimate_bound(
    config: NelboConfig, layout: InputLayout, model: Transformer, batch: CleanBatch, on_progress: OnProgress
) -> NelboReport:
    estimator = NelboEstimator(layout, batch, config.num_mc_samples, config.seed, config.batch_size)
    forward_sums = []
    for index in range(estimator.num_forwards):
        forward_sums.append(estimator.run_forward(model, index))
        on_progress("scoring", "forwards", index + 1, estimator.num_forwards)
    return estimator.build_report(forward_sums)


def exchange_prompts(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Give each row of one conversation the prompt of the next row that has another prompt and fits.

    The prompt is what precedes the first target, with its images. Padding stays at the end.

    Returns:
        The rows, and how many have another prompt.
    """
    prompts = [_Prompt.of(row) for row in rows]
    exchanged, num_exchanged = [], 0
    for index, row in enumerate(rows):
        own = prompts[index]
        max_length = len(own.token_ids) + int((row.document_ids_L < 0).sum())
        others = (prompts[(index + offset) % len(rows)] for offset in range(1, len(rows)))
        other = next((item for item in others if len(item.token_ids) <= max_length and item != own), None)
        num_exchanged += other is not None
        exchanged.append(row if other is None else _replace_prompt(row, len(own.token_ids), other))
    return exchanged, num_exchanged


@dataclass(frozen=True)
class _Prompt:
    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]

    @classmethod
    def of(cls, row: Row) -> _Prompt:
        end = int(row.loss_mask_L.argmax())
        return cls(tuple(row.tokens_L[:end].tolist()), tuple(placed for placed in row.images if placed.start < end))


def _replace_prompt(row: Row, num_own: int, prompt: _Prompt) -> Row:
    assert row.segment_ids_L is not None and row.is_eos_padding_L is not None, "the row is a conversation"
    size, num_tokens = int((row.document_ids_L >= 0).sum()), len(prompt.token_ids)

    def move(values_L: NDArray[Any], prompt: Any = 0) -> NDArray[Any]:
        return np.concatenate((np.full(num_tokens, prompt, values_L.dtype), values_L[num_own:size]))

    later_images = (placed.move(num_tokens - num_own) for placed in row.images if placed.start >= num_own)
    document = Document(
        tokens=move(row.tokens_L, prompt.token_ids),
        loss_mask=move(row.loss_mask_L),
        is_eos_padding=move(row.is_eos_padding_L),
        segment_ids=move(row.segment_ids_L),
        images=(*prompt.images, *later_images),
    )
    # The last token is padding, or the row has none: then any token will do, since nothing attends to padding.
    return RowFormat(len(row.tokens_L), int(row.tokens_L[-1]), has_segments=True).build_row([document])
