"""Exact likelihood of text under samplers with a deterministic order, and whether greedy decoding yields a text.

Shapes: B rows, L tokens, N masked positions in the current blocks of several documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.generation import DISTRIBUTION_KEYS, GenerationConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.likelihood.answers import AnswerBuilder
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES, LikelihoodReport, check_positive
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.request_builder import prepare_known_text
from diffusionlm.inference.requests import DEFAULT_OPTIONS, ActiveRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class SamplerReport(LikelihoodReport):
    """The exact negative log-likelihood of text under a sampler."""

    num_forwards: int
    """Forwards that decoding the documents one by one takes."""


@torch.inference_mode()
def sampler_likelihood(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None = None,
    config: GenerationConfig | None = None,
    *,
    document_BL: Tensor | None = None,
    row_options: Sequence[RequestOptions] | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> SamplerReport:
    """Compute the negative log-likelihood under a sampler with a deterministic order (DUEL, arXiv 2603.01367).

    All target tokens are masked. In each step the strategy selects positions from the model's distributions alone, the
    true tokens are revealed there, and their log-probabilities given the tokens visible before are summed. The sampler
    is that of `generate` at temperature 1, except that confidences do not depend on sampled tokens: ``low_confidence``
    uses the probability of the most probable one. Only the mask token and the placeholder of images have probability
    zero.

    Args:
        tokens_BL: clean token ids.
        loss_mask_BL: target tokens, which are decoded; None: all but padding. A mask token in the data is never a
            target, and with shifted outputs neither is the first token of a document.
        config: blocks, steps, attention and strategy; None: the defaults. ``max_new_tokens`` and ``stop_token_ids`` are
            ignored.
        document_BL: document id of each position; documents are independent texts, and padding is -1.
        row_options: images of each row, which are no targets, and their processor. None: there are none.
        batch_size: documents per forward; fewer if their logits exceed `MAX_LOGITS_BYTES`.
        on_progress: called after each forward with the number of scored tokens and the number of all tokens.

    Raises:
        ValueError: there is no target token, ``steps`` is less than the number of blocks, the probabilities are not
            finite, or the sampler has no exact likelihood: its order is random, its temperature is not 1 (or 0, read as
            1), or it changes the model's distributions (top_k, top_p, suppressed or deferred tokens, guidance, ...).
    """
    config = GenerationConfig() if config is None else config
    check_exact_likelihood(resolve_settings(config, model.config))
    settings = resolve_settings(config.model_copy(update={"temperature": 0.0}), model.config)
    check_positive(batch_size=batch_size)
    documents = list(_split_into_documents(model, tokens_BL, loss_mask_BL, document_BL, settings, row_options))
    requests = [request for _, request in documents]
    sizes = [len(request.masked_positions) for request in requests]
    if not sum(sizes):
        raise ValueError("no target token: loss_mask_BL is false at all positions that can be predicted")
    largest = max(len(block.positions) for request in requests for block in request.blocks)
    max_documents = min(batch_size, MAX_LOGITS_BYTES // (4 * largest * model.config.vocab_size))
    decoder = Decoder.for_requests(model, requests, max(1, max_documents))
    for _ in decoder.steps():
        if on_progress is not None:
            on_progress(sum(sizes) - sum(int(request.is_masked_L.sum()) for request in requests), sum(sizes))
    nats_B, sizes_B = np.zeros(len(tokens_BL)), np.zeros(len(tokens_BL), dtype=np.int64)
    for (row, request), size in zip(documents, sizes, strict=True):
        nats_B[row] -= request.logprobs_L[request.masked_positions].sum()
        sizes_B[row] += size
    return SamplerReport.from_rows(nats_B, sizes_B, num_forwards=sum(request.num_forwards for request in requests))


def check_exact_likelihood(settings: DecodingSettings) -> None:
    """Check that a sampler has an exact likelihood.

    Raises:
        ValueError: its order is random, its temperature is not 1 (or 0, read as 1), or it changes the model's
            distributions; names the key.
    """
    strategy = settings.strategy
    if not strategy.has_exact_likelihood:
        names = [name for name, strategy_class in STRATEGIES.items() if strategy_class().has_exact_likelihood]
        default_options = type(strategy)().model_dump()
        options = [f"{key} = {value}" for key, value in strategy.model_dump().items() if value != default_options[key]]
        cause = " with ".join([f'remasking_strategy = "{strategy.name}"', *options])
        raise ValueError(
            f"{cause} has no exact likelihood: its order depends on randomness or it remasks; choose one of "
            f"{', '.join(names)}, with default options"
        )
    check_plain_distributions(settings, temperatures=(0.0, 1.0))


def check_plain_distributions(settings: DecodingSettings, *, temperatures: Sequence[float]) -> None:
    """Check that a sampler draws from the model's own distributions.

    Raises:
        ValueError: it does not; names the key.
    """
    config, defaults = settings.config, GenerationConfig()
    if settings.has_speculation:
        raise ValueError(
            f'speculation = "{config.speculation}" has forwards that depend on drafts, and the likelihood is that of '
            "the text alone: remove it, and decode with block_length = 1"
        )
    others = ("suppress_token_ids", "defer_token_ids", "cfg_scale", "canvas", "attention_bias")
    keys = (*DISTRIBUTION_KEYS, *others)
    is_changed = {key: getattr(config, key) != getattr(defaults, key) for key in keys} | {
        "temperature": settings.temperature not in temperatures,
        "attention": config.attention == "prompt_and_own_block",
        "cache": config.cache in ("prefix", "dual"),
    }
    for key in filter(is_changed.get, is_changed):
        raise ValueError(
            f"{key} = {getattr(config, key)} changes the sampler's distributions, but the likelihood is that of the "
            "model, at temperature 1: remove it"
        )


def greedy_matches(
    model: Transformer, requests: Sequence[OptionsRequest], config: AnswerLikelihoodConfig | None = None
) -> list[bool]:
    """Decode the only option of each document greedily, and compare.

    In each step the most probable token of the most confident masked position is committed, as LLaDA's published
    evaluation does (Nie et al. 2025): `generate` with ``low_confidence`` and one token per step. In block-causal
    attention blocks are decoded one after the other. Autoregressive models predict the tokens in order. Decoding stops
    at the first wrong token.
    """
    config = AnswerLikelihoodConfig() if config is None else config
    builder = AnswerBuilder(model.config, config)
    block_length = builder.layout.block_length
    texts, active = [], []
    for index, item in enumerate(requests):
        answer = builder.build(item.context, item.options[0], f"continuation {index}", item.context_options)
        generation = GenerationConfig(
            attention="bidirectional" if block_length is None else "block_causal",
            block_length=block_length or answer.num_tokens,
            remasking_strategy="low_confidence",
            temperature=0.0,
            cfg_scale=config.cfg_scale,
        )
        texts.append(answer.tokens_T)
        settings = resolve_settings(generation, model.config)
        known = prepare_known_text(settings, answer.tokens_T, answer.positions, item.context_options)
        active.append(ActiveRequest(replace(known, known_tokens_L=None)))
    indices = {id(request): index for index, request in enumerate(active)}
    decoder = Decoder.for_requests(model, active, max(1, config.batch_tokens // max(map(len, texts), default=1)))
    results = [True] * len(requests)
    for output in decoder.steps():
        for request in output.decoded:
            index = indices[id(request)]
            if (request.tokens_L != texts[index])[~request.is_masked_L].any():
                results[index] = False
                decoder.remove(request)
    return results


def _split_into_documents(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None,
    document_BL: Tensor | None,
    settings: DecodingSettings,
    row_options: Sequence[RequestOptions] | None,
) -> Iterator[tuple[int, ActiveRequest]]:
    """Split the rows into documents: row and request of the target tokens. Documents without one are left out."""
    tokens_BL = tokens_BL.cpu()
    documents_BL = torch.zeros_like(tokens_BL) if document_BL is None else document_BL.cpu().expand_as(tokens_BL)
    is_text_BL = documents_BL >= 0
    targets_BL = is_text_BL if loss_mask_BL is None else loss_mask_BL.bool().cpu() & is_text_BL
    layout = InputLayout.from_config(model.config, settings.block_causal_length)
    masked_BL = layout.maskable(CleanBatch(tokens_BL, targets_BL, documents_BL)).copy()
    row_options = [DEFAULT_OPTIONS] * len(tokens_BL) if row_options is None else row_options
    rows = zip(tokens_BL.numpy(), documents_BL.numpy(), masked_BL, row_options, strict=True)
    for row, (tokens_L, document_ids_L, is_masked_L, options) in enumerate(rows):
        for placed in options.images:
            is_masked_L[placed.start : placed.end] = False
        edges = np.flatnonzero(np.diff(document_ids_L)) + 1
        for positions in np.split(np.arange(len(tokens_L)), edges):
            masked_positions = np.flatnonzero(is_masked_L[positions])
            if not len(masked_positions):
                continue
            first, last = positions[[0, -1]].tolist()
            images = tuple(placed.move(-first) for placed in options.images if first <= placed.start <= last)
            own = replace(options, images=images)
            yield row, ActiveRequest(prepare_known_text(settings, tokens_L[positions], masked_positions, own))
