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

from config.generation import STRATEGIES, GenerationConfig, RemaskingStrategy
from config.model import ModelConfig
from diffusionlm.diffusion.layout import Layout
from diffusionlm.diffusion.noised_batch import Batch
from diffusionlm.evaluation.nelbo import ratio_and_error
from diffusionlm.inference.blocks import Block, block_causal_length, blocks_of, comparable, placeholder_token
from diffusionlm.inference.model_runner import open_logits
from diffusionlm.inference.sampling import CHUNK_BYTES
from diffusionlm.inference.settings import with_defaults
from diffusionlm.inference.strategies import Look, Policy, build_policy
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

LOGITS_BYTES = 1 << 30
"""Budget for the logits of one forward, counted in fp32; a single text may need more."""

OnProgress = Callable[[int, int], None]
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
    is_target_BL: Tensor | None = None,
    config: GenerationConfig | None = None,
    *,
    document_BL: Tensor | None = None,
    batch_size: int = 32,
    on_progress: OnProgress | None = None,
) -> SamplerReport:
    """Negative log-likelihood of texts under a sampler with a deterministic order (DUEL, arXiv 2603.01367).

    All targets are masked. At each step the policy picks positions by the model's distributions alone, the true tokens
    are put there, and their log-probabilities given what was visible before are added up. The sampler is `generate`'s
    at temperature 1, where each position's confidence is that of its distribution: of the best token for
    ``low_confidence``, not of the one drawn. The mask token and nothing else has probability zero.

    Args:
        tokens_BL: clean token ids.
        is_target_BL: tokens that are decoded; all but padding if None. A mask token in the data is never one, and with
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
    config = with_defaults(GenerationConfig() if config is None else config, model.config)
    _check_config(config, model.config)
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} must be at least 1")
    texts = list(_texts(model, tokens_BL, is_target_BL, document_BL, config))
    num_tokens = sum(text.num_targets for text in texts)
    if num_tokens == 0:
        raise ValueError("no target token: is_target_BL is false wherever a token could be predicted")
    reader = _Reader(build_policy(config), model.config.mask_token_id)
    block_length = block_causal_length(config, model.config)
    # Texts of like length together: less padding.
    waiting = sorted((text for text in texts if text.blocks), key=lambda text: len(text.tokens_L), reverse=True)
    active: list[_Text] = []
    num_scored = 0
    while waiting or active:
        while waiting and len(active) < batch_size:
            active.append(waiting.pop())
        some = _within_budget(active, model.config.vocab_size)
        canvases, places = [text.canvas_L for text in some], [text.open_positions() for text in some]
        with nvtx.range("likelihood: forward"):
            logits_RV = open_logits(model, canvases, places, block_length)
        num_scored += reader.read(logits_RV, some)
        active = [*active[len(some) :], *(text for text in some if text.blocks)]
        if on_progress is not None:
            on_progress(num_scored, num_tokens)
    return _report(texts, len(tokens_BL))


class _Text:
    """One document on its way from masks to its own tokens."""

    def __init__(self, row: int, tokens_L: NDArray[np.int64], canvas_L: NDArray[np.int64], blocks: list[Block]) -> None:
        self.row = row
        self.tokens_L = tokens_L
        self.canvas_L = canvas_L
        """The tokens, placeholders where they are not revealed yet."""
        self.blocks = blocks
        """Still to be revealed, the current one first."""
        self.is_open_L = np.zeros(len(tokens_L), dtype=np.bool_)
        for block in blocks:
            self.is_open_L[block.positions] = True
        self.num_targets = int(self.is_open_L.sum())
        self.num_forwards = 0
        self.step = 0
        """Of the current block."""
        self.nats = 0.0

    def open_positions(self) -> NDArray[np.int64]:
        """Masked positions of the current block, [M]."""
        positions = self.blocks[0].positions
        return positions[self.is_open_L[positions]]

    def reveal(self, confidence_M: NDArray[np.float64], nll_M: NDArray[np.float64], policy: Policy) -> int:
        """Put the true tokens where the policy settles some; how many."""
        plan = self.blocks[0].plan
        chosen_M = policy.choose(
            Look(
                confidence_N=comparable(confidence_M, self.canvas_L),
                is_masked_N=np.ones(len(confidence_M), dtype=np.bool_),
                uniforms_N=np.zeros(len(confidence_M)),
                quota=plan[self.step],
                step=self.step,
                num_steps=len(plan),
            )
        )
        positions = self.open_positions()[chosen_M]
        self.canvas_L[positions] = self.tokens_L[positions]
        self.is_open_L[positions] = False
        self.num_forwards += 1
        self.step += 1
        self.nats += float(nll_M[chosen_M].sum())
        if len(positions) == len(confidence_M):
            self.blocks.pop(0)
            self.step = 0
        return len(positions)


@dataclass(frozen=True)
class _Reader:
    """How logits are read."""

    policy: Policy
    mask_token: int | None

    def read(self, logits_RV: Tensor, texts: list[_Text]) -> int:
        """Reveal some tokens of each text; how many in all. The one wait for the device in a forward."""
        R, V = logits_RV.shape
        ends = np.cumsum([0, *(len(text.open_positions()) for text in texts)]).tolist()
        targets = np.concatenate([text.tokens_L[text.open_positions()] for text in texts])
        targets_R = torch.from_numpy(targets).to(logits_RV.device)
        size = max(1, CHUNK_BYTES // (8 * V))
        chunks = [slice(start, start + size) for start in range(0, R, size)]
        read = [self._rows(logits_RV[some], targets_R[some]) for some in chunks]
        confidence_R, nll_R = torch.cat(read, dim=1).cpu().numpy()
        if np.isnan(confidence_R).any() or np.isnan(nll_R).any():
            raise ValueError(
                "the model's probabilities are not finite: its weights may be damaged, or its numbers overflow in this "
                'dtype; try dtype = "float32"'
            )
        return sum(
            text.reveal(confidence_R[start:end], nll_R[start:end], self.policy)
            for text, (start, end) in zip(texts, pairwise(ends), strict=True)
        )

    def _rows(self, logits_RV: Tensor, targets_R: Tensor) -> Tensor:
        """Confidence and negative log-likelihood of the true token of each row, [2, R] in fp64."""
        own_RV = logits_RV.to(torch.float64, copy=True)
        if self.mask_token is not None:
            own_RV[:, self.mask_token] = float("-inf")
        logprobs_RV = own_RV.log_softmax(dim=1)
        probs_RV = logprobs_RV.exp()
        confidence_R = self.policy.confidence(probs_RV, probs_RV.argmax(dim=1))
        return torch.stack([confidence_R, -logprobs_RV.gather(1, targets_R[:, None])[:, 0]])


def _check_config(config: GenerationConfig, model: ModelConfig) -> None:
    if not build_policy(config).is_deterministic:
        known = ", ".join(name for name in STRATEGIES if _is_deterministic(name, model))
        name = (
            f"alg_temp = {config.alg_temp}"
            if config.alg_temp
            else f'remasking_strategy = "{config.remasking_strategy}"'
        )
        raise ValueError(
            f"{name} has no exact likelihood: its order depends on chance; choose one of {known}, without alg_temp"
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


def _is_deterministic(strategy: RemaskingStrategy, model: ModelConfig) -> bool:
    return build_policy(with_defaults(GenerationConfig(remasking_strategy=strategy), model)).is_deterministic


def _texts(
    model: Transformer,
    tokens_BL: Tensor,
    is_target_BL: Tensor | None,
    document_BL: Tensor | None,
    config: GenerationConfig,
) -> Iterator[_Text]:
    """Each document of each row, masked."""
    tokens_BL = tokens_BL.cpu()
    documents_BL = torch.zeros_like(tokens_BL) if document_BL is None else document_BL.cpu().expand_as(tokens_BL)
    is_text_BL = documents_BL >= 0
    targets_BL = is_text_BL if is_target_BL is None else is_target_BL.bool().cpu() & is_text_BL
    layout = Layout.of(model.config, block_causal_length(config, model.config))
    eligible_BL = layout.eligible(Batch(tokens_BL, targets_BL, documents_BL))
    placeholder = placeholder_token(config, model.config)
    for row, (tokens_L, documents_L) in enumerate(zip(tokens_BL.numpy(), documents_BL.numpy(), strict=True)):
        edges = np.flatnonzero(np.diff(documents_L)) + 1
        for places in np.split(np.arange(len(tokens_L)), edges):
            if documents_L[places[0]] < 0:
                continue
            text_L, holes = tokens_L[places].astype(np.int64), np.flatnonzero(eligible_BL[row, places])
            canvas_L = text_L.copy()
            canvas_L[holes] = placeholder
            yield _Text(row, text_L, canvas_L, blocks_of(holes, config, model.config))


def _within_budget(texts: list[_Text], vocab_size: int) -> list[_Text]:
    """The first texts, as many as have logits within `LOGITS_BYTES`, at least one."""
    rows = np.cumsum([len(text.open_positions()) for text in texts])
    return texts[: max(1, int((rows * vocab_size * 4 <= LOGITS_BYTES).sum()))]


def _report(texts: list[_Text], num_rows: int) -> SamplerReport:
    nats_B, sizes_B = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    for text in texts:
        nats_B[text.row] += text.nats
        sizes_B[text.row] += text.num_targets
    mean, error = ratio_and_error(nats_B, sizes_B)
    num_forwards = sum(text.num_forwards for text in texts)
    return SamplerReport(mean, error, int(sizes_B.sum()), float(nats_B.sum()), tuple(nats_B.tolist()), num_forwards)
