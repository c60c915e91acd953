"""The mixture of experts against that of transformers on the same weights, forward and backward, on the CPU.

    python -m benchmarking.bench_moe

Each way that transformers has for its experts is a contestant: ``eager``, and ``grouped_mm``, its default where torch
has that.

Shapes: T tokens, D hidden, E experts, I inner width of one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarking.harness import (
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from config.model import ModelConfig
from diffusionlm.models.moe import MoE
from profiling.cores import usable_cores

THEIRS = ("eager", "grouped_mm")
"""Values of ``experts_implementation``."""
PRECISIONS = (torch.float32, torch.bfloat16)
"""Of the weights and of all else."""

Step = Callable[[], None]


@dataclass(frozen=True)
class MoECase:
    """A mixture, and how many tokens it gets."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    experts: int
    chosen: int
    """Experts of a token."""

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden_size}, {self.chosen} of {self.experts} x {self.intermediate_size}"


CASES = (
    MoECase(2048, 256, 128, 16, 2),
    MoECase(1024, 512, 192, 64, 8),
    MoECase(512, 1024, 384, 32, 4),
    MoECase(512, 2048, 768, 16, 8),
    MoECase(64, 512, 192, 64, 8),
)


def build_ours(case: MoECase) -> MoE:
    """Ours, all weights random."""
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
        num_experts_per_tok=case.chosen,
        moe_intermediate_size=case.intermediate_size,
    )
    mixture = MoE(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return mixture


def build_theirs(case: MoECase, ours: MoE, implementation: str) -> nn.Module:
    """Theirs with our weights, which it stacks."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config: Any = Qwen3MoeConfig(
        hidden_size=case.hidden_size,
        moe_intermediate_size=case.intermediate_size,
        num_experts=case.experts,
        num_experts_per_tok=case.chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    made: Any = Qwen3MoeSparseMoeBlock(config)
    experts: Any = ours.experts
    with torch.no_grad():
        made.gate.weight.copy_(ours.gate.weight)
        for index, expert in enumerate(experts):
            made.experts.gate_up_proj[index].copy_(torch.cat([expert.gate_proj.weight, expert.up_proj.weight]))
            made.experts.down_proj[index].copy_(expert.down_proj.weight)
    return made  # type: ignore[no-any-return]


def build_step(mixture: nn.Module, case: MoECase, dtype: torch.dtype, *, backward: bool) -> Step:
    """One forward of the tokens, and the gradients of them and of all weights if asked for."""
    mixture = mixture.to(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (1, case.tokens, case.hidden_size)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    wanted = [x.requires_grad_(), *mixture.parameters()]

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = mixture(x)
        if backward:
            torch.autograd.grad(out, wanted, grad)

    return step


def bench_moe(cases: Sequence[MoECase], *, rounds: int, warmup: int) -> str:
    """Markdown table, one call of each contestant in turn."""
    rows = []
    for dtype, case, backward in itertools.product(PRECISIONS, cases, (False, True)):
        name = [str(dtype).removeprefix("torch."), str(case), "forward and backward" if backward else "forward"]
        print_message(", ".join(name))
        ours = build_ours(case)
        theirs = {each: build_theirs(case, ours, each) for each in THEIRS}
        steps = {each: build_step(mixture, case, dtype, backward=backward) for each, mixture in theirs.items()}
        seconds = time_in_turns(
            {"ours": build_step(ours, case, dtype, backward=backward), **steps}, rounds=rounds, warmup=warmup
        )
        times = [f"{1e3 * statistics.median(seconds[each]):.2f}" for each in ("ours", *THEIRS)]
        ratios = [speedup(seconds["ours"], seconds[each]).format_ratio() for each in THEIRS]
        rows.append([*name, *times, *ratios])
    header = ["precision", "tokens and experts", "call", "ours ms", *(f"{each} ms" for each in THEIRS)]
    header += [f"speed over {each} [quartiles]" for each in THEIRS]
    return markdown_table(header, rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description="Compare the mixture of experts with that of transformers.", allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=20, help="measured calls of each (default: 20, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    if not is_installed("transformers"):
        parser.error("transformers is not installed, which this compares with: uv sync --group bench")
    torch.set_num_threads(arguments.threads)
    table = bench_moe(CASES, rounds=arguments.rounds, warmup=3)
    print(
        f"{table}\n\n{markdown_list(collect_environment(threads=arguments.threads, packages=['torch', 'transformers']))}"
    )


if __name__ == "__main__":
    main()
