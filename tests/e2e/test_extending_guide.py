"""The worked examples of docs/extending.md, applied to a copy of the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PACKAGES = ("config", "ddp", "diffusionlm", "files", "logger", "profiling", "tokenizer")
MAX_FILES = {
    "A decoding strategy": 1,
    "A noise schedule": 1,
    "An optimizer": 2,
    "A data source": 2,
    "A model family": 1,
    "A reward": 1,
    "A logging sink": 2,
}
"""Section -> number of files that its example may touch."""

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
EDIT = re.compile(
    r"^In `(?P<path>[^`]+)`(?:"
    r", replace `(?P<old>[^`]+)` with `(?P<new>[^`]+)`\.$"
    r"|(?:, before `(?P<anchor>[^`]+)`)?:\n\n```python\n(?P<code>.*?)```$)",
    re.MULTILINE | re.DOTALL,
)
CHECK = re.compile(r"^Check:\n\n```python\n(.*?)```$", re.MULTILINE | re.DOTALL)


def apply(edit: re.Match[str], tree: Path) -> None:
    path = tree / edit["path"]
    if edit["code"] is not None and edit["anchor"] is None:
        assert not path.exists(), f"{edit['path']} exists already"
        path.write_text(edit["code"], encoding="utf-8")
        return
    old = edit["old"] or edit["anchor"]
    new = edit["new"] if edit["code"] is None else edit["code"] + old
    text = path.read_text(encoding="utf-8")
    assert text.count(f"\n{old}") + text.startswith(old) == 1, f"{edit['path']}: {old!r} must begin one line"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source with all edits of the guide."""
    tree = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in EDIT.finditer(GUIDE):
        apply(edit, tree)
    return tree


def test_examples_touch_no_more_files_than_promised() -> None:
    titles = [match[1] for match in SECTION.finditer(GUIDE)]
    bodies = SECTION.split(GUIDE)[2::2]
    files = {title: {edit["path"] for edit in EDIT.finditer(body)} for title, body in zip(titles, bodies, strict=True)}
    assert {title: len(paths) for title, paths in files.items() if paths} == MAX_FILES


@pytest.mark.slow
def test_tests_accept_a_new_strategy_schedule_and_optimizer(tree: Path) -> None:
    """They find them by their registries; one command writes the tables of the documentation."""
    for folder in ("tests", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    run_python(tree, "tests/test_docs_tables.py")
    assert "`top_share`" in (tree / "docs" / "decoding.md").read_text(encoding="utf-8")
    assert "`smoothstep`" in (tree / "docs" / "objectives.md").read_text(encoding="utf-8")
    files = [
        "tests/unit/inference/test_strategies.py",
        "tests/test_docs_tables.py",
        "tests/unit/config/test_generation_section.py",
        "tests/reference/decoding/test_sampler_truths.py",
        "tests/unit/config/test_optimizer_section.py",
        "tests/unit/optim/test_build.py",
        "tests/unit/diffusion/test_schedules.py",
        "tests/reference/test_nelbo_exact.py::test_drawn_times_probabilities_and_weights_fit_together",
        "tests/reference/test_nelbo_forms.py::test_nelbo_does_not_depend_on_the_schedule",
    ]
    run_python(tree, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *files)


@pytest.mark.slow
def test_tests_accept_a_new_source_and_a_new_sink(tree: Path) -> None:
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    files = ["tests/unit/data/sources/test_local_files.py", "tests/unit/config/test_data_section.py"]
    files.append("tests/unit/logger/test_sinks.py")
    run_python(tree, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *files)


@pytest.mark.slow
def test_examples_run(tree: Path) -> None:
    run_python(tree, "-P", "-c", "\n".join(CHECK.findall(GUIDE)))


def run_python(tree: Path, *arguments: str) -> None:
    """Run Python in the tree, with its packages."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
