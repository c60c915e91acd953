"""Mixture of experts in place of the feed-forward (Qwen3-MoE, SDAR-MoE): each token goes to its k likeliest of them.

Shapes: T tokens, D hidden, E experts, K experts of a token, S = T * K pairs of a token and an expert, sorted by expert,
I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import ModelConfig
from diffusionlm.models.layers import Linear, SwiGLU, compute_dtype

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Of an expert, in this order."""


@dataclass(frozen=True)
class Routing:
    """What one router decided."""

    probabilities_TE: Tensor
    """Softmax over all experts, at least fp32, with gradient."""
    experts_TK: Tensor
    """The likeliest of them, int64."""


class MoE(nn.Module):
    """``sum_k w_k expert_k(x)``: softmax over all experts, the K largest, divided by their sum if the config says so.

    Each expert is a feed-forward of its own, so that parameters have the names that they have in files, and LoRA and
    quantisation find their projections.
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

    def forward(self, x: Tensor, routings: list[Routing] | None = None) -> Tensor:
        """Shape as given, [..., D]; appends what the router decided to ``routings``."""
        x_TD = x.flatten(0, -2)
        logits_TE = self.gate(x_TD)
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
        weights_TK, experts_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if routings is not None:
            routings.append(Routing(probabilities_TE, experts_TK))
        projections = [getattr(expert, name) for expert in self.experts for name in EXPERT_PROJECTIONS]
        if self.hidden_act == "silu" and all(type(each) is Linear for each in projections):
            return run_experts_grouped([each.weight for each in projections], x_TD, weights_TK, experts_TK).view(
                x.shape
            )
        return run_experts_one_by_one(self.experts, x_TD, weights_TK, experts_TK).view(x.shape)


def compute_load_balancing_loss(routings: Sequence[Routing]) -> Tensor:
    """``E sum_e f_e P_e`` (Fedus et al. 2022, eq. 4, as transformers has it for Qwen3-MoE); K where all is even.

    f_e is the number of experts e chosen per token, P_e the mean probability of e. Both are means over the tokens of
    all routers together: every position that a router saw, padding and both streams included, and of the last layer
    the scored rows alone. Only P has a gradient.
    """
    experts = routings[0].probabilities_TE.shape[1]
    tokens = max(1, sum(len(each.probabilities_TE) for each in routings))
    chosen_E = torch.stack([_count_tokens_by_expert(each.experts_TK, experts) for each in routings]).sum(dim=0)
    probability_E = torch.stack([each.probabilities_TE.sum(dim=0) for each in routings]).sum(dim=0)
    return experts * torch.dot(chosen_E.to(probability_E.dtype) / tokens, probability_E / tokens)


def run_experts_one_by_one(experts: nn.ModuleList, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The reference, and the way of experts whose projections are not plain ones: one module after the other."""
    out_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
    for index, expert in enumerate(experts):
        tokens, places = (experts_TK == index).nonzero(as_tuple=True)
        out_TD = out_TD.index_add(0, tokens, expert(x_TD[tokens]) * weights_TK[tokens, places, None])
    return out_TD.to(compute_dtype(x_TD))


def run_experts_grouped(projections: Sequence[Tensor], x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The same for SiLU, with tokens sorted by expert: a slice for each expert that has any, the rest in few passes.

    Projections are gate, up and down of expert 0, of expert 1 and so on. On a GPU it waits once, for the number of
    tokens of each expert.
    """
    groups = ExpertGroups.of(experts_TK, len(projections) // len(EXPERT_PROJECTIONS))
    # Asked here: inside a Function gradients always look switched off.
    options = (groups, compute_dtype(x_TD), torch.is_grad_enabled())
    return _GroupedExperts.apply(x_TD, weights_TK, options, *projections)  # type: ignore[no-any-return]


def _count_tokens_by_expert(experts: Tensor, total: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=total)


@dataclass(frozen=True)
class ExpertGroups:
    """Pairs of token and expert, sorted by expert."""

    pair_order_S: Tensor
    """Flat place in [T, K] of each pair."""
    pair_index_TK: Tensor
    """Where the pairs of a token are: the inverse of the order."""
    counts: list[int]
    """Pairs of each expert."""

    @classmethod
    def of(cls, experts_TK: Tensor, total: int) -> ExpertGroups:
        """Sort, stably: an expert's tokens stay in order."""
        pair_order_S = experts_TK.flatten().argsort(stable=True)
        pair_index_S = torch.empty_like(pair_order_S)
        pair_index_S[pair_order_S] = torch.arange(len(pair_order_S), device=pair_order_S.device)
        return cls(
            pair_order_S, pair_index_S.view(experts_TK.shape), _count_tokens_by_expert(experts_TK, total).tolist()
        )

    def iterate_active_experts(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """The experts that have tokens, three times their number (the place of their weights), and their rows."""
        slices = zip(*(torch.split(each, self.counts) for each in tensors), strict=True)
        return (
            (3 * index, *rows) for index, (count, rows) in enumerate(zip(self.counts, slices, strict=True)) if count
        )

    def repeat_tokens(self, x_TD: Tensor) -> Tensor:
        """Each token once for each of its experts, [S, D]."""
        return x_TD.index_select(0, self.pair_order_S // self.pair_index_TK.shape[1])

    def sum_by_token(self, x_SD: Tensor) -> Tensor:
        """The sum of each token's pairs, [T, D]."""
        if not len(x_SD):
            return x_SD
        # An index_add turned round: each sum is made in one go, whose order is that of the token's experts.
        return F.embedding_bag(self.pair_index_TK, x_SD, mode="sum")


class _GroupedExperts(torch.autograd.Function):
    """Weights are gate, up and down of expert 0, of expert 1 and so on."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, options: tuple[ExpertGroups, torch.dtype, bool], *weights: Tensor
    ) -> Tensor:
        groups, dtype, wants_grad = options
        matrices = _cast_active_experts(groups, weights, dtype)
        x_SD = groups.repeat_tokens(x_TD.to(dtype))
        gate_SI = x_SD.new_empty(len(x_SD), weights[0].shape[0])
        up_SI = torch.empty_like(gate_SI)
        for first, x, gate, up in groups.iterate_active_experts(x_SD, gate_SI, up_SI):
            torch.mm(x, matrices[first].T, out=gate)
            torch.mm(x, matrices[first + 1].T, out=up)
        factor_S1 = weights_TK.flatten()[groups.pair_order_S, None]
        # Weighted here, where rows are narrower than behind the last product.
        inner_SI = F.silu(gate_SI, inplace=not wants_grad).mul_(up_SI).mul_(factor_S1)
        for first, inner, out in groups.iterate_active_experts(inner_SI, x_SD):
            torch.mm(inner, matrices[first + 2].T, out=out)
        if wants_grad:
            ctx.groups, ctx.dtypes = groups, [each.dtype for each in weights]
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
        # An expert without tokens has a gradient of zeros: all ranks and steps then have the same set of gradients.
        grad_weights = [
            torch.zeros_like(matrix, dtype=kind) if wanted and not groups.counts[index // 3] else None
            for index, (matrix, kind, wanted) in enumerate(zip(matrices, ctx.dtypes, needed, strict=True))
        ]
        for first, grad, weighted, out in groups.iterate_active_experts(grad_SD, weighted_SI, grad_inner_SI):
            torch.mm(grad, matrices[first + 2], out=out)
            if needed[first + 2]:
                grad_weights[first + 2] = (grad.T @ weighted).to(ctx.dtypes[first + 2])
        grad_factor_S = (grad_inner_SI * inner_SI).sum(dim=1, dtype=factor_S1.dtype)
        grad_inner_SI.mul_(factor_S1)
        grad_up_SI = activated_SI.mul_(grad_inner_SI)
        grad_gate_SI = torch.ops.aten.silu_backward(grad_inner_SI.mul_(up_SI), gate_SI)
        for first, x, grad_gate, grad_up, out in groups.iterate_active_experts(x_SD, grad_gate_SI, grad_up_SI, grad_SD):
            if needed[first]:
                grad_weights[first] = (grad_gate.T @ x).to(ctx.dtypes[first])
            if needed[first + 1]:
                grad_weights[first + 1] = (grad_up.T @ x).to(ctx.dtypes[first + 1])
            torch.mm(grad_gate, matrices[first], out=out).addmm_(grad_up, matrices[first + 1])
        grad_x_TD = groups.sum_by_token(grad_SD).to(x_TD.dtype)
        return grad_x_TD, grad_factor_S[groups.pair_index_TK], None, *grad_weights


def _cast_active_experts(groups: ExpertGroups, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights of experts that have tokens in the dtype of the products."""
    return [each.to(dtype) if groups.counts[index // 3] else each for index, each in enumerate(weights)]
