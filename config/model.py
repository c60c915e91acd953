"""The architecture of a model. Field names are the keys of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, TupleOf

VISION_PREFIX = "model.visual."
"""Start of the names of the parameters of a vision tower."""
VisionPart = Literal["vision", "merger"]
"""Parts of a vision tower: patch embedding, position table and blocks; or what projects their outputs to the text."""
BlockAttention = Literal["block", "token"]
"""Last key of a query in its own block: that of the block, or the query itself."""
NoisyAttention = Literal["block", "token", "visible_first"]
"""The same of a noisy query. visible_first: token, in an order in which the tokens of a block precede its masks."""
BlockOrigin = Literal["text", "turn"]
"""Origin of blocks: the start of the text, or in a chat the end of the last answer before them."""


IMAGE_TOKEN_ID_KEYS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
TOKEN_ID_KEYS = ("mask_token_id", "eos_token_id", "pad_token_id", *IMAGE_TOKEN_ID_KEYS)


class LinearRope(Section):
    """Position interpolation: positions are divided by a factor (Chen et al. 2023)."""

    rope_type: Literal["linear"] = "linear"
    factor: PositiveFloat
    """Divisor of positions."""


class Llama3Rope(Section):
    """Llama 3.1's scaling: low frequencies as in `LinearRope`, high ones unchanged, a ramp between them."""

    rope_type: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    """Divisor of low frequencies."""
    low_freq_factor: PositiveFloat
    """Frequencies with fewer rotations than this in the original context are low."""
    high_freq_factor: PositiveFloat
    """Frequencies with more rotations than this in the original context are high."""
    original_max_position_embeddings: PositiveInt
    """Context length before scaling."""

    @model_validator(mode="after")
    def _check_frequency_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} must be less than high_freq_factor = {self.high_freq_factor}"
            )
        return self


class YarnRope(Section):
    """YaRN (Peng et al. 2023), in Qwen's long contexts: low frequencies as in `LinearRope`, high ones unchanged, a ramp
    between them, and scaled queries and keys."""

    rope_type: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1.0)]
    """Divisor of low frequencies."""
    original_max_position_embeddings: PositiveInt
    """Context length before scaling."""
    attention_factor: PositiveFloat | None = None
    """Factor of rotated queries and keys. None: 0.1 ln(factor) + 1."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies with more rotations than this in the original context are high."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies with fewer rotations than this in the original context are low."""
    llama_4_scaling_beta: NonNegativeFloat | None = None
    """Scale s of rotated queries (Llama 4, Ministral 3): at position i they are multiplied by
    1 + s ln(1 + floor(i / original_max_position_embeddings)). None: they are not."""

    @model_validator(mode="after")
    def _check_frequency_order(self) -> Self:
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow} must be less than beta_fast = {self.beta_fast}")
        return self

    @property
    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


MAX_SIZE = 1 << 28
MAX_MODULES = 10_000

Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
"""Rows or columns of a matrix. So limited, the bytes of a matrix fit the integers of 64 bits."""

RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="rope_type")]


class VisionConfig(Section):
    """Qwen3-VL's vision tower, and how images stand among the positions of the text."""

    depth: Annotated[int, Field(gt=0, le=MAX_MODULES)]
    """Blocks of the tower."""
    hidden_size: Size
    """Size of the tower's residual stream."""
    num_heads: Size
    """Attention heads; their size must be a multiple of 4."""
    intermediate_size: Size
    """Inner size of the tower's feed-forward."""
    num_position_embeddings: Size
    """Rows of the position table, a square number; a grid of patches interpolates in it."""
    mrope_section: TupleOf[NonNegativeInt]
    """Rotary pairs of the text for an image's time, rows and columns; together half of head_dim. Rows and columns are
    interleaved: pair 3 i + 1 belongs to rows for i below their number, pair 3 i + 2 to columns, the rest to time."""
    deepstack_visual_indexes: TupleOf[NonNegativeInt] = ()
    """Blocks whose outputs are added, merged, to the image positions after the first text layers, in this order."""
    patch_size: Size = 16
    """Pixels of the side of a patch."""
    temporal_patch_size: Size = 2
    """Frames of a patch; a still image is repeated."""
    spatial_merge_size: Size = 2
    """Patches of the side of a square that becomes one position of the text."""

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 4:
            raise ValueError(
                f"hidden_size = {self.hidden_size} must be num_heads = {self.num_heads} times a multiple of 4: rotary "
                "embeddings rotate pairs for rows and for columns"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings = {self.num_position_embeddings} must be a square number")
        if len(self.mrope_section) != 3:
            raise ValueError(f"mrope_section = {list(self.mrope_section)} must have three numbers")
        indexes = self.deepstack_visual_indexes
        if len(set(indexes)) < len(indexes) or max(indexes, default=0) >= self.depth:
            raise ValueError(
                f"deepstack_visual_indexes = {list(indexes)} must be different blocks below depth = {self.depth}"
            )
        return self

    @property
    def pixels_per_token(self) -> int:
        """Pixels of the side of the square that becomes one position of the text."""
        return self.patch_size * self.spatial_merge_size


class Architecture(Section):
    """Options of a model, without its vocabulary."""

    hidden_size: Size
    """Size of the residual stream."""
    num_hidden_layers: Annotated[int, Field(gt=0, le=MAX_MODULES)]
    """Transformer blocks."""
    num_attention_heads: Size
    """Query heads."""
    num_key_value_heads: Size
    """Key and value heads. Fewer than query heads: grouped-query attention."""
    head_dim: Size
    """Size of a head, even; independent of hidden_size."""
    intermediate_size: Size
    """Inner size of the SwiGLU feed-forward."""
    max_position_embeddings: PositiveInt
    """Context length: tokens of the longest sequence."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    qk_norm: bool = True
    """RMSNorm on the queries and keys of each head (Qwen3)."""
    attention_bias: bool = False
    """Bias in the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """Bias in the attention output projection (transformers' Llama and Qwen3 with attention_bias)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for a longer context. None: no scaling."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation of the feed-forward; gelu_pytorch_tanh is Gemma's."""
    sandwich_norms: bool = False
    """Also normalize the outputs of attention and feed-forward, before the residual addition (Gemma 2)."""
    norm_offset: bool = False
    """The gain of a norm is 1 + its weight (Gemma)."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(hidden_size) (Gemma)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by its square root (Gemma). None: head_dim."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Soft cap c of attention scores: c tanh(scores / c) (Gemma 2). None: no cap."""
    final_logit_softcapping: PositiveFloat | None = None
    """Soft cap c of logits: c tanh(logits / c) (Gemma 2). None: no cap."""
    num_experts: Annotated[int, Field(ge=0, le=MAX_MODULES)] = 0
    """Experts of a mixture of experts, in place of the feed-forward (Qwen3-MoE). 0: a feed-forward."""
    num_experts_per_tok: PositiveInt = 8
    """Experts that each token is routed to."""
    moe_intermediate_size: Size | None = None
    """Inner size of an expert; required with experts."""
    norm_topk_prob: bool = True
    """Divide the routing weights of a token's experts by their sum."""
    decoder_sparse_step: PositiveInt = 1
    """Layers n, 2n, 3n ... (counted from 1) have experts; the others have a feed-forward."""
    mlp_only_layers: TupleOf[int] = ()
    """Layers (counted from 0) that have a feed-forward in any case."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the routers' load-balancing loss in training (Fedus et al. 2022, eq. 4)."""
    tie_word_embeddings: bool = True
    """The output head is the embedding matrix."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of embeddings and input projections; output projections start at zero."""
    logit_alignment: Literal["same_position", "shifted"] = "same_position"
    """Output that predicts token i: output i, or output i - 1 (shifted), as in autoregressive models and diffusion
    models that start from them (Dream)."""
    clean_alignment: Literal["shifted"] | None = None
    """Output of committed text. shifted: committed text is token-causal, its output i - 1 predicts token i, and noisy
    outputs predict all tokens of a block: with shifted `logit_alignment` one token further than their own position, the
    first token of the next block with the last output (I-DLM). None: committed text is block-causal."""
    noisy_attention: NoisyAttention = "block"
    """Keys of a noisy query in its own block: all (block), up to itself (token, I-DLM), or of a token those up to
    itself, of a mask all tokens and the masks up to itself (visible_first, WeDLM). The last two need
    `clean_alignment`, visible_first also outputs at the same position."""
    sliding_window: PositiveInt | None = None
    """In layers of "sliding_attention", queries attend to keys less than this many positions away."""
    layer_types: TupleOf[Literal["full_attention", "sliding_attention"]] | None = None
    """Attention of each layer. None: full attention in all layers."""
    vision: VisionConfig | None = None
    """Vision tower for images. None: a model of text alone."""

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if self.num_attention_heads * self.head_dim > MAX_SIZE:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} times head_dim = {self.head_dim} must be at most "
                f"{MAX_SIZE}"
            )
        if len(self.mlp_only_layers) > self.num_hidden_layers:
            raise ValueError(
                f"mlp_only_layers has {len(self.mlp_only_layers)} entries for num_hidden_layers = "
                f"{self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.num_experts:
            if self.moe_intermediate_size is None:
                raise ValueError(
                    f"num_experts = {self.num_experts} needs moe_intermediate_size, the inner size of an expert"
                )
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok = {self.num_experts_per_tok} must be at most num_experts = {self.num_experts}"
                )
        if isinstance(self.rope_scaling, YarnRope) and self.rope_theta <= 1.0:
            raise ValueError(f'rope_theta = {self.rope_theta} must be more than 1 with rope_scaling of "yarn"')
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary embeddings rotate pairs of channels")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers = {self.num_hidden_layers}"
            )
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError('layer_types has "sliding_attention": set sliding_window')
        if self.vision is not None:
            self._check_vision(self.vision)
        return self

    @model_validator(mode="after")
    def _check_noisy_attention(self) -> Self:
        if self.noisy_attention != "block" and self.clean_alignment is None:
            raise ValueError(
                f'noisy_attention = "{self.noisy_attention}" needs token-causal text: set clean_alignment = "shifted"'
            )
        if self.noisy_attention == "visible_first" and self.logit_alignment == "shifted":
            raise ValueError(
                'noisy_attention = "visible_first" has no output before a mask: set logit_alignment = "same_position"'
            )
        if self.noisy_attention == "visible_first" and self.vision is not None:
            raise ValueError('noisy_attention = "visible_first" reads no images: remove vision, or set "token"')
        return self

    def _check_vision(self, vision: VisionConfig) -> None:
        _, num_rows, num_columns = vision.mrope_section
        num_pairs = self.head_dim // 2
        if sum(vision.mrope_section) != num_pairs or 3 * num_rows > num_pairs + 1 or 3 * num_columns > num_pairs:
            raise ValueError(
                f"vision.mrope_section = {list(vision.mrope_section)} must sum to head_dim / 2 = {num_pairs}, with at "
                "most a third of it for rows and for columns"
            )
        if len(vision.deepstack_visual_indexes) >= self.num_hidden_layers:
            raise ValueError(
                f"vision.deepstack_visual_indexes = {list(vision.deepstack_visual_indexes)} must be fewer than "
                f"num_hidden_layers = {self.num_hidden_layers}: one text layer receives each"
            )

    @property
    def scales_queries(self) -> bool:
        """Queries are scaled by their position (Llama 4)."""
        return isinstance(self.rope_scaling, YarnRope) and self.rope_scaling.llama_4_scaling_beta is not None

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts in place of the feed-forward (the rule of transformers' Qwen3-MoE)."""
        on_step = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and on_step and layer not in self.mlp_only_layers


class ModelConfig(Architecture):
    """Options of a model and its vocabulary: the contents of ``config.json``."""

    vocab_size: Size
    """Rows of the embedding, with special tokens."""
    model_type: str | None = None
    """Model family, whose config keys and tensor names are used to write the model (`diffusionlm.families.registry`).
    None: the transformers family that the options describe."""
    mask_token_id: NonNegativeInt | None = None
    """Id of the mask token. None: an autoregressive model."""
    block_length: PositiveInt | None = None
    """Tokens of a block in block diffusion, for which the model was trained. None: one block for the whole sequence. 1
    with shifted logits: an autoregressive model."""
    block_origin: BlockOrigin = "text"
    """Origin of blocks. turn: the model was trained on all answers of conversations, with blocks that begin
    anew after each answer. text: at the start of the text."""
    eos_token_id: NonNegativeInt | None = None
    """Id of the end-of-text token."""
    stop_token_ids: TupleOf[NonNegativeInt] = ()
    """Ids that end generation, beginning with eos_token_id. Empty: only eos_token_id."""
    begin_with_eos: bool = False
    """Training texts began with the end-of-text token, so prompts and canvases do too."""
    pad_token_id: NonNegativeInt | None = None
    """Id of the padding token, usually the end of text."""
    image_token_id: NonNegativeInt | None = None
    """Id of the placeholder that stands for a part of an image. Required with a vision tower."""
    vision_start_token_id: NonNegativeInt | None = None
    """Id of the token before an image."""
    vision_end_token_id: NonNegativeInt | None = None
    """Id of the token after an image."""
    video_token_id: NonNegativeInt | None = None
    """Id of the placeholder of videos, which are not computed here: programs that read the model's files need it."""

    @model_validator(mode="after")
    def _check_token_ids(self) -> Self:
        for name in TOKEN_ID_KEYS:
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
        if self.vision is not None and None in (getattr(self, name) for name in IMAGE_TOKEN_ID_KEYS):
            raise ValueError(f"a vision tower needs the ids of its tokens: {', '.join(IMAGE_TOKEN_ID_KEYS)}")
        return self

    @property
    def required_mask_token_id(self) -> int:
        """Id of the mask token.

        Raises:
            ValueError: the model has no mask token.
        """
        if self.mask_token_id is None:
            raise ValueError(
                "the model has no mask token, which masked diffusion needs: mask_token_id is missing in its "
                "config.json. Add one with diffusionlm-convert and [diffusion], or evaluate the next-token likelihood"
            )
        return self.mask_token_id

    @property
    def prefix_ids(self) -> list[int]:
        """Token ids at the beginning of every text."""
        return [self.eos_token_id] if self.begin_with_eos and self.eos_token_id is not None else []

    @property
    def is_autoregressive(self) -> bool:
        """The model predicts the next token and nothing else: blocks of one token, shifted logits."""
        return self.block_length == 1 and self.logit_alignment == "shifted" and self.clean_alignment is None
