"""The routers' balance loss in a training step: beside the loss, in the gradient, weighted over micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.loop import train
from diffusionlm.training.metrics import StepMetrics
from diffusionlm.training.reporting import collect_launch_metrics, collect_step_metrics
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 2}


def sparse(config: TrainConfig, directory: Path, coefficient: float, micro: int = 4) -> TrainConfig:
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["model"] |= {**EXPERTS, "router_aux_loss_coef": coefficient}
    values["training"] |= {"micro_batch_size": micro, "max_grad_norm": 1e9}
    values["run"] |= {"directory": directory}
    return TrainConfig.model_validate(values)


def one_step(config: TrainConfig) -> tuple[StepMetrics, dict[str, torch.Tensor], list[NoisedBatch], Run]:
    """Numbers, gradients, draws, and the run, its weights as they were."""
    with open_run_directory(config) as opened:
        run = build_run(config, opened)
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in run.state.model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
        parameters = dict(run.state.model.named_parameters())
        gradients: dict[str, torch.Tensor] = {}

        class Keep:
            can_skip_on_device = True

            def step(self, factor: float, skip: torch.Tensor | None) -> None:
                assert factor > 0 and skip is None
                gradients.update(
                    {
                        name: parameter.grad.clone()
                        for name, parameter in parameters.items()
                        if parameter.grad is not None
                    }
                )

        keep: Any = Keep()
        run.state.optimizers = keep
        batch = load_step_batch(run.loader, 0, run.world, StopRequest())
        metrics = train_step(run.state, run.loader, batch, run.settings, run.monitor)
        assert metrics.is_finite
    return metrics, gradients, batch.noised_batches, run


def balance_of(run: Run, draw: NoisedBatch) -> torch.Tensor:
    loss_inputs = LossInputs(draw.targets_N, draw.weights_N, load_balancing_weight=1.0)
    balance = run.state.model(
        draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs
    ).load_balancing_loss
    assert balance is not None
    return balance


@pytest.mark.parametrize(("micro", "shares"), [(4, [1.0]), (2, [0.5, 0.5]), (1, [0.25] * 4)])
def test_a_step(config: TrainConfig, micro: int, shares: list[float], tmp_path: Path) -> None:
    numbers, with_it, draws, run = one_step(sparse(config, tmp_path / "with", 0.7, micro))
    plain, without, _, _ = one_step(sparse(config, tmp_path / "without", 0.0, micro))
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
        numbers, _, draws, run = one_step(sparse(config, tmp_path / str(coefficient), coefficient))
        run.progress.step, run.progress.seconds = 1, 1.0
        run.state.optimizers.learning_rates = lambda: {"all": 1.0}  # type: ignore[method-assign]
        collect_launch_metrics(run, numbers, draws)
        values = collect_step_metrics(run, numbers)
        assert values.get("balance_loss", 0.0) == numbers.load_balancing_loss
        assert ("balance_loss" in values) == (coefficient > 0)


@pytest.mark.slow
def test_mixture_of_experts_run_resumes(config: TrainConfig, tmp_path: Path) -> None:
    """Experts without tokens have a state of the optimizer as well: a checkpoint without it would be refused."""
    sparse_config = sparse(config, tmp_path / "run", 0.1)
    sparse_config = sparse_config.model_copy(
        update={"model": sparse_config.model.model_copy(update={"num_experts": 40})}
    )
    assert train(sparse_config).step == 8
    longer = sparse_config.training.model_copy(update={"max_steps": 10})
    update_window = sparse_config.checkpoint.model_copy(update={"config_change": "accept"})
    assert train(sparse_config.model_copy(update={"training": longer, "checkpoint": update_window})).step == 10
