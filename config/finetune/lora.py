"""``[lora]``: low-rank adapters on the projections of a frozen model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from config.base import (
    ConfigPath,
    HalfOpenFraction,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    TupleOf,
    check_distinct,
)
from config.model import VISION_PREFIX
from files.regular_expression import check_pattern, matches_pattern
from files.usage_error import prefix_errors

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
ROUTER_SUFFIX = ".mlp.gate"
"""End of a router's name, which "all-linear" leaves out."""
MATCH_SECONDS = 0.05
"""CPU time of the process to match a pattern, which may come from anybody's adapter_config.json, with one name: usually
microseconds."""
_Value = TypeVar("_Value", int, float)


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al. 2021): ``W x + s B A dropout(x)`` with a trained A [rank, in] and B [out, rank].

    Target names and patterns are those of PEFT's adapter_config.json, over the module names of the checkpoint's family.
    """

    rank: PositiveInt = 16
    """Rank r of B A."""
    alpha: PositiveFloat = 32.0
    """s is alpha / rank, or with `rslora` alpha / sqrt(rank)."""
    dropout: HalfOpenFraction = 0.0
    """Probability that an input of A is zero in training."""
    targets: str | TupleOf[str] = ALL_LINEAR
    """Adapted projections: "all-linear" (all but the head), a list of module names such as `q_proj` or `lm_head`, or a
    regular expression that matches whole module names. A vision tower has no adapters."""
    exclude: str | TupleOf[str] = ()
    """Module names that are left out, or a regular expression that matches whole module names."""
    layers_to_transform: TupleOf[NonNegativeInt] = ()
    """Indices of the layers that are adapted, from 0. Empty: all."""
    modules_to_save: TupleOf[NonEmptyStr] = ()
    """Modules that are trained whole beside the adapter: all whose names end with one of these, such as `lm_head`,
    `embed_tokens` or `norm`. Of a tied head and embedding each means both."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained: none, all of the model, or those of the adapted projections."""
    positions: Literal["all", "masks"] = "all"
    """Positions that the adapter acts on. masks: masked ones alone, so that it adapts the drafts of a model with
    token-causal text, and next-token outputs stay those of the base (R-ISD of I-DLM, arXiv 2604.11035)."""
    rank_patterns: Mapping[str, PositiveInt] = Field(default_factory=dict)
    """Regular expression for the end of a module name -> its rank; the first match counts."""
    alpha_patterns: Mapping[str, PositiveFloat] = Field(default_factory=dict)
    """The same for alpha."""
    rslora: bool = False
    """Divide by sqrt(rank), so that s B A does not shrink with the rank (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the row norms of the weight apart from its directions (Liu et al. 2024)."""
    trainable_tokens: Literal["mask"] | TupleOf[NonNegativeInt] = ()
    """Token ids whose rows of the embedding are trained. "mask": the mask token's, of a model that had none."""
    trainable_head_rows: bool = True
    """Train the same rows of the head too, unless all of it is trained or adapted. A tied head always has the
    embedding's."""
    init: Literal["default", "gaussian", "pissa", "olora"] = "default"
    """`default`: A uniform, B zero. `gaussian`: A normal, B zero. `pissa`: the largest singular values of the weight
    (Meng et al. 2024). `olora`: the first columns of its QR decomposition (Büyükakyüz 2024)."""

    @field_validator("targets", "exclude")
    @classmethod
    def _check_names(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        if not value and info.field_name == "targets":
            raise ValueError(f'is empty: name projections such as "q_proj", or "{ALL_LINEAR}"')
        if isinstance(value, str):
            check_pattern(value)
        return value

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        others = {
            "modules_to_save": self.modules_to_save != (),
            f'bias = "{self.bias}"': self.bias != "none",
            "dora = true": self.dora,
            "trainable_tokens": self.trainable_tokens != (),
        }
        other = next((key for key, is_set in others.items() if is_set), None)
        if self.positions == "masks" and other is not None:
            raise ValueError(
                f'positions = "masks" leaves all other positions as they are, and {other} changes them: remove it, or '
                'set positions = "all"'
            )
        return self

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        check_distinct({"trainable_tokens": self.token_ids(None)})
        if self.layers_to_transform and isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise ValueError("layers_to_transform needs names as targets; a regular expression names layers itself")
        for key in ("rank_patterns", "alpha_patterns"):
            for pattern in getattr(self, key):
                with prefix_errors(key):
                    check_pattern(pattern)
        return self

    def selects(self, module_name: str) -> bool:
        """Whether `targets` and `layers_to_transform` name a module; "all-linear" names all. `exclude` is not read."""
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            return _matches(self.targets, module_name, "targets")
        if module_name in self.targets:  # a whole name, as in PEFT, in whatever layer
            return True
        layer = re.search(r"\.(\d+)\.", module_name)
        if self.layers_to_transform and (layer is None or int(layer[1]) not in self.layers_to_transform):
            return False
        return self.targets == ALL_LINEAR or any(is_module(module_name, name) for name in self.targets)

    def excludes(self, module_name: str) -> bool:
        """Whether a module has no adapter because of `exclude`, or of `modules_to_save`."""
        if isinstance(self.exclude, str):
            is_excluded = _matches(self.exclude, module_name, "exclude")
        else:
            is_excluded = any(is_module(module_name, name) for name in self.exclude)
        return is_excluded or self.saves(f"{module_name}.weight")

    @property
    def trains_base(self) -> bool:
        """Whether the config may train parameters of the base beside the adapter."""
        return bool(self.modules_to_save) or self.bias != "none"

    def saves(self, parameter_name: str) -> bool:
        """Whether `modules_to_save` names the module of a parameter, or one around it. As in PEFT a name is any end of
        theirs, so that `norm` is also `input_layernorm`."""
        modules = accumulate(parameter_name.split(".")[:-1], "{}.{}".format)
        return any(module.endswith(self.modules_to_save) for module in modules)

    def trains(self, parameter_name: str, *, is_adapted: bool) -> bool:
        """Whether a parameter of the base is trained whole; its name is that in the checkpoints of the model's family.

        ``is_adapted``: its module has an adapter.
        """
        has_trained_bias = self.bias == "all" or (self.bias == "lora_only" and is_adapted)
        return self.saves(parameter_name) or (has_trained_bias and parameter_name.endswith(".bias"))

    def adapts(self, name: str, module_name: str) -> bool:
        """Whether a projection has an adapter.

        Args:
            name: of the projection in the model.
            module_name: its name in the checkpoints of the model's family, which targets and patterns mean.
        """
        if name.startswith(VISION_PREFIX):
            return False
        if self.targets == ALL_LINEAR and (name == HEAD or name.endswith(ROUTER_SUFFIX)):
            return False
        return self.selects(module_name) and not self.excludes(module_name)

    def find_unused_names(self, module_names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Iterate over the keys with names or patterns that fit none of the projections of a model, and these names."""
        for key in ("targets", "exclude"):
            names = getattr(self, key)
            for name in () if isinstance(names, str) else names:
                if not is_module(HEAD, name) and not any(is_module(module_name, name) for module_name in module_names):
                    yield key, name
        for key in ("rank_patterns", "alpha_patterns"):
            for pattern, value in getattr(self, key).items():
                if not any(_first_match({pattern: value}, module_name, key) for module_name in module_names):
                    yield key, pattern

    def token_ids(self, mask_token_id: int | None) -> tuple[int, ...]:
        """The ids of `trainable_tokens`; ``mask_token_id``: the model's. None: it has none, or it is not known yet."""
        if self.trainable_tokens == "mask":
            return () if mask_token_id is None else (mask_token_id,)
        return self.trainable_tokens

    def check_token_ids(self, vocab_size: int) -> None:
        """
        Raises:
            ValueError: one of `trainable_tokens` is not in a vocabulary of this size.
        """
        outside = [str(id_) for id_ in self.token_ids(None) if id_ >= vocab_size]
        if outside:
            raise ValueError(
                f"lora.trainable_tokens: {', '.join(outside)} is not in the model's vocabulary of {vocab_size:,} "
                f"tokens: use ids of 0 to {vocab_size - 1}, or add rows to the model with diffusionlm-convert"
            )

    def rank_of(self, module_name: str) -> int:
        """Rank of a module's adapter."""
        return _first_match(self.rank_patterns, module_name, "rank_patterns") or self.rank

    def scale_of(self, module_name: str) -> float:
        """The factor s of a module's adapter."""
        alpha = _first_match(self.alpha_patterns, module_name, "alpha_patterns") or self.alpha
        rank = self.rank_of(module_name)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


class LoraTrainingConfig(LoraConfig):
    """``[lora]`` of a training config: train an adapter on the frozen model of `model.init_from`. Without an
    [optimizer] table the optimizer is AdamW with learning rate 2e-4 and no weight decay."""

    init_from: ConfigPath | None = None
    """Directory of a PEFT adapter, or run directory, whose values the adapter starts from, and with preferences the
    reference's adapter. It must have the ranks, scales and modules of this section."""
    lr_ratio_b: PositiveFloat = 1.0
    """Learning rate of B over that of A; 16 is LoRA+ (Hayou et al. 2024)."""
    base: Literal["auto", "float32", "bfloat16", "nf4"] = "auto"
    """Dtype in which the adapted projections are kept. auto: bfloat16 if the products are in bfloat16, which then are
    the same. nf4: four bits for each weight (QLoRA, Dettmers et al. 2023), with the package bitsandbytes. A and B are
    float32."""

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.init_from is not None and self.init != "default":
            raise ValueError(f'init = "{self.init}" and init_from are alternatives: remove one of them')
        return self


DEFAULT_LORA_OPTIMIZER: dict[str, object] = {
    "kind": "adamw",
    "learning_rate": 2e-4,
    "betas": [0.9, 0.999],
    "weight_decay": 0.0,
}
"""``[optimizer]`` of a run with ``[lora]`` that has no such table."""


def is_module(module_name: str, name: str) -> bool:
    """Whether a name is that of a module or the end of it, after a dot."""
    return module_name == name or module_name.endswith(f".{name}")


def _matches(pattern: str, module_name: str, key: str) -> bool:
    """Whether a pattern of a key matches a whole name.

    Raises:
        ValueError: that takes longer than `MATCH_SECONDS`.
    """
    with prefix_errors(f"lora.{key}"):
        return matches_pattern(pattern, module_name, MATCH_SECONDS)


def _first_match(patterns: Mapping[str, _Value], module_name: str, key: str) -> _Value | None:
    """As in PEFT: a pattern matches the end of a name, after a dot."""
    return next(
        (value for pattern, value in patterns.items() if _matches(rf"(.*\.)?({pattern})", module_name, key)), None
    )
