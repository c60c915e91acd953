"""Eager attention against SDPA, forward and backward: where ``auto`` in diffusionlm/models/attention.py should switch.

    python -m benchmarking.bench_attention

Shapes: B rows, L positions, N heads, H width of a head.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarking.harness import environment, markdown_list, markdown_table, say, speedup, time_in_turns, usable_cores
from diffusionlm.models.attention import EAGER_MAX_LENGTH, Backend, attend

LENGTHS = (128, 256, 512, 1024)
BACKENDS: tuple[Backend, ...] = ("eager", "sdpa")
PRECISIONS = (torch.float32, torch.bfloat16)
TOKENS, HEADS, HEAD_DIM = 4096, 4, 64


def attention_step(backend: Backend, length: int, dtype: torch.dtype, tokens: int) -> Callable[[], None]:
    """Forward and backward of attention without a mask over ``tokens`` tokens in rows of ``length``."""
    generator = torch.Generator().manual_seed(0)
    size = (max(1, tokens // length), length, HEADS, HEAD_DIM)
    q, k, v, grad = (torch.randn(size, generator=generator).to(dtype) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(attend(q, k, v, None, backend), inputs, grad)

    return step


def bench_attention(lengths: Sequence[int], *, rounds: int, warmup: int, tokens: int = TOKENS) -> str:
    """Markdown table of both lowerings, on the CPU, one call of each in turn."""
    rows = []
    for dtype in PRECISIONS:
        name = str(dtype).removeprefix("torch.")
        for length in lengths:
            say(f"{name}, {length} tokens a row")
            contestants: dict[str, Callable[[], None]] = {
                backend: attention_step(backend, length, dtype, tokens) for backend in BACKENDS
            }
            seconds = time_in_turns(contestants, rounds=rounds, warmup=warmup)
            ratio = speedup(seconds["eager"], seconds["sdpa"])
            times = [f"{1e3 * statistics.median(seconds[backend]):.2f}" for backend in BACKENDS]
            rows.append([name, str(length), *times, f"{ratio.of_medians:.2f}", ratio.within_rounds()])
    header = ["precision", "tokens a row", "eager ms", "SDPA ms", "eager's speedup", "in a round [quartiles]"]
    return markdown_table(header, rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare the lowerings of attention on the CPU.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20, help="measured calls of each (default: 20, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(arguments.threads)
    where = environment(threads=arguments.threads, packages=["torch"])
    where["each call"] = f"forward and backward, {TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, no mask"
    where["EAGER_MAX_LENGTH"] = f"{EAGER_MAX_LENGTH} (bfloat16 on a CPU)"
    print(bench_attention(LENGTHS, rounds=arguments.rounds, warmup=3))
    print(f"\n{markdown_list(where)}")


if __name__ == "__main__":
    main()
