"""The grid of a sweep: its values, names, configs, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import (
    GridError,
    PointLoader,
    Setting,
    ValueRange,
    format_number,
    iterate_grid,
    name_run,
    parse_range,
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
    names: list[str] = []
    for values in points:
        names.append(name_run(values, names))
    assert names[:3] == ["rate-1e-3", "rate--1", "rate-x-..-y-z"]
    assert names[3].startswith("rate-x-..-y-z-") and len(names[3]) == len("rate-x-..-y-z-") + 6
    assert len(name_run({"a.b": '"' + "w" * 300 + '"'}, [])) <= 110
    assert name_run({"a.rate": "2"}, ["RATE-2"]) != "rate-2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log:1e-4..1e-1", ValueRange(1e-4, 0.1, None, is_log=True, is_integer=False)),
        ("0.0..0.3", ValueRange(0.0, 0.3, None, is_log=False, is_integer=False)),
        ("-1..1.", ValueRange(-1.0, 1.0, None, is_log=False, is_integer=False)),
        ("64..250:32", ValueRange(64.0, 224.0, 32.0, is_log=False, is_integer=True)),
        ("log:16..1024", ValueRange(16.0, 1024.0, None, is_log=True, is_integer=True)),
        ("0..1:0.25", ValueRange(0.0, 1.0, 0.25, is_log=False, is_integer=False)),
        ("../data", None),
        ("a..b", None),
        ("1e-3", None),
    ],
)
def test_ranges(text: str, expected: ValueRange | None) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3..1", "lower end comes first"),
        ("1..1", "lower end comes first"),
        ("log:0..1", "begins above 0"),
        ("log:1..8:2", "has no step"),
        ("1..8:0", "step must be greater than 0 and at most 7"),
        ("1..8:9", "at most 7"),
        ("log:a..b", "log:LOW..HIGH"),
    ],
)
def test_invalid_ranges_name_the_key_and_the_form(text: str, problem: str) -> None:
    with pytest.raises(GridError, match=problem) as caught:
        read_settings([f"a.b={text}"], SWEEP_COMMANDS["train"])
    assert f"--set a.b={text}" in str(caught.value)


def test_numbers_of_a_range_stay_within_it() -> None:
    narrow = ValueRange(0.123456, 0.123459, None, is_log=False, is_integer=False)
    assert format_number(narrow, 0.1234571) == "0.123459"
    assert format_number(ValueRange(0.0, 1.0, None, is_log=False, is_integer=False), 1 / 3) == "0.3333"
    assert format_number(ValueRange(0.0, 1.0, 0.1, is_log=False, is_integer=False), 0.1 * 3) == "0.3"
    assert format_number(ValueRange(0.0, 9.0, None, is_log=False, is_integer=True), 3.0) == "3"


def points_of(base: Path, *texts: str) -> list[TrainConfig]:
    command = SWEEP_COMMANDS["train"]
    points = PointLoader(command, base, read_settings(texts, command)).load_all()
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


def test_both_ends_of_ranges_are_validated(base: Path) -> None:
    configs = points_of(base, "optimizer.learning_rate=log:1e-3..0.5", "training.batch_size=2..8:4")
    rates = [(config.optimizer.learning_rate, config.training.batch_size) for config in configs]
    assert rates == [(1e-3, 2), (1e-3, 6), (0.5, 2), (0.5, 6)]
    with pytest.raises(GridError, match=r"2 of 4 runs .*\noptimizer.learning_rate=-1.0"):
        points_of(base, "optimizer.learning_rate=-1.0..0.5", "training.batch_size=2,4")


def test_the_digest_is_that_of_the_config_without_its_paths(base: Path) -> None:
    command = SWEEP_COMMANDS["train"]
    load = PointLoader(command, base, read_settings(["run.seed=0,1"], command))
    points = [load({"run.seed": seed}, Path(folder)) for seed, folder in (("1", "a"), ("1", "b"), ("2", "a"))]
    assert points[0].digest == points[1].digest != points[2].digest
    assert str(points[1].config.run.directory) == "b"  # type: ignore[attr-defined]


def test_the_digest_has_the_values_that_are_not_defaults(base: Path) -> None:
    class NewTrainConfig(TrainConfig):
        new_key: int = 1

    command = SWEEP_COMMANDS["train"]
    settings = read_settings(["optimizer.kind=adamw,lion,muon", "optimizer.learning_rate=0.1"], command)
    digests = [point.digest for point in PointLoader(command, base, settings).load_all()]
    assert len({*digests}) == 3
    fixed = [*settings, *read_settings(["new_key=1,2"], command)]
    points = PointLoader(replace(command, config=NewTrainConfig), base, fixed).load_all()
    assert [point.digest for point in points[::2]] == digests
    assert points[1].digest not in digests


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
    command = SWEEP_COMMANDS["infer"]
    with pytest.raises(GridError, match=problem):
        PointLoader(command, None, read_settings([*texts, "input.seed=1,2"], command)).load_all()
