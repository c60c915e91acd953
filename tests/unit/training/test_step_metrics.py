"""What is looked at in a logged step: sums by masked share, and norms, against plain loops."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from config.training.logging import LoggingConfig
from ddp.parallelism import NoParallel
from diffusionlm.diffusion.layout import InputLayout, LogitAlignment
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch
from diffusionlm.kernels.loss_types import LossInputs
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.master_weights import MasterWeights
from diffusionlm.training.metrics import (
    NUM_LOSS_BINS,
    StepMonitor,
    record_activation_norms,
    sum_losses_by_masked_fraction,
    sum_weight_squares,
    summarize_norms,
)
from tests.conftest import MakeModel

B, L = 3, 10
DOCUMENTS = torch.tensor([[0] * 10, [0] * 7 + [1] * 3, [0] * 3 + [1] * 7])
MASK = 18


def draw_of(
    masked_BL: np.ndarray[Any, Any], block_length: int | None, alignment: LogitAlignment, packed: bool
) -> NoisedBatch:
    batch = CleanBatch(
        torch.arange(B * L).view(B, L) % 7, torch.ones(B, L, dtype=torch.bool), DOCUMENTS if packed else None
    )
    layout = InputLayout(block_length, alignment, MASK)
    return layout.build_noised_batch(batch, masked_BL, np.ones((B, L)), num_targets=B * L, denominator=1.0)


def by_loop(masked_BL: np.ndarray[Any, Any], block_length: int | None, packed: bool) -> list[list[float]]:
    """The loss of a token is its place, 1 to B * L."""
    units: dict[Any, list[int]] = defaultdict(list)
    for row in range(B):
        begin = 0
        for position in range(L):
            if packed and position and DOCUMENTS[row, position] != DOCUMENTS[row, position - 1]:
                begin = position
            unit = (row,) if block_length is None else (row, begin, (position - begin) // block_length)
            units[unit].append(row * L + position)
    sums = [[0.0] * NUM_LOSS_BINS, [0.0] * NUM_LOSS_BINS]
    for positions in units.values():
        masked = [position for position in positions if masked_BL.flatten()[position]]
        for position in masked:
            # (k / n) * 5 rounded up, in whole numbers.
            part = -(-len(masked) * NUM_LOSS_BINS // len(positions)) - 1
            sums[0][part] += position + 1
            sums[1][part] += 1
    return sums


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("block_length", [None, 2, 4, 5])
def test_sums_by_share(block_length: int | None, alignment: LogitAlignment, packed: bool) -> None:
    rng = np.random.default_rng(0)
    for share in (0.1, 0.4, 0.9, 1.0):
        masked_BL = rng.random((B, L)) < share
        if alignment == "shifted":  # no output predicts the first token of a document
            masked_BL[:, 0] = False
            masked_BL[DOCUMENTS.diff(dim=1, prepend=DOCUMENTS[:, :1]).numpy() != 0] = False
        draw = draw_of(masked_BL, block_length, alignment, packed)
        # Each scored output is told by the token that it predicts: only the order of the draw knows which it is.
        place_R = torch.from_numpy(masked_BL).flatten().nonzero()[:, 0]
        if draw.pattern.positions_per_token == 2 and alignment == "shifted":
            assert block_length is not None
            place_R = in_order_of_outputs(place_R, block_length, packed)
        sums = sum_losses_by_masked_fraction(draw, (place_R + 1).float(), alignment)
        assert sums.tolist() == by_loop(masked_BL, block_length, packed)


def in_order_of_outputs(place_R: torch.Tensor, block_length: int, packed: bool) -> torch.Tensor:
    """The first token of a block is predicted by the clean stream, which comes after the whole noisy row."""
    keys = []
    for position in place_R.tolist():
        row, column = divmod(position, L)
        begin = column
        while packed and begin and DOCUMENTS[row, begin] == DOCUMENTS[row, begin - 1]:
            begin -= 1
        begin = begin if packed else 0
        keys.append((row, (column - begin) % block_length == 0, column))
    return place_R[sorted(range(len(keys)), key=keys.__getitem__)]


def test_rows_of_no_weight_only_fill_up() -> None:
    masked_BL = np.ones((B, L), dtype=np.bool_)
    draw = draw_of(masked_BL, None, "same_position", False)
    draw.weights_N[L:] = 0.0
    nll_N = torch.ones(B * L).index_fill(0, torch.arange(L, B * L), float("nan"))
    assert sum_losses_by_masked_fraction(draw, nll_N, "same_position").tolist() == [[0, 0, 0, 0, L], [0, 0, 0, 0, L]]


def test_shares_are_of_targets_not_of_prompts_and_padding() -> None:
    is_target = torch.zeros(B, L, dtype=torch.bool)
    is_target[:, 2:7] = True
    masked_BL = np.zeros((B, L), dtype=np.bool_)
    masked_BL[0, 2:7], masked_BL[1, 3] = True, True  # all of five, and one of five
    batch = CleanBatch(torch.arange(B * L).view(B, L) % 7, is_target, None)
    draw = InputLayout(None, "same_position", MASK).build_noised_batch(
        batch, masked_BL, np.ones((B, L)), num_targets=15, denominator=1.0
    )
    assert sum_losses_by_masked_fraction(draw, torch.ones(6), "same_position")[1].tolist() == [1, 0, 0, 0, 5]


def watch_of(model: Transformer, **options: Any) -> StepMonitor:
    return StepMonitor(LoggingConfig(**options), 20, model, NoParallel(model), MasterWeights({}))


def see(monitor: StepMonitor, step: int, masked_BL: np.ndarray[Any, Any]) -> dict[str, float]:
    draw = draw_of(masked_BL, None, "same_position", False)
    loss_inputs = LossInputs(draw.targets_N, draw.weights_N)
    with monitor.step(step), torch.no_grad():
        scored = monitor.model(
            draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs
        )
        monitor.add_micro_batch(draw, scored.nll_N)
    return monitor.read_results() if monitor.read_results else {}


def test_only_steps_that_are_logged_are_looked_at(tiny_model: MakeModel) -> None:
    model = tiny_model()
    monitor = watch_of(model, every_steps=10, norms_every_steps=7)
    masked_BL = np.zeros((B, L), dtype=np.bool_)
    masked_BL[0, :3] = masked_BL[1, :10] = True
    assert [step for step in range(1, 21) if see(monitor, step, masked_BL)] == [7, 10, 14, 20]
    values = see(monitor, 10, masked_BL)
    assert values.keys() == {"mask_ratio", "loss_by_masked_fraction/0.2-0.4", "loss_by_masked_fraction/0.8-1"}
    assert values["mask_ratio"] == 13 / 30
    assert not any(module._forward_hooks for module in model.modules())
    with_norms = see(monitor, 14, masked_BL)
    assert {key: with_norms[key] for key in values} == values
    assert not any(module._forward_hooks for module in model.modules())
    assert see(monitor, 15, masked_BL) == {}, "and nothing is left of the step before"


def test_sums_are_over_the_micro_batches_of_a_step(tiny_model: MakeModel) -> None:
    monitor = watch_of(tiny_model(), every_steps=1)
    draw = draw_of(np.eye(B, L, dtype=np.bool_), None, "same_position", False)
    with monitor.step(1):
        for value in (1.0, 4.0):
            monitor.add_micro_batch(draw, torch.full((B,), value))
    assert monitor.read_results is not None
    assert monitor.read_results() == {"mask_ratio": 0.1, "loss_by_masked_fraction/0-0.2": 2.5}


def read_norms(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Names without their prefix, and the quotients."""
    return {name.partition("/")[2]: float(value[0] / value[1]) for name, value in sums.items()}


def test_norms_of_activations(tiny_model: MakeModel) -> None:
    model = tiny_model()
    tokens = torch.arange(B * L).view(B, L) % 19
    recorded: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda module, inputs, output: recorded.extend([inputs[0], output]))
    with torch.no_grad(), record_activation_norms(model) as sums:
        model(tokens, pattern=Bidirectional(), output_positions=torch.tensor([3, 17]))
    handle.remove()
    norms = read_norms(sums)
    assert list(norms) == ["embed_tokens", "layers.0", "layers.1", "norm"]
    rows = model.model.embed_tokens.weight[tokens.flatten()].double()
    assert norms["embed_tokens"] == pytest.approx(rows.norm(dim=1).mean().item(), rel=1e-6)
    assert [len(norms_of_layer) for norms_of_layer in recorded] == [2, 2], "of the scored positions alone"
    for name, output in zip(("layers.1", "norm"), recorded, strict=True):
        assert norms[name] == pytest.approx(output.double().norm(dim=1).mean().item(), rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_of_weights(tied: bool, tiny_model: MakeModel) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    squares = read_norms(sum_weight_squares(model, NoParallel(model)))
    assert ("lm_head.weight" in squares) is not tied
    for name, parameter in model.named_parameters():
        assert squares[name] == pytest.approx(parameter.detach().double().square().sum().item(), rel=1e-6)


def test_norm_statistics_have_mean_minimum_and_maximum() -> None:
    metrics = {"mask_ratio": 0.5, "weight_norms/a": 1.0, "activation_norms/a.b": 7.0, "weight_norms/b": 16.0}
    assert summarize_norms(metrics) == {
        "mask_ratio": 0.5,
        "weight_norms/mean": 2.5,
        "weight_norms/min": 1.0,
        "weight_norms/max": 4.0,
        "weight_norms/a": 1.0,
        "weight_norms/b": 4.0,
        **{f"activation_norms/{name}": 7.0 for name in ("mean", "min", "max", "a.b")},
    }
