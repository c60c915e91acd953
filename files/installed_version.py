"""The version of the installed package."""

from __future__ import annotations

from importlib import metadata


def read_version() -> str:
    """Version of diffusionlm; "unknown" if it is imported from a directory of sources."""
    try:
        return metadata.version("diffusionlm")
    except metadata.PackageNotFoundError:
        return "unknown"
