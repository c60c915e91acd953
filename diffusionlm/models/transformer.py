"""The model: a pre-norm Transformer with Hugging Face's parameter names. Families differ by options of its config.

The model has no notion of noise, data, ranks or training. Only `Transformer.forward` uses the head.

Shapes: B sequences, L positions, D hidden, V vocabulary, P output positions out of B * L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn

from config.model import ModelConfig
from config.training.runtime import AttentionBackend
from diffusionlm.kernels.cross_entropy import LossInputs, LossOutput, linear_cross_entropy
from diffusionlm.kernels.loss_types import VocabularyShard
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models.adapter_inputs import MaskedRows
from diffusionlm.models.attention import Attention, PreparedAttention, PreparedBatch
from diffusionlm.models.attention_backends import prepare_attention
from diffusionlm.models.dense_attention import AttentionScale
from diffusionlm.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, RotaryTables, SwiGLU, soft_cap
from diffusionlm.models.moe import MoE, RoutingLog, compute_load_balancing_loss
from diffusionlm.models.patterns import AttentionPattern
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.varlen import VarlenBatch, prepare_varlen_attention
from diffusionlm.models.vision.inputs import Grid, ImageInputs
from diffusionlm.models.vision.tower import VisionTower


class Block(nn.Module):
    """Pre-norm residual block: attention, then a feed-forward or a mixture of experts.

    ``post_attention_layernorm`` is the norm before the feed-forward. With ``sandwich_norms`` (Gemma 2) it is the norm
    after attention, and the feed-forward has a norm before it and one after it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.has_sandwich_norms = config.sandwich_norms
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = _norm(config)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = _norm(config)
            self.post_feedforward_layernorm = _norm(config)
        is_sparse = config.is_sparse(layer)
        feed_forward = (config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp: MoE | SwiGLU = MoE(config) if is_sparse else SwiGLU(*feed_forward)

    def forward(
        self,
        x_BLD: Tensor,
        rope: RotaryTables,
        attention: PreparedAttention,
        *,
        output_positions: Tensor | None = None,
        routings: RoutingLog | None = None,
    ) -> Tensor:
        """Output [B, L, D], or [P, D] at ``output_positions``: then the others get keys and values only.

        A router appends its `Routing` to ``routings``.
        """
        attended = self.self_attn(self.input_layernorm(x_BLD), rope, attention, output_positions=output_positions)
        if self.has_sandwich_norms:
            attended = self.post_attention_layernorm(attended)
        x: Tensor = (x_BLD if output_positions is None else x_BLD.flatten(0, 1)[output_positions]) + attended
        before = self.pre_feedforward_layernorm if self.has_sandwich_norms else self.post_attention_layernorm
        is_sparse = isinstance(self.mlp, MoE)
        fed: Tensor = self.mlp(before(x), routings) if is_sparse else self.mlp(before(x))
        return x + (self.post_feedforward_layernorm(fed) if self.has_sandwich_norms else fed)


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)


class Backbone(nn.Module):
    """Embedding, blocks and final norm; Hugging Face names it ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.visual: VisionTower | None = None
        """Vision tower. None: a model of text alone."""
        if config.vision is not None:
            self.visual = VisionTower(config.vision, config.hidden_size)


class Transformer(nn.Module):
    """A masked, block or causal language model, depending on the attention pattern of the call.

    Parameters are uninitialized until `init.init_weights` or a checkpoint fills them.

    Raises:
        ValueError: the attention backend cannot compute the soft cap of the config.
    """

    def __init__(self, config: ModelConfig, *, attention_backend: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention_backend = attention_backend
        self.uses_cuda_graphs = False
        """Decoding on a GPU may record forwards: parameters stay where they are in memory."""
        self.has_collective_forwards = False
        """Whether all ranks take part in each forward, so that none may repeat one alone."""
        self.has_collective_tower = False
        """Whether all ranks take part in each forward of the vision tower, so that each runs it in all forwards."""
        self.store_features: Callable[[ImageInputs, Tensor], None] | None = None
        """Called with images and the features [E, F, D] that the tower computed of their patches."""
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Sums a tensor over ranks with different positions, for the load-balancing loss of all of them."""
        self.values_of_first_rank: Callable[[Tensor], Tensor] | None = None
        """Replaces predictions, which all ranks compute and which may differ by rounding, by those of the first one."""
        self.vocabulary_shard: VocabularyShard | None = None
        """Rows of the head on this rank. None: all."""
        self.keeps_vocabulary_shards = False
        """Return this rank's columns of the logits, -inf for padding, instead of gathering those of all ranks."""
        self.masked_rows: MaskedRows | None = None
        """Inputs that the adapter acts on. None: it acts on all, or there is none."""
        self._build_attention_scale().check_backend(attention_backend)
        self.model = Backbone(config)
        mrope_section = None if config.vision is None else config.vision.mrope_section
        self.rope = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling, mrope_section)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @overload
    def __call__(
        self,
        tokens_BL: Tensor,
        *,
        pattern: AttentionPattern,
        positions: Tensor | None = ...,
        inputs_embeds_BLD: Tensor | None = ...,
        images: ImageInputs | None = ...,
        masked_BL: Tensor | None = ...,
        output_positions: Tensor,
        loss_inputs: LossInputs,
    ) -> LossOutput: ...

    @overload
    def __call__(
        self,
        tokens_BL: Tensor,
        *,
        pattern: AttentionPattern | VarlenBatch | PreparedBatch,
        positions: Tensor | None = ...,
        inputs_embeds_BLD: Tensor | None = ...,
        images: ImageInputs | None = ...,
        masked_BL: Tensor | None = ...,
        output_positions: Tensor | None = ...,
        loss_inputs: None = ...,
    ) -> Tensor: ...

    def __call__(self, *args: object, **kwargs: object) -> Tensor | LossOutput:
        return super().__call__(*args, **kwargs)  # type: ignore[no-any-return]

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        pattern: AttentionPattern | VarlenBatch | PreparedBatch,
        positions: Tensor | None = None,
        inputs_embeds_BLD: Tensor | None = None,
        images: ImageInputs | None = None,
        masked_BL: Tensor | None = None,
        output_positions: Tensor | None = None,
        loss_inputs: LossInputs | None = None,
    ) -> Tensor | LossOutput:
        """Compute logits, or with ``loss_inputs`` the loss.

        Args:
            tokens_BL: token ids, int64.
            pattern: attention pattern; or a `VarlenBatch` (or `PreparedBatch`) of sequences that follow each other in
                one row, B = 1, with positions and outputs of its own, without gradient.
            positions: position ids, [L] or [B, L]. None: 0, 1, 2 ..., again in the second half of a two-stream
                sequence.
            inputs_embeds_BLD: used in place of the token embeddings, without ``scale_embeddings``.
            images: features in place of embeddings, and more after the first blocks (DeepStack); the position ids.
            masked_BL: True at masked positions, which an adapter with ``positions = "masks"`` acts on. A mask token in
                text is none. None: no position is masked.
            output_positions: flat indices into B * L, ascending, [P]. The last block computes queries and feed-forward,
                and the head logits, for these positions only.
            loss_inputs: targets and weights at ``output_positions``; the logits are never held all at once.

        Returns:
            Without loss inputs: logits [B, L, V], or [P, V] at the output positions. With loss inputs: `LossOutput`.

        Raises:
            ValueError: loss inputs without output positions, a sequence longer than the model's context, an attention
                backend that cannot compute the pattern, or an argument that cannot be used with a varlen batch.
        """
        if loss_inputs is not None and output_positions is None:
            raise ValueError("loss_inputs need output_positions: flat indices into B * L")
        x = self._embed(tokens_BL) if inputs_embeds_BLD is None else inputs_embeds_BLD
        if isinstance(pattern, VarlenBatch | PreparedBatch):
            if positions is not None or output_positions is not None:
                raise ValueError("a varlen batch has its own: pass neither positions nor output_positions, and no loss")
            attentions, positions, output_positions = self._prepare_varlen_attention(pattern, tokens_BL, x.device)
        else:
            attentions, positions = self._prepare_attention(pattern, tokens_BL.shape[1], positions, x.device)
        if self.masked_rows is not None:
            self.masked_rows.set(masked_BL, output_positions, x.device)
        deep_features_KMD: Sequence[Tensor] = ()
        if images is None and self._always_runs_tower():
            images = ImageInputs.none(positions)
        if images is not None:
            (features_MD, *deep_features_KMD), positions = self._read_images(images, x), images.positions_3BS
            x = x.flatten(0, 1).index_copy(0, images.indices_M, features_MD).view_as(x)
        rope = self._build_rotary_tables(positions if positions.dim() > 1 else positions[None], x)
        log = RoutingLog() if loss_inputs is not None and loss_inputs.load_balancing_weight else None
        last = len(self.model.layers) - 1
        for index, (block, attention) in enumerate(zip(self.model.layers, attentions, strict=True)):
            x = block(x, rope, attention, output_positions=output_positions if index == last else None, routings=log)
            if images is not None and index < len(deep_features_KMD):
                x = x.flatten(0, 1).index_add(0, images.indices_M, deep_features_KMD[index]).view_as(x)
        return self._compute_output(self.model.norm(x), loss_inputs, log)

    def compute_features(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of images, [E, F, D], as a forward with their patches computes them; a forward by itself."""
        assert self.model.visual is not None, "callers check that there is a vision tower"
        features_EFD: Tensor = self.model.visual(patches_PC, grids)
        return features_EFD

    @property
    def num_key_value_heads(self) -> int:
        """Key-value heads of a layer on this rank."""
        block = self.model.layers[0]
        assert isinstance(block, Block)
        return block.self_attn.k_proj.out_features // self.config.head_dim

    def _build_rotary_tables(self, positions: Tensor, x: Tensor) -> RotaryTables:
        """Rotary tables of a forward, in the dtype of the queries."""
        heads = self.config.num_attention_heads if x.device.type == "cpu" else 1
        tables: RotaryTables = self.rope(positions, heads=heads, dtype=compute_dtype(x))
        return tables

    def _embed(self, tokens_BL: Tensor) -> Tensor:
        """Token embeddings, with ``scale_embeddings`` times sqrt(D), which is rounded to fp32 first (Gemma)."""
        x_BLD: Tensor = self.model.embed_tokens(tokens_BL)
        if not self.config.scale_embeddings:
            return x_BLD
        scale = torch.full((), self.config.hidden_size**0.5, dtype=torch.float32, device=x_BLD.device)
        return x_BLD * scale.to(x_BLD.dtype)

    def _compute_output(self, x: Tensor, loss_inputs: LossInputs | None, log: RoutingLog | None) -> Tensor | LossOutput:
        """Logits of x [..., D]; with loss inputs the loss, and the load-balancing loss of the routings."""
        softcap, shard = self.config.final_logit_softcapping, self.vocabulary_shard
        if loss_inputs is None:
            logits: Tensor = self.lm_head(x)
            return logits if softcap is None else soft_cap(logits, softcap)
        head_rows = self.lm_head.head_rows()
        head = self.lm_head.effective_weight() if head_rows is None else self.lm_head.weight
        output = linear_cross_entropy(x, head, loss_inputs, softcap, head_rows=head_rows, shard=shard)
        if log is None or not log.routings:
            return output
        load_balancing_loss = compute_load_balancing_loss(log.routings, self.sum_over_ranks)
        return replace(output, load_balancing_loss=loss_inputs.load_balancing_weight * load_balancing_loss)

    def _always_runs_tower(self) -> bool:
        """Whether the vision tower runs in a forward without patches as well, on a blank image that no position shows.

        A sharded tower needs all ranks. Of a trained one all parameters then have gradients in each step, zeros in
        place of none, so that updates, optimizer state and checkpoints are the same for any division of the images
        into micro-batches and ranks.
        """
        if self.model.visual is None:
            return False
        is_trained = torch.is_grad_enabled() and any(value.requires_grad for value in self.model.visual.parameters())
        return is_trained or self.has_collective_tower

    def _read_images(self, images: ImageInputs, x: Tensor) -> Sequence[Tensor]:
        """Features at the image positions, E times [M, D], in the dtype of x.

        Raises:
            ValueError: the model has no vision tower.
        """
        visual, patches_PC, grids = self.model.visual, images.patches_PC, images.grids[images.num_stored :]
        if visual is not None and patches_PC is None and self._always_runs_tower():
            patches_PC, grids = visual.build_blank_image(x.device)
        parts = [] if images.features_EFD is None else [images.features_EFD]
        if patches_PC is not None:
            if visual is None:
                raise ValueError("the model has no vision tower, so it cannot read images: load a Qwen3-VL model")
            parts.append(visual(patches_PC, grids))
            if self.store_features is not None and images.patches_PC is not None:
                self.store_features(images, parts[-1])
        features_EFD = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return features_EFD[:, images.feature_rows_M].to(x.dtype).unbind()

    def _prepare_attention(
        self, pattern: AttentionPattern, length: int, positions: Tensor | None, device: torch.device
    ) -> tuple[Sequence[PreparedAttention], Tensor]:
        """Attention of each layer, and position ids. Layers with the same window share one attention."""
        num_tokens = pattern.num_keys(length) // pattern.positions_per_token
        if num_tokens > self.config.max_position_embeddings:
            raise ValueError(
                f"{num_tokens} tokens are more than the model's context, "
                f"max_position_embeddings = {self.config.max_position_embeddings}; shorten the input"
            )
        windows, scale_options = self._layer_windows(), self._build_attention_scale()
        attention_of_window = {
            window: prepare_attention(pattern, length, device, self.attention_backend, window, scale_options)
            for window in dict.fromkeys(windows)
        }
        if positions is None:
            positions = pattern.default_positions(length, device)
        return [attention_of_window[window] for window in windows], positions

    def _prepare_varlen_attention(
        self, batch: VarlenBatch | PreparedBatch, tokens_1Q: Tensor, device: torch.device
    ) -> tuple[Sequence[PreparedAttention], Tensor, Tensor | None]:
        """Attention of each layer, position ids and output positions of sequences in one row."""
        if list(tokens_1Q.shape) != [1, batch.num_inputs]:
            raise ValueError(f"tokens {list(tokens_1Q.shape)} must be [1, {batch.num_inputs}], the inputs of the batch")
        if torch.is_grad_enabled():
            raise ValueError("a varlen batch has no gradient: call the model under torch.inference_mode() or no_grad()")
        windows, scale_options = self._layer_windows(), self._build_attention_scale()
        if isinstance(batch, PreparedBatch):
            return *batch.prepare_attention(windows, self.attention_backend, scale_options), None
        length, context = max(part.num_positions for part in batch.sequences), self.config.max_position_embeddings
        if length > context:
            raise ValueError(
                f"{length} tokens are more than the model's context, max_position_embeddings = {context}; shorten the "
                "input"
            )
        attentions, positions = prepare_varlen_attention(batch, windows, device, self.attention_backend, scale_options)
        output_positions = batch.output_positions()
        return (
            attentions,
            positions,
            None if output_positions is None else copy_to_device(output_positions, device),
        )

    def _build_attention_scale(self) -> AttentionScale:
        scalar = self.config.query_pre_attn_scalar
        return AttentionScale(None if scalar is None else scalar**-0.5, self.config.attn_logit_softcapping)

    def _layer_windows(self) -> list[int | None]:
        """Sliding window of each layer. None: full attention."""
        layer_types = self.config.layer_types or ["full_attention"] * self.config.num_hidden_layers
        return [self.config.sliding_window if kind == "sliding_attention" else None for kind in layer_types]
