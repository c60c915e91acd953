"""Expert parallelism: the experts of each layer are divided over the ranks of an axis, and tokens travel to them.

Each rank computes its own tokens but for the experts (GShard, Lepikhin et al. 2020). No token is dropped: counts travel
first, then as many rows as there are.

Shapes: N ranks, T tokens of this rank, K experts of a token, S = T * K pairs of a token and an expert sorted by expert,
E experts in all, X = E / N experts of a rank, R pairs that this rank receives, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp.mesh import Axis
from diffusionlm.kernels.precision import compute_dtype
from diffusionlm.models.moe import ExpertGroups, MoE
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer


def apply_expert_parallel(model: Transformer, axis: Axis) -> None:
    """Keep this rank's experts of a model, in place: from rank * E / N on, E / N of them.

    Parameters keep their names in the whole model. The router and everything else stay on all ranks. Adapters are added
    before, so that all ranks draw the same initial values.

    Every rank must run the same number of forwards and backwards, also without tokens. The gradient of an expert is
    that of the tokens of all ranks; other gradients are those of this rank's tokens.

    Raises:
        ValueError: the model has no experts, or the ranks do not divide them; names the keys.
    """
    if axis.size == 1:
        return
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    num_experts = model.config.num_experts
    if not mixtures:
        raise ValueError(
            f"parallel.expert = {axis.size}, but no layer of the model has experts (num_experts = {num_experts}): set "
            "parallel.expert = 1"
        )
    if num_experts % axis.size:
        raise ValueError(
            f"parallel.expert = {axis.size} must divide num_experts = {num_experts}: set parallel.expert to one of its "
            "divisors"
        )
    experts_per_rank = num_experts // axis.size
    own_experts = range(axis.rank * experts_per_rank, (axis.rank + 1) * experts_per_rank)

    # A function, which a copy of the model shares: a process group cannot be copied.
    def dispatch(mixture: MoE, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return run_divided_experts(mixture, x_TD, weights_TK, experts_TK, axis)

    for mixture in mixtures:
        for index in range(num_experts):
            if index not in own_experts:
                delattr(mixture.experts, str(index))  # not `del experts[index]`, which renumbers the others
        mixture.dispatch = dispatch
    model.has_collective_forwards = True


def run_divided_experts(mixture: MoE, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, axis: Axis) -> Tensor:
    """Run the experts of all ranks: weighted sums [T, D] of this rank's tokens. A `moe.Dispatch`.

    On a GPU it has three host syncs: for the counts of this rank's pairs, of received pairs, and of each own expert.

    Raises:
        ValueError: the module is of a model with an adapter per request, or for deterministic decoding.
    """
    if mixture.select_rows is not None or mixture.max_dense_tokens:
        raise ValueError(
            "parallel.expert > 1 supports neither adapters of single requests nor deterministic = True: load the whole "
            "model on each rank"
        )
    experts_per_rank, top_k = len(mixture.experts), experts_TK.shape[1]
    groups = ExpertGroups.from_experts(experts_TK, axis.size * experts_per_rank)
    sent_NX = torch.tensor(groups.counts).view(axis.size, experts_per_rank)
    is_trained = torch.is_grad_enabled() and any(value.requires_grad for value in mixture.experts.parameters())
    message = copy_to_device(F.pad(sent_NX, (0, 1), value=int(is_trained)), x_TD.device)
    answer = torch.empty_like(message)
    dist.all_to_all_single(answer, message, group=axis.group)
    received_NX, is_trained_N = answer[:, :-1], answer[:, -1]
    send_counts = sent_NX.sum(dim=1).tolist()
    receive_counts, trained_ranks = torch.stack([received_NX.sum(dim=1), is_trained_N]).tolist()

    # Copied before the selection: then the backward adds the gradients of a token's pairs in a fixed order.
    x_SD = x_TD.to(compute_dtype(x_TD)).repeat_interleave(top_k, dim=0).index_select(0, groups.pair_order_S)
    x_RD: Tensor = _AllToAll.apply(x_SD, axis, send_counts, receive_counts)
    indices_NX = torch.arange(experts_per_rank, device=x_TD.device).expand(axis.size, -1)
    experts_R = indices_NX.flatten().repeat_interleave(received_NX.flatten(), output_size=len(x_RD))
    out_RD = mixture.run_experts(x_RD, weights_TK.new_ones(len(x_RD), 1), experts_R[:, None])
    if any(trained_ranks):
        # Every rank takes part in the backward, also one whose experts are frozen and whose rows have no gradient.
        out_RD.requires_grad_()
    out_SD: Tensor = _AllToAll.apply(out_RD, axis, receive_counts, send_counts)
    out_TKD = out_SD.index_select(0, groups.pair_index_TK.flatten()).view(*experts_TK.shape, x_TD.shape[1])
    return (out_TKD * weights_TK[..., None]).sum(dim=1).to(out_SD.dtype)


class _AllToAll(torch.autograd.Function):
    """Send consecutive rows to each rank and receive as many as it sends; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        ctx.options = axis, receive_counts, send_counts
        return _exchange_rows(rows, axis, send_counts, receive_counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grads[0], *ctx.options), None, None, None


def _exchange_rows(rows: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
    received = rows.new_empty(sum(receive_counts), rows.shape[1])
    dist.all_to_all_single(received, rows, receive_counts, send_counts, group=axis.group)
    return received
