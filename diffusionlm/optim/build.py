"""Assign parameters to groups, build the optimizers of a config, and step them as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from config.training.optimizer import PARAMETER_GROUPS, MuonConfig, OptimizerSection
from ddp.all_to_all_rows import AllToAllRows
from diffusionlm.optim import eight_bit
from diffusionlm.optim.muon import Muon, select_product_dtype
from files.terminal_text import print_message

OptimizerState = dict[str, torch.Tensor]
Group = dict[str, Any]
"""A parameter group in torch's form: ``params``, ``name`` and options."""

HIDDEN_NAMES = (".layers.", ".visual.blocks.", ".visual.merger.", ".visual.deepstack_merger_list.")
"""What names of parameters between embedding and head have in them."""
FULL_PRECISION_STATE_GROUPS = ("embed", "scalar")
"""Groups whose moments are never quantized, as Dettmers et al. advise: the gradients of an embedding are too uneven for
blocks with one scale."""


class Optimizers:
    """Torch optimizers that step as one. Their state is keyed by the names of the parameters."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[torch.Tensor, str]) -> None:
        self.optimizers = optimizers
        self.names = names
        self.base_learning_rates = [
            [float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers
        ]

    @property
    def can_skip_on_device(self) -> bool:
        """True if all optimizers accept `step`'s ``skip``, as torch's fused ones and ours do."""
        return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in self.optimizers)

    def step(self, factor: float, skip: torch.Tensor | None = None) -> None:
        """Update with every group's learning rate multiplied by ``factor``, then drop the gradients.

        Where ``skip``, a 0-d boolean on the device, is true, weights and state stay as they are; the host does not wait
        for it. It needs `can_skip_on_device`.
        """
        for optimizer, rates in zip(self.optimizers, self.base_learning_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            if skip is None:
                optimizer.step()
                continue
            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def learning_rates(self) -> dict[str, float]:
        """Current learning rate of each group, by name."""
        return {group["name"]: float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups}

    def state_dict(self) -> OptimizerState:
        """State by ``parameter.key``. The tensors are not copies: the next step changes them."""
        state: OptimizerState = {}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                name = self.names[parameter]
                for key, value in values.items():
                    state[f"{name}.{key}"] = torch.as_tensor(value).detach()
        return state

    def load_state_dict(self, state: OptimizerState) -> None:
        """Restore the state of `state_dict`; an empty one is that of a run before its first step.

        Raises:
            ValueError: keys are missing, unexpected or have another shape.
        """
        slots = {
            f"{self.names[parameter]}.{key}": (optimizer, parameter, key)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for key in _state_keys(optimizer, parameter)
        }
        missing = [f"missing {name}" for name in sorted(slots.keys() - state.keys())] if state else []
        unexpected = [f"unexpected {name}" for name in sorted(state.keys() - slots.keys())]
        misshapen: list[str] = []
        for name in sorted(slots.keys() & state.keys()):
            _, parameter, key = slots[name]
            shape = torch.Size() if key == "step" else parameter.shape
            if state[name].shape != shape and key not in eight_bit.BLOCKWISE_STATE_KEYS:
                misshapen.append(f"{name} has shape {list(state[name].shape)}, the parameter {list(shape)}")
        if missing or unexpected or misshapen:
            problems = [*_truncate(missing), *_truncate(unexpected), *_truncate(misshapen)]
            raise ValueError(
                f"the optimizer state does not fit the model: {'; '.join(problems)}. It belongs to another model or "
                "another optimizer.kind"
            )
        for name, value in state.items():
            optimizer, parameter, key = slots[name]
            # `state_dict` makes a tensor of integers of a count that the host keeps; a count on the device is a float.
            is_host_count = key == "step" and not value.is_floating_point()
            optimizer.state[parameter][key] = int(value) if is_host_count else value.to(parameter.device, copy=True)


def _state_keys(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[str, ...]:
    keys: tuple[str, ...] | None = getattr(optimizer, "state_keys", None)
    return eight_bit.state_keys(optimizer, parameter) if keys is None else keys


def _truncate(problems: list[str], limit: int = 4) -> list[str]:
    return problems[:limit] + ([f"and {len(problems) - limit:,} more"] if len(problems) > limit else [])


def build_optimizers(
    config: OptimizerSection,
    named: Mapping[str, nn.Parameter],
    log: Callable[[str], None] = print_message,
    row_exchange: AllToAllRows | None = None,
    lr_ratio_b: float = 1.0,
) -> Optimizers:
    """Build optimizers for the parameters that require gradients.

    | group  | parameters                     | optimizer                    | decays by default   |
    |--------|--------------------------------|------------------------------|---------------------|
    | hidden | matrices of blocks and mergers | that of the kind             | yes                 |
    | head   | the head if it is not tied     | that of the kind; Muon: rest | only as Muon's rest |
    | embed  | embeddings, also of patches    | that of the kind; Muon: rest | only as Muon's rest |
    | router | MoE routers                    | that of the kind; Muon: rest | yes                 |
    | scalar | norms and biases               | that of the kind; Muon: rest | no                  |

    Args:
        named: parameters by name, whole or this rank's shards.
        log: called if ``fallback`` replaces an 8-bit optimizer.
        row_exchange: gathers whole matrices; needed if the parameters are sharded by rows.
        lr_ratio_b: learning rate of the factors B of adapters over that of their group (LoRA+). If it is not 1 they are
            a group of their own, "lora_b".

    Raises:
        ValueError: an 8-bit optimizer is not available and ``fallback`` is false.
    """
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    parameters: dict[str, list[nn.Parameter]] = {group: [] for group in PARAMETER_GROUPS}
    for name, parameter in trained.items():
        parameters[_assign_group(name, parameter)].append(parameter)
    present = [group for group in PARAMETER_GROUPS if parameters[group]]

    def make_groups(section: OptimizerSection, names: list[str], decaying: set[str]) -> list[Group]:
        return [
            {
                **_torch_options(section.group_options(name, decays=name in decaying)),
                "params": parameters[name],
                "name": name,
            }
            for name in names
        ]

    if isinstance(config, MuonConfig):
        rest = config.grouped_rest
        rest_groups = make_groups(rest, [name for name in present if name != "hidden"], {"head", "embed", "router"})
        hidden = make_groups(config, [name for name in present if name == "hidden"], {"hidden"})
        optimizers = [
            *(_build_muon(group, row_exchange) for group in hidden),
            *_build_elementwise(rest, rest_groups, log, is_sharded=row_exchange is not None),
        ]
    else:
        groups = make_groups(config, present, {"hidden", "router"})
        if lr_ratio_b != 1.0:
            is_b = {parameter for name, parameter in trained.items() if name.endswith(".lora_B")}
            groups = [part for group in groups for part in _split_factors(group, is_b, lr_ratio_b)]
        optimizers = _build_elementwise(config, groups, log, is_sharded=row_exchange is not None)
    return Optimizers(optimizers, {parameter: name for name, parameter in trained.items()})


def _split_factors(group: Group, factors_b: set[nn.Parameter], lr_ratio: float) -> list[Group]:
    """Divide a group into the factors B of adapters, with another learning rate, and the other parameters."""
    rest = [parameter for parameter in group["params"] if parameter not in factors_b]
    own = [parameter for parameter in group["params"] if parameter in factors_b]
    parts = [{**group, "params": rest}, {**group, "params": own, "lr": group["lr"] * lr_ratio, "name": "lora_b"}]
    return [part for part in parts if part["params"]]


def requires_whole_matrix(config: OptimizerSection, name: str, parameter: torch.Tensor) -> bool:
    """Return whether sharding by rows is forbidden: Muon's matrices, and moments with 8 bits, which share scales.

    AdamW and Lion update each element independently.
    """
    group = _assign_group(name, parameter)
    if isinstance(config, MuonConfig):
        if group == "hidden":
            return True
        config = config.rest
    return config.is_quantized and group not in FULL_PRECISION_STATE_GROUPS


def _assign_group(name: str, parameter: torch.Tensor) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if not any(part in name for part in HIDDEN_NAMES):
        return "head" if "lm_head" in name else "embed"
    return "router" if name.endswith("mlp.gate.weight") else "hidden"


def _torch_options(options: dict[str, Any]) -> dict[str, Any]:
    options = {"lr" if key == "learning_rate" else key: value for key, value in options.items()}
    return options | ({"betas": tuple(options["betas"])} if "betas" in options else {})


def _build_elementwise(
    config: OptimizerSection, groups: list[Group], log: Callable[[str], None], *, is_sharded: bool
) -> list[torch.optim.Optimizer]:
    """Build an optimizer that updates each element by its gradients alone, or two if some groups have 8-bit moments."""
    quantized = [group for group in groups if group["name"] not in FULL_PRECISION_STATE_GROUPS]
    if not config.is_quantized or not quantized:
        return _build_full_precision(config, groups)
    problem = eight_bit.find_unavailable_reason(config.kind, quantized[0]["params"][0].device)
    remedy = "install bitsandbytes for this device"
    if is_sharded:
        problem = (
            f'optimizer.kind = "{config.kind}" updates whole parameters, but parallel.strategy = "fsdp" shards them'
        )
        remedy = 'set parallel.strategy = "ddp"'
    if problem is None:
        full_precision = [group for group in groups if group["name"] in FULL_PRECISION_STATE_GROUPS]
        return [eight_bit.build_eight_bit(config.kind, quantized), *_build_full_precision(config, full_precision)]
    full_precision_kind = config.kind.removesuffix("8bit")
    if not config.fallback:
        raise ValueError(f'{problem}: {remedy}, choose kind = "{full_precision_kind}", or set fallback = true')
    log(f'{problem}; using kind = "{full_precision_kind}", since fallback = true')
    return _build_full_precision(config, groups)


def _build_full_precision(config: OptimizerSection, groups: list[Group]) -> list[torch.optim.Optimizer]:
    if not groups:
        return []
    # Every group has all options, so those of the first one serve as torch's defaults, which nothing reads.
    defaults = {key: value for key, value in groups[0].items() if key not in ("params", "name")}
    module, _, name = config.implementation.partition(":")
    return [getattr(import_module(f"diffusionlm.optim.{module}"), name)(groups, **defaults)]


def _build_muon(group: Group, row_exchange: AllToAllRows | None) -> Muon:
    options = {key: value for key, value in group.items() if key not in ("params", "name", "precision")}
    return Muon(
        [{"params": group["params"], "name": group["name"]}],
        **options,
        dtype=select_product_dtype(group["precision"], group["params"][0].device),
        row_exchange=row_exchange,
    )
