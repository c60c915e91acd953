"""The shape of a model. Field names are those of a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import ConfigPath, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, TupleOf


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
    logit_alignment: Literal["same_position", "shifted"] = "same_position"
    """Which output predicts token i: output i, or output i - 1, as in autoregressive models and those made of them
    (Dream)."""
    sliding_window: PositiveInt | None = None
    """Layers with "sliding_attention" see keys less than this many positions away."""
    layer_types: TupleOf[Literal["full_attention", "sliding_attention"]] | None = None
    """Attention of each layer. None: full in all of them."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers = {self.num_hidden_layers}"
            )
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError('layer_types names "sliding_attention": set sliding_window')
        return self


class ModelConfig(Architecture):
    """Everything that a model needs to be built; what ``config.json`` holds."""

    vocab_size: PositiveInt
    """Rows of the embedding, special tokens included."""
    mask_token_id: NonNegativeInt | None = None
    """The token that stands for noise. None: an autoregressive model, which has none."""
    block_length: PositiveInt | None = None
    """Blocks that the model was trained to fill one after the other, each seeing those before it. None: the whole
    sequence at once. 1 with shifted logits: an autoregressive model."""
    eos_token_id: NonNegativeInt | None = None
    """End of text."""
    begin_with_eos: bool = False
    """Texts began with the end of text in training, so prompts and canvases do, too."""
    pad_token_id: NonNegativeInt | None = None
    """Padding; usually the end of text."""

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and value >= self.vocab_size:
                raise ValueError(f"{name} = {value} is outside the vocabulary of {self.vocab_size} tokens")
        if self.begin_with_eos and self.eos_token_id is None:
            raise ValueError("begin_with_eos = true needs eos_token_id")
        return self

    @property
    def mask_token(self) -> int:
        """The mask token's id.

        Raises:
            ValueError: the model has none.
        """
        if self.mask_token_id is None:
            raise ValueError(
                "the model has no mask token, which masked diffusion needs: its config.json names no mask_token_id. "
                "Only next-token likelihood is possible with it"
            )
        return self.mask_token_id

    @property
    def beginning(self) -> list[int]:
        """Token ids that stand before every text."""
        return [self.eos_token_id] if self.begin_with_eos and self.eos_token_id is not None else []

    @property
    def is_autoregressive(self) -> bool:
        """Blocks of one token, each predicted by the output before it: left to right, next token."""
        return self.block_length == 1 and self.logit_alignment == "shifted"


class ModelSection(Architecture):
    """``[model]`` of a training config: the architecture; the tokenizer brings the vocabulary."""

    init_from: ConfigPath | None = None
    """A model or run directory whose weights (and tokenizer) training starts from, instead of random ones."""

    def with_vocabulary(
        self,
        *,
        vocab_size: int,
        mask_token_id: int | None,
        eos_token_id: int | None,
        pad_token_id: int | None,
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
            block_length=block_length,
            begin_with_eos=begin_with_eos,
        )
