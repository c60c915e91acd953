"""The grid of a sweep: its values, names, configs, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import (
    GridError,
    Setting,
    iterate_grid,
    load_points,
    name_points,
    read_settings,
    short_keys,
    split_values,
)
from config.train import TrainConfig


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3, 3e-3,1e-2", ["1e-3", "3e-3", "1e-2"]),
        ("one", ["one"]),
        ("", [""]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('"a,b",c', ['"a,b"', "c"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        (r"'a\',b", [r"'a\'", "b"]),
        ('["x, [MASK:1]"],[]', ['["x, [MASK:1]"]', "[]"]),
        ('{a=1,b="}"},{a=2}', ['{a=1,b="}"}', "{a=2}"]),
        ("it's,fine", ["it's", "fine"]),
        ('"",1', ['""', "1"]),
    ],
)
def test_values_between_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1,,2", "is empty"),
        ("1,", "is empty"),
        ("[1,2", "] is missing at the end"),
        ('"a,b', '" is missing at the end'),
    ],
)
def test_values_that_cannot_be_read(text: str, problem: str) -> None:
    with pytest.raises(GridError, match=problem):
        split_values(text)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a.b"], "--set a.b: expected section.key=value"),
        (["a.b=1,2", "a.b=3"], "a.b is set twice; write its values with commas: a.b=a,b"),
        (["a.b=1"], "nothing to sweep: give a key several values"),
        (["run.directory=a,b"], "use --directory"),
        (["a.b=[1,2"], r"--set a.b=\[1,2: \] is missing"),
    ],
)
def test_settings_that_make_no_sweep(texts: list[str], problem: str) -> None:
    with pytest.raises(GridError, match=problem):
        read_settings(texts, SWEEP_COMMANDS["train"])


def test_a_section_that_belongs_to_the_sweep() -> None:
    with pytest.raises(GridError, match="use --directory"):
        read_settings(["output.file=a", "input.seed=1,2"], SWEEP_COMMANDS["infer"])


def test_the_last_axis_changes_fastest() -> None:
    settings = [Setting("a", ("1", "2")), Setting("b", ("x",)), Setting("c", ("3", "4"))]
    assert [list(values.values()) for values in iterate_grid(settings)] == [
        ["1", "3"],
        ["1", "4"],
        ["2", "3"],
        ["2", "4"],
    ]


def test_keys_are_as_short_as_they_tell_apart() -> None:
    keys = ["optimizer.learning_rate", "optimizer.rest.learning_rate", "training.batch_size"]
    assert list(short_keys(keys).values()) == ["optimizer.learning_rate", "rest.learning_rate", "batch_size"]


def test_names_are_safe_and_unique() -> None:
    points = [{"a.rate": "1e-3"}, {"a.rate": "-1"}, {"a.rate": '"x/../y z"'}, {"a.rate": '"x/../y:z"'}]
    names = name_points(points, {})
    assert names[:3] == ["rate-1e-3", "rate--1", "rate-x-..-y-z"]
    assert names[3].startswith("rate-x-..-y-z-") and len(names[3]) == len("rate-x-..-y-z-") + 6
    [long] = name_points([{"a.b": '"' + "w" * 300 + '"'}], {})
    assert len(long) <= 110
    assert name_points(points[:1], {"kept": {"a.rate": "1e-3"}}) == ["kept"]
    assert name_points([{"a.rate": "2"}], {"RATE-2": {"b": "1"}}) != ["rate-2"]


def points_of(base: Path, *texts: str) -> list[TrainConfig]:
    kind = SWEEP_COMMANDS["train"]
    points = load_points(kind, base, read_settings(texts, kind), Path("d"))
    return [point.config for point in points]  # type: ignore[misc]


def test_configs_of_the_points(base: Path) -> None:
    configs = points_of(base, "optimizer.learning_rate=1e-3,.5", "training.max_steps=7", "training.batch_size=2,4")
    assert [(config.optimizer.learning_rate, config.training.batch_size) for config in configs] == [
        (1e-3, 2),
        (1e-3, 4),
        (0.5, 2),
        (0.5, 4),
    ]
    assert {config.training.max_steps for config in configs} == {7}
    assert [str(config.run.directory) for config in configs[:2]] == [
        "d/learning_rate-1e-3_batch_size-2",
        "d/learning_rate-1e-3_batch_size-4",
    ]


def test_texts_and_arrays_as_values(base: Path) -> None:
    configs = points_of(base, 'samples.infills=["a, [MASK:1]","[MASK:2]b"],["[MASK:1]"]', "optimizer.kind=adamw,muon")
    assert [config.samples.infills for config in configs[::2]] == [("a, [MASK:1]", "[MASK:2]b"), ("[MASK:1]",)]
    assert [config.optimizer.kind for config in configs] == ["adamw", "muon"] * 2


def test_each_point_is_validated_and_named(base: Path) -> None:
    with pytest.raises(GridError) as caught:
        points_of(base, "training.batch_size=4,-1,x", "optimizer.learning_rate=1e-3,1e-2")
    summary, *problems = str(caught.value).splitlines()
    assert "4 of 6 runs" in summary
    assert problems == [
        "training.batch_size=-1, optimizer.learning_rate=1e-3 and 1 more:",
        "  --set training.batch_size=-1: must be greater than 0",
        "training.batch_size=x, optimizer.learning_rate=1e-3 and 1 more:",
        '  --set training.batch_size=x: expected an integer, got the string "x"',
    ]


def test_a_problem_of_all_runs_is_listed_once(base: Path) -> None:
    with pytest.raises(GridError, match=r"2 of 2 runs .*\nevery run:\n  --set training.max_step=3: unknown key"):
        points_of(base, "training.batch_size=4,8", "training.max_step=3")
    with pytest.raises(GridError, match=r'every run:\n  checkpoint.resume = "never"'):
        points_of(base, "training.batch_size=4,8", "checkpoint.resume=never")


def test_equal_points_are_rejected(base: Path) -> None:
    with pytest.raises(GridError, match=r"learning_rate=0.1 and optimizer.learning_rate=1e-1"):
        points_of(base, "optimizer.learning_rate=0.1,1e-1")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([], "no model given: add --set model.path=DIR"),
        (["model.path=/no/such", "input.prompts=[a]"], 'model.path = "/no/such": no model at'),
        (["model.path=."], r"\[input\] has no prompts"),
        (["model.path=.", "input.interactive=true"], "interactive chat: remove its keys, or input.interactive"),
        (["model.path=.", "input.prompts_file=-"], "no standard input"),
        (["model.path=.", "input.prompts_file=/no/such"], 'input.prompts_file = "/no/such"'),
    ],
)
def test_inference_that_cannot_be_swept(texts: list[str], problem: str) -> None:
    kind = SWEEP_COMMANDS["infer"]
    with pytest.raises(GridError, match=problem):
        load_points(kind, None, read_settings([*texts, "input.seed=1,2"], kind), Path("d"))
