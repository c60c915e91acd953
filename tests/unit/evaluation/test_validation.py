"""Validation: numbers on cases where they are known, and n-gram models against their definition, word by word."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.validation import DISCOUNT, NgramModel, evaluate, measure_masked_token_accuracy
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tokenizer import Tokenizer

VOCAB = 7


class Constant(torch.nn.Module):
    """A model that answers every row with the same logits."""

    def __init__(self, like: Transformer, logits_V: torch.Tensor) -> None:
        super().__init__()
        self.config, self.lm_head, self.logits_V = like.config, like.lm_head, logits_V

    def forward(
        self, tokens_BL: torch.Tensor, *, output_positions: torch.Tensor, loss_inputs: Any = None, **_: Any
    ) -> Any:
        from diffusionlm.kernels.cross_entropy import LossOutput

        logits = self.logits_V.expand(len(output_positions), -1).clone()
        if loss_inputs is None:
            return logits
        logits[:, loss_inputs.excluded_token] = float("-inf")
        nll = torch.nn.functional.cross_entropy(logits, loss_inputs.targets_N, reduction="none")
        return LossOutput((nll * loss_inputs.weights_N).sum(), nll)


def rows(count: int, length: int, vocab: int, padding: int = 0) -> list[Row]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(count):
        documents = np.zeros(length, dtype=np.int32)
        documents[length - padding :] = -1
        sequences.append(Row(rng.integers(0, vocab, length).astype(np.int32), documents, documents >= 0))
    return sequences


@pytest.fixture
def like(tiny_model: MakeModel, tokenizer: Tokenizer) -> Transformer:
    return tiny_model(vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id)


def test_a_uniform_model_scores_the_logarithm_of_the_vocabulary(like: Transformer, tokenizer: Tokenizer) -> None:
    model: Any = Constant(like, torch.zeros(tokenizer.vocab_size, dtype=torch.float64))
    sequences = rows(6, 12, 200, padding=3)
    result = evaluate(model, tokenizer, collate_rows(sequences), num_mc_samples=3, batch_size=4, majority_token=0)
    assert result.num_tokens == 6 * 9
    assert result.nats_per_token == pytest.approx(np.log(tokenizer.vocab_size - 1))
    tokens = np.concatenate([row.tokens_L[:9] for row in sequences])
    assert result.num_bytes == tokenizer.byte_lengths()[tokens].sum()
    assert result.bits_per_byte == pytest.approx(
        result.nats_per_token / np.log(2) * result.num_tokens / result.num_bytes
    )
    assert all(value == pytest.approx(np.log(tokenizer.vocab_size - 1)) for _, _, value in result.by_masked_fraction)
    shares = np.bincount(tokens)[np.unique(tokens)] / len(tokens)
    assert result.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())


def test_right_masked_tokens_are_counted(like: Transformer, tokenizer: Tokenizer) -> None:
    logits = torch.zeros(tokenizer.vocab_size)
    logits[[5, 6, 7, 8, 9]] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    logits[tokenizer.mask_token_id] = 99.0  # never guessed
    tokens = np.array([5, 5, 6, 7, 8, 9, 10, 10], dtype=np.int32)
    batch = collate_rows([Row(tokens, np.zeros(8, dtype=np.int32), np.ones(8, dtype=np.bool_))] * 4)
    model: Any = Constant(like, logits)
    layout = InputLayout.from_config(like.config, None)
    all_masked = measure_masked_token_accuracy(model, layout, batch, 1.0, 3, majority_token=10)
    assert (all_masked.top1_accuracy, all_masked.top5_accuracy, all_masked.majority_baseline) == (2 / 8, 6 / 8, 2 / 8)
    half = measure_masked_token_accuracy(model, layout, batch, 0.5, 3, majority_token=None)
    assert half.majority_baseline is None
    assert half == measure_masked_token_accuracy(model, layout, batch, 0.5, 2, majority_token=None)


def test_logits_of_a_forward_are_bounded(
    like: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 150,000 and 32 rows of thousands of tokens would take tens of GiB."""
    model, batch = like, collate_rows(rows(6, 8, 200))
    layout = InputLayout.from_config(model.config, None)
    num_logits: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: num_logits.append(logits.numel()))
    whole = measure_masked_token_accuracy(model, layout, batch, 0.5, 6, majority_token=None)
    monkeypatch.setattr("diffusionlm.evaluation.validation.MAX_LOGITS_BYTES", 4 * tokenizer.vocab_size * 9)
    assert measure_masked_token_accuracy(model, layout, batch, 0.5, 6, majority_token=None) == whole
    row = 4 * tokenizer.vocab_size
    assert num_logits == [6 * row, 2 * row, 2 * row, 2 * row]


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length)


def probability(train: list[int], context: tuple[int, ...], word: int) -> float:
    """The definition, by counting."""
    if not context:
        return (train.count(word) + 1) / (len(train) + VOCAB)
    size = len(context) + 1
    grams = Counter(tuple(train[i : i + size]) for i in range(len(train) - size + 1))
    total = sum(count for gram, count in grams.items() if gram[:-1] == context)
    shorter = probability(train, context[1:], word)
    if total == 0:
        return shorter
    kinds = sum(gram[:-1] == context for gram in grams)
    return max(grams[(*context, word)] - DISCOUNT, 0) / total + DISCOUNT * kinds / total * shorter


@pytest.mark.parametrize("order", [1, 4])
def test_probabilities_are_the_definition(order: int) -> None:
    train, held_out = text(0, 200), text(1, 30)
    held_out[5] = VOCAB - 1  # never seen in training
    probabilities = NgramModel(train, order, VOCAB).probabilities(held_out)
    for position, word in enumerate(held_out.tolist()):
        context = tuple(held_out[max(0, position - order + 1) : position].tolist())
        assert probabilities[position] == pytest.approx(probability(train.tolist(), context, word), rel=1e-12)
