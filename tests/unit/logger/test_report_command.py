"""``diffusionlm-report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.report import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        line = json.dumps({"step": 1, "metrics": {"loss": 2.0}}) + "\n"
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(line, encoding="utf-8")
        (tmp_path / "runs" / name / "config.toml").write_text("", encoding="utf-8")
    return "runs/one", "runs/two"


def test_one_run_has_its_page_beside_it(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main([runs[0]])
    assert "<title>one</title>" in Path("runs/one/report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == "runs/one/report.html shows one\n"
    main([runs[0], "runs/two/../one"])
    assert not Path("report.html").exists(), "the same run twice is one run"


def test_page_of_several_runs_is_in_the_working_directory_or_at_output(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("runs/two/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "me')
    main([*runs])
    assert Path("report.html").is_file()
    output = capsys.readouterr().out
    assert output.startswith("two: Lines of metrics.jsonl that cannot be read and are not shown: 1.")
    assert output.endswith("report.html shows 2 runs\n")
    main([*runs, "--output", "other.html"])
    assert Path("other.html").read_text() == Path("report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/none"], "runs/none has no metrics.jsonl: name the directory of a run"),
        (["runs/one/metrics.jsonl"], "runs/one/metrics.jsonl has no metrics.jsonl: name the directory of a run"),
        (["runs/one", "--output", "runs/one/metrics.jsonl"], "name a file that ends in .html"),
    ],
)
def test_bad_input_exits_with_2_and_names_the_problem(
    runs: tuple[str, str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("runs/one/metrics.jsonl").read_text()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert Path("runs/one/metrics.jsonl").read_text() == before
