"""What a generation config leaves open, filled in from the model's family."""

from __future__ import annotations

from config.families.registry import get_family
from config.generation import (
    DEFAULT_ENTROPY_BOUND,
    DEFAULT_FACTOR,
    DEFAULT_NEW_TOKENS,
    DEFAULT_REMDM_ALPHA_ON,
    DEFAULT_REMDM_ETA,
    DEFAULT_REMDM_T_OFF,
    DEFAULT_REMDM_T_ON,
    DEFAULT_THRESHOLD_FALLBACK,
    STRATEGIES,
    GenerationConfig,
)
from config.model import ModelConfig


def fill_defaults(config: GenerationConfig, model: ModelConfig) -> GenerationConfig:
    """The config with every option filled in that has a default and an effect; given ones stay. Idempotent.

    Options that do nothing with the strategy stay None, and ``max_new_tokens`` does where ``total_length`` is given.

    Raises:
        ValueError: what only the model can tell: an option has no effect with its family's strategy, a cache or canvas
            does not fit its attention, blocks without a length or longer than its context, or guidance without a mask
            token.
    """
    name = config.remasking_strategy or get_family(model).default_strategy
    if config.remasking_strategy is None:
        try:
            config.model_copy(update={"remasking_strategy": name}).check_strategy()
        except ValueError as error:
            raise ValueError(f"{error} (remasking_strategy is the default of the model's family)") from None
    strategy = STRATEGIES[name]
    attention = config.attention or ("bidirectional" if model.block_length is None else "block_causal")
    is_causal = attention == "block_causal"
    defaults: dict[str, object] = {
        "remasking_strategy": name,
        "attention": attention,
        "cache": "block" if is_causal else "none",
        "temperature": strategy.temperature,
        "confidence_from": strategy.confidence_from,
        "confidence_threshold": strategy.confidence_threshold,
        "threshold_comparison": strategy.threshold_comparison,
    }
    options: dict[str, object] = {
        "threshold_fallback": DEFAULT_THRESHOLD_FALLBACK,
        "factor": DEFAULT_FACTOR,
        "entropy_bound": DEFAULT_ENTROPY_BOUND,
        "remdm_eta": DEFAULT_REMDM_ETA,
        "remdm_t_on": DEFAULT_REMDM_T_ON,
        "remdm_t_off": DEFAULT_REMDM_T_OFF,
        "remdm_alpha_on": DEFAULT_REMDM_ALPHA_ON,
    }
    defaults |= {key: value for key, value in options.items() if key in strategy.keys}
    if is_causal:
        defaults["block_length"] = model.block_length
    if config.total_length is None:
        defaults["max_new_tokens"] = DEFAULT_NEW_TOKENS
    filled = config.model_copy(update={key: value for key, value in defaults.items() if getattr(config, key) is None})
    _check(filled, model)
    return filled


def _check(config: GenerationConfig, model: ModelConfig) -> None:
    """What is wanted suits the model's context and attention."""
    if config.block_length is not None and config.block_length > model.max_position_embeddings:
        raise ValueError(
            f"block_length = {config.block_length} is more than the model's context, max_position_embeddings = "
            f"{model.max_position_embeddings}: lower it, or leave it out for one block"
        )
    if config.attention == "block_causal":
        if config.block_length is None:
            raise ValueError('attention = "block_causal" needs block_length: the model\'s config.json names none')
        if config.cache in ("prefix", "dual"):
            raise ValueError(
                f'cache = "{config.cache}" is for bidirectional attention, and here it is block-causal, whose finished '
                'blocks are kept without loss: choose "block" or leave it out'
            )
        if config.canvas == "growing":
            raise ValueError(
                'canvas = "growing" has no effect with block-causal attention, which sees no later block: remove it, '
                'or set attention = "bidirectional"'
            )
    elif config.cache == "block":
        raise ValueError(
            'cache = "block" is for block-causal attention, and here it is bidirectional, where keys and values of '
            'finished blocks change with what follows: choose "prefix", "dual" or "none"'
        )
    if config.cfg_scale > 0.0 and model.mask_token_id is None:
        raise ValueError(
            f"cfg_scale = {config.cfg_scale} needs a mask token, and the model's config.json names no mask_token_id: "
            "remove it"
        )
