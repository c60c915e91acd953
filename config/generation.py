"""``[generation]``: how masked positions become text, for one generation or infilling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator
from pydantic.fields import FieldInfo

from config.base import (
    ConfigPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    Probability,
    Section,
    TupleOf,
)
from config.dump import format_value
from config.model import BlockOrigin
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import STEP_KEYS, ConfidenceFrom, OffByDefault, Strategy

DEFAULT_NEW_TOKENS = 64
"""New tokens of a prompt if neither max_new_tokens nor total_length is set."""

DEFAULT_DRAFT_LENGTH = 4
"""Drafted tokens if draft_length is not set."""

StepCount = Annotated[int, Field(gt=0, le=100_000)]
"""Steps of decoding; some strategies take a forward for each. Published experiments use a few thousand at most."""

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


def _strategy_keys() -> dict[str, Any]:
    """``remasking_strategy`` and the options of all strategies as flat keys, for `create_model`."""
    rules = "; ".join(f"{name} ({cls.family.name}): {cls.summary().rstrip('.')}" for name, cls in STRATEGIES.items())
    description = (
        "Which positions are committed after a forward. m masks are left in the block, S steps are scheduled for it. "
        f"{rules}. None: low_confidence_dynamic for SDAR models, entropy for Dream, threshold for "
        "Nemotron-Labs-Diffusion, penalized_entropy for WeDLM, else low_confidence."
    )
    strategy_names = Literal[tuple(STRATEGIES)] | None  # type: ignore[valid-type]
    uses: dict[str, dict[str, FieldInfo]] = {}
    for name, strategy in STRATEGIES.items():
        for key, option in strategy.model_fields.items():
            uses.setdefault(key, {})[name] = option
    flat_options = {key: _flatten_option(options) for key, options in uses.items()}
    return {"remasking_strategy": (strategy_names, Field(default=None, description=description)), **flat_options}


def _flatten_option(options: Mapping[str, FieldInfo]) -> tuple[Any, Any]:
    """Annotation and field of one option's flat key; ``options`` by the name of the strategy that has it."""
    option = next(iter(options.values()))
    is_off = any(isinstance(item, OffByDefault) for item in option.metadata)
    names: dict[str, list[str]] = {}
    for name, field in options.items():
        names.setdefault(field.description or "", []).append(name if is_off else f"{name} (None: {field.default})")
    description = " ".join(f"{', '.join(group)}: {text}" for text, group in names.items())
    annotation: Any = option.rebuild_annotation()
    if is_off:
        return annotation, Field(default=option.default, description=description)
    return annotation | None, Field(default=None, description=description)


if TYPE_CHECKING:

    class StrategyOptions(Section):
        remasking_strategy: str | None = None

else:
    StrategyOptions = create_model("StrategyOptions", __base__=Section, __module__=__name__, **_strategy_keys())


class GenerationConfig(StrategyOptions):
    """``[generation]``: decoding. The defaults are those of the model's family: LLaDA's, SDAR's or Dream's.

    The options of the strategies (`diffusionlm.inference.strategies`) are flat keys of this section.
    """

    max_new_tokens: PositiveInt | None = None
    """New tokens of a prompt; fewer only if a stop token comes first. None: 64. Not used for infilling."""
    min_new_tokens: NonNegativeInt = 0
    """No stop token is generated among this many first new tokens; not for infilling."""
    total_length: PositiveInt | None = None
    """Instead of max_new_tokens: length of the prompt and the new tokens together."""
    attention: Literal["bidirectional", "block_causal", "prompt_and_own_block"] | None = None
    """bidirectional: every position attends to the whole text (LLaDA). block_causal: to its block and all earlier ones
    (SDAR). prompt_and_own_block: to the prompt and its own block, for models trained so (objective.attention). None:
    what the model was trained with (block_length in its config.json)."""
    attention_bias: ConfigPath | None = None
    """File of a bias of bidirectional attention, the one of objective.attention_bias in training. None: no bias."""
    cache: Literal["none", "prefix", "dual", "block"] | None = None
    """KV cache. block: finished blocks; exact, for block-causal attention. prefix, dual: everything before the block,
    or everything outside it, refreshed once per block (Fast-dLLM); approximate, for bidirectional attention. None:
    block with block-causal attention, else none."""
    canvas: Literal["fixed", "growing"] = "fixed"
    """fixed: all masks are visible from the start. growing: the text ends with the current block (LLaDA's "origin");
    for bidirectional attention."""
    block_length: PositiveInt | None = None
    """Masked positions are decoded in blocks of this many, left to right. Bidirectional: counted from the first masked
    position, and all later masks stay visible; the last block may be shorter. Block-causal: counted from the start of
    the text. None: the model's block length, or else one block."""
    block_origin: BlockOrigin | None = None
    """Origin of the blocks of a chat with block-causal attention. text: the start of the text (SDAR). turn:
    they also begin anew after each earlier answer; if the template changes earlier answers, as training expands such
    conversations, at the start of the text. None: as the model was trained (block_origin in its config.json)."""
    denoising_steps: StepCount | None = None
    """Forwards per block, at most 100,000. If neither this nor `steps` is set: one per position. Forwards that would
    commit nothing are skipped."""
    steps: StepCount | None = None
    """Forwards of the whole answer, at most 100,000, divided evenly among its blocks, the surplus to the first ones."""
    temperature: NonNegativeFloat | None = None
    """Temperature of token sampling. 0: the most probable token, the lowest id among equals. None: 1 for the strategies
    of MDLM and ReMDM, 0 for all others."""
    top_k: Annotated[Annotated[int, Field(ge=-1)] | None, AfterValidator(lambda k: k if k and k > 0 else None)] = None
    """Sample from the k most probable tokens. None, 0 or -1: from all."""
    top_p: PositiveFraction = 1.0
    """Sample from the fewest most probable tokens that together have this probability, after top_k. 1: from all."""
    min_p: Probability = 0.0
    """Sample from the tokens whose probability is at least this fraction of the highest one, after top_p. 0: from
    all."""
    presence_penalty: Penalty = 0.0
    """Number that is subtracted from the logits of tokens of the answer, before temperature. Counted are the tokens
    that are committed when the forward begins; masked positions count nothing."""
    frequency_penalty: Penalty = 0.0
    """The same, times the number of their occurrences in the answer."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Before these two, positive logits of tokens of the prompt and the answer are divided by this number, negative
    ones multiplied (Keskar et al. 2019, arXiv 1909.05858)."""
    confidence_from: ConfidenceFrom | None = None
    """Distribution that confidences are computed from. filtered: after temperature (1 if it is 0), top_k, top_p and
    min_p. unfiltered: the model's own. None: unfiltered for the strategies of LLaDA and Fast-dLLM, filtered for those
    of SDAR, Dream and P2."""
    confidence_of: Literal["sampled", "most_probable"] = "sampled"
    """Token whose probability is the confidence of a masked position, for strategies that use it. sampled: the proposed
    one. most_probable: then the order does not depend on what was sampled, so the answer's likelihood is exact, which
    reinforcement learning needs. The same at temperature 0."""
    next_token_first: bool | None = None
    """The first new token of each block is the next-token choice of committed text, by one forward more, before the
    block's masks are read (Nemotron-Labs-Diffusion); not for infilling. Needs blocks of several tokens of a model with
    clean_alignment. None: true for Nemotron-Labs-Diffusion, else false."""
    speculation: Literal["none", "two_forwards", "one_forward", "auto"] = "none"
    """Lossless speculative decoding: the text of next-token decoding (block_length = 1) in fewer forwards. The model
    drafts tokens by masks and verifies them as committed text; those up to the first wrong one are committed, and one
    more. two_forwards: one drafts, one verifies (Nemotron-Labs-Diffusion). one_forward: both at once (I-DLM, arXiv
    2604.11035). auto: one_forward with as many drafts, from 0 to draft_length, as measured times and acceptance make
    fastest."""
    draft_length: PositiveInt | None = None
    """Tokens that are drafted at a time, with "auto" at most; with keyed acceptance they do not change the text. None:
    4."""
    acceptance: Literal["keyed", "rejection"] = "keyed"
    """How sampled drafts are verified; greedy ones are right or wrong. keyed: a verified token is the seeded one. The
    text is that of next-token decoding with the same seed. rejection: a draft d is accepted with probability
    min(1, p(d) / q(d)) (Leviathan et al. 2023, arXiv 2211.17192). More drafts are accepted; the text has the same
    distribution, but also depends on the drafter and draft_length. Not with auto or constraints."""
    cfg_scale: NonNegativeFloat = 0.0
    """Classifier-free guidance: logits = u + (cfg_scale + 1) (c - u), where u are the logits with the prompt masked.
    0: none; otherwise every forward is two."""
    stop_token_ids: TupleOf[NonNegativeInt] | None = None
    """The text ends before the first of these tokens; not for infilling. None: the model's stop tokens. []: never."""
    suppress_token_ids: TupleOf[NonNegativeInt] = ()
    """Tokens that are never generated. The mask token never is."""
    defer_token_ids: TupleOf[NonNegativeInt] = ()
    """Positions whose proposed token is one of these are committed last, with strategies that use confidences. The
    confidences of the other positions are those of the tokens that are not deferred."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...  # the keys of strategies are not known to type checkers

    @model_validator(mode="after")
    def _check_keys_agree(self) -> Self:
        if self.max_new_tokens is not None and self.total_length is not None:
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens} and total_length = {self.total_length} (the prompt and "
                "the new tokens) both set the length: remove one"
            )
        if self.steps is not None and self.denoising_steps is not None:
            raise ValueError(
                f"steps = {self.steps} (of the whole answer) and denoising_steps = {self.denoising_steps} (per block) "
                "both set the number of forwards: remove one"
            )
        self._check_speculation()
        check_attention_fits(self.attention, self.cache, self.canvas)
        if self.attention_bias is not None and self.attention not in (None, "bidirectional"):
            raise ValueError(
                f'attention_bias needs attention = "bidirectional", and it is "{self.attention}": remove one of them'
            )
        if self.attention_bias is not None and self.cache not in (None, "none"):
            raise ValueError(f'attention_bias has no cache: set cache = "none" instead of "{self.cache}"')
        if self.remasking_strategy is not None:
            self.build_strategy(self.remasking_strategy)
        return self

    def _check_speculation(self) -> None:
        if self.speculation == "none":
            for key in ("draft_length", "acceptance"):
                own = getattr(self, key)
                if own != type(self).model_fields[key].get_default():
                    raise ValueError(
                        f"{key} = {format_value(own)} has no effect without speculation: remove it, or set "
                        'speculation = "two_forwards", "one_forward" or "auto"'
                    )
            return
        if self.speculation == "auto" and self.acceptance == "rejection":
            raise ValueError(
                'acceptance = "rejection" makes the text depend on the number of drafts, which speculation = "auto" '
                'chooses by the clock: set acceptance = "keyed", or another speculation'
            )
        for key, value in SPECULATION_KEYS.items():
            own = getattr(self, key)
            if own != type(self).model_fields[key].get_default() and own != value:
                raise ValueError(
                    f'{key} = {format_value(own)} cannot be used with speculation = "{self.speculation}", which is '
                    "next-token decoding with a cache: remove one of them"
                )

    def build_strategy(self, default: str) -> Strategy:
        """The strategy with the options that are set.

        Args:
            default: name of the strategy if ``remasking_strategy`` is not set.

        Raises:
            ValueError: an option has no effect with the strategy, or options contradict each other.
        """
        name = self.remasking_strategy or default
        strategy_class = STRATEGIES[name]
        for key in STRATEGY_KEYS:
            value = getattr(self, key)
            if value != type(self).model_fields[key].get_default() and key not in strategy_class.option_keys():
                names = [alternative for alternative, cls in STRATEGIES.items() if key in cls.option_keys()]
                alternatives = f"one that uses it: {', '.join(names)}" if len(names) < 6 else "another strategy"
                raise ValueError(
                    f'{key} = {format_value(value)} has no effect with remasking_strategy = "{name}": remove it, '
                    f"or choose {alternatives}"
                )
        options = {key: getattr(self, key) for key in strategy_class.model_fields}
        strategy = strategy_class(**{key: value for key, value in options.items() if value is not None})
        steps = {key: getattr(self, key) for key in STEP_KEYS}
        strategy.check_options({key: value for key, value in steps.items() if value is not None})
        return strategy


STRATEGY_KEYS = tuple(
    key
    for key in GenerationConfig.model_fields
    if any(key in strategy.option_keys() for strategy in STRATEGIES.values())
)
"""Keys that have no effect with some strategy."""

SPECULATION_KEYS: Mapping[str, object] = {
    "remasking_strategy": "sequential",
    "attention": "block_causal",
    "cache": "block",
    "block_length": 1,
    "denoising_steps": None,
    "steps": None,
    "attention_bias": None,
    "cfg_scale": 0.0,
    "next_token_first": None,
}
"""Keys that have one value with speculation: that of next-token decoding."""

DISTRIBUTION_KEYS = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Keys beside the temperature that change the distributions from which tokens are sampled."""


CACHES = {
    "bidirectional": ("prefix", "dual", "none"),
    "block_causal": ("block", "none"),
    "prompt_and_own_block": ("none",),
}
"""Attention -> its caches. In bidirectional attention, keys and values of finished blocks change with later tokens."""


def check_attention_fits(attention: str | None, cache: str | None, canvas: str = "fixed") -> None:
    """Check that a cache and a canvas are possible with an attention; None: not known yet.

    Raises:
        ValueError: they are not.
    """
    if attention is not None and cache not in (None, *CACHES[attention]):
        kind = "block-causal" if cache == "block" else "bidirectional"
        raise ValueError(
            f'cache = "{cache}" is for {kind} attention, and attention is "{attention}": set cache = '
            f"{' or '.join(map(format_value, CACHES[attention]))}, or remove it"
        )
    if attention == "block_causal" and canvas == "growing":
        raise ValueError(
            'canvas = "growing" has no effect with attention = "block_causal", where no position sees a later block: '
            'remove it, or set attention = "bidirectional"'
        )
