"""Select device and dtype by what torch and the machine can do.

Torch is imported inside functions, so that the doctor can report a machine without it.
"""

from __future__ import annotations

import subprocess

from files.usage_error import UsageError

_DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
_QUERY_SECONDS = 10.0


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


def drivers() -> list[str]:
    """Return ``driver, name`` of each GPU that nvidia-smi lists; empty without a driver."""
    try:
        done = subprocess.run(_DRIVER_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
