"""The routers' balance loss in a training step: beside the loss, in the gradient, weighted over micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.data.loader import LoadedStep
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.reporting import collect_launch_metrics, collect_step_metrics
from diffusionlm.training.run import Run
from tests.tiny_run import change_config, make_first_step

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 2}


def sparse(config: TrainConfig, directory: Path, coefficient: float, micro: int = 4) -> TrainConfig:
    model = {**EXPERTS, "router_aux_loss_coef": coefficient}
    return change_config(config, directory, model=model, training={"micro_batch_size": micro, "max_grad_norm": 1e9})


def balance_of(run: Run, draw: NoisedBatch) -> torch.Tensor:
    loss_inputs = LossInputs(draw.targets_N, draw.weights_N, load_balancing_weight=1.0)
    balance = run.state.model(
        draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs
    ).load_balancing_loss
    assert balance is not None
    return balance


@pytest.mark.parametrize(("micro", "shares"), [(4, [1.0]), (2, [0.5, 0.5]), (1, [0.25] * 4)])
def test_a_step(config: TrainConfig, micro: int, shares: list[float], tmp_path: Path) -> None:
    numbers, with_it, draws, run = make_first_step(sparse(config, tmp_path / "with", 0.7, micro))
    plain, without, _, _ = make_first_step(sparse(config, tmp_path / "without", 0.0, micro))
    assert numbers.loss == plain.loss
    assert plain.load_balancing_loss == 0.0
    assert len(draws) == len(shares)
    parts = [0.7 * share * balance_of(run, draw) for draw, share in zip(draws, shares, strict=True)]
    total = torch.stack(parts).sum()
    assert numbers.load_balancing_loss == pytest.approx(total.item(), rel=1e-5)
    names, parameters = zip(*run.state.model.named_parameters(), strict=True)
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    moved = 0
    for name, grad in zip(names, expected, strict=True):
        difference = with_it[name] - without[name]
        grad = torch.zeros_like(difference) if grad is None else grad
        torch.testing.assert_close(difference, grad, rtol=1e-3, atol=2e-6)
        moved += bool(grad.abs().max() > 1e-4)
    assert moved > 4


def test_it_is_logged_where_it_is_trained(config: TrainConfig, tmp_path: Path) -> None:
    for coefficient in (0.0, 0.5):
        numbers, _, draws, run = make_first_step(sparse(config, tmp_path / str(coefficient), coefficient))
        run.progress.step, run.progress.seconds = 1, 1.0
        run.state.optimizers.learning_rates = lambda: {"all": 1.0}  # type: ignore[method-assign]
        loaded = LoadedStep(draws, {"epoch": 0, "padding": 0, "num_positions": 0}, 1.0, 0.0)
        collect_launch_metrics(run, numbers, loaded)
        values = collect_step_metrics(run, numbers, 1.0)
        assert values.get("balance_loss", 0.0) == numbers.load_balancing_loss
        assert ("balance_loss" in values) == (coefficient > 0)
