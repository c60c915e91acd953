"""The structure of the source: who imports whom, and how large things may be. Each test lists all violations."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = ("benchmarking", "cli", "config", "ddp", "diffusionlm", "files", "logger", "profiling", "tokenizer")
CORE_NAMES = (
    "checkpoints", "data", "diffusion", "evaluation", "families", "inference", "kernels", "models", "optim", "serving",
    "rl", "training", "vision",
)  # fmt: skip
CORE = {f"diffusionlm.{name}" for name in CORE_NAMES}
EVERYTHING = CORE | set(TOP_LEVEL)
EVERYBODY_MAY_IMPORT = {"profiling", "files"}

ALLOWED_IMPORTS: dict[str, set[str]] = {
    "config": {"diffusionlm.families"},
    "tokenizer": set(),
    "logger": set(),
    "profiling": {"diffusionlm.families"},
    "files": set(),
    "ddp": {"diffusionlm.diffusion", "diffusionlm.kernels", "diffusionlm.models"},
    "diffusionlm.families": set(),
    "diffusionlm.kernels": set(),
    "diffusionlm.models": {"diffusionlm.kernels"},
    "diffusionlm.vision": {"diffusionlm.families", "diffusionlm.models"},
    "diffusionlm.diffusion": {"diffusionlm.models", "diffusionlm.kernels"},
    "diffusionlm.data": {"tokenizer", "diffusionlm.diffusion", "diffusionlm.models", "diffusionlm.vision"},
    "diffusionlm.optim": {"ddp"},
    "diffusionlm.checkpoints": {"tokenizer", "diffusionlm.families", "diffusionlm.models"},
    "diffusionlm.inference": {
        "tokenizer",
        "diffusionlm.diffusion",
        "diffusionlm.families",
        "diffusionlm.models",
        "diffusionlm.vision",
    },
    "diffusionlm.evaluation": {
        "ddp",
        "tokenizer",
        "diffusionlm.checkpoints",
        "diffusionlm.data",
        "diffusionlm.diffusion",
        "diffusionlm.inference",
        "diffusionlm.kernels",
        "diffusionlm.models",
        "diffusionlm.vision",
    },
    "diffusionlm.serving": {"ddp", "tokenizer", "diffusionlm.inference", "diffusionlm.models", "diffusionlm.vision"},
    "diffusionlm.training": CORE
    - {"diffusionlm.kernels", "diffusionlm.rl", "diffusionlm.serving", "diffusionlm.training"}
    | {"config", "ddp", "logger", "tokenizer"},
    "diffusionlm.rl": CORE | {"config", "ddp", "logger", "tokenizer"},
    "diffusionlm": CORE | {"tokenizer"},
    "benchmarking": CORE | {"config", "ddp", "diffusionlm", "logger", "tokenizer"},
    "cli": EVERYTHING - {"cli"},
}
"""Package -> packages it may import, beside itself, config's sections and ``EVERYBODY_MAY_IMPORT``."""

OPTION_MODULES = {
    "diffusionlm.diffusion.schedules",
    "diffusionlm.inference.strategies",
    "diffusionlm.inference.strategy",
    "logger.sinks",
}
"""Classes that bring their own options: the config derives its keys from them, so they stay without torch."""

TASK_KINDS = ("diffusionlm.evaluation.tasks.", "diffusionlm.rl.graded")
"""What `config.evaluation.tasks` makes its union of."""

NO_SECTIONS = {"config.load"}
"""What belongs to commands; every other file of config/ is a section, or what sections are made of."""

WITHOUT_TORCH = ("config", "diffusionlm.families", "files", "tokenizer", "logger")

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS, MAX_INHERITANCE = 500, 60, 8, 2
MAX_FOLDER_MODULES = 16


def find_modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole source."""
    modules = {}
    for package in TOP_LEVEL:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


PATHS = find_modules()


@functools.cache
def parse_modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree. Not parsed on import: each worker of xdist imports this file, one runs its tests."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


def package_of(module: str) -> str:
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in CORE else module.split(".")[0]


def imports_of(module: str) -> Iterator[str]:
    """Every module that an import statement names, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(parse_modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in parse_modules() else str(node.module)


def test_imports_go_one_way() -> None:
    unknown = {package_of(module) for module in parse_modules()} - ALLOWED_IMPORTS.keys()
    assert not unknown, "packages without a row in ALLOWED_IMPORTS"
    violations = []
    for module in parse_modules():
        package = package_of(module)
        allowed = ALLOWED_IMPORTS[package] | EVERYBODY_MAY_IMPORT | {package}
        for target in imports_of(module):
            is_section = target.split(".")[0] == "config" and target not in NO_SECTIONS
            is_task_kind = module == "config.evaluation.tasks" and target.startswith(TASK_KINDS)
            is_option_module = is_task_kind or (package == "config" and target in OPTION_MODULES)
            if is_section or is_option_module or target.split(".")[0] not in TOP_LEVEL:
                continue
            if package_of(target) not in allowed:
                violations.append(f"{module} -> {target}")
    assert not violations


def test_light_packages_never_load_torch() -> None:
    """Also not through an import of an import: ``--help`` and config errors answer at once."""
    modules = [name for name in parse_modules() if package_of(name) in WITHOUT_TORCH]
    assert not [name for name in modules if "torch" in {target.split(".")[0] for target in imports_of(name)}]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False"]


def test_sizes() -> None:
    violations = []
    for module, tree in parse_modules().items():
        lines = len(PATHS[module].read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            violations.append(f"{module}: {lines} lines")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or 0) - node.lineno + 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            num_arguments = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if length > MAX_FUNCTION_LINES:
                violations.append(f"{module}.{node.name}: {length} lines")
            if num_arguments > MAX_ARGUMENTS and package_of(module) != "diffusionlm.kernels":
                violations.append(f"{module}.{node.name}: {num_arguments} arguments")
    assert not violations


def test_folders_have_few_modules() -> None:
    counts = Counter(path.parent for path in PATHS.values() if path.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_FOLDER_MODULES}
    assert not crowded


def test_no_module_imports_itself_through_others() -> None:
    """Counted over all import statements, also inside functions and under TYPE_CHECKING."""
    sorter = TopologicalSorter(
        {name: {*imports_of(name)} & parse_modules().keys() - {name} for name in parse_modules()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_class_name_means_one_thing() -> None:
    modules: dict[str, set[str]] = {}
    for module, tree in parse_modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, set()).add(module)
    assert not {
        name: sorted(modules_of_class) for name, modules_of_class in modules.items() if len(modules_of_class) > 1
    }


def test_inheritance_is_shallow() -> None:
    """Counted over the project's own classes, by name."""
    bases: dict[str, set[str]] = {}
    for tree in parse_modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in plain)

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases[name] if base in bases and base != name), default=0)

    assert depth("ModelConfig") == 2
    assert not [name for name in bases if depth(name) > MAX_INHERITANCE]


def test_modules_have_no_import_side_effects_and_specific_names() -> None:
    """No calls, loops or assertions at the top level, no global that a function rebinds, no module for leftovers."""
    leftovers = {"utils", "util", "helpers", "misc", "common"}
    violations = [name for name in parse_modules() if leftovers & set(name.split("."))]
    for module, tree in parse_modules().items():
        for node in tree.body:
            if isinstance(node, ast.If):
                condition = ast.unparse(node.test)
                if condition not in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"):
                    violations.append(f"{module}: if {condition}")
                continue
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            does_work = isinstance(node, ast.For | ast.While | ast.With | ast.Try | ast.Assert | ast.Delete)
            if does_work or (isinstance(node, ast.Expr) and not is_docstring):
                violations.append(f"{module}:{node.lineno} runs at import")
        violations += [
            f"{module}:{node.lineno} rebinds a global" for node in ast.walk(tree) if isinstance(node, ast.Global)
        ]
    assert not violations


def test_test_files_have_different_names() -> None:
    """Without __init__.py files a basename stands for one module."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_paths_of_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page))
    assert len(paths) > 80 and sorted(path for path in paths if not (ROOT / path).exists()) == []
