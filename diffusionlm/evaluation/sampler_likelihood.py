"""Exact likelihood of samplers that choose their order by rule.

Shapes: B rows, L tokens, R open positions of the texts' current blocks, V vocabulary, M those of one text.
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
from diffusionlm.evaluation.statistics import ratio_with_standard_error
from diffusionlm.inference.blocks import DecodingBlock, round_if_uniform_canvas, split_into_blocks
from diffusionlm.inference.model_runner import masked_position_logits
from diffusionlm.inference.sampling import check_finite, iterate_chunks
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import DecodeState, Strategy
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

MAX_LOGITS_BYTES = 1 << 30
"""Budget for the logits of one forward, counted in fp32; a single text may need more."""

ProgressCallback = Callable[[int, int], None]
"""Told the tokens scored so far, and all of them."""


@dataclass(frozen=True)
class SamplerReport:
    """The negative log-likelihood of texts under a sampler: exact, no bound."""

    nats_per_token: float
    """Mean over target tokens."""
    standard_error: float
    """Of `nats_per_token`, over rows; infinite for a single row."""
    num_tokens: int
    """Target tokens."""
    nats: float
    """Sum over target tokens."""
    row_nats: tuple[float, ...]
    """The sum of each row."""
    num_forwards: int
    """Forwards that decoding these texts takes, one by one."""


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
    """Negative log-likelihood of texts under a sampler with a deterministic order (DUEL, arXiv 2603.01367).

    All targets are masked. At each step the policy picks positions by the model's distributions alone, the true tokens
    are put there, and their log-probabilities given what was visible before are added up. The sampler is `generate`'s
    at temperature 1, where each position's confidence is that of its distribution: of the best token for
    ``low_confidence``, not of the one drawn. The mask token and nothing else has probability zero.

    Args:
        tokens_BL: clean token ids.
        loss_mask_BL: tokens that are decoded; all but padding if None. A mask token in the data is never one, and with
            shifted outputs nor is the first token of a document.
        config: blocks, steps, attention and strategy, the defaults if None. ``max_new_tokens`` and ``stop_token_ids``
            play no part: the length of a text is given.
        document_BL: document of each position, each a text of its own; padding is -1.
        batch_size: texts of one forward; fewer where their logits would be too large.
        on_progress: called after each forward.

    Raises:
        ValueError: no target token, fewer ``steps`` than a text has blocks, probabilities that are not finite, or a
            config whose sampler has no exact likelihood: a strategy by chance, a temperature other than 1 (0, the
            default, stands for it), or what makes other distributions than the model's: top_k, top_p, suppressed or
            deferred tokens, guidance, an approximate cache, a growing canvas.
    """
    settings = resolve_settings(GenerationConfig() if config is None else config, model.config)
    _check_settings(settings)
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} must be at least 1")
    texts = list(_split_into_documents(model, tokens_BL, loss_mask_BL, document_BL, settings))
    num_tokens = sum(text.num_targets for text in texts)
    if num_tokens == 0:
        raise ValueError("no target token: loss_mask_BL is false wherever a token could be predicted")
    reader = _LogitReader(settings.strategy, model.config.mask_token_id)
    # Texts of like length together: less padding.
    waiting = sorted((text for text in texts if text.blocks), key=lambda text: len(text.tokens_L), reverse=True)
    active: list[_DocumentState] = []
    num_scored = 0
    while waiting or active:
        while waiting and len(active) < batch_size:
            active.append(waiting.pop())
        some = _take_within_budget(active, model.config.vocab_size)
        canvases, places = [text.canvas_L for text in some], [text.masked_positions() for text in some]
        with nvtx.annotate("likelihood: forward"):
            logits_NV = masked_position_logits(model, canvases, places, settings.block_causal_length)
        num_scored += reader.read(logits_NV, some)
        active = [*active[len(some) :], *(text for text in some if text.blocks)]
        if on_progress is not None:
            on_progress(num_scored, num_tokens)
    return _report(texts, len(tokens_BL))


class _DocumentState:
    """One document on its way from masks to its own tokens."""

    def __init__(
        self, row: int, tokens_L: NDArray[np.int64], canvas_L: NDArray[np.int64], blocks: list[DecodingBlock]
    ) -> None:
        self.row = row
        self.tokens_L = tokens_L
        self.canvas_L = canvas_L
        """The tokens, placeholders where they are not revealed yet."""
        self.blocks = blocks
        """Still to be revealed, the current one first."""
        self.is_masked_L = np.zeros(len(tokens_L), dtype=np.bool_)
        for block in blocks:
            self.is_masked_L[block.positions] = True
        self.num_targets = int(self.is_masked_L.sum())
        self.num_forwards = 0
        self.step = 0
        """Of the current block."""
        self.nats = 0.0

    def masked_positions(self) -> NDArray[np.int64]:
        """Masked positions of the current block, [M]."""
        positions = self.blocks[0].positions
        return positions[self.is_masked_L[positions]]

    def reveal(self, confidence_M: NDArray[np.float64], nll_M: NDArray[np.float64], strategy: Strategy) -> int:
        """Put the true tokens where the policy settles some; how many."""
        unmasking_schedule = self.blocks[0].unmasking_schedule
        chosen_M = strategy.select_positions(
            DecodeState(
                confidence_M=round_if_uniform_canvas(confidence_M, self.canvas_L),
                is_masked_M=np.ones(len(confidence_M), dtype=np.bool_),
                uniforms_M=np.zeros(len(confidence_M)),
                schedule_value=unmasking_schedule[self.step],
                step=self.step,
                num_steps=len(unmasking_schedule),
            )
        )
        positions = self.masked_positions()[chosen_M]
        self.canvas_L[positions] = self.tokens_L[positions]
        self.is_masked_L[positions] = False
        self.num_forwards += 1
        self.step += 1
        self.nats += float(nll_M[chosen_M].sum())
        if len(positions) == len(confidence_M):
            self.blocks.pop(0)
            self.step = 0
        return len(positions)


@dataclass(frozen=True)
class _LogitReader:
    """How logits are read."""

    strategy: Strategy
    mask_token: int | None

    def read(self, logits_NV: Tensor, texts: list[_DocumentState]) -> int:
        """Reveal some tokens of each text; how many in all. The one wait for the device in a forward."""
        ends = np.cumsum([0, *(len(text.masked_positions()) for text in texts)]).tolist()
        targets = np.concatenate([text.tokens_L[text.masked_positions()] for text in texts])
        targets_N = torch.from_numpy(targets).to(logits_NV.device)
        read = [self._score_positions(logits_NV[chunk], targets_N[chunk]) for chunk in iterate_chunks(logits_NV)]
        confidence_M, nll_N = torch.cat(read, dim=1).cpu().numpy()
        check_finite(~np.isnan(confidence_M) & ~np.isnan(nll_N))
        return sum(
            text.reveal(confidence_M[start:end], nll_N[start:end], self.strategy)
            for text, (start, end) in zip(texts, pairwise(ends), strict=True)
        )

    def _score_positions(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Confidence and negative log-likelihood of the true token of each row, [2, R] in fp64."""
        own_NV = logits_NV.to(torch.float64, copy=True)
        if self.mask_token is not None:
            own_NV[:, self.mask_token] = float("-inf")
        logprobs_NV = own_NV.log_softmax(dim=1)
        probs_NV = logprobs_NV.exp()
        tokens_N, measure = probs_NV.argmax(dim=1), self.strategy.measure
        confidence_N = torch.zeros_like(probs_NV[:, 0]) if measure is None else measure.compute(probs_NV, tokens_N)
        return torch.stack([confidence_N, -logprobs_NV.gather(1, targets_N[:, None])[:, 0]])


def _check_settings(settings: DecodingSettings) -> None:
    config, strategy = settings.config, settings.strategy
    if not strategy.has_exact_likelihood:
        names = [name for name, strategy_class in STRATEGIES.items() if strategy_class().has_exact_likelihood]
        defaults = type(strategy)().model_dump()
        options = [f"{key} = {value}" for key, value in strategy.model_dump().items() if value != defaults[key]]
        cause = " with ".join([f'remasking_strategy = "{strategy.name}"', *options])
        raise ValueError(
            f"{cause} has no exact likelihood: its order depends on randomness or it remasks; choose one of "
            f"{', '.join(names)}, with default options"
        )
    if config.temperature not in (0.0, 1.0):
        raise ValueError(f"temperature = {config.temperature}: the likelihood is that of temperature 1; remove it")
    plain = GenerationConfig()
    for name in ("top_k", "top_p", "suppress_token_ids", "defer_token_ids", "cfg_scale", "canvas"):
        value = getattr(config, name)
        if value != getattr(plain, name):
            raise ValueError(
                f"{name} = {value} changes what the sampler may say, and the likelihood is the model's own: remove it"
            )
    if config.cache in ("prefix", "dual"):
        raise ValueError(
            f"cache = \"{config.cache}\" makes other distributions than the model's, and the likelihood is the model's "
            "own: remove it"
        )


def _split_into_documents(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None,
    document_BL: Tensor | None,
    settings: DecodingSettings,
) -> Iterator[_DocumentState]:
    """Each document of each row, masked."""
    tokens_BL = tokens_BL.cpu()
    documents_BL = torch.zeros_like(tokens_BL) if document_BL is None else document_BL.cpu().expand_as(tokens_BL)
    is_text_BL = documents_BL >= 0
    targets_BL = is_text_BL if loss_mask_BL is None else loss_mask_BL.bool().cpu() & is_text_BL
    layout = InputLayout.from_config(model.config, settings.block_causal_length)
    maskable_BL = layout.maskable(CleanBatch(tokens_BL, targets_BL, documents_BL))
    placeholder_id = settings.placeholder_token_id
    for row, (tokens_L, document_ids_L) in enumerate(zip(tokens_BL.numpy(), documents_BL.numpy(), strict=True)):
        edges = np.flatnonzero(np.diff(document_ids_L)) + 1
        for places in np.split(np.arange(len(tokens_L)), edges):
            if document_ids_L[places[0]] < 0:
                continue
            text_L, holes = tokens_L[places].astype(np.int64), np.flatnonzero(maskable_BL[row, places])
            canvas_L = text_L.copy()
            canvas_L[holes] = placeholder_id
            yield _DocumentState(row, text_L, canvas_L, split_into_blocks(holes, settings))


def _take_within_budget(texts: list[_DocumentState], vocab_size: int) -> list[_DocumentState]:
    """The first texts, as many as have logits within `MAX_LOGITS_BYTES`, at least one."""
    rows = np.cumsum([len(text.masked_positions()) for text in texts])
    return texts[: max(1, int((rows * vocab_size * 4 <= MAX_LOGITS_BYTES).sum()))]


def _report(texts: list[_DocumentState], num_rows: int) -> SamplerReport:
    nats_B, sizes_B = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    for text in texts:
        nats_B[text.row] += text.nats
        sizes_B[text.row] += text.num_targets
    mean, error = ratio_with_standard_error(nats_B, sizes_B)
    num_forwards = sum(text.num_forwards for text in texts)
    return SamplerReport(mean, error, int(sizes_B.sum()), float(nats_B.sum()), tuple(nats_B.tolist()), num_forwards)
