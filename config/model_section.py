"""``[model]`` of a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from config.base import ConfigPath
from config.families.model_directory import read_model_config, resolve_model_directory
from config.model import Architecture, ModelConfig

CHANGEABLE_OPTIONS = ("max_position_embeddings", "initializer_range", "logit_alignment", "router_aux_loss_coef")
"""What a model may have otherwise than the one that its weights come from."""


class ModelSection(Architecture):
    """``[model]`` of a training config: the architecture; the tokenizer brings the vocabulary."""

    init_from: ConfigPath | None = None
    """A model or run directory whose weights (and tokenizer) training starts from, instead of random ones. Options
    that are not given are those of its config.json."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_from_checkpoint(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take what is not given from the checkpoint; a complete section, as a run keeps it, needs none for that."""
        start = values.get("init_from") if isinstance(values, dict) else None
        always = {name for name, field in Architecture.model_fields.items() if field.get_default() is not None}
        if not isinstance(start, str | Path) or always <= values.keys():
            return handler(values)
        try:
            checkpoint_config = read_model_config(resolve_model_directory(start))
        except ValueError as error:
            raise ValueError(
                f"init_from = {start}: {error}; what [model] leaves out is read there: correct the path, or set all of "
                "[model]"
            ) from error
        there = {name: getattr(checkpoint_config, name) for name in Architecture.model_fields}
        section = handler({name: value for name, value in there.items() if value is not None} | values)
        section.check_same_architecture(checkpoint_config)
        return section

    def check_same_architecture(self, checkpoint_config: ModelConfig) -> None:
        """Compare the architecture with that of the model that the weights come from.

        Raises:
            ValueError: it is another one; lists what differs.
        """
        differing = [
            f"model.{name} = {getattr(self, name)!r}, there {getattr(checkpoint_config, name)!r}"
            for name in Architecture.model_fields
            if name not in CHANGEABLE_OPTIONS and getattr(self, name) != getattr(checkpoint_config, name)
        ]
        if differing:
            raise ValueError(
                f"model.init_from = {self.init_from} is another architecture than [model]: {'; '.join(differing)}"
            )

    def to_model_config(
        self,
        *,
        vocab_size: int,
        mask_token_id: int | None,
        eos_token_id: int | None,
        pad_token_id: int | None,
        stop_token_ids: tuple[int, ...] = (),
        block_length: int | None = None,
        begin_with_eos: bool = False,
    ) -> ModelConfig:
        """The complete model config for a tokenizer's vocabulary, the objective's blocks and the rows' beginning."""
        return ModelConfig(
            **self.model_dump(exclude={"init_from"}),
            vocab_size=vocab_size,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            stop_token_ids=stop_token_ids,
            block_length=block_length,
            begin_with_eos=begin_with_eos,
        )
