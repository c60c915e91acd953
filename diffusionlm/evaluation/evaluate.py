"""What a trained model is worth: the bound, how well it fills holes, and the company it keeps.

Shapes: B rows, L positions, V vocabulary, R masked positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.process_group import World
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.rng import RngStream
from diffusionlm.evaluation.nelbo import NelboEstimator, choose_masked_per_sequence, ratio_with_standard_error
from diffusionlm.models.transformer import Transformer
from profiling import nvtx
from tokenizer import Tokenizer

FILL_FRACTIONS = (0.15, 0.50)

VALIDATION_SEED = 0
"""The rows and draws of a validation are the same whatever the run's seed, so that runs compare."""

T = TypeVar("T")


class MapForwards(Protocol):
    """Who computes ``work(0)`` ... ``work(count - 1)``, each a forward and what is made of it; returns all of them."""

    def __call__(self, count: int, work: Callable[[int], T]) -> list[T]:
        """Raises ValueError where ``work`` does."""


def map_locally(count: int, work: Callable[[int], T]) -> list[T]:
    """This process does it all."""
    return [work(index) for index in range(count)]


@dataclass(frozen=True)
class MapOverRanks:
    """Each rank computes its share, and all have all results: those of one process, since the forwards are the same."""

    world: World
    is_collective: bool = False
    """Whether a forward takes all ranks (FSDP), so that all make equally many; what is too much is dropped."""

    def __call__(self, count: int, work: Callable[[int], T]) -> list[T]:
        """An error of any rank is raised on all, once all have made their forwards."""
        size = self.world.size
        own: list[tuple[list[T], str]] = []
        for index in range(self.world.rank, -(-count // size) * size, size):
            if index >= count and not self.is_collective:
                continue
            try:
                own.append(([work(min(index, count - 1))], ""))
            except ValueError as error:
                own.append(([], str(error)))
        gathered = self.world.all_gather_objects(own)
        results: list[T] = []
        for index in range(count):
            result, problem = gathered[index % size][index // size]
            if problem:
                raise ValueError(problem)
            results += result
        return results


@dataclass(frozen=True)
class FillAccuracy:
    """Accuracy on masked held-out tokens, as shares of the masked tokens."""

    fraction: float
    """Share of each row that is masked."""
    top1_accuracy: float
    top5_accuracy: float
    majority_baseline: float | None
    """Accuracy of always predicting the most frequent training token."""


@dataclass(frozen=True)
class EvaluationResult:
    """The table at the end of a run."""

    nats_per_token: float
    standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    unigram_entropy: float
    """Of the validation tokens themselves, in nats per token."""
    num_tokens: int
    num_bytes: int
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    fills: tuple[FillAccuracy, ...]
    block_length: int | None
    """Of block diffusion; 1: exact, from left to right. None: bidirectional."""
    num_rows: int

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for files."""
        return asdict(self)


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    rows: list[Row],
    *,
    num_mc_samples: int,
    batch_size: int,
    block_length: int | None = None,
    majority_token: int | None = None,
    map_forwards: MapForwards = map_locally,
) -> EvaluationResult:
    """The evaluation of validation rows on a fixed grid of draws.

    Args:
        rows: validation rows; padding is not counted.
        block_length: of block diffusion; None: bidirectional, and only then the fill test is made.
        num_mc_samples: masked versions of each row.
        batch_size: rows of one forward.
        majority_token: the most frequent training token, if known.
        spread: who makes the forwards.

    Raises:
        ValueError: no token to score, or a model whose numbers are not finite.
    """
    batch = collate_rows(rows)
    forwards = NelboEstimator.of(
        model.config,
        batch.tokens_BL,
        batch.loss_mask_BL,
        block_length,
        num_mc_samples,
        VALIDATION_SEED,
        document_BL=batch.document_BL,
        batch_size=batch_size,
    )
    report = forwards.report(map_forwards(forwards.count, lambda index: forwards.run(model, index)))
    layout = InputLayout.from_config(model.config, block_length)
    maskable_BL = layout.maskable(batch)
    tokens = batch.tokens_BL.numpy()[maskable_BL]
    bytes_B = count_row_bytes(tokenizer, batch.tokens_BL.numpy(), maskable_BL)
    bits, bits_error = bits_per_byte(report.row_nats, bytes_B)
    return EvaluationResult(
        nats_per_token=report.nats_per_token,
        standard_error=report.standard_error,
        bits_per_byte=bits,
        bits_per_byte_standard_error=bits_error,
        unigram_entropy=entropy(np.bincount(tokens)),
        num_tokens=report.num_tokens,
        num_bytes=int(bytes_B.sum()),
        by_masked_fraction=report.by_masked_fraction,
        fills=tuple(
            measure_fill_accuracy(model, batch, fraction, batch_size, majority_token, map_forwards)
            for fraction in FILL_FRACTIONS
            if block_length is None
        ),
        block_length=block_length,
        num_rows=len(rows),
    )


def count_row_bytes(
    tokenizer: Tokenizer, tokens_BL: NDArray[np.integer[Any]], is_scored_BL: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Bytes of text behind the scored tokens of each row, [B]; special tokens have none."""
    bytes_B: NDArray[np.int64] = np.where(is_scored_BL, tokenizer.byte_lengths()[tokens_BL], 0).sum(axis=1)
    return bytes_B


def bits_per_byte(row_nats: Sequence[float], bytes_B: NDArray[np.int64]) -> tuple[float, float]:
    """Bits for each byte of the text, and their standard error over rows; infinite where there is no byte at all."""
    if not bytes_B.any():
        return math.inf, math.inf
    nats, error = ratio_with_standard_error(np.array(row_nats), bytes_B)
    return nats / math.log(2), error / math.log(2)


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@torch.no_grad()
def measure_fill_accuracy(
    model: Transformer,
    batch: CleanBatch,
    fraction: float,
    batch_size: int,
    majority_token: int | None,
    map_forwards: MapForwards = map_locally,
) -> FillAccuracy:
    """Mask a share of each row's tokens, once; count how many are the model's first or among its five most probable tokens."""
    layout = InputLayout.from_config(model.config, None)
    maskable_BL = layout.maskable(batch)
    counts_B = np.ceil(fraction * maskable_BL.sum(axis=1)).astype(np.int64)
    masked_BL = choose_masked_per_sequence(
        maskable_BL, counts_B, VALIDATION_SEED, RngStream.FILL_MASKS, round(1000 * fraction)
    )
    mask_token = model.config.mask_token

    def count(index: int) -> tuple[int, int, int, int]:
        """Numbers of top-1 hits, top-5 hits, majority tokens and masked tokens of one batch of rows."""
        some = slice(index * batch_size, (index + 1) * batch_size)
        masked = masked_BL[some]
        draw = layout.build_noised_batch(
            batch.select(some), masked, np.ones(masked.shape), num_targets=0, denominator=0.0
        )
        draw = draw.to(model.lm_head.weight.device)
        with nvtx.range("filling: forward"):
            logits_RV = model(draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N).float()
        logits_RV[:, mask_token] = float("-inf")
        hits_R5 = logits_RV.topk(min(5, logits_RV.shape[1]), dim=1).indices == draw.targets_N[:, None]
        common = 0 if majority_token is None else int((draw.targets_N == majority_token).sum())
        return int(hits_R5[:, 0].sum()), int(hits_R5.sum()), common, len(draw.targets_N)

    counts = map_forwards(-(-len(maskable_BL) // batch_size), count)
    right, among, common, total = (sum(column) for column in zip(*counts, strict=True))
    return FillAccuracy(fraction, right / total, among / total, None if majority_token is None else common / total)
