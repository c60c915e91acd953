"""Configs of any size and depth give an error of limited length."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.infer import InferConfig
from config.load import MAX_PROBLEMS, ConfigError, load_config
from config.train import TrainConfig

MAX_LENGTH = 50_000


@pytest.mark.parametrize("config_class", [InferConfig, TrainConfig])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = " + "[" * 200_000, "nested too deeply"),
        ("".join(f"key{number} = 1\n" for number in range(20_000)), "further problems are not listed"),
        ("[run]\n" + "".join(f"key{number} = 1\n" for number in range(20_000)), ""),
        ("x" * 50_000 + " = 1", "unknown key"),
        ("[input]\nchats = " + "['" * 100 + "x" + "']" * 100, ""),
        (f"[input]\nchats = {['x' * 10] * 5000}\nbatch_size = {[1] * 50_000}", ""),
        (f'[model]\npath = "{"x" * 100_000}"\nthreads = 0', ""),
    ],
)
def test_the_error_is_short(
    config_class: type[InferConfig | TrainConfig], text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class, path)
    lines = str(caught.value).split("\n")
    assert str(path) in lines[0] and problem in str(caught.value)
    assert len(lines) <= MAX_PROBLEMS + 2 and len(str(caught.value)) < MAX_LENGTH


def test_no_more_of_a_file_is_read_than_a_config_may_have() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero: has more than [\d,]+ characters"):
        load_config(InferConfig, Path("/dev/zero"))


@pytest.mark.parametrize(
    "override",
    [
        "input.batch_size=" + "[" * 100_000,
        "input.batch_size=" + "1" * 100_000,
        f"input.{'x' * 100_000}=1",
    ],
)
def test_overrides(override: str) -> None:
    with pytest.raises(ConfigError, match="1 problem"):
        load_config(InferConfig, None, [override])
