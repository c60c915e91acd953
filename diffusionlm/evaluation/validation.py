"""Validation on a fixed grid of rows and draws, and samples for the eye."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from config.generation import GenerationConfig
from config.parallel import FSDP
from config.train import TrainConfig
from ddp.process_group import SINGLE, Ranks
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import Part, open_parts, rows_of, training_tokens
from diffusionlm.data.reader import KnownEntropy
from diffusionlm.evaluation.evaluate import GRID_SEED, Evaluation, OverRanks, evaluate, here
from diffusionlm.evaluation.ngram import NgramModel, max_order
from diffusionlm.inference.generate import Generation, check_infill, infill
from diffusionlm.inference.text import parse_infill, token_texts
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.ema import WeightAverage
from logger import RunLogger
from tokenizer import Tokenizer

NGRAM_TOKENS = 10_000_000
"""n-gram models count at most so many training tokens."""


@dataclass(frozen=True)
class Validator:
    """The validation rows of a run, and how they are evaluated; every rank has them all, and makes its share of the
    forwards."""

    config: TrainConfig
    tokenizer: Tokenizer
    training_parts: list[Part]
    rows: list[Row]
    ranks: Ranks = SINGLE

    @classmethod
    def open(
        cls, config: TrainConfig, tokenizer: Tokenizer, training_parts: list[Part], ranks: Ranks = SINGLE
    ) -> Validator:
        """Read the rows once: a shuffled choice of the validation documents.

        Raises:
            ValueError: there are none.
        """
        parts = open_parts(config.data, "validation")
        rows = rows_of(parts, config.data, tokenizer, config.row_length, GRID_SEED, repeat=False)
        most = max(config.validation.rows, config.validation.final_rows)
        chosen, _ = rows.read(0, None, most)
        if not chosen:
            raise ValueError("data.source has no validation documents; give some, or a larger validation_fraction")
        return cls(config, tokenizer, training_parts, chosen, ranks)

    @property
    def block_lengths(self) -> list[int | None]:
        """All that the objective trains for, the one that the model is made for first."""
        objective = self.config.objective
        return list(dict.fromkeys([objective.final_block_length, *objective.block_lengths]))

    @property
    def source_entropy(self) -> float | None:
        """Exact floor of the bound in nats per document, where the source knows it and each row is one whole document.

        A bidirectional model sees how long a document is; where lengths differ, nothing is said of the models between
        that and next-token prediction.
        """
        data = self.config.data
        source = self.training_parts[0].source if len(self.training_parts) == 1 else None
        if not isinstance(source, KnownEntropy) or data.rows != "padded":
            return None
        if self.config.model.logit_alignment == "shifted" and not data.begin_with_eos:
            return None  # nothing predicts the first token
        if source.max_length + data.begin_with_eos + data.end_with_eos > self.config.row_length:
            return None
        if self.block_lengths[0] is None:
            return source.entropy_nats - source.length_entropy_nats
        return source.entropy_nats if source.length_entropy_nats == 0.0 else None

    def quick(self, model: Transformer, average: WeightAverage | None) -> Evaluation:
        """The evaluation during the run."""
        with inference_weights(model, average):
            return self._evaluate(model, self.rows[: self.config.validation.rows], self.block_lengths[0], None)

    def final(self, model: Transformer, average: WeightAverage | None) -> tuple[list[Evaluation], dict[str, float]]:
        """The evaluation at the end for each block length, and the n-gram models' cross-entropy of the same rows."""
        rows = self.rows[: self.config.validation.final_rows]
        commonest, ngrams = self.ranks.from_first(lambda: self._of_training_tokens(rows))
        with inference_weights(model, average):
            return [self._evaluate(model, rows, length, commonest) for length in self.block_lengths], ngrams

    def _of_training_tokens(self, rows: list[Row]) -> tuple[int, dict[str, float]]:
        """The commonest one, and the n-gram models' cross-entropy of the rows in nats per token."""
        read = training_tokens(self.training_parts, self.tokenizer, NGRAM_TOKENS, self.config.data.end_with_eos)
        tokens = read.astype(np.int64)
        vocab_size = self.tokenizer.vocab_size
        ngrams: dict[str, float] = {}
        if self.config.validation.ngrams:
            for order in sorted({2, max_order(vocab_size)}):
                counts = NgramModel(tokens, order, vocab_size)
                # A row starts without context, for the n-gram as for the model.
                logs = [np.log(counts.probabilities(row.tokens_L[row.is_target_L].astype(np.int64))) for row in rows]
                ngrams[f"{order}-gram, left to right"] = float(-np.concatenate(logs).mean())
        return int(np.bincount(tokens).argmax()), ngrams

    def _evaluate(
        self, model: Transformer, rows: list[Row], block_length: int | None, commonest: int | None
    ) -> Evaluation:
        settings = self.config.validation
        is_collective = isinstance(self.config.parallel, FSDP)
        return evaluate(
            model,
            self.tokenizer,
            rows,
            draws=settings.draws,
            batch_size=settings.batch_size,
            block_length=block_length,
            commonest=commonest,
            spread=here if self.ranks.is_alone else OverRanks(self.ranks, is_collective),
        )


@contextlib.contextmanager
def inference_weights(model: Transformer, average: WeightAverage | None) -> Iterator[None]:
    """The weights that the run is judged by: the averaged ones, where there are any."""
    with torch.no_grad(), average.applied() if average is not None else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class Samples:
    """Texts with holes that a run fills now and then, for the eye."""

    tokenizer: Tokenizer
    texts: Sequence[str]
    beginning: list[int]
    """What stands before each text and is not shown."""
    canvases: list[list[int]]

    @classmethod
    def open(cls, texts: Sequence[str], tokenizer: Tokenizer, model: Transformer, takes_part: bool = True) -> Samples:
        """Encode the texts, and see that the model can fill them.

        Args:
            takes_part: whether this rank fills them: the first one does, and all do where a forward takes all (FSDP).

        Raises:
            ValueError: it cannot; names the key.
        """
        beginning = model.config.beginning
        try:
            canvases = [[*beginning, *parse_infill(text, tokenizer)] for text in texts]
            if canvases:
                check_infill(model, canvases, GenerationConfig())
        except ValueError as error:
            raise ValueError(f"samples.infills = {list(texts)}: {error}") from error
        return cls(tokenizer, texts, beginning, canvases if takes_part else [])

    def show(self, model: Transformer, step: int, logger: RunLogger) -> None:
        """Fill the holes greedily, one token a forward, and log what comes out and in which order."""
        if not self.canvases:
            return
        results = infill(model, self.canvases, GenerationConfig())
        for text, canvas, result in zip(self.texts, self.canvases, results, strict=True):
            values = self._told(text, canvas, result)
            logger.event(step, "sample", f"step {step}: {text!r} -> {values['filled']!r}", values)

    def _told(self, text: str, canvas: list[int], result: Generation) -> dict[str, Any]:
        """``given``, ``filled``, and of each token of ``filled`` its text, and, if it was a hole, the forward from 1 on
        in which it became final and its log-probability in nats (else null)."""
        start = len(self.beginning)
        holes = [place - start for place, token in enumerate(canvas) if token == self.tokenizer.mask_token_id]
        texts = token_texts(self.tokenizer, result.token_ids[start:])
        step_map = dict(zip(holes, result.step_map, strict=True))
        finite = (value if math.isfinite(value) else None for value in result.logprobs)
        logprobs = dict(zip(holes, finite, strict=True))
        places = range(len(texts))
        return {
            "given": text,
            "filled": "".join(texts),
            "tokens": texts,
            "step_map": [step_map.get(place) for place in places],
            "logprobs": [logprobs.get(place) for place in places],
        }
