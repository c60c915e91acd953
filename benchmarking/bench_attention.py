"""The attention backends, forward and backward; the thresholds of ``auto`` in diffusionlm/models follow from it.

    python -m benchmarking.bench_attention

Two tables on the CPU: eager attention against SDPA without a mask, and tiles against a dense mask for block patterns.
A third on a GPU, if there is one: FlexAttention against a dense mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from benchmarking.harness import (
    SPEEDUP_COLUMN,
    Benchmark,
    Report,
    Settings,
    Table,
    compare,
    describe_accelerator,
    main,
)
from config.training.runtime import AttentionBackend
from diffusionlm.models.attention_backends import (
    BFLOAT16_TILED_MIN_LENGTH,
    EAGER_MAX_LENGTH,
    TILED_MAX_DENSITY,
    TILED_MIN_LENGTH,
    prepare_attention,
)
from diffusionlm.models.dense_attention import DenseBackend
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, BlockDiffusion
from diffusionlm.models.tiled import BFLOAT16_TILE_LENGTH, TILE_LENGTH, build_tiles, tile_density

LENGTHS = (128, 256, 512, 1024)
BLOCK_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
DENSE_BACKENDS: tuple[DenseBackend, ...] = ("eager", "sdpa")
PATTERNS: tuple[type[BlockDiffusion | BlockCausal], ...] = (BlockDiffusion, BlockCausal)
PRECISIONS = (torch.float32, torch.bfloat16)
TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
BLOCK_CASES = [(512, block) for block in BLOCK_LENGTHS] + [(tokens, 16) for tokens in (256, 128, 64)]
"""Tokens of a sequence (block diffusion has two positions for each), and block length."""
CUDA_TOKENS = 4096

Step = Callable[[], None]


def pattern_step(
    pattern: AttentionPattern,
    backend: AttentionBackend,
    length: int,
    dtype: torch.dtype,
    tokens: int,
    device: str = "cpu",
) -> Step:
    """Forward and backward of a pattern over ``tokens`` positions in sequences of ``length``.

    Masks and tiles are prepared outside of the step, because all layers of a forward share them.
    """
    q, k, v, grad = _random_inputs(length, dtype, tokens, device)
    attention = prepare_attention(pattern, length, device, backend)

    def step() -> None:
        torch.autograd.grad(attention(q, k, v), (q, k, v), grad)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def prepare_step(pattern: AttentionPattern, backend: AttentionBackend, length: int, dtype: torch.dtype) -> Step:
    """Build what is computed once per forward: a mask or tiles."""
    q = torch.zeros(1, 1, 1, HEAD_DIM, dtype=dtype)
    keys = torch.zeros(1, length, 1, HEAD_DIM, dtype=dtype)

    def step() -> None:
        prepare_attention(pattern, length, "cpu", backend)(q, keys, keys)

    return step


def _random_inputs(length: int, dtype: torch.dtype, tokens: int, device: str) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the output; each ``[batch, length, heads, head_dim]``."""
    generator = torch.Generator().manual_seed(0)
    size = (max(1, tokens // length), length, HEADS, HEAD_DIM)
    q, k, v, grad = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(4))
    return [*(tensor.requires_grad_() for tensor in (q, k, v)), grad]


def compare_dense(lengths: Sequence[int], settings: Settings, tokens: int = TOKENS) -> Table:
    """Compare both dense backends without a mask on the CPU."""
    rows = []
    for dtype, length in itertools.product(PRECISIONS, lengths):
        case = [str(dtype).removeprefix("torch."), str(length)]
        steps: dict[str, Step] = {
            backend: pattern_step(Bidirectional(), backend, length, dtype, tokens) for backend in DENSE_BACKENDS
        }
        times = compare(steps, settings, label=", ".join(case))
        rows.append([*case, *map(times.format_ms, steps), *times.speedup_cells("eager", "sdpa")])
    return Table(["precision", "sequence length", "eager ms", "SDPA ms", "eager's speedup", SPEEDUP_COLUMN], rows)


def compare_tiled(cases: Sequence[tuple[int, int]], settings: Settings, tokens: int = TOKENS) -> Table:
    """Compare tiles with the faster of both dense backends on the CPU, for pairs of sequence and block length."""
    rows = []
    for dtype, pattern_type, (length, block_length) in itertools.product(PRECISIONS, PATTERNS, cases):
        pattern = pattern_type(block_length)
        positions = length * pattern.positions_per_token
        case = [str(dtype).removeprefix("torch."), pattern_type.__name__, str(length), str(block_length)]
        backends: tuple[AttentionBackend, ...] = (*DENSE_BACKENDS, "tiled")
        steps: dict[str, Step] = {
            backend: pattern_step(pattern, backend, positions, dtype, tokens) for backend in backends
        }
        times = compare(steps, settings, label=", ".join(case))
        dense = min(DENSE_BACKENDS, key=times.median)
        preparation = compare(
            {
                "mask": prepare_step(pattern, dense, positions, dtype),
                "tiles": prepare_step(pattern, "tiled", positions, dtype),
            },
            settings,
        )
        tiles = build_tiles(pattern.intervals(positions), pattern.positions_per_token, dtype)
        skipped = f"{1 - tile_density(tiles, positions):.1%}"
        cells = [*map(times.format_ms, steps), *map(preparation.format_ms, ("mask", "tiles"))]
        rows.append([*case, skipped, *cells, *times.speedup_cells("tiled", dense)])
    header = ["precision", "pattern", "sequence length", "block length", "pairs skipped", "eager ms", "SDPA ms"]
    return Table([*header, "tiled ms", "mask ms", "tiles ms", "tiled's speedup", SPEEDUP_COLUMN], rows)


def compare_flex(block_lengths: Sequence[int], settings: Settings, length: int = CUDA_TOKENS) -> Table:
    """Compare FlexAttention with SDPA and a dense mask on a GPU."""
    rows = []
    for pattern_type, block_length in itertools.product(PATTERNS, block_lengths):
        pattern = pattern_type(block_length)
        case = [pattern_type.__name__, str(block_length)]
        positions = length * pattern.positions_per_token
        backends: tuple[AttentionBackend, ...] = ("sdpa", "flex")
        steps: dict[str, Step] = {
            backend: pattern_step(pattern, backend, positions, torch.bfloat16, 2 * positions, "cuda")
            for backend in backends
        }
        times = compare(steps, settings, label=", ".join(["GPU", *case]))
        rows.append([*case, *map(times.format_ms, steps), *times.speedup_cells("flex", "sdpa")])
    return Table(["pattern", "block length", "SDPA ms", "flex ms", "flex's speedup", SPEEDUP_COLUMN], rows)


def run(settings: Settings) -> Report:
    """Run all comparisons that the machine allows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts: list[Table | str] = [
        "No mask:",
        compare_dense(LENGTHS, settings),
        "Blocks:",
        compare_tiled(BLOCK_CASES, settings),
    ]
    if device == "cuda":
        title = f"GPU, bfloat16, 2 sequences of {CUDA_TOKENS} tokens:"
        parts += [title, compare_flex(BLOCK_LENGTHS, settings)]
    facts = {
        "each call": f"forward and backward, {TOKENS} positions, {HEADS} heads of {HEAD_DIM}",
        "EAGER_MAX_LENGTH": f"{EAGER_MAX_LENGTH} (bfloat16 on a CPU)",
        "tiles": f"of about {TILE_LENGTH} queries, in bfloat16 {BFLOAT16_TILE_LENGTH}",
        "auto": f"tiles from {TILED_MIN_LENGTH} positions on, in bfloat16 {BFLOAT16_TILED_MIN_LENGTH}, if they skip at "
        f"least {1 - TILED_MAX_DENSITY:.0%} of the pairs",
        "mask ms, tiles ms": "once per forward for all layers; not part of a call",
    }
    return Report(parts, facts | describe_accelerator(device))


BENCHMARK = Benchmark("Compare the attention backends, forward and backward.", run)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
