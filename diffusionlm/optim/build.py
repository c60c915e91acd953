"""Optimizers: which parameter belongs to which group, and one handle for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import nn

from config.optimizer import PARAMETER_GROUPS, AdamWConfig, AdamWGroup, LionConfig, LionGroup, MuonConfig, MuonGroup
from diffusionlm.optim import eight_bit, lion, muon

OptimizerState = dict[str, torch.Tensor]
ParameterGroups = dict[str, list[nn.Parameter]]
"""Parameters by name of group."""
Log = Callable[[str], None]

STATE_KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    lion.Lion: ("exp_avg",),
    muon.Muon: ("momentum_buffer",),
}
"""What each optimizer keeps of a parameter; all others are those of 8 bits."""
FULL_PRECISION_STATE_GROUPS = ("embed", "scalar")
"""Without moments of 8 bits, as their authors advise: the gradients of an embedding are too uneven for blocks with one
scale."""


class Optimizers:
    """Torch optimizers, one or several, that step as one; their state has the parameters' names."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[torch.Tensor, str]) -> None:
        self.optimizers = optimizers
        self.names = names
        self.base_learning_rates = [
            [float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers
        ]

    def step(self, factor: float) -> None:
        """Update with every group's rate at ``factor`` of its own, then drop the gradients."""
        for optimizer, rates in zip(self.optimizers, self.base_learning_rates, strict=True):
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

    def state_dict(self) -> OptimizerState:
        """``parameter.state`` -> tensor; the tensors themselves, which the next step changes, not copies."""
        state: OptimizerState = {}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                name = self.names[parameter]
                for key, value in values.items():
                    state[f"{name}.{key}"] = torch.as_tensor(value).detach()
        return state

    def load_state_dict(self, state: OptimizerState) -> None:
        """What `state_dict` gave, before the first step or after it.

        Raises:
            ValueError: it is not that of these parameters; tells what is missing, unexpected or misshapen.
        """
        expected = {
            f"{self.names[parameter]}.{key}": (optimizer, parameter, key)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for key in STATE_KEYS.get(type(optimizer)) or eight_bit.state_keys(optimizer, parameter)
        }
        missing = [f"missing {name}" for name in sorted(expected.keys() - state.keys())] if state else []
        unexpected = [f"unexpected {name}" for name in sorted(state.keys() - expected.keys())]
        misshapen: list[str] = []
        for name in sorted(expected.keys() & state.keys()):
            _, parameter, key = expected[name]
            shape = torch.Size() if key == "step" else parameter.shape
            if state[name].shape != shape and key not in eight_bit.BLOCKWISE_STATE_KEYS:
                misshapen.append(f"{name} has shape {list(state[name].shape)}, the parameter {list(shape)}")
        if missing or unexpected or misshapen:
            told = "; ".join(
                some for problems in (missing, unexpected, misshapen) for some in _truncate_problems(problems)
            )
            raise ValueError(
                f"the optimizer state does not fit the model: {told}. It is of another model or optimizer.kind"
            )
        for name, value in state.items():
            optimizer, parameter, key = expected[name]
            is_count = key == "step" and type(optimizer) not in STATE_KEYS
            optimizer.state[parameter][key] = int(value) if is_count else value.to(parameter.device, copy=True)


def _truncate_problems(problems: list[str], most: int = 4) -> list[str]:
    return problems[:most] + ([f"and {len(problems) - most:,} more"] if len(problems) > most else [])


def _log_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_optimizers(
    config: AdamWConfig | LionConfig | MuonConfig,
    named: Mapping[str, nn.Parameter],
    log: Log = _log_to_stderr,
    row_exchange: muon.MatrixRowExchange | None = None,
) -> Optimizers:
    """Optimizers over those of the parameters that require gradients.

    | group  | parameters                           | optimizer                 | decays by default |
    |--------|--------------------------------------|---------------------------|-------------------|
    | hidden | matrices of the blocks               | Muon, or that of the kind | yes               |
    | head   | head that is not the embedding       | that of the kind or rest  | as Muon's rest    |
    | embed  | embedding                            | that of the kind or rest  | as Muon's rest    |
    | router | routers of a mixture of experts      | that of the kind or rest  | yes               |
    | scalar | norms and biases                     | that of the kind or rest  | no                |

    Args:
        config: the kind, and what its groups have of their own.
        named: parameters of a model, or this rank's part of them, by the model's names.
        say: told where another optimizer than asked for is taken.
        exchange: where matrices are cut by rows, what brings them together.

    Raises:
        ValueError: one of 8 bits that cannot be had, without `fallback`.
    """
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in trained.items()}
    groups: ParameterGroups = {name: [] for name in PARAMETER_GROUPS}
    for name, parameter in trained.items():
        groups[_assign_group(name, parameter)].append(parameter)
    assert sum(map(len, groups.values())) == len(names)
    groups = {name: group for name, group in groups.items() if group}
    own = {name: getattr(config, name) for name in groups}
    is_sharded = row_exchange is not None
    match config:
        case AdamWConfig() | LionConfig():
            return Optimizers(_build_adamw_or_lion(config, groups, own, {"hidden", "router"}, log, is_sharded), names)
        case MuonConfig():
            hidden = {name: groups.pop(name) for name in ("hidden",) if name in groups}
            rest = _build_adamw_or_lion(config.rest, groups, own, {"head", "embed", "router"}, log, is_sharded)
            return Optimizers([*_build_muon(config, hidden, row_exchange), *rest], names)
        case _:
            assert_never(config)


def requires_whole_matrix(config: AdamWConfig | LionConfig | MuonConfig, name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is updated as a whole: Muon's matrices, and those whose moments share scales of 8 bits. AdamW
    and Lion update number by number, so that any part of a parameter will do."""
    group = _assign_group(name, parameter)
    if isinstance(config, MuonConfig):
        return group == "hidden" or (config.rest.kind.endswith("8bit") and group not in FULL_PRECISION_STATE_GROUPS)
    return config.kind.endswith("8bit") and group not in FULL_PRECISION_STATE_GROUPS


def _assign_group(name: str, parameter: torch.Tensor) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if ".layers." not in name:
        return "head" if "lm_head" in name else "embed"
    return "router" if name.endswith("mlp.gate.weight") else "hidden"


GroupOverrides = AdamWGroup | LionGroup | MuonGroup | None
GroupOptions = dict[str, Any]


def _apply_overrides(settings: GroupOptions, own: GroupOverrides) -> GroupOptions:
    """Torch's settings of a group, by what the optimizer has and what the group has of its own."""
    given = own.model_dump(exclude_none=True) if own is not None else {}
    torch_names = {"learning_rate": "lr"}
    return settings | {torch_names.get(key, key): value for key, value in given.items()}


def _build_adamw_or_lion(
    config: AdamWConfig | LionConfig,
    groups: ParameterGroups,
    own: dict[str, GroupOverrides],
    decaying: Iterable[str],
    log: Log,
    is_sharded: bool,
) -> list[torch.optim.Optimizer]:
    """AdamW or Lion over the groups, in one optimizer or, where some moments have 8 bits, in two."""
    common: GroupOptions = {"lr": config.learning_rate, "betas": config.betas}
    if isinstance(config, AdamWConfig):
        common["eps"] = config.eps
    params: list[GroupOptions] = []
    for name, parameters in groups.items():
        decay = config.weight_decay if name in decaying else 0.0
        settings = _apply_overrides({**common, "weight_decay": decay}, own[name])
        params.append({**settings, "betas": tuple(settings["betas"]), "params": parameters, "name": name})
    few_bits = [each for each in params if each["name"] not in FULL_PRECISION_STATE_GROUPS]
    if not config.kind.endswith("8bit") or not few_bits:
        return _build_full_precision(config, params)
    reason, remedy = (
        eight_bit.find_unavailable_reason(config.kind, few_bits[0]["params"][0].device),
        "install bitsandbytes for this device",
    )
    if is_sharded:
        reason = f'optimizer.kind = "{config.kind}" updates whole parameters, and parallel.strategy = "fsdp" cuts them'
        remedy = 'set parallel.strategy = "ddp"'
    if reason is None:
        others = [each for each in params if each["name"] in FULL_PRECISION_STATE_GROUPS]
        return [eight_bit.build_eight_bit(config.kind, few_bits), *_build_full_precision(config, others)]
    plain = config.kind.removesuffix("8bit")
    if not config.fallback:
        raise ValueError(f'{reason}: {remedy}, choose kind = "{plain}", or set fallback = true')
    log(f'{reason}; going on with kind = "{plain}", since fallback = true')
    return _build_full_precision(config, params)


def _build_full_precision(config: AdamWConfig | LionConfig, params: list[GroupOptions]) -> list[torch.optim.Optimizer]:
    if not params:
        return []
    first, second = config.betas
    if isinstance(config, LionConfig):
        return [lion.Lion(params, lr=config.learning_rate, betas=(first, second), weight_decay=config.weight_decay)]
    # Fused: the loops of the other variants cost several times as much on a CPU.
    return [torch.optim.AdamW(params, lr=config.learning_rate, fused=True)]


def _build_muon(
    config: MuonConfig, groups: ParameterGroups, row_exchange: muon.MatrixRowExchange | None
) -> list[torch.optim.Optimizer]:
    common: GroupOptions = {
        "lr": config.learning_rate,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "adjust_lr": config.adjust_lr,
        "precision": config.precision,
    }
    settings = _apply_overrides(common, config.hidden)
    precision = settings.pop("precision")
    return [
        muon.Muon(
            [{"params": parameters, "name": name}],
            dtype=muon.choose_product_dtype(precision, parameters[0]),
            row_exchange=row_exchange,
            **settings,
        )
        for name, parameters in groups.items()
    ]
