"""Exact likelihood of text under samplers with a deterministic decoding order.

Shapes: B rows, L tokens, N masked positions in the current blocks of several documents, M in that of one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES, ratio_with_standard_error
from diffusionlm.inference.model_runner import build_pattern, masked_position_logits
from diffusionlm.inference.requests import DecodingBlock, round_if_uniform_canvas, split_into_blocks
from diffusionlm.inference.sampling import check_finite, iterate_chunks
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import DecodeState, Strategy
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

ProgressCallback = Callable[[int, int], None]
"""Called with the number of scored tokens and the number of all tokens."""


@dataclass(frozen=True)
class SamplerReport:
    """The exact negative log-likelihood of text under a sampler."""

    nats_per_token: float
    """Mean over target tokens."""
    standard_error: float
    """Standard error of `nats_per_token` over rows; infinite for a single row."""
    num_tokens: int
    """Number of target tokens."""
    nats: float
    """Sum over target tokens."""
    row_nats: tuple[float, ...]
    """Sum over each row."""
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
    num_tokens = sum(document.num_targets for document in documents)
    if num_tokens == 0:
        raise ValueError("no target token: loss_mask_BL is false at all positions that can be predicted")
    pattern = build_pattern(settings)
    reader = _LogitReader(settings.strategy, model.config.mask_token_id)
    # Sorted by length, so that a forward needs little padding.
    unfinished = [document for document in documents if document.blocks]
    unfinished.sort(key=lambda document: len(document.tokens_L))
    num_scored = 0
    while unfinished:
        batch = _take_within_budget(unfinished[:batch_size], model.config.vocab_size)
        canvases = [document.canvas_L for document in batch]
        positions = [document.masked_positions() for document in batch]
        with nvtx.annotate("likelihood: forward"):
            logits_NV = masked_position_logits(model, canvases, positions, [pattern] * len(batch))
        num_scored += reader.reveal_tokens(logits_NV, batch)
        unfinished[: len(batch)] = [document for document in batch if document.blocks]
        if on_progress is not None:
            on_progress(num_scored, num_tokens)
    return _build_report(documents, len(tokens_BL))


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


class _DocumentState:
    """A document whose target tokens are revealed step by step."""

    def __init__(
        self, row: int, tokens_L: NDArray[np.int64], canvas_L: NDArray[np.int64], blocks: list[DecodingBlock]
    ) -> None:
        self.row = row
        self.tokens_L = tokens_L
        self.canvas_L = canvas_L
        """Tokens, with placeholders at masked positions."""
        self.blocks = blocks
        """Blocks with masked positions; the first is the current one."""
        self.is_masked_L = np.zeros(len(tokens_L), dtype=np.bool_)
        for block in blocks:
            self.is_masked_L[block.positions] = True
        self.num_targets = int(self.is_masked_L.sum())
        self.num_forwards = 0
        self.step = 0
        """Step within the current block."""
        self.nats = 0.0

    def masked_positions(self) -> NDArray[np.int64]:
        """Masked positions of the current block, [M]."""
        positions = self.blocks[0].positions
        return positions[self.is_masked_L[positions]]

    def reveal(self, confidence_M: NDArray[np.float64], nll_M: NDArray[np.float64], strategy: Strategy) -> int:
        """Reveal the true tokens at the positions that the strategy selects. Returns their number."""
        unmasking_schedule = self.blocks[0].unmasking_schedule
        is_selected_M = strategy.select_positions(
            DecodeState(
                confidence_M=round_if_uniform_canvas(confidence_M, self.canvas_L),
                is_masked_M=np.ones(len(confidence_M), dtype=np.bool_),
                uniforms_M=np.zeros(len(confidence_M)),
                schedule_value=unmasking_schedule[self.step],
                step=self.step,
                num_steps=len(unmasking_schedule),
            )
        )
        positions = self.masked_positions()[is_selected_M]
        self.canvas_L[positions] = self.tokens_L[positions]
        self.is_masked_L[positions] = False
        self.num_forwards += 1
        self.step += 1
        self.nats += float(nll_M[is_selected_M].sum())
        if len(positions) == len(confidence_M):
            self.blocks.pop(0)
            self.step = 0
        return len(positions)


@dataclass(frozen=True)
class _LogitReader:
    """Turns logits into confidences and log-likelihoods, and reveals tokens."""

    strategy: Strategy
    mask_token: int | None

    def reveal_tokens(self, logits_NV: Tensor, documents: list[_DocumentState]) -> int:
        """Reveal tokens of each document, with one host-device synchronization. Returns their number."""
        ends = np.cumsum([0, *(len(document.masked_positions()) for document in documents)]).tolist()
        targets = np.concatenate([document.tokens_L[document.masked_positions()] for document in documents])
        targets_N = copy_to_device(torch.from_numpy(targets), logits_NV.device)
        scores = [self._score_positions(logits_NV[chunk], targets_N[chunk]) for chunk in iterate_chunks(logits_NV)]
        confidence_N, nll_N = torch.cat(scores, dim=1).cpu().numpy()
        check_finite(~np.isnan(confidence_N) & ~np.isnan(nll_N))
        return sum(
            document.reveal(confidence_N[start:end], nll_N[start:end], self.strategy)
            for document, (start, end) in zip(documents, pairwise(ends), strict=True)
        )

    def _score_positions(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Confidence of each position and negative log-likelihood of its true token, [2, N] in float64."""
        logits64_NV = logits_NV.to(torch.float64, copy=True)
        if self.mask_token is not None:
            logits64_NV[:, self.mask_token] = float("-inf")
        logprobs_NV = logits64_NV.log_softmax(dim=1)
        probs_NV = logprobs_NV.exp()
        tokens_N, measure = probs_NV.argmax(dim=1), self.strategy.measure
        confidence_N = torch.zeros_like(probs_NV[:, 0]) if measure is None else measure.compute(probs_NV, tokens_N)
        return torch.stack([confidence_N, -logprobs_NV.gather(1, targets_N[:, None])[:, 0]])


def _split_into_documents(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None,
    document_BL: Tensor | None,
    settings: DecodingSettings,
) -> Iterator[_DocumentState]:
    """Split the rows into documents, and mask their target tokens."""
    tokens_BL = tokens_BL.cpu()
    documents_BL = torch.zeros_like(tokens_BL) if document_BL is None else document_BL.cpu().expand_as(tokens_BL)
    is_text_BL = documents_BL >= 0
    targets_BL = is_text_BL if loss_mask_BL is None else loss_mask_BL.bool().cpu() & is_text_BL
    layout = InputLayout.from_config(model.config, settings.block_causal_length)
    maskable_BL = layout.maskable(CleanBatch(tokens_BL, targets_BL, documents_BL))
    placeholder_id = settings.placeholder_token_id
    for row, (tokens_L, document_ids_L) in enumerate(zip(tokens_BL.numpy(), documents_BL.numpy(), strict=True)):
        edges = np.flatnonzero(np.diff(document_ids_L)) + 1
        for positions in np.split(np.arange(len(tokens_L)), edges):
            if document_ids_L[positions[0]] < 0:
                continue
            text_L = tokens_L[positions].astype(np.int64)
            masked_positions = np.flatnonzero(maskable_BL[row, positions])
            canvas_L = text_L.copy()
            canvas_L[masked_positions] = placeholder_id
            yield _DocumentState(row, text_L, canvas_L, split_into_blocks(masked_positions, settings))


def _take_within_budget(documents: list[_DocumentState], vocab_size: int) -> list[_DocumentState]:
    """The longest prefix of the documents whose logits fit into `MAX_LOGITS_BYTES`, at least one document."""
    num_positions = np.cumsum([len(document.masked_positions()) for document in documents])
    return documents[: max(1, int((num_positions * vocab_size * 4 <= MAX_LOGITS_BYTES).sum()))]


def _build_report(documents: list[_DocumentState], num_rows: int) -> SamplerReport:
    nats_B, sizes_B = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    for document in documents:
        nats_B[document.row] += document.nats
        sizes_B[document.row] += document.num_targets
    mean, error = ratio_with_standard_error(nats_B, sizes_B)
    num_forwards = sum(document.num_forwards for document in documents)
    return SamplerReport(mean, error, int(sizes_B.sum()), float(nats_B.sum()), tuple(nats_B.tolist()), num_forwards)
