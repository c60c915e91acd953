"""Whether Triton and torch can compile kernels here, and how they round. Triton itself is not imported."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

FUSION_VARIABLE = "TRITON_DEFAULT_FP_FUSION"
"""Triton fuses a multiplication and an addition, which are then rounded once, if it is 1. Its default changes with
Triton 3.10; older versions ignore the variable and fuse."""


def find_triton_problem() -> str | None:
    """Why Triton cannot run kernels on a GPU, with a remedy. None: it can, as far as is known before the first one."""
    if not is_triton_installed():
        return "needs the package triton, which is not installed: install it"
    return _find_own_compiler_problem()


@functools.cache
def is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _find_own_compiler_problem() -> str | None:
    return find_c_compiler_problem(os.environ) or find_header_problem(os.environ)


def find_cpp_problem() -> str | None:
    """Why torch cannot compile for a CPU, with a remedy: it needs a C++ compiler and Python.h. None: it can."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "needs a C++ compiler, and there is no g++: install it, or name another in CXX"
    return find_header_problem(os.environ)


def find_c_compiler_problem(environment: Mapping[str, str]) -> str | None:
    """Why Triton finds no C compiler, with a remedy; it compiles what launches its kernels. None: it finds one.

    Triton takes ``CC`` as a program's name without arguments, else gcc or clang.
    """
    path, named = environment.get("PATH", os.defpath), environment.get("CC")
    if named is not None:
        if shutil.which(named, path=path) is None:
            return f'needs a C compiler, and CC = "{named}" is no program: correct or unset it'
    elif not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return "needs a C compiler, and there is neither gcc nor clang: install one, or name another in CC"
    return None


def python_include_folder() -> Path:
    """Folder in which Triton looks for Python's headers: Debian's own scheme would name one below /usr/local."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def find_header_problem(environment: Mapping[str, str]) -> str | None:
    """Why the compiler finds no Python.h, which the code that launches Triton's kernels includes, with a remedy.

    None: it is where Triton looks, or in a folder that ``CPATH`` or ``C_INCLUDE_PATH`` names.
    """
    own = python_include_folder()
    folders = [own]
    for name in ("CPATH", "C_INCLUDE_PATH"):
        folders += [Path(folder) for folder in environment.get(name, "").split(os.pathsep)]
    if any((folder / "Python.h").is_file() for folder in folders):
        return None
    return (
        f"needs Python.h, which is not in {own}: install Python's headers (python3-dev, python3-devel), or use uv's "
        "Python, which has them (uv sync --managed-python)"
    )


def set_kernel_rounding() -> None:
    """Fuse multiplications and additions in kernels of every version of Triton, unless the user has chosen."""
    os.environ.setdefault(FUSION_VARIABLE, "1")
