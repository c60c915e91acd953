"""The settings of decoding: a generation config with the defaults of a model, checked against the model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from config.generation import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_NEW_TOKENS,
    SPECULATION_KEYS,
    GenerationConfig,
    check_attention_fits,
)
from config.model import ModelConfig
from diffusionlm.families.registry import get_family
from diffusionlm.inference.strategy import Strategy


@dataclass(frozen=True, eq=False)
class DecodingSettings:
    """A generation config that is complete and fits a model; made by `resolve_settings`. Compared by identity."""

    model: ModelConfig
    config: GenerationConfig
    """Every key that has a default and an effect is set."""
    strategy: Strategy
    block_causal_length: int | None
    """Block length of block-causal attention; None: bidirectional attention."""
    temperature: float
    stop_token_ids: frozenset[int]
    forbidden_token_ids: tuple[int, ...]
    """Tokens that are never generated: the mask token, the placeholder of images and the suppressed ones."""

    @property
    def has_independent_blocks(self) -> bool:
        """Positions attend to the prompt and their own block."""
        return self.config.attention == "prompt_and_own_block"

    @property
    def is_random(self) -> bool:
        """Another seed gives another answer."""
        is_sampled = self.temperature > 0.0 and self.config.top_k != 1
        return is_sampled or not self.strategy.is_deterministic

    @property
    def output_shift(self) -> int:
        """1 if output i - 1 predicts token i. The token before a block is final, so that output is the clean stream's
        of training. In blocks of one token all outputs are those of committed text."""
        is_next_token = self.block_causal_length == 1 and self.model.clean_alignment == "shifted"
        return int(self.noisy_output_shift or is_next_token)

    @property
    def noisy_output_shift(self) -> int:
        """The same for the outputs of noisy blocks, which draft tokens."""
        return int(self.model.logit_alignment == "shifted")

    @property
    def has_noisy_blocks(self) -> bool:
        """Blocks are denoised after token-causal text, which each becomes when it is complete."""
        return _has_noisy_blocks(self.config, self.model)

    @property
    def has_speculation(self) -> bool:
        """Tokens are drafted, and then verified."""
        return self.config.speculation != "none"

    @property
    def rejects_drafts(self) -> bool:
        """Drafts are verified by rejection sampling. Without a temperature nothing is drawn, and the most probable
        tokens are compared."""
        return self.config.acceptance == "rejection" and self.temperature > 0.0

    @property
    def placeholder_token_id(self) -> int:
        """Token at masked positions: the mask token. An autoregressive model never reads it and needs none.

        Raises:
            ValueError: the model has no mask token and does not decode token by token.
        """
        if self.model.mask_token_id is None and self.model.is_autoregressive:
            if self.block_causal_length == 1:
                return 0
            raise ValueError(
                "the model has no mask token, so it can only generate token by token: remove generation.attention and "
                "generation.block_length"
            )
        return self.model.required_mask_token_id


READ_KEYS = ("attention", "attention_bias", "block_length", "block_origin", "cache", "cfg_scale", "suppress_token_ids")
"""Keys that have an effect on a read (`RequestOptions.is_read`)."""
MAX_KEPT_SETTINGS = 256
"""Settings that are resolved once, and for which what is built of them is kept."""


@lru_cache(MAX_KEPT_SETTINGS)
def resolve_settings(config: GenerationConfig, model: ModelConfig) -> DecodingSettings:
    """Set the keys that the config leaves open to the defaults of the model's family, and check them. Idempotent.

    Equal configs get the same settings, so that their requests share computations. Keys without an effect stay None, as
    does ``max_new_tokens`` if ``total_length`` is set.

    Raises:
        ValueError: a key has no effect with the default strategy of the model's family, a cache or canvas is impossible
            with the attention, a block is longer than the model's context, a token id is outside the vocabulary, every
            token is suppressed, guidance is used without a mask token, ``next_token_first`` without noisy blocks, or
            speculation with a model that does not predict next tokens or has no drafter.
    """
    if config.speculation != "none":
        _check_drafter(config, model)
        config = config.model_copy(
            update={**SPECULATION_KEYS, "draft_length": config.draft_length or DEFAULT_DRAFT_LENGTH}
        )
    default_strategy = config.remasking_strategy or get_family(model).default_strategy
    try:
        strategy = config.build_strategy(default_strategy)
    except ValueError as error:
        note = " (remasking_strategy is the default of the model's family)" if config.remasking_strategy is None else ""
        raise ValueError(f"{error}{note}") from None
    config = _fill_defaults(config, strategy, model)
    _check_config(config, model)
    placeholder_ids = [token for token in (model.mask_token_id, model.image_token_id) if token is not None]
    forbidden_token_ids = (*placeholder_ids, *config.suppress_token_ids)
    if len(set(forbidden_token_ids)) == model.vocab_size:
        raise ValueError("suppress_token_ids contains every token of the vocabulary: remove some")
    stop_token_ids = _resolve_stop_token_ids(config, model)
    if config.min_new_tokens and len(stop_token_ids.union(forbidden_token_ids)) == model.vocab_size:
        raise ValueError("min_new_tokens leaves no token that is neither suppressed nor a stop token: remove it")
    assert config.temperature is not None
    return DecodingSettings(
        model=model,
        config=config,
        strategy=strategy,
        block_causal_length=config.block_length if config.attention == "block_causal" else None,
        temperature=config.temperature,
        stop_token_ids=stop_token_ids,
        forbidden_token_ids=forbidden_token_ids,
    )


def resolve_read_settings(settings: DecodingSettings) -> DecodingSettings:
    """The settings of one forward that predicts all masks: without steps, order and sampling."""
    keys = {key: getattr(settings.config, key) for key in READ_KEYS}
    config = GenerationConfig(remasking_strategy="low_confidence", temperature=0.0, **keys)
    return resolve_settings(config, settings.model)


def _fill_defaults(config: GenerationConfig, strategy: Strategy, model: ModelConfig) -> GenerationConfig:
    has_no_blocks = model.block_length is None or config.attention_bias is not None
    attention = config.attention or ("bidirectional" if has_no_blocks else "block_causal")
    is_block_causal = attention == "block_causal"
    defaults: dict[str, object] = {
        "remasking_strategy": strategy.name,
        "attention": attention,
        "cache": "block" if is_block_causal else "none",
        "temperature": strategy.family.temperature,
        **strategy.model_dump(),
    }
    if strategy.measure is not None:
        defaults["confidence_from"] = strategy.family.confidence_from
    if attention != "bidirectional":
        defaults["block_length"] = model.block_length
    if is_block_causal:
        defaults["block_origin"] = model.block_origin
    if config.total_length is None:
        defaults["max_new_tokens"] = DEFAULT_NEW_TOKENS
    config = config.model_copy(update={key: value for key, value in defaults.items() if getattr(config, key) is None})
    if config.next_token_first is None and _has_noisy_blocks(config, model):
        return config.model_copy(update={"next_token_first": get_family(model).next_token_first})
    return config


def _has_noisy_blocks(config: GenerationConfig, model: ModelConfig) -> bool:
    is_block_causal = config.attention == "block_causal" and config.block_length != 1
    return is_block_causal and model.clean_alignment == "shifted"


def _check_config(config: GenerationConfig, model: ModelConfig) -> None:
    if config.next_token_first and not _has_noisy_blocks(config, model):
        raise ValueError(
            "next_token_first = true needs blocks of several tokens after token-causal text: remove it, or use a model "
            'with clean_alignment = "shifted", attention = "block_causal" and a block_length of at least 2'
        )
    if config.block_length is not None and config.block_length > model.max_position_embeddings:
        raise ValueError(
            f"block_length = {config.block_length} is more than the model's context, max_position_embeddings = "
            f"{model.max_position_embeddings}: lower it, or remove it for one block"
        )
    if config.attention != "bidirectional" and config.block_length is None:
        raise ValueError(f'attention = "{config.attention}" needs block_length: the model\'s config.json names none')
    if config.attention != "block_causal" and config.block_origin is not None:
        raise ValueError(
            f'block_origin = "{config.block_origin}" has no effect with attention = "{config.attention}": remove it, '
            'or set attention = "block_causal"'
        )
    if config.attention == "prompt_and_own_block" and model.logit_alignment == "shifted":
        raise ValueError(
            'attention = "prompt_and_own_block" needs outputs at the same position, and the model\'s are shifted: '
            "remove the key"
        )
    if config.attention_bias is not None and not config.attention_bias.is_file():
        raise ValueError(f"attention_bias = {config.attention_bias} does not exist: correct the path")
    check_attention_fits(config.attention, config.cache, config.canvas)
    if config.cfg_scale > 0.0 and model.mask_token_id is None:
        raise ValueError(
            f"cfg_scale = {config.cfg_scale} needs a mask token, and the model's config.json names no mask_token_id: "
            "remove it"
        )
    for key in ("stop_token_ids", "suppress_token_ids", "defer_token_ids"):
        check_token_ids(getattr(config, key) or (), model, key)


def _check_drafter(config: GenerationConfig, model: ModelConfig) -> None:
    if not (model.is_autoregressive or model.clean_alignment == "shifted"):
        raise ValueError(
            f'speculation = "{config.speculation}" needs a model that predicts next tokens of committed text '
            "(clean_alignment in its config.json, or an autoregressive model), and this one does not: remove it"
        )
    if model.mask_token_id is None:
        raise ValueError(
            f'speculation = "{config.speculation}" needs a drafter, and the model has none, because its config.json '
            "names no mask_token_id: remove it, and the model decodes token by token"
        )


def check_token_ids(token_ids: Collection[int], model: ModelConfig, label: str | None = None) -> None:
    """Check that token ids are in the model's vocabulary.

    Raises:
        ValueError: one is not; ``label`` says where, unless the caller does.
    """
    invalid_id = next((token for token in token_ids if not 0 <= token < model.vocab_size), None)
    if invalid_id is not None:
        place = f"{label}: " if label else ""
        raise ValueError(
            f"{place}token {invalid_id} is outside the model's vocabulary of {model.vocab_size} tokens: use the "
            "model's own tokenizer"
        )


def _resolve_stop_token_ids(config: GenerationConfig, model: ModelConfig) -> frozenset[int]:
    """Stop tokens of the config, else of the model, else its end-of-text token."""
    if config.stop_token_ids is not None:
        return frozenset(config.stop_token_ids)
    if model.stop_token_ids:
        return frozenset(model.stop_token_ids)
    return frozenset() if model.eos_token_id is None else frozenset({model.eos_token_id})
