"""``[model]`` of a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from config.base import ConfigPath
from config.model import IMAGE_TOKEN_ID_KEYS, Architecture, ModelConfig
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from diffusionlm.families.registry import get_family

CHANGEABLE_OPTIONS = (
    "max_position_embeddings", "initializer_range", "logit_alignment", "clean_alignment", "noisy_attention",
    "router_aux_loss_coef",
)  # fmt: skip
"""Options that may differ from those of the model whose weights training starts from."""


class ModelSection(Architecture):
    """``[model]`` of a training config: the architecture. The vocabulary is the tokenizer's."""

    init_from: ConfigPath | None = None
    """Model or run directory, or model of the Hub (org/name), with the weights (and tokenizer) to start training from.
    None: random weights. Options of [model] that are not set are those of its config.json."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_from_checkpoint(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in missing options from the checkpoint. A complete section, as in a run directory, does not read it."""
        start = values.get("init_from") if isinstance(values, dict) else None
        has_value = {name for name, field in Architecture.model_fields.items() if field.get_default() is not None}
        if not isinstance(start, str | Path) or not str(start).strip() or has_value <= values.keys():
            return handler(values)
        try:
            checkpoint_config = read_model_config(resolve_model_directory(start, needs_weights=False))
        except ValueError as error:
            raise ValueError(
                f"init_from = {start}: {error}; the options that [model] does not set are read there: correct the "
                "path, or set all options"
            ) from error
        options = {name: getattr(checkpoint_config, name) for name in Architecture.model_fields}
        section = handler({name: value for name, value in options.items() if value is not None} | values)
        section.check_same_architecture(checkpoint_config)
        return section

    def check_same_architecture(self, checkpoint_config: ModelConfig) -> None:
        """Check that the weights of a checkpoint fit this architecture.

        Raises:
            ValueError: an option differs; lists all of them.
        """
        differing = [
            f"model.{name} = {getattr(self, name)!r} (checkpoint: {getattr(checkpoint_config, name)!r})"
            for name in Architecture.model_fields
            if name not in CHANGEABLE_OPTIONS and getattr(self, name) != getattr(checkpoint_config, name)
        ]
        if differing:
            raise ValueError(
                f"model.init_from = {self.init_from} has another architecture than [model]: "
                f"{'; '.join(differing)}; remove these keys"
            )

    def check_vocab_size(self, checkpoint_config: ModelConfig, tokenizer_size: int) -> None:
        """Check that a checkpoint has a row for each token of the tokenizer; it may have more.

        Raises:
            ValueError: it has fewer.
        """
        if checkpoint_config.vocab_size < tokenizer_size:
            raise ValueError(
                f"model.init_from = {self.init_from} has {checkpoint_config.vocab_size} rows in its embedding, the "
                f"tokenizer {tokenizer_size} tokens: add the missing rows with diffusionlm-convert, or use its own "
                "tokenizer"
            )

    def to_model_config(self, **vocabulary: Any) -> ModelConfig:
        """Build the complete model config, with the options that only `ModelConfig` has."""
        return ModelConfig(**self.model_dump(exclude={"init_from"}), **vocabulary)

    def to_adapted_config(self, **vocabulary: Any) -> ModelConfig:
        """The same for a model with an adapter: of the family of `init_from`, whose module names the adapter's files
        have, unless that family has no model with these options. Ids of image tokens that are not given are its own."""
        try:
            source = read_model_config(resolve_model_directory(self.init_from or "", needs_weights=False))
        except ValueError:
            return self.to_model_config(**vocabulary)
        image_tokens = {key: getattr(source, key) for key in IMAGE_TOKEN_ID_KEYS}
        config = self.to_model_config(**image_tokens | vocabulary)
        adapted = config.model_copy(update={"model_type": source.model_type})
        try:
            get_family(adapted).to_config_json(adapted)
        except ValueError:
            return config
        return adapted
