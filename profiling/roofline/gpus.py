"""How long a GPU takes for a kernel: the largest of three bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from profiling.accelerators import B200, H100, H200, Accelerator
from profiling.flops import PEAK_FLOPS
from profiling.roofline.fake_gpu import ATTENTION, ATTENTION_BACKWARD
from profiling.roofline.kernels import Kernel

LARGE_PRODUCT_SHARE = 0.80
"""Share of the peak in products whose sides all have `LARGE_SIDE` or more: 790 of an H200's 989 TFLOP/s, an
assumption."""
LARGE_SIDE = 2048
PRODUCT_SHARE = 0.70
"""Share of the peak in other products: 690 of 989 TFLOP/s, an assumption."""
ATTENTION_SHARE = 0.30
"""Share of the peak in fused attention, over forward and backward: 300 of 989 TFLOP/s, an assumption."""
BANDWIDTH_SHARE = 0.90
"""Share of the data sheet's bandwidth: 4.3 of an H200's 4.8 TB/s, an assumption."""
KERNEL_SECONDS = 2e-6
"""Shortest time from the start of a kernel to that of the next one."""
LAUNCH_SECONDS = 5e-6
"""Time of the host for an operator and its kernel, which passes while the GPU works on earlier ones."""


@dataclass(frozen=True)
class GpuModel:
    """Rates that a GPU is assumed to reach."""

    accelerator: Accelerator
    peak: float
    """Dense bfloat16 FLOPs per second."""
    attention_share: float = ATTENTION_SHARE
    """Share of the peak in fused attention."""

    @property
    def bandwidth(self) -> float:
        return BANDWIDTH_SHARE * self.accelerator.bandwidth

    def bounds(self, kernel: Kernel) -> Mapping[str, float]:
        """Seconds that the products, the memory and the launch of a kernel take at least."""
        return {
            "products": kernel.flops / (self.peak * self.product_share(kernel)),
            "memory": kernel.num_bytes / self.bandwidth,
            "launch": KERNEL_SECONDS,
        }

    def product_share(self, kernel: Kernel) -> float:
        """Share of the peak that the products of a kernel are assumed to reach."""
        if kernel.name in (ATTENTION, ATTENTION_BACKWARD):
            return self.attention_share
        sides = [side for product in kernel.products for side in (*product.first.shape[-2:], product.second.shape[-1])]
        return LARGE_PRODUCT_SHARE if min(sides, default=0) >= LARGE_SIDE else PRODUCT_SHARE

    def seconds(self, kernel: Kernel) -> float:
        """Predicted duration of a kernel: the longest of its bounds."""
        return max(self.bounds(kernel).values())

    def time_by_bound(self, kernels: Iterable[Kernel]) -> Mapping[str, float]:
        """Seconds of kernels, by what bounds each."""
        seconds = Counter[str]()
        for kernel in kernels:
            bounds = self.bounds(kernel)
            seconds[max(bounds, key=lambda name: bounds[name])] += self.seconds(kernel)  # type: ignore[assignment]
        return seconds


GPUS: Mapping[str, GpuModel] = {
    gpu.name.lower(): GpuModel(gpu, PEAK_FLOPS[f"NVIDIA {gpu.name}"]) for gpu in (H100, H200, B200)
}
