"""``diffusionlm-bench-infer``: what it refuses, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.bench.infer import main

RESOURCE = Path(__file__).parents[3] / "config" / "resources" / "bench_infer.toml"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "grid.caches=prefix"], 2, 'cache = "prefix" is for bidirectional attention'),
        (["--set", "strategies=[]"], 2, "--set strategies=[]: must not be empty"),
        (["--model", "no/such/model"], 1, "no model at no/such/model: there is no such directory"),
    ],
)
def test_bad_input_ends_with_a_message(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(RESOURCE), *arguments])
    assert ended.value.code == code
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("diffusionlm-bench-infer: error: ") and message in output.err
