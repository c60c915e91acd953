"""The mixture of experts against that of transformers with the same weights, forward and backward, on the CPU.

    python -m benchmarking.bench_moe

transformers has two implementations of its experts: ``eager``, and ``grouped_mm``, its default where torch has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarking.harness import Benchmark, Report, Settings, Table, compare, main
from config.model import ModelConfig
from diffusionlm.models.moe import MoE

PEERS = ("eager", "grouped_mm")
"""Values of ``experts_implementation``."""
PRECISIONS = (torch.float32, torch.bfloat16)
"""Dtypes of weights, inputs and gradients."""

Step = Callable[[], None]


@dataclass(frozen=True)
class MoECase:
    """The shape of a mixture of experts, and the number of tokens of a call."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    """Inner width of one expert."""
    experts: int
    experts_per_token: int

    def __str__(self) -> str:
        experts = f"{self.experts_per_token} of {self.experts} x {self.intermediate_size}"
        return f"{self.tokens} x {self.hidden_size}, {experts}"


CASES = (
    MoECase(2048, 256, 128, 16, 2),
    MoECase(1024, 512, 192, 64, 8),
    MoECase(512, 1024, 384, 32, 4),
    MoECase(512, 2048, 768, 16, 8),
    MoECase(64, 512, 192, 64, 8),
)


def build_ours(case: MoECase) -> MoE:
    """Build our module with random weights."""
    config = ModelConfig(
        hidden_size=case.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        intermediate_size=case.intermediate_size,
        max_position_embeddings=case.tokens,
        vocab_size=2,
        num_experts=case.experts,
        num_experts_per_tok=case.experts_per_token,
        moe_intermediate_size=case.intermediate_size,
    )
    moe = MoE(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return moe


def build_peer(case: MoECase, ours: MoE, implementation: str) -> nn.Module:
    """Build the module of transformers, with our weights stacked as it stores them."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config: Any = Qwen3MoeConfig(
        hidden_size=case.hidden_size,
        moe_intermediate_size=case.intermediate_size,
        num_experts=case.experts,
        num_experts_per_tok=case.experts_per_token,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    peer: Any = Qwen3MoeSparseMoeBlock(config)
    experts: Any = ours.experts
    with torch.no_grad():
        peer.gate.weight.copy_(ours.gate.weight)
        for index, expert in enumerate(experts):
            peer.experts.gate_up_proj[index].copy_(torch.cat([expert.gate_proj.weight, expert.up_proj.weight]))
            peer.experts.down_proj[index].copy_(expert.down_proj.weight)
    return peer  # type: ignore[no-any-return]


def build_step(moe: nn.Module, case: MoECase, dtype: torch.dtype, *, backward: bool) -> Step:
    """One forward of the tokens; with ``backward`` also the gradients of the input and of all weights."""
    moe = moe.to(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (1, case.tokens, case.hidden_size)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    inputs = [x.requires_grad_(), *moe.parameters()]

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = moe(x)
        if backward:
            torch.autograd.grad(out, inputs, grad)

    return step


def compare_moe(cases: Sequence[MoECase], settings: Settings) -> Table:
    """Compare ours with each implementation of transformers, in both precisions, with and without backward."""
    rows = []
    for dtype, case, backward in itertools.product(PRECISIONS, cases, (False, True)):
        names = [str(dtype).removeprefix("torch."), str(case), "forward and backward" if backward else "forward"]
        ours = build_ours(case)
        modules = {"ours": ours, **{name: build_peer(case, ours, name) for name in PEERS}}
        steps = {name: build_step(module, case, dtype, backward=backward) for name, module in modules.items()}
        times = compare(steps, settings, label=", ".join(names))
        ratios = [times.speedup("ours", peer).format_ratio() for peer in PEERS]
        rows.append([*names, *map(times.format_ms, steps), *ratios])
    header = ["precision", "tokens and experts", "call", "ours ms", *(f"{peer} ms" for peer in PEERS)]
    return Table([*header, *(f"speedup over {peer} [quartiles]" for peer in PEERS)], rows)


def run(settings: Settings) -> Report:
    return Report([compare_moe(CASES, settings)])


BENCHMARK = Benchmark(
    "Compare the mixture of experts with that of transformers.",
    run,
    packages=("torch", "transformers"),
    required_packages=("transformers",),
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
