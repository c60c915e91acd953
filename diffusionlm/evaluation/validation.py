"""Validation of a training run: the same rows and masks each time, so that results compare.

The likelihood bound, bits per byte, accuracy on masked tokens, and n-gram models as baselines for the bound.

Shapes: B rows, L tokens of a row, N masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from config.train import TrainConfig
from ddp.map_over_ranks import SINGLE_PROCESS_MAP, MapOverRanks
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row, pad_to_longest
from diffusionlm.data.pipeline import (
    MixtureComponent,
    build_row_reader,
    describe_skipped,
    list_skipped,
    open_components,
    read_training_tokens,
)
from diffusionlm.data.sources.synthetic import SyntheticSource
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.objectives import build_layout
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.draft_acceptance import Acceptance, measure_draft_acceptance
from diffusionlm.evaluation.nelbo import NelboEstimator, NelboReport
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES, bits_per_byte
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.features import FeatureStore
from diffusionlm.vision.processor import ImageProcessor
from profiling import nvtx
from tokenizer import Tokenizer

MASKED_FRACTIONS = (0.15, 0.50)
"""Masked fractions at which the accuracy on masked tokens is measured."""
VALIDATION_SEED = 0
"""Rows and masks of a validation do not depend on the run's seed, so that runs compare."""
MAX_NGRAM_TOKENS = 10_000_000
"""Number of training tokens that the n-gram models count at most."""
DISCOUNT = 0.75
"""Subtracted from every count above zero; its probability goes to the shorter context."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def read_validation_rows(
    config: TrainConfig, tokenizer: Tokenizer, components: Sequence[MixtureComponent]
) -> list[Row]:
    """Read the rows of a run's validations: the first ones of the shuffled validation documents.

    With ``chat.eos_padding = "batch_max"``, groups of ``training.batch_size`` rows are padded as the steps are.

    Raises:
        ValueError: there is no validation text.
    """
    reader = build_row_reader(
        components,
        config.data,
        tokenizer,
        config.row_length,
        VALIDATION_SEED,
        repeat=False,
        block_length=config.objective.longest_block_length,
    )
    rows, _ = reader.read(0, None, max(config.validation.rows, config.validation.final_rows))
    if not rows:
        remedy = "name other validation_paths or another validation_split, or without these raise validation_fraction"
        if any(log.num_left_out for component in components for log in component.skip_logs):
            remedy = "mend such records"
        raise ValueError(f"[data]: the sources have no validation text{describe_skipped(components)}; {remedy}")
    if not config.data.pads_to_longest:
        return rows
    size = config.training.batch_size
    return [row for start in range(0, len(rows), size) for row in pad_to_longest(rows[start : start + size])]


class Validator:
    """Evaluates a run on its validation rows. Every rank has all rows and runs its share of the forwards."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Tokenizer,
        training_components: list[MixtureComponent],
        world: World = SINGLE_PROCESS,
        processor: ImageProcessor | None = None,
        features: FeatureStore | None = None,
    ) -> None:
        """Read the rows once, from shuffled validation documents.

        Args:
            processor: reads the images of conversations. None: images are refused.
            features: of images. None: none are stored.
        """
        self.config, self.tokenizer, self.world = config, tokenizer, world
        self.training_components, self._processor, self._features = training_components, processor, features
        components = open_components(config.data, "validation", processor=processor)
        self.rows = read_validation_rows(config, tokenizer, components)
        self.skipped_records = [
            line for component in components for line in list_skipped(component.name, component.skip_logs)
        ]
        """Lines on validation records that were left out or repaired."""

    @property
    def block_lengths(self) -> list[int | None]:
        """Block lengths of the objective; the first is that of the trained model, None is bidirectional."""
        objective = self.config.objective
        return list(dict.fromkeys([objective.final_block_length, *objective.block_lengths]))

    @property
    def source_entropy(self) -> float | None:
        """Entropy of a document in nats, which the bound cannot fall below; None if it is not known.

        It is known for a single synthetic source whose rows are whole documents.
        """
        data = self.config.data
        source = self.training_components[0].source if len(self.training_components) == 1 else None
        if not isinstance(source, SyntheticSource) or data.rows != "padded":
            return None
        if self.config.model.logit_alignment == "shifted" and not data.begin_with_eos:
            return None  # the first token is not scored
        num_tokens = source.length + data.begin_with_eos + data.end_with_eos
        return source.entropy_nats if num_tokens <= self.config.row_length else None

    def evaluate_quick(self, model: Transformer) -> EvaluationResult:
        """Evaluate during the run, for the model's first block length."""
        return self._evaluate(model, self.rows[: self.config.validation.rows], self.block_lengths[0], None)

    def final(self, model: Transformer) -> tuple[list[EvaluationResult], dict[str, float]]:
        """Evaluate at the end: the result for each block length, and the cross-entropy of n-gram models by name."""
        rows = self.rows[: self.config.validation.final_rows]
        majority_token: int | None = None
        ngrams: dict[str, float] = {}
        if rows[0].segment_ids_L is None:  # the baselines know nothing of prompts and answers
            majority_token, ngrams = self.world.run_on_first(lambda: self._compute_baselines(rows))
        return [self._evaluate(model, rows, length, majority_token) for length in self.block_lengths], ngrams

    def _compute_baselines(self, rows: list[Row]) -> tuple[int, dict[str, float]]:
        """The most frequent training token, and the cross-entropy of n-gram models by name, in nats per token."""
        tokens = read_training_tokens(
            self.training_components, self.tokenizer, MAX_NGRAM_TOKENS, self.config.data.end_with_eos
        ).astype(np.int64)
        vocab_size = self.tokenizer.vocab_size
        ngrams: dict[str, float] = {}
        if self.config.validation.ngrams:
            max_order = min(4, int(63 / np.log2(vocab_size)))  # whose n-gram codes fit into 63 bits
            for order in sorted({2, max_order}):
                model = NgramModel(tokens, order, vocab_size)
                # A row starts without context, for the n-gram model as for the diffusion model.
                logprobs = [np.log(model.probabilities(row.tokens_L[row.loss_mask_L].astype(np.int64))) for row in rows]
                ngrams[f"{order}-gram, left to right"] = float(-np.concatenate(logprobs).mean())
        return int(np.bincount(tokens).argmax()), ngrams

    def _evaluate(
        self, model: Transformer, rows: list[Row], block_length: int | None, majority_token: int | None
    ) -> EvaluationResult:
        settings = self.config.validation
        return evaluate(
            model,
            self.tokenizer,
            collate_rows(rows, self._processor, self._features),
            num_mc_samples=settings.num_mc_samples,
            batch_size=settings.batch_size,
            layout=build_layout(self.config.objective, model.config, block_length),
            majority_token=majority_token,
            map_forwards=MapOverRanks(self.world, is_collective=self.config.parallel.has_collective_forwards),
        )


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation of rows


@dataclass(frozen=True)
class MaskedTokenAccuracy:
    """Accuracy on masked held-out tokens, as shares of the masked tokens."""

    fraction: float
    """Fraction of each row's tokens that is masked."""
    top1_accuracy: float
    top5_accuracy: float
    majority_baseline: float | None
    """Accuracy of always predicting the most frequent training token."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate`; the fields are keys of summary.json."""

    nats_per_token: float
    standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    unigram_entropy: float
    """Entropy of the validation tokens' own frequencies, in nats per token."""
    num_tokens: int
    num_bytes: int
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """See `NelboReport`."""
    fills: tuple[MaskedTokenAccuracy, ...]
    """Empty unless the evaluation is bidirectional."""
    block_length: int | None
    """Block length of block diffusion; 1: exact, token by token. None: bidirectional."""
    num_rows: int
    eos_padding_nats_per_token: float | None = None
    """Bound of the EOS padding after an answer, which no other number counts; None: there is none."""
    next_token_nats_per_token: float | None = None
    """Exact negative log-likelihood by the next-token outputs of token-causal text; None: there are none."""
    draft_acceptance: Acceptance = ()
    """See `measure_draft_acceptance`; empty if there are no next-token outputs."""


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    batch: CleanBatch,
    *,
    num_mc_samples: int,
    batch_size: int,
    layout: InputLayout | None = None,
    majority_token: int | None = None,
    map_forwards: MapOverRanks = SINGLE_PROCESS_MAP,
) -> EvaluationResult:
    """Evaluate rows on a fixed grid of masks.

    Args:
        batch: validation rows; padding and prompts are not counted.
        num_mc_samples: masked versions of each row.
        batch_size: rows per forward.
        layout: of the forwards. None: bidirectional. Without blocks the result includes the accuracy on masked tokens.
        map_forwards: shares the forwards among the ranks.

    Raises:
        ValueError: no token can be scored, or the model's probabilities are not finite.
    """
    layout = layout or InputLayout.from_config(model.config, None)

    def measure(layout: InputLayout) -> tuple[NelboReport, NDArray[np.bool_]]:
        estimator = NelboEstimator(layout, batch, num_mc_samples, VALIDATION_SEED, batch_size)
        sums = map_forwards(estimator.num_forwards, lambda index: estimator.run_forward(model, index))
        return estimator.build_report(sums), estimator.is_scored_BL

    report, is_scored_BL = measure(layout)
    next_token = measure(layout.next_token)[0] if layout.clean_attention == "token" else None
    tokens_BL = batch.tokens_BL.numpy()
    bits, bits_error, num_bytes = bits_per_byte(tokenizer, tokens_BL, is_scored_BL, report.row_nats)
    counts_V = np.bincount(tokens_BL[is_scored_BL])
    frequencies = counts_V[counts_V > 0] / counts_V.sum()
    fills = [
        measure_masked_token_accuracy(model, layout, batch, fraction, batch_size, majority_token, map_forwards)
        for fraction in MASKED_FRACTIONS
        if layout.block_length is None
    ]
    return EvaluationResult(
        nats_per_token=report.nats_per_token,
        standard_error=report.standard_error,
        bits_per_byte=bits,
        bits_per_byte_standard_error=bits_error,
        unigram_entropy=float(-(frequencies * np.log(frequencies)).sum()),
        num_tokens=report.num_tokens,
        num_bytes=num_bytes,
        by_masked_fraction=report.by_masked_fraction,
        fills=tuple(fills),
        block_length=layout.block_length,
        num_rows=len(batch.tokens_BL),
        eos_padding_nats_per_token=report.eos_padding_nats_per_token,
        next_token_nats_per_token=None if next_token is None else next_token.nats_per_token,
        draft_acceptance=measure_draft_acceptance(model, layout, batch, batch_size, map_forwards),
    )


@torch.no_grad()
def measure_masked_token_accuracy(
    model: Transformer,
    layout: InputLayout,
    batch: CleanBatch,
    fraction: float,
    batch_size: int,
    majority_token: int | None,
    map_forwards: MapOverRanks = SINGLE_PROCESS_MAP,
) -> MaskedTokenAccuracy:
    """Mask a fraction of each row's tokens once, and measure top-1 and top-5 accuracy on them. Padding is visible."""
    maskable_BL = layout.maskable(batch)
    if batch.is_eos_padding_BL is not None:
        maskable_BL = maskable_BL & ~batch.is_eos_padding_BL.numpy()
    counts_B = np.ceil(fraction * maskable_BL.sum(axis=1)).astype(np.int64)
    masked_BL = np.zeros_like(maskable_BL)
    for row, count in enumerate(counts_B):
        rng = keyed_rng(VALIDATION_SEED, RngStream.FILL_MASKS, round(1000 * fraction), row)
        masked_BL[row, rng.permutation(np.flatnonzero(maskable_BL[row]))[:count]] = True
    row_bytes = 4 * model.config.vocab_size * max(1, int(counts_B.max(initial=0)))
    batch_size = max(1, min(batch_size, MAX_LOGITS_BYTES // row_bytes))

    def count_hits(index: int) -> tuple[int, int, int, int]:
        """Numbers of top-1 hits, top-5 hits, majority tokens and masked tokens in one batch of rows."""
        rows = slice(index * batch_size, (index + 1) * batch_size)
        noised = layout.build_noised_batch(batch.select(rows), masked_BL[rows], np.ones(masked_BL[rows].shape)).to(
            model.lm_head.weight.device
        )
        with nvtx.annotate("masked accuracy: forward"):
            logits_NV = noised.run(model).float()
        logits_NV[:, model.config.required_mask_token_id] = float("-inf")
        is_hit_N5 = logits_NV.topk(min(5, logits_NV.shape[1]), dim=1).indices == noised.targets_N[:, None]
        num_majority = 0 if majority_token is None else int((noised.targets_N == majority_token).sum())
        return int(is_hit_N5[:, 0].sum()), int(is_hit_N5.sum()), num_majority, len(noised.targets_N)

    counts = map_forwards(-(-len(maskable_BL) // batch_size), count_hits)
    top1, top5, majority, total = (sum(column) for column in zip(*counts, strict=True))
    return MaskedTokenAccuracy(
        fraction, top1 / total, top5 / total, None if majority_token is None else majority / total
    )


# ----------------------------------------------------------------------------------------------------------------------
# n-gram models


Table = tuple[Ints, Ints]
"""Sorted codes, and the count of each; other codes have none."""


def _look_up(table: Table, queries: Ints) -> Floats:
    codes, counts = table
    indices = np.minimum(np.searchsorted(codes, queries), len(codes) - 1)
    return np.where(codes[indices] == queries, counts[indices], 0).astype(np.float64)


class NgramModel:
    """n-gram model with interpolated absolute discounting (Ney et al. 1994).

    p(w | c) = max(n(cw) - d, 0) / n(c) + d continuations(c) / n(c) p(w | c'), down to unigrams with add-one counts. c'
    is c without its first token, d is `DISCOUNT`.

    Contexts cross document boundaries; the end-of-text token is one like the others.
    """

    def __init__(self, tokens: Ints, order: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        counts = np.bincount(tokens, minlength=vocab_size).astype(np.float64)
        self.unigram = (counts + 1.0) / (counts.sum() + vocab_size)
        self._orders: list[tuple[Table, Table, Table]] = []
        """Of each length from 2 on: how often an n-gram and a context come, and how many continuations it has."""
        for length in range(2, order + 1):
            ngrams, ngram_counts = np.unique(_encode_ngrams(tokens, length, vocab_size), return_counts=True)
            contexts, starts, continuations = np.unique(ngrams // vocab_size, return_index=True, return_counts=True)
            totals = np.add.reduceat(ngram_counts, starts) if len(starts) else ngram_counts
            self._orders.append(((ngrams, ngram_counts), (contexts, totals), (contexts, continuations)))

    def probabilities(self, tokens: Ints) -> Floats:
        """Probability of each token given the up to ``order - 1`` tokens before it."""
        result: Floats = self.unigram[tokens]
        for length, (ngrams, contexts, continuations) in enumerate(self._orders, start=2):
            codes = _encode_ngrams(tokens, length, self.vocab_size)
            total = _look_up(contexts, codes // self.vocab_size)
            divisor = np.maximum(total, 1.0)
            discounted = np.maximum(_look_up(ngrams, codes) - DISCOUNT, 0.0) / divisor
            backoff_weight = DISCOUNT * _look_up(continuations, codes // self.vocab_size) / divisor
            shorter = result[length - 1 :]
            result[length - 1 :] = np.where(total > 0.0, discounted + backoff_weight * shorter, shorter)
        return result


def _encode_ngrams(tokens: Ints, length: int, vocab_size: int) -> Ints:
    """Code of the n-gram that ends at each position from length - 1 on; code // vocab_size is its context's code."""
    codes = np.zeros(max(0, len(tokens) - length + 1), dtype=np.int64)
    for offset in range(length):
        codes = codes * vocab_size + tokens[offset : offset + len(codes)]
    return codes
