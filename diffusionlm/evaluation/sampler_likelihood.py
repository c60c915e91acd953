"""Exact likelihood of text under samplers with a deterministic decoding order.

Shapes: B rows, L tokens, N masked positions in the current blocks of several documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES, LikelihoodReport
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.requests import (
    ActiveRequest,
    Predictions,
    PreparedRequest,
    RequestOptions,
    split_into_blocks,
)
from diffusionlm.inference.sampling import LogitRows, check_finite, iterate_chunks
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import ConfidenceMeasure
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer

ProgressCallback = Callable[[int, int], None]
"""Called with the number of scored tokens and the number of all tokens."""


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
    batch_size: int = 32,
    on_progress: ProgressCallback | None = None,
) -> SamplerReport:
    """Compute the negative log-likelihood under a sampler with a deterministic order (DUEL, arXiv 2603.01367).

    All target tokens are masked. In each step the strategy selects positions from the model's distributions alone, the
    true tokens are revealed there, and their log-probabilities given the tokens visible before are summed. The sampler
    is that of `generate` at temperature 1, except that confidences do not depend on sampled tokens: ``low_confidence``
    uses the probability of the most probable one. Only the mask token has probability zero.

    Args:
        tokens_BL: clean token ids.
        loss_mask_BL: target tokens, which are decoded; None: all but padding. A mask token in the data is never a
            target, and with shifted outputs neither is the first token of a document.
        config: blocks, steps, attention and strategy; None: the defaults. ``max_new_tokens`` and ``stop_token_ids`` are
            ignored.
        document_BL: document id of each position; documents are independent texts, and padding is -1.
        batch_size: documents per forward; fewer if their logits exceed `MAX_LOGITS_BYTES`.
        on_progress: called after each forward.

    Raises:
        ValueError: there is no target token, ``steps`` is less than the number of blocks, the probabilities are not
            finite, or the sampler has no exact likelihood: its order is random, its temperature is not 1 (or 0, read as
            1), or it changes the model's distributions (top_k, top_p, suppressed or deferred tokens, guidance, ...).
    """
    settings = resolve_settings(GenerationConfig() if config is None else config, model.config)
    check_exact_likelihood(settings)
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} must be at least 1")
    documents = list(_split_into_documents(model, tokens_BL, loss_mask_BL, document_BL, settings))
    sizes = [len(document.request.masked_positions) for document in documents]
    if not sum(sizes):
        raise ValueError("no target token: loss_mask_BL is false at all positions that can be predicted")
    largest = max(len(block.positions) for document in documents for block in document.request.blocks)
    max_documents = min(batch_size, MAX_LOGITS_BYTES // (4 * largest * model.config.vocab_size))
    decoder = _RevealingDecoder.for_requests(model, [item.request for item in documents], max(1, max_documents))
    decoder.tokens = {id(document.request): document.tokens_L for document in documents}
    while decoder.has_work:
        for request in decoder.step().decoded:
            if request.error is not None:
                raise request.error
        if on_progress is not None:
            on_progress(sum(sizes) - sum(int(item.request.is_masked_L.sum()) for item in documents), sum(sizes))
    decoder.keep_graphs()
    nats_B, sizes_B = np.zeros(len(tokens_BL)), np.zeros(len(tokens_BL), dtype=np.int64)
    for document, size in zip(documents, sizes, strict=True):
        nats_B[document.row] -= document.request.logprobs_L[document.request.masked_positions].sum()
        sizes_B[document.row] += size
    num_forwards = sum(document.request.num_forwards for document in documents)
    return SamplerReport.from_rows(nats_B, sizes_B, num_forwards=num_forwards)


def check_exact_likelihood(settings: DecodingSettings) -> None:
    """Check that a sampler has an exact likelihood.

    Raises:
        ValueError: its order is random, its temperature is not 1 (or 0, read as 1), or it changes the model's
            distributions; names the key.
    """
    config, strategy = settings.config, settings.strategy
    if not strategy.has_exact_likelihood:
        names = [name for name, strategy_class in STRATEGIES.items() if strategy_class().has_exact_likelihood]
        default_options = type(strategy)().model_dump()
        options = [f"{key} = {value}" for key, value in strategy.model_dump().items() if value != default_options[key]]
        cause = " with ".join([f'remasking_strategy = "{strategy.name}"', *options])
        raise ValueError(
            f"{cause} has no exact likelihood: its order depends on randomness or it remasks; choose one of "
            f"{', '.join(names)}, with default options"
        )
    if config.attention == "prompt_and_own_block" or config.attention_bias is not None:
        raise ValueError("generation: attention_bias and prompt_and_own_block have no sampler likelihood: remove them")
    if config.temperature not in (0.0, 1.0):
        raise ValueError(f"temperature = {config.temperature}: the likelihood is defined for temperature 1: remove it")
    defaults = GenerationConfig()
    for name in ("top_k", "top_p", "suppress_token_ids", "defer_token_ids", "cfg_scale", "canvas"):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name} = {value} changes the sampler's distributions, but the likelihood is that of the model: "
                "remove it"
            )
    if config.cache in ("prefix", "dual"):
        raise ValueError(
            f'cache = "{config.cache}" approximates the distributions, but the likelihood is that of the model: '
            "remove it"
        )


def mask_text(
    tokens_L: NDArray[np.int64], masked_positions: NDArray[np.int64], settings: DecodingSettings
) -> ActiveRequest:
    """A request that decodes some positions of a text."""
    canvas_L = tokens_L.copy()
    canvas_L[masked_positions] = settings.placeholder_token_id
    blocks = tuple(split_into_blocks(masked_positions, settings))
    options = RequestOptions(is_infill=True)
    return ActiveRequest(
        PreparedRequest(settings, options, 0, canvas_L, masked_positions, blocks, len(tokens_L), allowed_token_ids={})
    )


@dataclass(frozen=True)
class _Document:
    row: int
    tokens_L: NDArray[np.int64]
    request: ActiveRequest
    """Of its target tokens."""


class _RevealingDecoder(Decoder):
    """Reveals the true tokens at the positions that the strategy selects."""

    tokens: Mapping[int, NDArray[np.int64]]
    """Id of a request -> the true tokens of its text."""

    def _sample(self, logits: LogitRows) -> list[Predictions | Exception]:
        """Confidences and log-probabilities of the true tokens, with one host-device synchronization."""
        requests, logits_NV = logits.requests, logits.select(logits.requests)
        targets = [self.tokens[id(request)][request.output_positions] for request in requests]
        targets_N = copy_to_device(torch.from_numpy(np.concatenate(targets)), logits_NV.device)
        measure = requests[0].settings.strategy.measure
        forbidden_ids = list(requests[0].settings.forbidden_token_ids)
        scores = [
            _score_positions(logits_NV[chunk], targets_N[chunk], forbidden_ids, measure)
            for chunk in iterate_chunks(logits_NV)
        ]
        scores_2N = torch.cat(scores, dim=1).cpu().numpy()
        check_finite(~np.isnan(scores_2N).any(axis=0))
        parts = np.split(scores_2N, np.cumsum([len(part) for part in targets])[:-1], axis=1)
        return [
            Predictions(tokens_N, confidence_N, logprobs_N, np.zeros((len(tokens_N), 0), np.int64), np.zeros((0, 0)))
            for tokens_N, (confidence_N, logprobs_N) in zip(targets, parts, strict=True)
        ]


def _score_positions(
    logits_NV: Tensor, targets_N: Tensor, forbidden_ids: Sequence[int], measure: ConfidenceMeasure | None
) -> Tensor:
    """Confidence of each position and log-probability of its true token, [2, N] in float64."""
    logits64_NV = logits_NV.to(torch.float64, copy=True)
    logits64_NV[:, forbidden_ids] = float("-inf")
    logprobs_NV = logits64_NV.log_softmax(dim=1)
    probs_NV = logprobs_NV.exp()
    tokens_N = probs_NV.argmax(dim=1)
    confidence_N = torch.zeros_like(probs_NV[:, 0]) if measure is None else measure.compute(probs_NV, tokens_N)
    return torch.stack([confidence_N, logprobs_NV.gather(1, targets_N[:, None])[:, 0]])


def _split_into_documents(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None,
    document_BL: Tensor | None,
    settings: DecodingSettings,
) -> Iterator[_Document]:
    """Split the rows into documents, and mask their target tokens. Documents without one are left out."""
    tokens_BL = tokens_BL.cpu()
    documents_BL = torch.zeros_like(tokens_BL) if document_BL is None else document_BL.cpu().expand_as(tokens_BL)
    is_text_BL = documents_BL >= 0
    targets_BL = is_text_BL if loss_mask_BL is None else loss_mask_BL.bool().cpu() & is_text_BL
    layout = InputLayout.from_config(model.config, settings.block_causal_length)
    maskable_BL = layout.maskable(CleanBatch(tokens_BL, targets_BL, documents_BL))
    for row, (tokens_L, document_ids_L) in enumerate(zip(tokens_BL.numpy(), documents_BL.numpy(), strict=True)):
        edges = np.flatnonzero(np.diff(document_ids_L)) + 1
        for positions in np.split(np.arange(len(tokens_L)), edges):
            masked_positions = np.flatnonzero(maskable_BL[row, positions])
            if len(masked_positions):
                text_L = tokens_L[positions].astype(np.int64)
                yield _Document(row, text_L, mask_text(text_L, masked_positions, settings))
