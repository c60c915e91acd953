"""Optimizers: which parameter belongs to which group, and one handle for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import nn

from config.optimizer import GROUPS, AdamW, AdamWGroup, Lion, LionGroup, Muon, MuonGroup
from diffusionlm.optim import eight_bit, lion, muon

State = dict[str, torch.Tensor]
Groups = dict[str, list[nn.Parameter]]
"""Parameters by name of group."""
Say = Callable[[str], None]

STATE_KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    lion.Lion: ("exp_avg",),
    muon.Muon: ("momentum_buffer",),
}
"""What each optimizer keeps of a parameter; all others are those of 8 bits."""
WIDE_GROUPS = ("embed", "scalar")
"""Without moments of 8 bits, as their authors advise: the gradients of an embedding are too uneven for blocks with one
scale."""


class Optimizers:
    """Torch optimizers, one or several, that step as one; their state has the parameters' names."""

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
        """``parameter.state`` -> tensor; the tensors themselves, which the next step changes, not copies."""
        state: State = {}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                name = self.names[parameter]
                for key, value in values.items():
                    state[f"{name}.{key}"] = torch.as_tensor(value).detach()
        return state

    def load_state_dict(self, state: State) -> None:
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
            if state[name].shape != shape and key not in eight_bit.FLAT_KEYS:
                misshapen.append(f"{name} has shape {list(state[name].shape)}, the parameter {list(shape)}")
        if missing or unexpected or misshapen:
            told = "; ".join(some for problems in (missing, unexpected, misshapen) for some in _first(problems))
            raise ValueError(
                f"the optimizer state does not fit the model: {told}. It is of another model or optimizer.kind"
            )
        for name, value in state.items():
            optimizer, parameter, key = expected[name]
            is_count = key == "step" and type(optimizer) not in STATE_KEYS
            optimizer.state[parameter][key] = int(value) if is_count else value.to(parameter.device, copy=True)


def _first(problems: list[str], most: int = 4) -> list[str]:
    return problems[:most] + ([f"and {len(problems) - most:,} more"] if len(problems) > most else [])


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_optimizers(
    config: AdamW | Lion | Muon,
    named: Mapping[str, nn.Parameter],
    say: Say = _tell,
    exchange: muon.Exchange | None = None,
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
    groups: Groups = {name: [] for name in GROUPS}
    for name, parameter in trained.items():
        groups[_group_of(name, parameter)].append(parameter)
    assert sum(map(len, groups.values())) == len(names)
    groups = {name: group for name, group in groups.items() if group}
    own = {name: getattr(config, name) for name in groups}
    is_cut = exchange is not None
    match config:
        case AdamW() | Lion():
            return Optimizers(_of_kind(config, groups, own, {"hidden", "router"}, say, is_cut), names)
        case Muon():
            hidden = {name: groups.pop(name) for name in ("hidden",) if name in groups}
            rest = _of_kind(config.rest, groups, own, {"head", "embed", "router"}, say, is_cut)
            return Optimizers([*_muon(config, hidden, exchange), *rest], names)
        case _:
            assert_never(config)


def must_be_whole(config: AdamW | Lion | Muon, name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is updated as a whole: Muon's matrices, and those whose moments share scales of 8 bits. AdamW
    and Lion update number by number, so that any part of a parameter will do."""
    group = _group_of(name, parameter)
    if isinstance(config, Muon):
        return group == "hidden" or (config.rest.kind.endswith("8bit") and group not in WIDE_GROUPS)
    return config.kind.endswith("8bit") and group not in WIDE_GROUPS


def _group_of(name: str, parameter: torch.Tensor) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if ".layers." not in name:
        return "head" if "lm_head" in name else "embed"
    return "router" if name.endswith("mlp.gate.weight") else "hidden"


Own = AdamWGroup | LionGroup | MuonGroup | None
Settings = dict[str, Any]


def _with_own(settings: Settings, own: Own) -> Settings:
    """Torch's settings of a group, by what the optimizer has and what the group has of its own."""
    given = own.model_dump(exclude_none=True) if own is not None else {}
    torch_names = {"learning_rate": "lr"}
    return settings | {torch_names.get(key, key): value for key, value in given.items()}


def _of_kind(
    config: AdamW | Lion, groups: Groups, own: dict[str, Own], decaying: Iterable[str], say: Say, is_cut: bool
) -> list[torch.optim.Optimizer]:
    """AdamW or Lion over the groups, in one optimizer or, where some moments have 8 bits, in two."""
    common: Settings = {"lr": config.learning_rate, "betas": config.betas}
    if isinstance(config, AdamW):
        common["eps"] = config.eps
    params: list[Settings] = []
    for name, parameters in groups.items():
        decay = config.weight_decay if name in decaying else 0.0
        settings = _with_own({**common, "weight_decay": decay}, own[name])
        params.append({**settings, "betas": tuple(settings["betas"]), "params": parameters, "name": name})
    few_bits = [each for each in params if each["name"] not in WIDE_GROUPS]
    if not config.kind.endswith("8bit") or not few_bits:
        return _plain(config, params)
    reason, remedy = (
        eight_bit.why_not(config.kind, few_bits[0]["params"][0].device),
        "install bitsandbytes for this device",
    )
    if is_cut:
        reason = f'optimizer.kind = "{config.kind}" updates whole parameters, and parallel.strategy = "fsdp" cuts them'
        remedy = 'set parallel.strategy = "ddp"'
    if reason is None:
        others = [each for each in params if each["name"] in WIDE_GROUPS]
        return [eight_bit.build(config.kind, few_bits), *_plain(config, others)]
    plain = config.kind.removesuffix("8bit")
    if not config.fallback:
        raise ValueError(f'{reason}: {remedy}, choose kind = "{plain}", or set fallback = true')
    say(f'{reason}; going on with kind = "{plain}", since fallback = true')
    return _plain(config, params)


def _plain(config: AdamW | Lion, params: list[Settings]) -> list[torch.optim.Optimizer]:
    if not params:
        return []
    first, second = config.betas
    if isinstance(config, Lion):
        return [lion.Lion(params, lr=config.learning_rate, betas=(first, second), weight_decay=config.weight_decay)]
    # Fused: the loops of the other variants cost several times as much on a CPU.
    return [torch.optim.AdamW(params, lr=config.learning_rate, fused=True)]


def _muon(config: Muon, groups: Groups, exchange: muon.Exchange | None) -> list[torch.optim.Optimizer]:
    common: Settings = {
        "lr": config.learning_rate,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "adjust_lr": config.adjust_lr,
        "precision": config.precision,
    }
    settings = _with_own(common, config.hidden)
    precision = settings.pop("precision")
    return [
        muon.Muon(
            [{"params": parameters, "name": name}],
            dtype=muon.product_dtype(precision, parameters[0]),
            exchange=exchange,
            **settings,
        )
        for name, parameters in groups.items()
    ]
