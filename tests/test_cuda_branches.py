"""docs/cuda.md names every module that asks for CUDA, and the tests that show its branches without a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "cuda.md"
PACKAGES = ("benchmarking", "cli", "ddp", "diffusionlm", "profiling")
ATTRIBUTES = {"is_cuda", "pin_memory", "record_stream"}
"""Of tensors."""
MODULES = ("torch.cuda", "torch.backends.cuda", "torch.version.hip")
DEVICES = {"cuda", "nccl"}


def find_markers(tree: ast.Module) -> Iterator[str]:
    """Code that asks for CUDA: its devices, tensors and libraries."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in ATTRIBUTES or ast.unparse(node).startswith(MODULES):
                yield ast.unparse(node)
            case ast.keyword(arg="pin_memory"):
                yield "pin_memory"
            case ast.Constant(value=str(text)) if text in DEVICES and id(node) not in docstrings:
                yield text
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if is_library(alias.name))
            case ast.ImportFrom(module=str(name)) if is_library(name):
                yield name


def is_library(module: str) -> bool:
    return module.partition(".")[0] == "triton" or module.endswith("flex_attention")


def read_table(after: str) -> list[list[str]]:
    """Cells of the rows of the first table after a text."""
    lines = GUIDE.read_text(encoding="utf-8").partition(after)[2].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_module_that_asks_for_cuda_has_a_proof() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {
        str(path.relative_to(ROOT)) for path in paths if any(find_markers(ast.parse(path.read_text(encoding="utf-8"))))
    }
    listed = [name for row in read_table("## CUDA-only branches") for name in names_in(row[0])]
    assert len(set(listed)) == len(listed)
    assert modules - set(listed) == set(), "these ask for CUDA: add them to the table with a test that needs no GPU"
    assert set(listed) - modules == set(), "these do not ask for CUDA any more: take them out of the table"


def test_every_proof_exists() -> None:
    kinds = {row[0] for row in read_table("# Code for GPUs")}
    for modules, _, proof, tests in read_table("## CUDA-only branches"):
        assert proof and set(proof.split(", ")) <= kinds, modules
        assert names_in(tests) and all((ROOT / "tests" / name).is_file() for name in names_in(tests)), modules
