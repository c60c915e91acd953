"""Validation of a training run: the same rows and masks each time, so that results compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config.train import TrainConfig
from config.training.parallel import FSDP
from ddp.map_over_ranks import MapOverRanks
from ddp.process_group import SINGLE_PROCESS, World
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
from diffusionlm.diffusion.objectives import build_layout
from diffusionlm.evaluation.evaluate import VALIDATION_SEED, EvaluationResult, evaluate
from diffusionlm.evaluation.ngram import NgramModel, max_order
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

MAX_NGRAM_TOKENS = 10_000_000
"""Number of training tokens that the n-gram models count at most."""


def read_validation_rows(
    config: TrainConfig, tokenizer: Tokenizer, components: Sequence[MixtureComponent]
) -> list[Row]:
    """Read the rows of a run's validations: the first ones of the shuffled validation documents.

    With ``chat.eos_padding = "batch_max"``, groups of ``training.batch_size`` rows are padded as the steps are.

    Args:
        components: the validation sources.

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
        if any(component.num_skipped for component in components):
            remedy = "mend such records"
        raise ValueError(f"[data]: the sources have no validation text{describe_skipped(components)}; {remedy}")
    if not config.data.pads_to_longest:
        return rows
    size = config.training.batch_size
    return [row for start in range(0, len(rows), size) for row in pad_to_longest(rows[start : start + size])]


@dataclass(frozen=True)
class Validator:
    """Evaluates a run on its validation rows. Every rank has all rows and runs its share of the forwards."""

    config: TrainConfig
    tokenizer: Tokenizer
    training_components: list[MixtureComponent]
    rows: list[Row]
    world: World = SINGLE_PROCESS
    skipped_records: tuple[str, ...] = ()
    """Lines on validation records that were left out or repaired."""

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        tokenizer: Tokenizer,
        training_components: list[MixtureComponent],
        world: World = SINGLE_PROCESS,
    ) -> Validator:
        """Read the rows once, from shuffled validation documents.

        Raises:
            ValueError: there is no validation text.
        """
        components = open_components(config.data, "validation")
        rows = read_validation_rows(config, tokenizer, components)
        skipped = (line for component in components for line in list_skipped(component.name, component.skip_logs))
        return cls(config, tokenizer, training_components, rows, world, tuple(skipped))

    @property
    def block_lengths(self) -> list[int | None]:
        """Block lengths of the objective; the first is that of the trained model, None is bidirectional."""
        objective = self.config.objective
        return list(dict.fromkeys([objective.final_block_length, *objective.block_lengths]))

    @property
    def source_entropy(self) -> float | None:
        """Entropy of a document in nats, which the bound cannot fall below; None if it is not known.

        It is known for a single synthetic source whose rows are whole documents. A bidirectional model sees the length
        of a document, so the entropy of the lengths is subtracted; for block diffusion of documents of different
        lengths it is not known.
        """
        data = self.config.data
        source = self.training_components[0].source if len(self.training_components) == 1 else None
        if not isinstance(source, SyntheticSource) or data.rows != "padded":
            return None
        if self.config.model.logit_alignment == "shifted" and not data.begin_with_eos:
            return None  # the first token is not scored
        if source.max_length + data.begin_with_eos + data.end_with_eos > self.config.row_length:
            return None
        if self.block_lengths[0] is None:
            return source.entropy_nats - source.length_entropy_nats
        return source.entropy_nats if source.length_entropy_nats == 0.0 else None

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
            for order in sorted({2, max_order(vocab_size)}):
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
            rows,
            num_mc_samples=settings.num_mc_samples,
            batch_size=settings.batch_size,
            layout=build_layout(self.config.objective, model.config, block_length),
            majority_token=majority_token,
            map_forwards=MapOverRanks(self.world, is_collective=isinstance(self.config.parallel, FSDP)),
        )
