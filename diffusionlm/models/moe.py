"""Mixture of experts in place of the feed-forward (Qwen3-MoE, SDAR-MoE): each token uses its K most probable experts.

Shapes: T tokens, D hidden, E experts, K experts of a token, S = T * K pairs of a token and an expert sorted by expert,
I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import ModelConfig
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models.layers import Linear, SwiGLU

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Projections of an expert, in the order of the weights of `run_experts_grouped`."""


SelectRows = Callable[[int, Tensor], AbstractContextManager[None]]
"""Called with the number of tokens and the indices of those of an expert, for a context of the call of this expert."""
Dispatch = Callable[["MoE", Tensor, Tensor, Tensor], Tensor]
"""Maps a module, tokens [T, D], weights [T, K] and indices [T, K] of their experts to the weighted sums [T, D]."""


@dataclass(frozen=True)
class Routing:
    """Router output of one layer."""

    probabilities_TE: Tensor
    """Softmax over all experts, at least fp32, with gradient."""
    experts_TK: Tensor
    """The K most probable experts, int64."""


class RoutingLog:
    """The routings of a forward, in the order of the layers.

    Not a list: FSDP gives a module copies of lists among its arguments, so what the module appends would be lost.
    """

    def __init__(self) -> None:
        self.routings: list[Routing] = []

    def append(self, routing: Routing) -> None:
        self.routings.append(routing)


class MoE(nn.Module):
    """``sum_k w_k expert_k(x)``: the K largest softmax weights, with ``norm_topk_prob`` divided by their sum.

    Each expert is a feed-forward module, so that parameters have the names of checkpoint files, and LoRA and
    quantization find the projections.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe_intermediate_size is not None
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.hidden_act = config.hidden_act
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size, config.hidden_act)
            for _ in range(config.num_experts)
        )
        self.select_rows: SelectRows | None = None
        """For projections that differ between rows."""
        self.max_dense_tokens = 0
        """Up to so many tokens each expert computes all of them, so that its products have one shape, whatever the
        router selects."""
        self.dispatch: Dispatch = MoE.run_experts
        """Runs the experts of each token. Replaced where this module has only some of the experts."""

    def forward(self, x: Tensor, routings: RoutingLog | None = None) -> Tensor:
        """Mixture of experts of x [..., D]; appends the router output to ``routings``."""
        x_TD = x.flatten(0, -2)
        logits_TE = self.gate(x_TD)
        softmax_dtype = torch.promote_types(logits_TE.dtype, torch.float32)
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=softmax_dtype)
        weights_TK, experts_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if routings is not None:
            routings.append(Routing(probabilities_TE, experts_TK))
        return self.dispatch(self, x_TD, weights_TK, experts_TK).view(x.shape)

    def run_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Run this module's experts: weighted sums [T, D]. ``experts_TK`` are indices into `experts`."""
        if len(x_TD) <= self.max_dense_tokens:
            return run_experts_on_all_tokens(self.experts, x_TD, weights_TK, experts_TK)
        projections = [getattr(expert, name) for expert in self.experts for name in EXPERT_PROJECTIONS]
        # type(), not isinstance: the grouped path reads the weights, and a subclass (LoRA) does more than that.
        if self.hidden_act == "silu" and all(type(projection) is Linear for projection in projections):
            weights = [projection.weight for projection in projections]
            return run_experts_grouped(weights, x_TD, weights_TK, experts_TK)
        return run_experts_one_by_one(self.experts, x_TD, weights_TK, experts_TK, self.select_rows)


def compute_load_balancing_loss(
    routings: Sequence[Routing], sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Load-balancing loss ``E sum_e f_e P_e``; its minimum K is an even load.

    Fedus et al. 2022, eq. 4, as in transformers for Qwen3-MoE. f_e is the number of times that expert e is selected per
    token, P_e its mean probability. Both are means over the inputs of all routers together: all positions, with padding
    and both halves, but only the output positions in the last layer. Only P has a gradient.

    With ``sum_over_ranks``, which sums a tensor over ranks with different positions, the means are over all of these.
    Each rank returns the part of its own positions: losses and gradients summed over the ranks are those of all.
    """
    num_experts, top_k = routings[0].probabilities_TE.shape[1], routings[0].experts_TK.shape[1]
    counts = [_count_tokens_by_expert(routing.experts_TK, num_experts) for routing in routings]
    count_E = torch.stack(counts).sum(dim=0)
    if sum_over_ranks is not None:
        count_E = sum_over_ranks(count_E)
    num_tokens = (count_E.sum() // top_k).clamp(min=1)
    probability_E = torch.stack([routing.probabilities_TE.sum(dim=0) for routing in routings]).sum(dim=0)
    return num_experts * torch.dot(count_E.to(probability_E.dtype) / num_tokens, probability_E / num_tokens)


def run_experts_one_by_one(
    experts: nn.ModuleList,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    select_rows: SelectRows | None = None,
) -> Tensor:
    """Run each expert module in turn: the reference, and the path for wrapped projections (LoRA).

    On a GPU it has one host sync, for the number of tokens of each expert.
    """
    out_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
    groups = ExpertGroups.from_experts(experts_TK, len(experts))
    for expert, pairs_S in zip(experts, torch.split(groups.pair_order_S, groups.counts), strict=True):
        tokens, slots = pairs_S // experts_TK.shape[1], pairs_S % experts_TK.shape[1]
        with nullcontext() if select_rows is None else select_rows(len(x_TD), tokens):
            out_SD = expert(x_TD[tokens])
        out_TD = out_TD.index_add(0, tokens, out_SD * weights_TK[tokens, slots, None])
    return out_TD.to(compute_dtype(x_TD))


def run_experts_on_all_tokens(experts: nn.ModuleList, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The same, but each expert computes all tokens; those of other experts are left out afterwards."""
    out_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
    for index, expert in enumerate(experts):
        is_routed_TK = experts_TK == index
        weight_T1 = torch.where(is_routed_TK, weights_TK, 0.0).sum(dim=1, keepdim=True)
        out_TD = torch.where(is_routed_TK.any(dim=1, keepdim=True), out_TD + expert(x_TD) * weight_T1, out_TD)
    return out_TD.to(compute_dtype(x_TD))


def run_experts_grouped(projections: Sequence[Tensor], x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The same for SiLU, with tokens sorted by expert: one product per expert that has tokens.

    On a GPU it has one host sync, for the number of tokens of each expert.

    Args:
        projections: weights gate, up and down of expert 0, of expert 1 and so on.
        weights_TK: weight of each expert of a token.
        experts_TK: experts of each token.
    """
    groups = ExpertGroups.from_experts(experts_TK, len(projections) // len(EXPERT_PROJECTIONS))
    # Read here: inside a Function grad mode is always off.
    options = (groups, compute_dtype(x_TD), torch.is_grad_enabled())
    return _GroupedExperts.apply(x_TD, weights_TK, options, *projections)  # type: ignore[no-any-return]


def _count_tokens_by_expert(experts_TK: Tensor, num_experts: int) -> Tensor:
    # Not bincount, which waits for a GPU twice: for the lowest value and the highest one.
    experts_S = experts_TK.flatten()
    return experts_S.new_zeros(num_experts).scatter_add_(0, experts_S, torch.ones_like(experts_S))


@dataclass(frozen=True)
class ExpertGroups:
    """Pairs of a token and an expert, sorted by expert."""

    pair_order_S: Tensor
    """Flat index in [T, K] of each pair."""
    pair_index_TK: Tensor
    """Index of each pair in the sorted order: the inverse permutation."""
    counts: list[int]
    """Number of pairs of each expert."""

    @classmethod
    def from_experts(cls, experts_TK: Tensor, num_experts: int) -> ExpertGroups:
        """Sort the pairs by expert; the tokens of an expert stay in order."""
        pair_order_S = experts_TK.flatten().argsort(stable=True)
        pair_index_S = torch.empty_like(pair_order_S)
        pair_index_S[pair_order_S] = torch.arange(len(pair_order_S), device=pair_order_S.device)
        counts = _count_tokens_by_expert(experts_TK, num_experts).tolist()
        return cls(pair_order_S, pair_index_S.view(experts_TK.shape), counts)

    def iterate_active_experts(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield (index of its first weight, row slices of the tensors) for each expert that has tokens."""
        slices = zip(*(torch.split(tensor, self.counts) for tensor in tensors), strict=True)
        for index, (count, rows) in enumerate(zip(self.counts, slices, strict=True)):
            if count:
                yield len(EXPERT_PROJECTIONS) * index, *rows

    def repeat_tokens(self, x_TD: Tensor) -> Tensor:
        """Copy of each token for each of its experts, sorted by expert, [S, D]."""
        return x_TD.index_select(0, self.pair_order_S // self.pair_index_TK.shape[1])

    def sum_by_token(self, x_SD: Tensor) -> Tensor:
        """Sum over the experts of each token, [T, D]."""
        if not len(x_SD):
            return x_SD
        # Instead of index_add: each token's sum is computed at once, in the order of its experts.
        return F.embedding_bag(self.pair_index_TK, x_SD, mode="sum")


class _GroupedExperts(torch.autograd.Function):
    """Forward and backward of `run_experts_grouped`."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, options: tuple[ExpertGroups, torch.dtype, bool], *weights: Tensor
    ) -> Tensor:
        groups, dtype, needs_grad = options
        # Experts without tokens need no cast.
        dtypes = [dtype if groups.counts[index // 3] else weight.dtype for index, weight in enumerate(weights)]
        matrices = _cast_together(weights, dtypes)
        x_SD = groups.repeat_tokens(x_TD.to(dtype))
        gate_SI = x_SD.new_empty(len(x_SD), weights[0].shape[0])
        up_SI = torch.empty_like(gate_SI)
        for first, x, gate, up in groups.iterate_active_experts(x_SD, gate_SI, up_SI):
            torch.mm(x, matrices[first].T, out=gate)
            torch.mm(x, matrices[first + 1].T, out=up)
        factor_S1 = weights_TK.flatten()[groups.pair_order_S, None]
        # Weighted before the last product, where rows are narrower.
        inner_SI = F.silu(gate_SI, inplace=not needs_grad).mul_(up_SI).mul_(factor_S1)
        for first, inner, out in groups.iterate_active_experts(inner_SI, x_SD):
            torch.mm(inner, matrices[first + 2].T, out=out)
        if needs_grad:
            ctx.groups, ctx.dtypes = groups, [weight.dtype for weight in weights]
            ctx.save_for_backward(x_TD, factor_S1, gate_SI, up_SI, *matrices)
        return groups.sum_by_token(x_SD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, factor_S1, gate_SI, up_SI, *matrices = ctx.saved_tensors
        groups, dtype, needed = ctx.groups, gate_SI.dtype, ctx.needs_input_grad[3:]
        grad_SD, x_SD = groups.repeat_tokens(grads[0].to(dtype)), groups.repeat_tokens(x_TD.to(dtype))
        activated_SI = F.silu(gate_SI)
        inner_SI = activated_SI * up_SI
        weighted_SI = (inner_SI * factor_S1).to(dtype)
        grad_inner_SI = torch.empty_like(inner_SI)
        # Zeros, not None, for experts without tokens: all ranks and steps then have the same set of gradients.
        grad_weights = [
            torch.zeros_like(matrix, dtype=weight_dtype) if is_needed and not groups.counts[index // 3] else None
            for index, (matrix, weight_dtype, is_needed) in enumerate(zip(matrices, ctx.dtypes, needed, strict=True))
        ]
        products: dict[int, Tensor] = {}
        for first, grad, weighted, out in groups.iterate_active_experts(grad_SD, weighted_SI, grad_inner_SI):
            torch.mm(grad, matrices[first + 2], out=out)
            if needed[first + 2]:
                products[first + 2] = grad.T @ weighted
        grad_factor_S = (grad_inner_SI * inner_SI).sum(dim=1, dtype=factor_S1.dtype)
        grad_inner_SI.mul_(factor_S1)
        grad_up_SI = activated_SI.mul_(grad_inner_SI)
        grad_gate_SI = torch.ops.aten.silu_backward(grad_inner_SI.mul_(up_SI), gate_SI)
        for first, x, grad_gate, grad_up, out in groups.iterate_active_experts(x_SD, grad_gate_SI, grad_up_SI, grad_SD):
            if needed[first]:
                products[first] = grad_gate.T @ x
            if needed[first + 1]:
                products[first + 1] = grad_up.T @ x
            torch.mm(grad_gate, matrices[first], out=out).addmm_(grad_up, matrices[first + 1])
        casts = _cast_together(list(products.values()), [ctx.dtypes[index] for index in products])
        for index, grad_weight in zip(products, casts, strict=True):
            grad_weights[index] = grad_weight
        grad_x_TD = groups.sum_by_token(grad_SD).to(x_TD.dtype)
        return grad_x_TD, grad_factor_S[groups.pair_index_TK], None, *grad_weights


def _cast_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Cast each tensor to its dtype, on a GPU with a few launches for all of them."""
    casts = [
        tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    changed = [index for index, tensor in enumerate(tensors) if casts[index] is not tensor]
    if changed:
        torch._foreach_copy_([casts[index] for index in changed], [tensors[index] for index in changed])
    return casts
