"""Data-sheet values of GPUs, and how many programs of a kernel fit on one of their multiprocessors. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Limits of a GPU. Registers are 32 bits wide; memory is in bytes."""

    name: str
    capability: str
    """Compute capability as ptxas names it, such as ``sm_90``."""
    bandwidth: float
    """Bytes per second between memory and the chip."""
    registers: int = 65536
    """Registers of a multiprocessor."""
    threads: int = 2048
    """Threads of a multiprocessor."""
    programs: int = 32
    """Programs (thread blocks) of a multiprocessor."""
    shared_memory: int = 228 << 10
    """Shared memory of a multiprocessor; each program takes 1 KiB of it for the system."""


A100 = Accelerator("A100", "sm_80", 2.039e12, shared_memory=164 << 10)
H100 = Accelerator("H100", "sm_90", 3.35e12)
H200 = Accelerator("H200", "sm_90", 4.8e12)
B200 = Accelerator("B200", "sm_100", 8.0e12)
ACCELERATORS: Sequence[Accelerator] = (A100, H100, H200, B200)
"""SXM variants; NVIDIA's data sheets and the CUDA programming guide, table of technical specifications."""

WARP_SIZE = 32
REGISTERS_PER_ALLOCATION = 256
"""A warp's registers are allocated in units of this many."""
SYSTEM_SHARED_MEMORY = 1 << 10


def occupancy(accelerator: Accelerator, threads: int, registers: int, shared_memory: int) -> float:
    """Share of a multiprocessor's threads that programs of a kernel can keep resident, from 0 to 1.

    Args:
        threads: of a program, a multiple of `WARP_SIZE`.
        registers: of a thread.
        shared_memory: of a program, in bytes.
    """
    warps = threads // WARP_SIZE
    registers_of_warp = -(-registers * WARP_SIZE // REGISTERS_PER_ALLOCATION) * REGISTERS_PER_ALLOCATION
    resident = min(
        accelerator.threads // threads,
        accelerator.registers // (registers_of_warp * warps),
        accelerator.shared_memory // (shared_memory + SYSTEM_SHARED_MEMORY),
        accelerator.programs,
    )
    return resident * threads / accelerator.threads
