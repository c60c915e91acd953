"""The lowerings of attention against each other, forward and backward: what ``auto`` in diffusionlm/models rests on.

    python -m benchmarking.bench_attention

Two tables on the CPU: eager attention against SDPA without a mask, and tiles against a dense mask for patterns of
blocks. A third on a GPU, if there is one: FlexAttention against a dense mask.

Shapes: B rows, L positions, N heads, H width of a head.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarking.harness import (
    collect_environment,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from config.runtime import AttentionBackend
from diffusionlm.models.attention_backends import (
    BFLOAT16_TILED_MIN_LENGTH,
    EAGER_MAX_LENGTH,
    TILED_MAX_DENSITY,
    TILED_MIN_LENGTH,
    prepare_attention,
)
from diffusionlm.models.dense_attention import DenseBackend, attend
from diffusionlm.models.patterns import AttentionPattern, BlockCausal, BlockDiffusion
from diffusionlm.models.tiled import BFLOAT16_TILE_LENGTH, TILE_LENGTH, build_tiles, tile_density
from profiling.cores import usable_cores

LENGTHS = (128, 256, 512, 1024)
BLOCK_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
BACKENDS: tuple[DenseBackend, ...] = ("eager", "sdpa")
PATTERNS: tuple[type[BlockDiffusion | BlockCausal], ...] = (BlockDiffusion, BlockCausal)
PRECISIONS = (torch.float32, torch.bfloat16)
TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
BLOCK_CASES = [(512, block) for block in BLOCK_LENGTHS] + [(tokens, 16) for tokens in (256, 128, 64)]
"""Tokens of a row (block diffusion has two positions for each), and block length."""
CUDA_TOKENS = 4096
"""The same on a GPU."""

Step = Callable[[], None]


def attention_step(backend: DenseBackend, length: int, dtype: torch.dtype, tokens: int) -> Step:
    """Forward and backward of attention without a mask over ``tokens`` tokens in rows of ``length``."""
    q, k, v, grad = _tensors(length, dtype, tokens, "cpu")

    def step() -> None:
        torch.autograd.grad(attend(q, k, v, None, backend), (q, k, v), grad)

    return step


def pattern_step(
    pattern: AttentionPattern,
    backend: AttentionBackend,
    length: int,
    dtype: torch.dtype,
    tokens: int,
    device: str = "cpu",
) -> Step:
    """Forward and backward of a pattern over ``tokens`` positions in rows of ``length``.

    Mask or tiles are made before: the layers of a forward share them.
    """
    q, k, v, grad = _tensors(length, dtype, tokens, device)
    attention = prepare_attention(pattern, length, device, backend)

    def step() -> None:
        torch.autograd.grad(attention(q, k, v), (q, k, v), grad)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def prepare_step(pattern: AttentionPattern, backend: AttentionBackend, length: int, dtype: torch.dtype) -> Step:
    """What is made once per forward: mask or tiles."""
    q = torch.zeros(1, 1, 1, HEAD_DIM, dtype=dtype)
    keys = torch.zeros(1, length, 1, HEAD_DIM, dtype=dtype)

    def step() -> None:
        prepare_attention(pattern, length, "cpu", backend)(q, keys, keys)

    return step


def _tensors(length: int, dtype: torch.dtype, tokens: int, device: str) -> list[torch.Tensor]:
    """Queries, keys, values, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    size = (max(1, tokens // length), length, HEADS, HEAD_DIM)
    made = [torch.randn(size, generator=generator).to(device, dtype) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in made[:3]] + made[3:]


def bench_attention(lengths: Sequence[int], *, rounds: int, warmup: int, tokens: int = TOKENS) -> str:
    """Markdown table of both dense lowerings, on the CPU, one call of each in turn."""
    rows = []
    for dtype in PRECISIONS:
        name = str(dtype).removeprefix("torch.")
        for length in lengths:
            print_message(f"{name}, {length} tokens a row")
            implementations: dict[str, Step] = {
                backend: attention_step(backend, length, dtype, tokens) for backend in BACKENDS
            }
            seconds = time_in_turns(implementations, rounds=rounds, warmup=warmup)
            ratio = speedup(seconds["eager"], seconds["sdpa"])
            times = [_format_median_ms(seconds[backend]) for backend in BACKENDS]
            rows.append([name, str(length), *times, f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio()])
    header = ["precision", "tokens a row", "eager ms", "SDPA ms", "eager's speedup", "in a round [quartiles]"]
    return markdown_table(header, rows)


def bench_blocks(cases: Sequence[tuple[int, int]], *, rounds: int, warmup: int, tokens: int = TOKENS) -> str:
    """Markdown table of tiles against the better of both dense lowerings, on the CPU, one call of each in turn.

    A case is the number of tokens of a row, and the block length.
    """
    rows = []
    for dtype, make, (length, block) in itertools.product(PRECISIONS, PATTERNS, cases):
        pattern = make(block)
        positions = length * pattern.positions_per_token
        name = [str(dtype).removeprefix("torch."), make.__name__, str(length), str(block)]
        print_message(", ".join(name))
        backends: tuple[AttentionBackend, ...] = (*BACKENDS, "tiled")
        steps: dict[str, Step] = {
            backend: pattern_step(pattern, backend, positions, dtype, tokens) for backend in backends
        }
        seconds = time_in_turns(steps, rounds=rounds, warmup=warmup)
        dense = min(BACKENDS, key=lambda backend: statistics.median(seconds[backend]))
        ratio = speedup(seconds["tiled"], seconds[dense])
        once = {"mask": prepare_step(pattern, dense, positions, dtype)}
        once["tiles"] = prepare_step(pattern, "tiled", positions, dtype)
        before = time_in_turns(once, rounds=rounds, warmup=warmup)
        skipped = 1 - tile_density(
            build_tiles(pattern.intervals(positions), pattern.positions_per_token, dtype), positions
        )
        times = [_format_median_ms(seconds[backend]) for backend in backends]
        times += [_format_median_ms(before[made]) for made in ("mask", "tiles")]
        rows.append([*name, f"{skipped:.1%}", *times, f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio()])
    header = ["precision", "pattern", "tokens a row", "block length", "pairs skipped"]
    header += ["eager ms", "SDPA ms", "tiled ms", "mask ms", "tiles ms", "tiled's speedup", "in a round [quartiles]"]
    return markdown_table(header, rows)


def bench_cuda(block_lengths: Sequence[int], *, rounds: int, warmup: int, length: int = CUDA_TOKENS) -> str:
    """Markdown table of FlexAttention against SDPA with a dense mask, on a GPU, one call of each in turn."""
    rows = []
    for pattern in (make(block) for make in PATTERNS for block in block_lengths):
        name = [type(pattern).__name__, str(pattern.block_length)]
        print_message(", ".join(["GPU", *name]))
        positions = length * pattern.positions_per_token
        backends: tuple[AttentionBackend, ...] = ("sdpa", "flex")
        seconds = time_in_turns(
            {
                backend: pattern_step(pattern, backend, positions, torch.bfloat16, 2 * positions, "cuda")
                for backend in backends
            },
            rounds=rounds,
            warmup=warmup,
        )
        ratio = speedup(seconds["flex"], seconds["sdpa"])
        times = [_format_median_ms(seconds[backend]) for backend in backends]
        rows.append([*name, *times, f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio()])
    header = ["pattern", "block length", "SDPA ms", "flex ms", "flex's speedup", "in a round [quartiles]"]
    return markdown_table(header, rows)


def _format_median_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare the lowerings of attention.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20, help="measured calls of each (default: 20, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    torch.set_num_threads(arguments.threads)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = collect_environment(threads=arguments.threads, packages=["torch"], accelerator=gpu)
    where["each call"] = f"forward and backward, {TOKENS} positions, {HEADS} heads of {HEAD_DIM}"
    where["EAGER_MAX_LENGTH"] = f"{EAGER_MAX_LENGTH} (bfloat16 on a CPU)"
    where["tiles"] = f"of about {TILE_LENGTH} queries, in bfloat16 {BFLOAT16_TILE_LENGTH}"
    where["auto"] = f"tiles from {TILED_MIN_LENGTH} positions on, in bfloat16 {BFLOAT16_TILED_MIN_LENGTH}, if they skip"
    where["auto"] += f" at least {1 - TILED_MAX_DENSITY:.0%} of the pairs"
    where["mask ms, tiles ms"] = "once per forward, for all its layers; not part of a call"
    print(f"No mask:\n\n{bench_attention(LENGTHS, rounds=arguments.rounds, warmup=3)}")
    print(f"\nBlocks:\n\n{bench_blocks(BLOCK_CASES, rounds=arguments.rounds, warmup=3)}")
    if gpu is not None:
        print(f"\n{CUDA_TOKENS} tokens a row, 2 rows, bfloat16, GPU:\n")
        print(bench_cuda(BLOCK_LENGTHS, rounds=arguments.rounds, warmup=3))
    print(f"\n{markdown_list(where)}")


if __name__ == "__main__":
    main()
