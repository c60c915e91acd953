"""The implementations of the training benchmark take the same optimizer step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarking.implementations import training as module
from benchmarking.implementations.peers import IGNORE_INDEX, build_noise, build_transformers
from benchmarking.implementations.training import FixedRowReader, TrainCase, TrainImplementation, build_ours
from config.training.objective import BlockDiffusionConfig, MaskedDiffusionConfig, NextTokenConfig, ObjectiveConfig
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.patterns import BlockDiffusion as BlockDiffusionPattern
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.step import StepBatch, TrainState, train_step
from tests.unit.benchmarking.cases import make_case, make_shape

OBJECTIVES: tuple[ObjectiveConfig, ...] = (
    MaskedDiffusionConfig(),
    BlockDiffusionConfig(block_length=8),
    NextTokenConfig(),
)


def same_weights(case: TrainCase) -> tuple[TrainImplementation, TrainImplementation]:
    """Both models with our weights, moved away from where training starts."""
    pytest.importorskip("transformers")
    ours, theirs = build_ours(case), build_transformers(case)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    theirs.model.load_state_dict(ours.model.state_dict())
    return ours, theirs


def test_a_peer_has_the_experts_of_the_shape() -> None:
    pytest.importorskip("transformers")
    case = make_case(shape=make_shape(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))
    ours, theirs = build_ours(case), build_transformers(case)
    sizes = [sum(parameter.numel() for parameter in peer.model.parameters()) for peer in (ours, theirs)]
    assert sizes[0] == sizes[1]
    assert theirs.step().item() == pytest.approx(math.log(64), rel=0.2)


def test_adapters_are_trained_on_a_frozen_model() -> None:
    whole, adapters = build_ours(make_case()), build_ours(make_case(shape=make_shape(lora_rank=2)))
    trained = {name for name, value in adapters.model.named_parameters() if value.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert whole.flops is not None and adapters.flops is not None
    assert adapters.step().item() == pytest.approx(math.log(63), rel=0.2)
    frozen = [value for name, value in adapters.model.named_parameters() if name not in trained]
    assert all(value.grad is None for value in frozen)
    assert adapters.flops < whole.flops  # no gradients of the weights


def test_answers_of_packed_chats_are_learned() -> None:
    tokens_BL = make_case().tokens()
    rows, _ = FixedRowReader(tokens_BL, chats_per_row=2).read(0, None, len(tokens_BL))
    length = tokens_BL.shape[1]
    assert rows[0].document_ids_L.tolist() == [0] * (length // 2) + [1] * (length // 2)
    assert rows[0].loss_mask_L.tolist() == 2 * ([False] * (length // 4) + [True] * (length // 4))
    assert build_ours(make_case(shape=make_shape(chats_per_row=2))).step().item() == pytest.approx(
        math.log(63), rel=0.2
    )


def test_our_step_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def spy(state: TrainState, loader: Any, batch: StepBatch, *args: Any) -> StepMetrics:
        steps.append(batch.step)
        [noised_batch] = batch.noised_batches
        assert noised_batch.inputs_BS.shape == (4, 32) and state.optimizers.learning_rates()["hidden"] == 1e-4
        return train_step(state, loader, batch, *args)

    monkeypatch.setattr(module, "train_step", spy)
    implementation = build_ours(make_case())
    implementation.step()
    implementation.step()
    assert steps == [0, 1]


@pytest.mark.parametrize("objective", OBJECTIVES[:2], ids=lambda objective: objective.kind)
def test_the_peer_computes_our_logits(objective: ObjectiveConfig) -> None:
    case = make_case(objective=objective)
    ours, theirs = same_weights(case)
    peer = build_noise(case, case.tokens())()
    inputs, L = peer.arguments["input_ids"], 32
    masked_BL = inputs[:, :L] == case.shape.mask_token
    assert torch.equal(masked_BL, peer.labels_BL != IGNORE_INDEX)
    assert torch.equal(peer.labels_BL[masked_BL], case.tokens()[masked_BL])
    is_block = isinstance(objective, BlockDiffusionConfig)
    assert inputs.shape == (4, 2 * L if is_block else L) and peer.num_outputs == (L if is_block else None)
    levels = {len(set(row.tolist())) for row in peer.weights_BL}
    assert levels == {4 if is_block else 1}, "one noise level per block, or per sequence"
    pattern = BlockDiffusionPattern(8) if is_block else Bidirectional()
    with torch.no_grad():
        expected = ours.model(inputs, pattern=pattern)
        logits = theirs.model(**peer.arguments, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
