"""The shape of a model. Field names are those of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import (
    IntTuple,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    TupleOf,
)


class LinearRope(Section):
    """Positions are divided by a factor (Chen et al. 2023)."""

    rope_type: Literal["linear"] = "linear"
    factor: PositiveFloat
    """What positions are divided by."""


class Llama3Rope(Section):
    """Llama 3.1's scaling: slow rotations as in `LinearRope`, fast ones as they are, those between in between."""

    rope_type: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    """What the slow rotations are divided by."""
    low_freq_factor: PositiveFloat
    """Rotations with fewer turns than this in the original context are slow."""
    high_freq_factor: PositiveFloat
    """Rotations with more turns than this in the original context are fast."""
    original_max_position_embeddings: PositiveInt
    """Context of the model before it was scaled."""

    @model_validator(mode="after")
    def _check_frequency_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} must be less than high_freq_factor = {self.high_freq_factor}"
            )
        return self


class YarnRope(Section):
    """YaRN (Peng et al. 2023), as Qwen's long contexts have it: slow rotations as in `LinearRope`, fast ones as they
    are, a ramp over those between, and longer queries and keys."""

    rope_type: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1.0)]
    """What the slow rotations are divided by."""
    original_max_position_embeddings: PositiveInt
    """Context of the model before it was scaled."""
    attention_factor: PositiveFloat | None = None
    """What rotated queries and keys are multiplied by. None: 0.1 ln(factor) + 1."""
    beta_fast: PositiveFloat = 32.0
    """Rotations with more turns than this in the original context are fast."""
    beta_slow: PositiveFloat = 1.0
    """Rotations with fewer turns than this in the original context are slow."""

    @model_validator(mode="after")
    def _check_frequency_order(self) -> Self:
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow} must be less than beta_fast = {self.beta_fast}")
        return self

    @property
    def attention_scaling(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="rope_type")]


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
    attention_output_bias: bool = False
    """Bias in the output projection, too (a Llama or Qwen3 of transformers with attention_bias)."""
    rope_scaling: RopeScaling | None = None
    """How rotations were slowed down for a longer context. None: not at all."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation of the feed-forward; the second is Gemma's."""
    sandwich_norms: bool = False
    """Norms behind attention and feed-forward as well, before they are added to the residual (Gemma 2)."""
    norm_offset: bool = False
    """A norm's gain is 1 + its weight (Gemma)."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by its square root (Gemma). None: head_dim."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Attention scores are c tanh(scores / c) (Gemma 2). None: not capped."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits are c tanh(logits / c) (Gemma 2). None: not capped."""
    num_experts: NonNegativeInt = 0
    """Experts of a mixture in place of the feed-forward (Qwen3-MoE). 0: none."""
    num_experts_per_tok: PositiveInt = 8
    """Experts that each token is sent to."""
    moe_intermediate_size: PositiveInt | None = None
    """Inner width of one expert; required with experts."""
    norm_topk_prob: bool = True
    """Weights of a token's experts are divided by their sum."""
    decoder_sparse_step: PositiveInt = 1
    """Every so many-th layer has experts; the others a feed-forward."""
    mlp_only_layers: IntTuple = ()
    """Layers that have a feed-forward all the same."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the routers' balance loss in training (Fedus et al. 2022, eq. 4)."""
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
    def _check_shapes(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.num_experts:
            if self.moe_intermediate_size is None:
                raise ValueError(
                    f"num_experts = {self.num_experts} needs moe_intermediate_size, the width of an expert"
                )
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok = {self.num_experts_per_tok} is more than num_experts = {self.num_experts}"
                )
        if isinstance(self.rope_scaling, YarnRope) and self.rope_theta <= 1.0:
            raise ValueError(f'rope_theta = {self.rope_theta} must be more than 1 with rope_scaling of "yarn"')
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers = {self.num_hidden_layers}"
            )
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError('layer_types names "sliding_attention": set sliding_window')
        return self

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of the feed-forward (as transformers' Qwen3-MoE says it)."""
        on_step = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and on_step and layer not in self.mlp_only_layers


class ModelConfig(Architecture):
    """Everything that a model needs to be built; what ``config.json`` holds."""

    vocab_size: PositiveInt
    """Rows of the embedding, special tokens included."""
    model_type: str | None = None
    """Family in whose keys and names the model is written (`config.families.registry`). None: the one of
    transformers that the options say."""
    mask_token_id: NonNegativeInt | None = None
    """The token that stands for noise. None: an autoregressive model, which has none."""
    block_length: PositiveInt | None = None
    """Blocks that the model was trained to fill one after the other, each seeing those before it. None: the whole
    sequence at once. 1 with shifted logits: an autoregressive model."""
    eos_token_id: NonNegativeInt | None = None
    """End of text."""
    stop_token_ids: TupleOf[NonNegativeInt] = ()
    """Ids that end a text in generation, the first of them eos_token_id. Empty: eos_token_id alone."""
    begin_with_eos: bool = False
    """Texts began with the end of text in training, so prompts and canvases do, too."""
    pad_token_id: NonNegativeInt | None = None
    """Padding; usually the end of text."""

    @model_validator(mode="after")
    def _check_token_ids(self) -> Self:
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and value >= self.vocab_size:
                raise ValueError(f"{name} = {value} is outside the vocabulary of {self.vocab_size} tokens")
        for value in self.stop_token_ids:
            if value >= self.vocab_size:
                raise ValueError(f"stop_token_ids: {value} is outside the vocabulary of {self.vocab_size} tokens")
        if self.stop_token_ids and self.stop_token_ids[0] != self.eos_token_id:
            raise ValueError(
                f"stop_token_ids = {list(self.stop_token_ids)} must begin with eos_token_id = {self.eos_token_id}"
            )
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
    def prefix_ids(self) -> list[int]:
        """Token ids that stand before every text."""
        return [self.eos_token_id] if self.begin_with_eos and self.eos_token_id is not None else []

    @property
    def is_autoregressive(self) -> bool:
        """Blocks of one token, each predicted by the output before it: left to right, next token."""
        return self.block_length == 1 and self.logit_alignment == "shifted"
