"""Tensor parallelism: ranks divide the heads, inner widths and vocabulary of a model (Shoeybi et al. 2019).

The modules stay as they are, with fewer rows or columns, and hooks add the collectives: an all-reduce of the outputs of
each attention and feed-forward, and one of the gradient of their inputs.

Shapes: n ranks, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.model import ModelConfig
from config.training.parallel import check_tensor_ranks
from ddp.all_to_all_rows import row_range_of_rank
from ddp.mesh import Axis, Shard
from diffusionlm.kernels.loss_types import LossOutput, VocabularyShard
from diffusionlm.models.attention import Attention
from diffusionlm.models.layers import Linear, SwiGLU
from diffusionlm.models.lora import LoRALinear, adapter_modules, start_values
from diffusionlm.models.moe import MoE
from diffusionlm.models.transformer import Block, Transformer

ROW_PARAMETERS = ("weight", "bias", "lora_B", "lora_magnitude")
"""Parameters of a projection that are divided with its outputs, by rows."""
COLUMN_PARAMETERS = ("weight", "lora_A")
"""Parameters of a projection that are divided with its inputs, by columns."""


def apply_tensor_parallel(model: Transformer, axis: Axis, *, sequence_norms: bool = False) -> dict[str, Shard]:
    """Replace the parameters of a model by this rank's parts, in place, and add the collectives to its modules.

    Names, dtype, `requires_grad` and tied weights stay. A model on ``meta`` stays there: the caller copies
    `Shard.select` of each whole parameter. Embedding and head have ceil(V / n) rows on each rank: rows behind
    `Shard.shape` are padding, and must be zero.

    Call it after `add_adapter`, and before the model is compiled. All ranks of the axis then run each forward and
    backward with the same inputs.

    Args:
        sequence_norms: in training forwards each rank has 1 / n of the positions between attention and feed-forward of
            all blocks but the last one, which has few positions.

    Returns:
        The part of each parameter, by name. A part that several ranks have is `num_holders` times in the model, and its
        gradient is the sum over them where it is partial.

    Raises:
        ValueError: a size is not divisible by the ranks, or an adapter has no form for several ranks.
    """
    check_tensor_ranks(model.config, axis.size, "parallel.tensor")
    division = _Division(axis)
    if axis.size > 1:
        _check_adapters(model, axis.size)
        for block in model.model.layers:
            assert isinstance(block, Block)
            division.divide_attention(block.self_attn, model.config)
            division.divide_feed_forward(block.mlp)
        model.vocabulary_shard = division.divide_vocabulary(model)
        model.has_collective_forwards = True
        _add_collectives(model, axis, model.vocabulary_shard, sequence_norms=sequence_norms)
        for block in model.model.layers[:-1] if sequence_norms else ():
            division.mark_partial(*(value for name, value in block.named_parameters() if "layernorm" in name))
    return {
        name: division.shards.get(parameter, Shard.whole(parameter.shape, axis.size))
        for name, parameter in model.named_parameters()
    }


def _check_adapters(model: Transformer, num_ranks: int) -> None:
    """
    Raises:
        ValueError: an adapter has no form for several ranks; names the key.
    """
    options = {"lora.init_from with a reference": bool(start_values(model))}
    for name, module in adapter_modules(model):
        if not isinstance(module, LoRALinear):
            options[f"lora.trainable_tokens, {name}"] = True
            continue
        options[f'lora.base = "nf4", {name}'] = module.quantized is not None
        options[f'lora.init = "{module.init}", {name}'] = module.first_A is not None
        if name.endswith((".o_proj", ".down_proj")):
            # The norms are of whole rows, and the masks hash the index of a feature in a whole row.
            options[f"lora.dora = true, {name}"] = module.lora_magnitude is not None
            options[f"lora.dropout, {name}"] = module.dropout is not None
    for option, is_used in options.items():
        if is_used:
            raise ValueError(
                f"parallel.tensor = {num_ranks} does not support {option}: leave it out, or set parallel.tensor = 1"
            )


@dataclass(frozen=True)
class _Range:
    """Consecutive outputs or inputs of a projection."""

    start: int
    size: int
    num_holders: int = 1
    """Ranks that have them."""


class _Division:
    """Replaces parameters by this rank's parts."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.shards: dict[nn.Parameter, Shard] = {}
        """Of all parameters, but for those that each rank has whole, with a whole gradient."""

    def divide_attention(self, attention: Attention, config: ModelConfig) -> None:
        """Divide the query heads, each with its key-value head."""
        n, H = self.axis.size, config.head_dim
        queries = self._range(config.num_attention_heads * H)
        num_holders = max(1, n // config.num_key_value_heads)
        num_keys = max(1, config.num_key_value_heads // n) * H
        keys = _Range(self.axis.rank // num_holders * num_keys, num_keys, num_holders)
        self._divide_outputs(attention.q_proj, queries)
        self._divide_outputs(attention.k_proj, keys)
        self._divide_outputs(attention.v_proj, keys)
        self._divide_inputs(attention.o_proj, queries)
        self.mark_partial(*attention.q_norm.parameters(), *attention.k_norm.parameters())

    def divide_feed_forward(self, mlp: nn.Module) -> None:
        """Divide the inner width, also of each expert that has projections."""
        if isinstance(mlp, MoE):
            self.mark_partial(*mlp.gate.parameters())
            for expert in mlp.experts:
                self.divide_feed_forward(expert)
        elif isinstance(mlp, SwiGLU):
            inner = self._range(mlp.gate_proj.out_features)
            self._divide_outputs(mlp.gate_proj, inner)
            self._divide_outputs(mlp.up_proj, inner)
            self._divide_inputs(mlp.down_proj, inner)

    def divide_vocabulary(self, model: Transformer) -> VocabularyShard:
        """Divide the rows of embedding and head."""
        vocab_size, embedding, head = model.config.vocab_size, model.model.embed_tokens, model.lm_head
        start, end = row_range_of_rank(vocab_size, self.axis.size, self.axis.rank)
        num_rows = -(-vocab_size // self.axis.size)
        own, is_tied = _Range(start, end - start), head.weight is embedding.weight
        self._replace(embedding, "weight", 0, own, num_rows)
        embedding.num_embeddings = num_rows
        if is_tied:
            head.weight, head.out_features = embedding.weight, num_rows
        else:
            self._divide_outputs(head, own, num_rows)
        group, num_ranks = self.axis.group, self.axis.size

        def all_reduce_max(tensor: Tensor) -> None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)

        def all_reduce_sum(tensor: Tensor) -> None:
            dist.all_reduce(tensor, group=group)

        def all_gather(tensor: Tensor) -> Tensor:
            gathered = tensor.new_empty(num_ranks * tensor.numel())
            dist.all_gather_into_tensor(gathered, tensor.flatten(), group=group)
            return gathered.view(num_ranks, *tensor.shape)

        return VocabularyShard(start, end - start, vocab_size, all_reduce_max, all_reduce_sum, all_gather)

    def _range(self, size: int) -> _Range:
        size //= self.axis.size
        return _Range(self.axis.rank * size, size)

    def _divide_outputs(self, projection: Linear, outputs: _Range, num_rows: int | None = None) -> None:
        """``num_rows``: of this rank, with padding. None: no padding."""
        for key, parameter in list(projection.named_parameters(recurse=False)):
            if key in ROW_PARAMETERS:
                self._replace(projection, key, 0, outputs, num_rows)
            else:
                self.mark_partial(parameter)
        projection.out_features = num_rows or outputs.size

    def _divide_inputs(self, projection: Linear, inputs: _Range) -> None:
        for key, parameter in list(projection.named_parameters(recurse=False)):
            if key in COLUMN_PARAMETERS:
                self._replace(projection, key, 1, inputs)
            elif key != "bias":  # its gradient is that of the summed outputs
                self.mark_partial(parameter)
        projection.in_features = inputs.size

    def mark_partial(self, *parameters: nn.Parameter) -> None:
        """Note parameters that each rank has whole, but whose gradient is that of the rank's heads or inner width."""
        for parameter in parameters:
            self.shards[parameter] = Shard.whole(parameter.shape, self.axis.size, has_partial_gradient=True)

    def _replace(self, module: nn.Module, key: str, dim: int, part: _Range, num_rows: int | None = None) -> None:
        """Replace a parameter by a part of one dimension, and zeros up to ``num_rows`` rows."""
        parameter: nn.Parameter = getattr(module, key)
        offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
        offsets[dim], sizes[dim] = part.start, part.size
        has_copies = part.num_holders > 1
        shard = Shard(tuple(offsets), torch.Size(sizes), parameter.shape, part.num_holders, has_copies)
        values = torch.empty(num_rows or sizes[0], *sizes[1:], dtype=parameter.dtype, device=parameter.device)
        if not parameter.is_meta:  # there most operators load torch's compiler
            values[: sizes[0]] = shard.select(parameter.detach())
            values[sizes[0] :] = 0.0
        own = nn.Parameter(values, requires_grad=parameter.requires_grad)
        setattr(module, key, own)
        self.shards[own] = shard


def _add_collectives(model: Transformer, axis: Axis, vocabulary: VocabularyShard, *, sequence_norms: bool) -> None:
    """Add hooks to the modules. They are plain functions, which a deep copy of the model shares."""
    group, blocks = axis.group, list(model.model.layers)
    for block in blocks:
        assert isinstance(block, Block)
        before, sum_heads, sum_inner = _build_block_hooks(axis, divides=sequence_norms and block is not blocks[-1])
        block.self_attn.register_forward_pre_hook(before)
        block.self_attn.register_forward_hook(sum_heads)
        block.mlp.register_forward_pre_hook(before)
        block.mlp.register_forward_hook(sum_inner)
    if sequence_norms and len(blocks) > 1:
        _divide_positions(blocks[0], blocks[-1], axis)

    def sum_hidden_gradient(_module: nn.Module, _inputs: tuple[Any, ...], hidden: Tensor) -> Tensor:
        return _SumGradients.apply(hidden, group)  # type: ignore[no-any-return]

    def gather_logits(module: nn.Module, _inputs: tuple[Any, ...], output: Tensor | LossOutput) -> Tensor | LossOutput:
        assert isinstance(module, Transformer)
        if isinstance(output, LossOutput):
            return output
        if module.keeps_vocabulary_shards:
            is_padding = torch.arange(output.shape[-1], device=output.device) >= vocabulary.num_tokens
            return output.masked_fill(is_padding, float("-inf"))
        whole: Tensor = _GatherColumns.apply(output, axis)
        return whole[..., : vocabulary.vocab_size]

    model.model.norm.register_forward_hook(sum_hidden_gradient)
    model.register_forward_hook(gather_logits)
    embedding = model.model.embed_tokens
    look_up = embedding.forward

    def embed(tokens: Tensor) -> Tensor:
        rows, is_own = vocabulary.find_rows(tokens)
        return _SumOutputs.apply(torch.where(is_own[..., None], look_up(rows), 0.0), group)  # type: ignore[no-any-return]

    embedding.forward = embed  # type: ignore[method-assign, assignment]


def _build_block_hooks(axis: Axis, *, divides: bool) -> tuple[Callable[..., Any], ...]:
    """Hooks before attention and feed-forward, after attention, and after the feed-forward.

    With ``divides`` their inputs and outputs are this rank's positions, in forwards with gradient.
    """
    group = axis.group

    def sum_input_gradient(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if divides and torch.is_grad_enabled():
            return _GatherPositions.apply(inputs[0], axis, True), *inputs[1:]
        return _SumGradients.apply(inputs[0], group), *inputs[1:]

    def sum_output(output: Tensor) -> Tensor:
        if divides and torch.is_grad_enabled():
            return _SumPositions.apply(output, axis)  # type: ignore[no-any-return]
        return _SumOutputs.apply(output, group)  # type: ignore[no-any-return]

    def sum_heads(module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(module, Attention)
        bias = module.o_proj.bias
        if bias is not None and axis.rank:  # the first rank adds it
            output = output - bias.detach().to(output.dtype)
        return sum_output(output)

    def sum_inner(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        routings = inputs[1].routings if len(inputs) > 1 and inputs[1] is not None else None
        if routings:  # each rank computes the whole load-balancing loss, and the router's gradient is summed
            probabilities_TE = _ScaleGradient.apply(routings[-1].probabilities_TE, 1 / axis.size)
            routings[-1] = replace(routings[-1], probabilities_TE=probabilities_TE)
        return sum_output(output)

    return sum_input_gradient, sum_heads, sum_inner


def _divide_positions(first: nn.Module, last: nn.Module, axis: Axis) -> None:
    """Let blocks from the first to the one before the last have this rank's positions, in forwards with gradient."""

    def take_positions(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return inputs
        if inputs[0].shape[1] % axis.size:
            raise ValueError(
                f"parallel.sequence_norms divides {inputs[0].shape[1]} positions over {axis.size} ranks: make "
                "data.row_length a multiple of parallel.tensor, or leave it out"
            )
        return _TakePositions.apply(inputs[0], axis), *inputs[1:]

    def gather_positions(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return inputs
        return _GatherPositions.apply(inputs[0], axis, False), *inputs[1:]

    first.register_forward_pre_hook(take_positions)
    last.register_forward_pre_hook(gather_positions)


def _sum_over_ranks(x: Tensor, group: Any) -> Tensor:
    # A copy: selective activation checkpointing may have saved x.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    """The input itself, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grads[0], ctx.group), None


class _SumOutputs(torch.autograd.Function):
    """The sum over the ranks, whose gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _gather_positions(x_BID: Tensor, axis: Axis) -> Tensor:
    own = x_BID.transpose(0, 1).contiguous()
    whole = own.new_empty(axis.size * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(whole, own, group=axis.group)
    return whole.transpose(0, 1)


def _sum_positions(x_BLD: Tensor, axis: Axis) -> Tensor:
    whole = x_BLD.transpose(0, 1).contiguous()
    own = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:])
    dist.reduce_scatter_tensor(own, whole, group=axis.group)
    return own.transpose(0, 1)


def _take_positions(x_BLD: Tensor, axis: Axis) -> Tensor:
    size = x_BLD.shape[1] // axis.size
    return x_BLD.narrow(1, axis.rank * size, size).contiguous()


class _GatherPositions(torch.autograd.Function):
    """The positions of all ranks, [B, L, D], of each rank's own, [B, L / n, D]. The gradient is the sum of the ranks'
    gradients at the own positions, or with ``sums`` false one of them: they are equal."""

    @staticmethod
    def forward(ctx: Any, x_BID: Tensor, axis: Axis, sums: bool) -> Tensor:
        ctx.axis, ctx.return_gradient = axis, _sum_positions if sums else _take_positions
        return _gather_positions(x_BID, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.return_gradient(grads[0], ctx.axis), None, None


class _SumPositions(torch.autograd.Function):
    """The sum over the ranks at this rank's own positions."""

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _sum_positions(x_BLD, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather_positions(grads[0], ctx.axis), None


class _TakePositions(torch.autograd.Function):
    """This rank's own positions of an input that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _take_positions(x_BLD, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather_positions(grads[0], ctx.axis), None


class _ScaleGradient(torch.autograd.Function):
    """The input itself, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _GatherColumns(torch.autograd.Function):
    """The columns of all ranks side by side, [..., C] to [..., n C]. All ranks compute the same with the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.start, ctx.size = axis.rank * x.shape[-1], x.shape[-1]
        gathered = x.new_empty(axis.size * x.numel())
        dist.all_gather_into_tensor(gathered, x.flatten(), group=axis.group)
        return gathered.view(axis.size, *x.shape).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.start, ctx.size), None
