"""The shape of a model. Field names are those of a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Architecture(Section):
    """What a model is, apart from its vocabulary."""

    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_hidden_layers: PositiveInt
    """Transformer blocks."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: PositiveInt
    """Width of one head, even; independent of hidden_size."""
    intermediate_size: PositiveInt
    """Inner width of the SwiGLU feed-forward."""
    max_position_embeddings: PositiveInt
    """Longest sequence, in tokens."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    qk_norm: bool = True
    """RMSNorm on each head's queries and keys (Qwen3)."""
    attention_bias: bool = False
    """Bias in the query, key and value projections (Qwen2)."""
    tie_word_embeddings: bool = True
    """The head is the embedding matrix."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of embeddings and input projections; output projections start at zero."""
    logit_alignment: Literal["same_position"] = "same_position"
    """Which output predicts token i: output i."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs")
        return self


class ModelConfig(Architecture):
    """Everything that a model needs to be built; what ``config.json`` holds."""

    vocab_size: PositiveInt
    """Rows of the embedding, special tokens included."""
    mask_token_id: NonNegativeInt
    """The token that stands for noise."""
    eos_token_id: NonNegativeInt | None = None
    """End of text."""
    pad_token_id: NonNegativeInt | None = None
    """Padding; usually the end of text."""

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and value >= self.vocab_size:
                raise ValueError(f"{name} = {value} is outside the vocabulary of {self.vocab_size} tokens")
        return self


class ModelSection(Architecture):
    """``[model]`` of a training config: the architecture; the tokenizer brings the vocabulary."""

    init_from: ConfigPath | None = None
    """A model or run directory whose weights (and tokenizer) training starts from, instead of random ones."""

    def with_vocabulary(
        self, *, vocab_size: int, mask_token_id: int, eos_token_id: int | None, pad_token_id: int | None
    ) -> ModelConfig:
        """The complete model config for a tokenizer's vocabulary."""
        return ModelConfig(
            **self.model_dump(exclude={"init_from"}),
            vocab_size=vocab_size,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
