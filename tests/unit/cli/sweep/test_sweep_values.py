"""The values of a sweep, the names and configs of its runs, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from cli.sweep.definition import Setting, Sweep, name_run, parse_range, read_settings, short_keys, split_values
from files.usage_error import UsageError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3, 3e-3,1e-2", ["1e-3", "3e-3", "1e-2"]),
        ("", [""]),
        ("[a, b],[c]", ["[a, b]", "[c]"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        (r"'a\',b", [r"'a\'", "b"]),
        ('["x], [MASK:1]"],[]', ['["x], [MASK:1]"]', "[]"]),
        ('{a=1,b="}"},{a=2}', ['{a=1,b="}"}', "{a=2}"]),
        ("it's,fine", ["it's", "fine"]),
        ('"",1', ['""', "1"]),
    ],
)
def test_values_between_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log:1e-4..1e-1", FloatDistribution(1e-4, 0.1, log=True)),
        ("64..256:32", IntDistribution(64, 256, step=32)),
        ("log:16..1024", IntDistribution(16, 1024, log=True)),
        ("0..1:0.25", FloatDistribution(0.0, 1.0, step=0.25)),
        ("../data", None),
        ("1e-3", None),
    ],
)
def test_ranges(text: str, expected: BaseDistribution | None) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a.b=1,,2"], "--set a.b=1,,2: .* is empty"),
        (["a.b=[1,2"], r"--set a.b=\[1,2: .* is not closed"),
        (["a.b"], "--set a.b: expected section.key=value"),
        (["a.b=1,2", "a.b=3"], "a.b is set twice; write its values with commas: a.b=a,b"),
        (["a.b=1"], "nothing to sweep: give a key several values"),
        (["run.directory=a,b"], "use --directory"),
        (["a.b=3..1"], "--set a.b=3..1: .*low <= high"),
        (["a.b=log:0..1"], "--set a.b=log:0..1: .*low"),
    ],
)
def test_settings_that_make_no_sweep(texts: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_settings(texts)


def test_numbers_of_a_range_stay_within_it() -> None:
    for distribution, value, text in (
        (FloatDistribution(0.123456, 0.123459), 0.1234571, "0.123459"),
        (FloatDistribution(0.0, 1.0), 1 / 3, "0.3333"),
        (FloatDistribution(0.0, 1.0, step=0.1), 0.1 * 3, "0.3"),
        (IntDistribution(0, 9), 3, "3"),
    ):
        assert Setting("a.b", ("0", "1"), distribution).format(value) == text


def test_names_are_safe_and_unique() -> None:
    keys = ["optimizer.learning_rate", "optimizer.rest.learning_rate", "training.batch_size"]
    assert list(short_keys(keys).values()) == ["optimizer.learning_rate", "rest.learning_rate", "batch_size"]
    assert name_run({"a.rate": "1e-3", "a.b": "-1"}) == "rate-1e-3_b--1"
    texts = ["x/../y z", "x/../y:z", "1E-3", "1e-3", "w" * 300, "w" * 301, ""]
    names = [name_run({"a.rate": text}).lower() for text in texts]
    assert len({*names}) == len(texts) and max(map(len, names)) <= 110
    assert not any({*name} & {*"/: "} for name in names)


def load(base: Path, *texts: str) -> tuple[Sweep, list[dict[str, str]]]:
    sweep = Sweep(base, read_settings(texts), Path("sweep"))
    return sweep, list(sweep.load_points().values())


def test_the_last_axis_changes_fastest_and_ends_of_ranges_are_validated(base: Path) -> None:
    sweep, points = load(base, "optimizer.learning_rate=1e-3,.5", "training.max_steps=7", "training.batch_size=2..6:4")
    configs = [sweep.load_config(values, Path("one")) for values in points]
    rates = [(config.optimizer.learning_rate, config.training.batch_size) for config in configs]
    assert rates == [(1e-3, 2), (1e-3, 6), (0.5, 2), (0.5, 6)]
    assert {(config.training.max_steps, config.run.directory) for config in configs} == {(7, Path("one"))}
    sweep, points = load(base, 'samples.infills=["a, [MASK:1]","[MASK:2]b"],["[MASK:1]"]')
    infills = [sweep.load_config(values).samples.infills for values in points]
    assert infills == [("a, [MASK:1]", "[MASK:2]b"), ("[MASK:1]",)]


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (
            ["training.batch_size=4,-1,x", "optimizer.learning_rate=1e-3,1e-2"],
            [
                "4 of 6 runs have an invalid config; nothing was started",
                "training.batch_size=-1, optimizer.learning_rate=1e-3, 2 in all:",
                "  --set training.batch_size=-1: must be greater than 0",
                "training.batch_size=x, optimizer.learning_rate=1e-3, 2 in all:",
                '  --set training.batch_size=x: expected an integer, got the string "x"',
            ],
        ),
        (["optimizer.learning_rate=1e-3,.001"], ["1e-3 is the same run; remove one of them"]),
        (["training.batch_size=4,8", "checkpoint.resume=never"], ["2 in all:", '  checkpoint.resume = "never"']),
    ],
)
def test_each_point_is_validated_and_named(base: Path, texts: list[str], lines: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        load(base, *texts)
    assert all(line in str(caught.value) for line in lines)
