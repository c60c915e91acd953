"""The plan of the house, held by a few lines of ast: who imports whom, and how large things may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("benchmarking", "cli", "config", "ddp", "diffusionlm", "files", "logger", "profiling", "sweeps", "tokenizer")

CORE = {
    f"diffusionlm.{name}" for name in ("checkpoints", "data", "diffusion", "inference", "kernels", "models", "training")
}
EVERYTHING = CORE | set(ROOMS)

ARROWS: dict[str, set[str]] = {
    "config": set(),
    "tokenizer": set(),
    "logger": set(),
    "profiling": set(),
    "files": set(),
    "ddp": set(),
    "diffusionlm.kernels": set(),
    "diffusionlm.models": {"diffusionlm.kernels"},
    "diffusionlm.diffusion": {"diffusionlm.models", "diffusionlm.kernels"},
    "diffusionlm.data": {"tokenizer", "diffusionlm.diffusion"},
    "diffusionlm.checkpoints": {"tokenizer", "diffusionlm.models"},
    "diffusionlm.inference": {"tokenizer", "diffusionlm.models", "diffusionlm.diffusion"},
    "diffusionlm.training": {
        "config",
        "ddp",
        "logger",
        "tokenizer",
        "diffusionlm.checkpoints",
        "diffusionlm.data",
        "diffusionlm.diffusion",
        "diffusionlm.inference",
        "diffusionlm.models",
    },
    "diffusionlm": CORE | {"tokenizer"},
    "sweeps": {"config", "logger"},
    "benchmarking": CORE | {"config", "ddp", "diffusionlm", "logger", "tokenizer"},
    "cli": EVERYTHING - {"cli"},
}
"""Room -> rooms it may import, beside itself, config's sections, profiling and files."""

NO_SECTIONS = {"config.command", "config.load"}
"""What belongs to commands; every other file of config/ is a section, or what sections are made of."""

TORCHLESS = ("config", "files", "tokenizer", "logger", "sweeps")


def modules() -> list[tuple[str, Path]]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES}
PATHS = dict(MODULES)


def room_of(module: str) -> str:
    parts = module.split(".")
    is_core = parts[0] == "diffusionlm" and len(parts) > 1 and f"diffusionlm.{parts[1]}" in ARROWS
    return ".".join(parts[:2]) if is_core else parts[0]


def imports(module: str) -> Iterator[str]:
    """Every module that is named by an import, also inside functions and under TYPE_CHECKING."""
    package = module if PATHS[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in TREES else base


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 30
    assert {room_of(name) for name in TREES} <= ARROWS.keys(), "a room without arrows: add it to the table"
    assert "diffusionlm.diffusion.batch" in TREES
    assert "diffusionlm.models.patterns" in set(imports("diffusionlm.diffusion.batch"))


@pytest.mark.parametrize("module", TREES)
def test_arrows_go_one_way(module: str) -> None:
    room = room_of(module)
    for target in imports(module):
        if target.split(".")[0] not in ROOMS:
            continue
        other = room_of(target)
        section = other == "config" and target not in NO_SECTIONS
        allowed = other == room or section or other in ("profiling", "files") or other in ARROWS[room]
        assert allowed, f"{PATHS[module].relative_to(ROOT)} ({room}) may not import {target}"


def test_the_guide_has_the_same_arrows() -> None:
    """Its table says the rooms of the package by their last name, and ``diffusionlm.*`` for all of them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    told: dict[str, set[str]] = {}
    for room, _, allowed in table:
        told[room.strip("`")] = reached = set()
        for name in allowed.partition(";")[0].replace("`", "").split(", "):
            known: dict[str, set[str]] = {"nothing": set(), "everything": EVERYTHING - {"cli"}, "diffusionlm.*": CORE}
            reached |= known.get(name, {name if name in EVERYTHING else f"diffusionlm.{name}"})
    assert told == ARROWS


@pytest.mark.parametrize("module", [name for name in TREES if name.split(".")[0] in TORCHLESS])
def test_leaves_name_no_torch(module: str) -> None:
    assert not [target for target in imports(module) if target.split(".")[0] == "torch"]


@pytest.mark.parametrize("room", TORCHLESS)
def test_leaves_load_no_torch(room: str) -> None:
    """Also not through somebody else: --help and config errors answer at once."""
    names = [name for name in TREES if name.split(".")[0] == room]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("module", TREES)
def test_budgets(module: str) -> None:
    lines = len(PATHS[module].read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{module} has {lines} lines"
    for function in functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 60, f"{module}.{function.name} has {length} lines"
        if room_of(module) == "diffusionlm.kernels":
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = len([each for each in arguments if each.arg not in ("self", "cls")])
        assert count <= 8, f"{module}.{function.name} has {count} arguments"


def bases() -> dict[str, list[str]]:
    """Class name -> names of its bases, over the whole project; Protocols say what is needed and inherit nothing."""
    found: dict[str, list[str]] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                found[node.name] = [ast.unparse(base).rpartition(".")[2] for base in plain]
    return found


def test_inheritance_is_shallow() -> None:
    project = bases()

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in project[name] if base in project and base != name), default=0)

    deep = {name: depth(name) for name in project if depth(name) > 2}
    assert not deep
    assert depth("ModelConfig") == 2


def test_no_drawer_for_odds_and_ends() -> None:
    names = {"utils", "util", "helpers", "misc", "common"}
    assert not [name for name in TREES if names & set(name.split("."))]


@pytest.mark.parametrize("module", TREES)
def test_no_work_at_import(module: str) -> None:
    """No bare calls, loops or assertions at the top level, and no mutable global that a function rebinds."""
    for node in TREES[module].body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            assert test in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"), f"{module}: if {test}"
            continue
        kinds = (ast.For, ast.While, ast.With, ast.Try, ast.Assert, ast.Delete)
        assert not isinstance(node, kinds), f"{module}:{node.lineno} works at import"
        assert is_docstring or not isinstance(node, ast.Expr), f"{module}:{node.lineno} calls at import"
    rebound = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Global)]
    assert not rebound, f"{module}:{rebound} rebinds a global"


def test_no_tests_share_a_name() -> None:
    """Without __init__.py files a basename stands for one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
    assert not list((ROOT / "tests").rglob("__init__.py"))
