"""Which stages run, and what interruptions leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.pipeline import main
from cli.pipeline.stamps import list_files
from config.eval import EvalConfig
from config.generation import GenerationConfig
from config.load import validate_config
from config.serving.server import ServeConfig
from config.training.objective import MaskedDiffusionConfig
from files.lock import lock_directory
from tests.unit.cli.conftest import Fails
from tests.unit.cli.pipeline.conftest import stage_of, write_pipeline

ALL = ["base", "tune", "after", "before"]


def run(values: dict[str, Any], *arguments: str) -> int:
    return main(["--config", write_pipeline(values), *arguments])


def take_log() -> list[str]:
    """Names of the stages that have run since the last call."""
    path = Path("out/log")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def outputs() -> dict[str, str]:
    """What the stages that are done have computed, by name."""
    results = {}
    for path in sorted(Path("out").glob("*/done.json")):
        weights = path.with_name("run") / "checkpoints" / "latest" / "model.safetensors"
        result = path.with_name("result.json")
        results[path.parent.name] = (
            json.loads(result.read_text())["weights"] if result.exists() else weights.read_text()
        )
    return results


def modified_times() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path("out").rglob("*") if path.is_file()}


def actions(values: dict[str, Any], capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Name -> action and reason, of a dry run, which must not change a file."""
    before = modified_times()
    capsys.readouterr()
    assert run(values, "--dry-run", *arguments) == 0
    assert modified_times() == before
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    starts = [stage_of(values, row[0]).get("from") for row in rows[1:-1]]
    return {row[0]: " ".join(row[3 if start else 2 :]) for row, start in zip(rows[1:-1], starts, strict=True)}


def test_a_changed_byte_of_data_makes_the_stage_and_its_successors_stale(
    pipeline: dict[str, Any], capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    assert actions(pipeline, capsys) == dict.fromkeys(ALL, "run not begun")
    assert not Path("out").exists()
    assert run(pipeline) == 0 and take_log() == ALL
    assert run(pipeline) == 0 and take_log() == []
    hashes, text = outputs(), Path("b.txt").read_text()
    Path("b.txt").write_text(text.replace("line 150", "lime 150"))
    expected = {"base": "skip done", "before": "skip done"}
    expected["tune"] = "stale changed: the content of data.source.paths"
    expected["after"] = "stale changed: the model in from"
    assert actions(pipeline, capsys) == expected
    error = fails(main, "--config", write_pipeline(pipeline))
    assert 'stage "tune": changed: the content of data.source.paths' in error
    assert take_log() == [] and outputs() == hashes
    assert run(pipeline, "--force") == 0 and take_log() == ["tune", "after"]
    assert outputs()["base"] == hashes["base"] and outputs()["tune"] != hashes["tune"]


def test_a_changed_config_is_named_and_keys_without_effect_are_not(
    pipeline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(pipeline)
    stage_of(pipeline, "tune")["settings"]["training"]["max_steps"] = 11
    assert actions(pipeline, capsys)["tune"] == "stale changed: training.max_steps: 10 -> 11"
    stage_of(pipeline, "tune")["settings"]["training"]["max_steps"] = 10
    stage_of(pipeline, "tune")["settings"] |= {"logging": {"every_steps": 3}, "checkpoint": {"keep_last": 5}}
    assert actions(pipeline, capsys) == dict.fromkeys(ALL, "skip done")
    stage_of(pipeline, "tune")["settings"]["checkpoint"] = {"keep_best": False}
    assert actions(pipeline, capsys)["tune"] == "stale changed: checkpoint.keep_best: true -> false"


def test_stages_with_older_spellings_of_keys_stay_done(
    pipeline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that start from them, which have recorded the digest of the older stamp."""
    run(pipeline)
    done = Path("out/base/done.json")
    record = json.loads(done.read_text())
    objective = record["fingerprint"]["config"]["objective"]
    assert objective.pop("normalizer") == "targets"
    objective["loss"] = "elbo"
    done.write_text(json.dumps(record))
    older = hashlib.sha256(json.dumps(record["fingerprint"], sort_keys=True).encode()).hexdigest()
    for name in ALL:
        path = Path("out") / name / "done.json"
        child = json.loads(path.read_text())
        if stage_of(pipeline, name).get("from") == "base":
            child["fingerprint"]["source"] = f"{older} {child['fingerprint']['source'].split()[1]}"
            path.write_text(json.dumps(child))
    result = actions(pipeline, capsys)
    assert result["base"] == "skip done" and result["before"] == "skip done"


def test_a_missing_output_and_a_damaged_record_are_noticed(
    pipeline: dict[str, Any], capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    run(pipeline)
    Path("out/after/result.json").unlink()
    Path("out/before/done.json").write_text("{")
    Path("out/before/stage.json").unlink()
    error = fails(main, "--config", write_pipeline(pipeline), "--dry-run")
    assert "out/before exists and is no stage of a pipeline" in error
    Path("out/before/done.json").unlink()
    Path("out/before/stage.json").write_text('{"fingerprint": {"format": 0}}')
    found = actions(pipeline, capsys)
    assert found["after"] == "stale its output result.json is missing" and found["tune"] == "skip done"
    assert found["before"].startswith("stale changed: ")


def test_removal_of_stale_results_may_be_interrupted(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(pipeline)
    Path("out/after/result.json").unlink()

    def stop(path: Path) -> None:
        (path / "done.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cli.pipeline.runner.shutil.rmtree", stop)
        with pytest.raises(SystemExit):
            run(pipeline, "--force")
    assert actions(pipeline, capsys)["after"] == "run not begun"
    assert run(pipeline) == 0
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == sorted(ALL)


def test_files_of_options_and_tasks_are_a_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bias.npy", "items.jsonl"):
        Path(name).write_text("x")
    for section in (MaskedDiffusionConfig, GenerationConfig):
        assert list(list_files(section(attention_bias=Path("bias.npy")))) == [("attention_bias", [Path("bias.npy")])]
    tasks = [{"kind": "multiple_choice", "data": "items.jsonl", "score": "letters"}]
    config = validate_config(EvalConfig, {"model": {"path": "model"}, "tasks": tasks}, "test")
    assert ("tasks.0.data", [Path("items.jsonl")]) in list(list_files(config))


def test_parts_of_a_pipeline(pipeline: dict[str, Any], capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    for arguments, message in (
        (["--only", "tune"], 'stage "tune" starts from stage "base", which is not done'),
        (["--only", "none"], "there is no such stage"),
        (["--only", "base", "--until", "base"], "not allowed with"),
    ):
        assert message in fails(main, "--config", write_pipeline(pipeline), *arguments) and take_log() == []
    assert list(actions(pipeline, capsys, "--until", "tune")) == ["base", "tune"]
    assert run(pipeline, "--until", "base") == 0 and take_log() == ["base"]
    assert run(pipeline, "--only", "before") == 0 and take_log() == ["before"]
    assert run(pipeline) == 0 and take_log() == ["tune", "after"]


def test_the_last_model_is_served_when_all_stages_are_done(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    served: list[tuple[list[str], str, str | None, int]] = []

    def note(config: ServeConfig) -> None:
        served.append((take_log(), str(config.model.path), config.serve.model_name, config.serve.port))

    monkeypatch.setattr("cli.pipeline.serve_model", note)
    assert run(pipeline, "--until", "base") == 0 and take_log() == ["base"]
    for arguments, message in (
        (["--only", "before"], "the stages to run write no model"),
        (["--set", "common.serve.model.path=x"], "common.serve.model.path is set by the pipeline: remove it"),
        (["--set", "common.serve.serve.ports=1"], "common.serve"),
    ):
        for options in (["--serve"], ["--serve", "--dry-run"]):
            error = fails(main, "--config", write_pipeline(pipeline), *options, *arguments)
            assert message in error and take_log() == []
    monkeypatch.setenv("FAILING", "tune")
    assert run(pipeline, "--serve") == 1 and take_log() == ["tune"] and not served
    monkeypatch.delenv("FAILING")
    assert run(pipeline, "--serve", "--set", "common.serve.serve.port=9") == 0
    assert run(pipeline, "--serve", "--until", "base", "--set", "common.serve.serve.model_name=mine") == 0
    assert served == [(["tune", "after", "before"], "out/tune/run", "tune", 9), ([], "out/base/run", "mine", 8000)]


def test_a_failed_stage_leaves_the_others(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILING", "tune")
    assert run(pipeline) == 1
    errors = capsys.readouterr().err
    assert 'stage "tune" failed with exit code 1' in errors and "out/report.html" in errors
    assert take_log() == ["base", "tune"] and list(outputs()) == ["base"]
    monkeypatch.delenv("FAILING")
    assert run(pipeline) == 0 and take_log() == ["tune", "after", "before"]


@pytest.mark.parametrize("stage", ["base", "tune"])
def test_a_file_that_changes_in_the_middle_is_noticed(
    stage: str, pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    """Of a later stage, and of the stage that runs: its results must not be taken for those of the old content."""
    monkeypatch.setenv("CHANGING", stage)
    error = fails(main, "--config", write_pipeline(pipeline), code=1)
    assert 'stage "tune": the content of data.source.paths has changed since the pipeline began' in error
    assert list(outputs()) == ["base"]
    monkeypatch.delenv("CHANGING")
    assert run(pipeline, "--force") == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_stage_once_and_the_same_command_goes_on(
    pipeline: dict[str, Any],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WAITING", "tune")
    ready, hangup = Path("out/tune/run/ready"), signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run(pipeline) == 128 + number
    thread.join()
    errors = capsys.readouterr().err
    assert "stopped; the same command goes on" in errors and "out/report.html" in errors
    signal.signal(signal.SIGHUP, hangup)
    assert Path("out/tune/run/saved").read_text() == f"half, {number.name}"
    monkeypatch.delenv("WAITING")
    assert actions(pipeline, capsys)["tune"] == "resume interrupted"
    assert run(pipeline) == 0 and Path("out/tune/run/saved").exists()


def test_one_pipeline_at_a_time(pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    monkeypatch.setattr("cli.pipeline.LOCK_TIMEOUT_SECONDS", 0.0)
    with lock_directory(Path("out")):
        error = fails(main, "--config", write_pipeline(pipeline))
    assert "directory = out is in use by another pipeline" in error


def test_the_report_has_all_stages_and_what_changed(
    pipeline: dict[str, Any], golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pipeline) == 0
    for path in Path("out").glob("*/done.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 65.0}))
    Path("out/base/run/report.html").touch()
    capsys.readouterr()
    assert run(pipeline) == 0
    golden("terminal.txt", capsys.readouterr().out)
    golden("report.markdown.txt", Path("out/report.md").read_text())
    page = Path("out/report.html").read_text()
    assert "a | &lt;b&gt;" in page and 'href="base/run/report.html"' in page
