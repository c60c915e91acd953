"""``[rl]``: reinforcement learning. docs/rl.md has the formulae, and what each estimator is biased by."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from config.base import (
    ConfigPath,
    Fraction,
    HalfOpenFraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    expand_kind,
)
from config.evaluation.tasks import GeneratedTask

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tracerl": {
            "logprobs": {"kind": "replay"},
            "advantage": "standardized",
            "clip": 0.2,
            "kl": {"coefficient": 0.01, "reference": "old"},
            "overlong": "zero",
        },
        "d1": {
            "logprobs": {"kind": "mean_field", "prompt_masking": 0.15},
            "inner_steps": 12,
            "clip": 0.5,
            "kl": {"coefficient": 0.04},
            "divisor": "length",
        },
        "coupled_grpo": {
            "logprobs": {"kind": "coupled"},
            "advantage": "standardized",
            "inner_steps": 2,
            "clip": 0.5,
            "kl": {"coefficient": 0.01},
            "divisor": "length",
        },
        "wd1": {
            "logprobs": {"kind": "mean_field", "prompt_masking": 0.15},
            "advantage": "softmax",
            "divisor": "length",
        },
        "spg": {"logprobs": {"kind": "sandwich"}, "ratio": "none", "inner_steps": 4, "divisor": "length"},
        "espo": {
            "logprobs": {"kind": "bound"},
            "ratio": "sequence",
            "inner_steps": 4,
            "clip": 0.2,
            "kl": {"coefficient": 0.01, "estimator": "k2", "per": "answer"},
        },
        "justgrpo": {"logprobs": {"kind": "replay"}, "advantage": "standardized", "clip": 0.2, "divisor": "length"},
    }
)
"""Publication -> values that it sets (docs/rl.md has the sources). Keys of the config win."""


class ReplayConfig(Section):
    """Exact: the steps of the answer again. Blocks: one row for the first step of all blocks, one for the second, and
    so on; bidirectional attention: one row for each step."""

    kind: Literal["replay"] = "replay"
    shrink: PositiveInt = 1
    """This many steps in a row are scored as if they were one: fewer rows; above 1 no longer exact (TraceRL)."""
    sampled_steps: PositiveInt | None = None
    """Score only so many rows of an answer, drawn at random, each with the weight rows / sampled_steps: the gradient
    stays unbiased (AGRPO). None: all rows."""


class BoundConfig(Section):
    """The evidence bound: below the log-likelihood, so that pushing it down need not lower the likelihood (ESPO)."""

    kind: Literal["bound"] = "bound"
    num_draws: PositiveInt = 1
    """Pairs of a mask and its complement for each answer; the numbers of masks are stratified over the step."""


class SandwichConfig(Section):
    """The evidence bound for positive advantages, and an upper bound of the log-likelihood for negative ones (SPG)."""

    kind: Literal["sandwich"] = "sandwich"
    num_draws: PositiveInt = 2
    """As of kind = "bound"."""
    beta: Annotated[float, Field(ge=1.0)] = 1.5
    """Exponent of the upper bound, (1/beta) log E[w p^beta] of each token. With fewer than the tokens of a block, or of
    an answer, it is one up to a constant alone (SPG, theorem 1)."""


class MeanFieldConfig(Section):
    """One row: each token given the prompt alone, as if the others were masked (d1). Biased, and cheap."""

    kind: Literal["mean_field"] = "mean_field"
    prompt_masking: HalfOpenFraction = 0.0
    """Share of the prompt's tokens that are masked as well."""


class CoupledConfig(Section):
    """Three rows: all masked, a random mask and its complement; a token's value is half of the first one's and half of
    the other's, divided by its share (DiffuCoder)."""

    kind: Literal["coupled"] = "coupled"
    low: Fraction = 0.2
    """Smallest share of the random mask."""
    high: Fraction = 0.8
    """Largest share of the random mask."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must be at most high = {self.high}")
        return self


LogprobConfig = Annotated[
    ReplayConfig | BoundConfig | SandwichConfig | MeanFieldConfig | CoupledConfig,
    Field(discriminator="kind"),
    BeforeValidator(expand_kind),
]
"""A name, or a table with ``kind`` and its options."""


class KLConfig(Section):
    """``[rl.kl]``: a penalty for the distance to another model."""

    coefficient: PositiveFloat
    """Factor of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log p_reference - log p. k1: -d, whose gradient is that of k2. k2: d^2 / 2, whose gradient is that of
    the KL divergence. k3: e^d - 1 - d, never negative (Schulman 2020)."""
    per: Literal["token", "answer"] = "token"
    """token: the sum over tokens, divided as the loss is. answer: of the log-probability of the answer per token."""
    reference: Literal["start", "old"] = "start"
    """start: the model before training; with [lora] that without its adapter, or the adapter as it was. old: the model
    that has written the answers."""
    model: ConfigPath | None = None
    """Model directory in place of the start: of the same architecture and tokenizer."""


class ValueConfig(Section):
    """``[rl.value]``: a linear value function of the last hidden states, and advantages of steps (GAE, TraceRL)."""

    learning_rate: PositiveFloat = 1e-2
    """Of the head, by Adam; it starts at zero, and no gradient goes into the model."""
    gamma: Probability = 1.0
    """Discount of a step."""
    gae_lambda: Probability = 1.0
    """1: rewards to come minus the value. 0: the next reward and the difference of two values."""


class RLConfig(Section):
    """``[rl]`` of ``diffusionlm-rl``: answers to prompts are decoded by the model, and rewarded ones made more likely.
    training.batch_size is the number of answers of a step."""

    preset: Literal["tracerl", "d1", "coupled_grpo", "wd1", "spg", "espo", "justgrpo"] | None = None
    """A publication, whose values are the defaults of this section (docs/rl.md)."""
    prompts: Annotated[GeneratedTask, Field(discriminator="kind")]
    """``[rl.prompts]``: a task, as of diffusionlm-eval, whose first metric is the reward. `repeats`: answers to each
    prompt, its group. `generation`: how they are decoded, at temperature 1. `batch_size`: answers decoded at a time."""
    logprobs: LogprobConfig = ReplayConfig()
    """Log-probabilities of answers."""
    advantage: Literal["centered", "leave_one_out", "standardized", "softmax", "none"] = "centered"
    """From rewards of a group. centered: minus their mean. leave_one_out: minus the mean of the others. standardized:
    centered, divided by their deviation. softmax: softmax(centered) - softmax(-centered) (wd1). none: the rewards."""
    divisor: Literal["answers", "length", "tokens"] = "answers"
    """The loss is a sum over tokens. answers: divided by the answers of the step. length: each answer's sum also by
    its tokens. tokens: divided by all tokens of the step."""
    ratio: Literal["token", "sequence", "none"] = "token"
    """What later inner steps correct by p / p_old: each token; the answer, as exp((log p - log p_old) / tokens), whose
    gradient is divided by the answer's tokens; or nothing (SPG)."""
    clip: PositiveFloat | None = None
    """Limit of the ratio to [1 - clip, 1 + clip] where it would help the loss (PPO). None: no limit."""
    inner_steps: PositiveInt = 1
    """Optimizer steps on the same answers."""
    kl: KLConfig | None = None
    """Penalty for the distance to a reference. None: none."""
    value: ValueConfig | None = None
    """A learned baseline for each step in place of the group's. None: none."""
    min_reward: float | None = None
    """Groups with a lower mean reward are left out. None: no limit."""
    max_reward: float | None = None
    """Groups with a higher mean reward are left out. None: no limit."""
    overlong: Literal["keep", "zero", "drop"] = "keep"
    """Answers without a stop token that had to end. keep: their reward counts. zero: it is 0. drop: they are left
    out."""
    num_shown: NonNegativeInt = 2
    """Answers with rewards that are logged every `samples.every_steps`."""

    @property
    def prompt_masking(self) -> float:
        """Share of the prompt that is masked."""
        return self.logprobs.prompt_masking if isinstance(self.logprobs, MeanFieldConfig) else 0.0

    @property
    def is_measured(self) -> bool:
        """The loss depends on what the model computes, so a forward without gradient comes first. It does not in a
        single inner step without a penalty, where the weights of positions follow from the rewards."""
        has_penalty = self.kl is not None and (self.kl.reference == "start" or self.inner_steps > 1)
        has_bound = isinstance(self.logprobs, SandwichConfig) or self.value is not None
        return self.inner_steps > 1 or has_penalty or has_bound

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        if not (isinstance(preset, str) and preset in PRESETS):
            return values
        merged = {**PRESETS[preset], **values}
        for name, published in PRESETS[preset].items():
            own = values.get(name)
            if (
                isinstance(published, dict)
                and isinstance(own, dict)
                and own.get("kind") in (None, published.get("kind"))
            ):
                merged[name] = {**published, **own}
        return merged

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        repeats = self.prompts.repeats
        if repeats < 2 and self.advantage != "none" and self.value is None:
            raise ValueError(
                f'prompts.repeats = {repeats}: advantage = "{self.advantage}" compares the answers to a prompt; set at '
                'least 2, or advantage = "none"'
            )
        if self.kl is not None and self.kl.model is not None and self.kl.reference == "old":
            raise ValueError('kl.model has no effect with kl.reference = "old": remove one of them')
        is_sampled = isinstance(self.logprobs, ReplayConfig) and self.logprobs.sampled_steps is not None
        needs_all = 'ratio = "sequence"' if self.ratio == "sequence" else None
        needs_all = 'kl.per = "answer"' if self.kl is not None and self.kl.per == "answer" else needs_all
        if is_sampled and needs_all is not None:
            raise ValueError(
                f"logprobs.sampled_steps scores a part of an answer, and {needs_all} needs all of it: remove one"
            )
        if self.ratio == "sequence" and self.divisor != "answers":
            raise ValueError(
                f'ratio = "sequence" divides by the tokens of the answer, and divisor = "{self.divisor}": remove it'
            )
        is_bound = isinstance(self.logprobs, BoundConfig | SandwichConfig)
        if is_bound and self.inner_steps > 1 and self.ratio == "token":
            raise ValueError(
                f'logprobs.kind = "{self.logprobs.kind}" weighs tokens by the tokens over the masks, which a ratio of '
                'each has in its exponent: set ratio = "sequence" or "none"'
            )
        if self.clip is not None and self.ratio == "none":
            raise ValueError(f'clip = {self.clip} limits ratios, and ratio = "none" has none: remove one of them')
        if self.min_reward is not None and self.max_reward is not None and self.min_reward > self.max_reward:
            raise ValueError(f"min_reward = {self.min_reward} must be at most max_reward = {self.max_reward}")
        if self.value is not None and (is_sampled or not isinstance(self.logprobs, ReplayConfig)):
            raise ValueError(
                'value has advantages of all steps: set logprobs = "replay" without sampled_steps, or remove value'
            )
        return self
