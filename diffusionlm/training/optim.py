"""Optimizers: which parameter belongs to which group, and one handle for all of them."""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch import nn

from config.optimizer import AdamW, Muon
from diffusionlm.models.transformer import Transformer

State = dict[str, torch.Tensor]

STATE_KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""What each optimizer keeps of a parameter."""


class Optimizers:
    """One or two torch optimizers that step as one; their state has the parameters' names."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[torch.Tensor, str]) -> None:
        self.optimizers = optimizers
        self.names = names
        self.full_rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, factor: float) -> None:
        """Update with every group's rate at ``factor`` of its own, then drop the gradients."""
        for optimizer, rates in zip(self.optimizers, self.full_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def learning_rates(self) -> dict[str, float]:
        """Present rate by name of group."""
        return {group["name"]: float(group["lr"]) for opt in self.optimizers for group in opt.param_groups}

    def state_dict(self) -> State:
        """``parameter.state`` -> tensor, for safetensors."""
        state: State = {}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                name = self.names[parameter]
                for key, value in values.items():
                    state[f"{name}.{key}"] = torch.as_tensor(value).detach().clone()
        return state

    def load_state_dict(self, state: State) -> None:
        """What `state_dict` gave, before the first step or after it.

        Raises:
            ValueError: it is not that of these parameters; lists what is missing, unexpected or misshapen.
        """
        expected = {
            f"{self.names[parameter]}.{key}": (optimizer, parameter, key)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for key in STATE_KEYS[type(optimizer)]
        }
        problems = [f"missing {name}" for name in sorted(expected.keys() - state.keys())] if state else []
        problems += [f"unexpected {name}" for name in sorted(state.keys() - expected.keys())]
        for name in expected.keys() & state.keys():
            _, parameter, key = expected[name]
            shape = torch.Size() if key == "step" else parameter.shape
            if state[name].shape != shape:
                problems.append(f"{name} has shape {list(state[name].shape)}, the parameter {list(shape)}")
        if problems:
            raise ValueError(f"the optimizer state does not fit the model: {'; '.join(problems)}")
        for name, value in state.items():
            optimizer, parameter, key = expected[name]
            optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def build_optimizers(config: AdamW | Muon, model: Transformer) -> Optimizers:
    """Optimizers over all parameters that require gradients.

    | group        | parameters                                    | optimizer        |
    |--------------|-----------------------------------------------|------------------|
    | hidden       | matrices of the blocks                        | Muon, or AdamW with decay |
    | embed        | embedding, untied head                        | AdamW            |
    | scalar       | norms and biases                              | AdamW            |
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in trained.items()}
    groups: dict[str, list[nn.Parameter]] = {"hidden": [], "embed": [], "scalar": []}
    for name, parameter in trained.items():
        groups[_group_of(name, parameter)].append(parameter)
    assert sum(map(len, groups.values())) == len(names)
    match config:
        case AdamW():
            decays = {"hidden": config.weight_decay, "embed": 0.0, "scalar": 0.0}
            return Optimizers([_adamw(config, groups, decays)], names)
        case Muon():
            hidden = {"hidden": groups.pop("hidden")}
            decays = {"embed": config.rest.weight_decay, "scalar": 0.0}
            return Optimizers([_muon(config, hidden), _adamw(config.rest, groups, decays)], names)
        case _:
            assert_never(config)


def _group_of(name: str, parameter: nn.Parameter) -> str:
    if parameter.dim() < 2:
        return "scalar"
    return "hidden" if ".layers." in name else "embed"


def _adamw(config: AdamW, groups: dict[str, list[nn.Parameter]], decays: dict[str, float]) -> torch.optim.Optimizer:
    """Fused: the loops of the other variants cost several times as much on a CPU."""
    params: list[dict[str, Any]] = [
        {"params": group, "name": name, "weight_decay": decays[name]} for name, group in groups.items() if group
    ]
    first, second = config.betas
    return torch.optim.AdamW(params, lr=config.learning_rate, betas=(first, second), eps=config.eps, fused=True)


def _muon(config: Muon, groups: dict[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        [{"params": group, "name": name} for name, group in groups.items()],
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
