"""Read facts about the torch installation and the GPUs.

Torch is imported inside functions, so that the doctor can report a machine without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from files.usage_error import UsageError

PACKAGES = (
    "datasets", "huggingface-hub", "jinja2", "numpy", "pyarrow", "pydantic", "regex", "rich", "safetensors", "tomli-w",
    "torch",
)  # fmt: skip
"""Required packages."""
_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
_QUERY_SECONDS = 10.0


@dataclass(frozen=True)
class GpuInfo:
    """A GPU that torch can use."""

    name: str
    memory: int
    """Bytes."""
    free: int
    capability: tuple[int, int]
    has_bfloat16: bool
    """True if it multiplies bfloat16 matrices in hardware."""


@dataclass(frozen=True)
class TorchInfo:
    """Facts about the torch installation."""

    version: str | None
    """None: torch cannot be imported."""
    problem: str
    """Why torch cannot be imported; "": it can."""
    build: str = ""
    """``CUDA 13.2``, ``ROCm 6.4`` or ``CPU``."""
    threads: int = 0
    interop_threads: int = 0
    capability: str = ""
    """CPU instruction set of torch's kernels, as torch names it."""
    has_bfloat16: bool = False
    """True if the CPU multiplies bfloat16 matrices in hardware."""
    gpus: tuple[GpuInfo, ...] = ()
    gpu_problem: str = ""
    """Why torch cannot use a GPU; "": no error."""


def read_torch() -> TorchInfo:
    """Import torch and read its facts; an import error is part of the result."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises anything
        return TorchInfo(None, _first_line(error))
    try:
        return _read_torch_info(torch)
    except Exception as error:  # so does an incomplete one
        return TorchInfo(
            None, f"{getattr(torch, '__file__', None) or 'its folder'} is incomplete: {_first_line(error)}"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _read_torch_info(torch: Any) -> TorchInfo:
    gpus, problem = _read_gpus(torch)
    return TorchInfo(
        version=str(torch.__version__),
        problem="",
        build=_build(torch),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        has_bfloat16=has_native_bfloat16("cpu"),
        gpus=gpus,
        gpu_problem=problem,
    )


def has_native_bfloat16(device_type: str) -> bool:
    """Return whether the device multiplies bfloat16 matrices in hardware; ``device_type`` is ``cuda`` or ``cpu``."""
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported()) or has_amx()


def has_amx() -> bool:
    """Return whether the CPU multiplies tiles of bfloat16 matrices: Intel's AMX."""
    import torch

    # torch.cpu.get_capabilities(), the public way, is newer than torch 2.9.
    return bool(torch.cpu._is_amx_tile_supported())


def find_compile_problem(version: str, device_type: str) -> str | None:
    """Why compiled blocks are wrong on a device type with a version of torch, with a remedy. None: they are right."""
    if device_type != "cpu" or version.split(".")[:2] != ["2", "11"]:
        return None
    return (
        f"computes wrong gradients on a CPU with torch {version}, whose compiler loses in-place operations of norms: "
        "install another version of torch"
    )


def select_device(device: str, key: str) -> str:
    """Resolve ``auto`` to ``cuda`` if torch finds a CUDA device, else to ``cpu``.

    Args:
        key: config key of the device, for the error.

    Raises:
        UsageError: ``device`` is ``cuda``, and there is no CUDA device.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f'{key} = "cuda", but torch finds no CUDA device: use "cpu" or "auto"')
    return device


def select_dtype(dtype: str, device: str) -> str:
    """Resolve ``auto`` to ``bfloat16`` on a GPU that multiplies it in hardware, else to ``float32``."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" and has_native_bfloat16(device) else "float32"


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if getattr(torch.version, "hip", None) else "CPU"


def _read_gpus(torch: Any) -> tuple[tuple[GpuInfo, ...], str]:
    if not torch.cuda.is_available():
        return (), ""
    gpus = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            with torch.cuda.device(index):
                free, total = torch.cuda.mem_get_info()
                has_bfloat16 = has_native_bfloat16("cuda")
            gpus.append(GpuInfo(properties.name, total, free, (properties.major, properties.minor), has_bfloat16))
    except RuntimeError as error:
        return tuple(gpus), str(error).splitlines()[0]
    return tuple(gpus), ""


def drivers() -> list[str]:
    """Return ``driver, name`` of each GPU that nvidia-smi lists; empty without a driver."""
    try:
        done = subprocess.run(_DRIVER_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def missing_packages(names: Sequence[str] = PACKAGES) -> list[str]:
    """Return the names of packages that are not installed."""
    return [name for name in names if installed_version(name) is None]


def installed_version(name: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
