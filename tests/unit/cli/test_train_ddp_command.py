"""``diffusionlm-train-ddp``: what it refuses, what it starts, and what it says of ranks that fail; none is started."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddp.launch as module
from cli.train import main as train
from cli.train_ddp import main
from config.training.parallel import DDP
from ddp.launch import Nodes, RankFailure, count_local_ranks, format_failures, launch, read_failures, run_rank
from files.usage_error import UsageError
from tests.unit.cli.conftest import Fails

ROOT = Path(__file__).parents[3]
RESOURCE = str(ROOT / "config" / "resources" / "train_ddp.toml")
SINGLE = str(ROOT / "config" / "resources" / "train.toml")


def test_an_explicit_single_is_refused_with_the_remedy(fails: Fails) -> None:
    text = fails(main, "--config", SINGLE, "--set", "parallel.strategy=single")
    assert 'expected "ddp" or "fsdp", got the string "single"' in text


def test_ranks_that_do_not_fit_are_refused_before_any_starts(fails: Fails) -> None:
    text = fails(main, "--config", SINGLE, "--set", "parallel.local_ranks=3", "--set", "run.device=cpu")
    assert "training.batch_size = 16" in text and "multiple of 3" in text
    assert "is not a positive number" in fails(main, "--config", RESOURCE, "--nodes", "0")


def test_launched_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that says nothing of ranks runs as ddp."""
    started: list[tuple[Any, ...]] = []

    def launched(act: Any, local_ranks: int, **options: Any) -> int:
        started.append((act.args[0], local_ranks, options))
        return 143

    monkeypatch.setattr(module, "launch", launched)
    arguments = ["--set", "run.device=cpu", "--nodes", "2", "--rendezvous", "first:29400"]
    assert main(["--config", SINGLE, *arguments, "--set", "parallel.max_restarts=3"]) == 143
    config, local_ranks, options = started[0]
    assert (type(config).__name__, config.parallel) == ("TrainConfig", DDP(max_restarts=3))
    assert (local_ranks, options["max_restarts"]) == (2, 3)
    assert options["nodes"] == Nodes(2, "first:29400", "runs/quickstart")


def test_plan_and_config_are_printed(capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    assert main(["--config", RESOURCE, "--dry-run"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    plan = {name: value.strip() for name, value in lines.items()}
    assert plan["ranks"] == "2; memory and traffic are those of each"
    # 1,115,520 parameters: weights, and the half that is updated; Muon keeps one number for each of these.
    assert plan["memory, weights"] == f"{1_115_520 * 6 / 2**20:.1f} MiB"
    assert plan["memory, optimizer"] == f"{1_115_520 * 2 / 2**20:.1f} MiB"
    assert 'strategy = "ddp"' in fails(main, "--config", SINGLE, "--print-config", code=0)


def test_errors_are_printed_by_the_first_torchrun_rank_only(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    errors = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        errors.append(fails(train, "--config", RESOURCE, "--set", "training.max_step=3"))
    assert "did you mean max_steps?" in errors[0] and errors[1] == ""


@pytest.mark.parametrize(("gpus", "count"), [(0, 2), (4, 4)])
def test_one_rank_per_gpu(gpus: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert count_local_ranks(DDP(), "auto") == count
    assert count_local_ranks(DDP(), "cpu") == 2
    if gpus:
        with pytest.raises(ValueError, match=r"parallel\.local_ranks = 5, but this machine has 4 GPUs"):
            count_local_ranks(DDP(local_ranks=5), "auto")


def failure(rank: int, text: str, *, is_user_error: bool = False, attempt: int = 0, at: float = 0.0) -> RankFailure:
    return RankFailure(rank, attempt, is_user_error, text, at)


def test_equal_errors_of_ranks_are_printed_once() -> None:
    same = [failure(rank, "a.toml: no such file", is_user_error=True) for rank in range(2)]
    assert format_failures("train", same) == "train: error: a.toml: no such file"
    followed = [*same, failure(2, "Traceback\nRuntimeError: connection closed")]
    assert format_failures("train", followed) == "train: error: a.toml: no such file"
    other = [same[0], failure(1, "b.toml: no such file", is_user_error=True)]
    assert format_failures("train", other).splitlines()[1] == "train: error on rank 1: b.toml: no such file"
    bugs = [failure(1, "Traceback\n  line\nKeyError: 1"), failure(0, "Traceback\n  line\nRuntimeError: closed")]
    assert format_failures("train", bugs).splitlines() == [
        "train: rank 1 failed first:",
        *("Traceback", "  line", "KeyError: 1"),
        "train: rank 0 failed:",
        "RuntimeError: closed",
    ]


class Verdict(SimpleNamespace):
    """A value that processes share, in one process."""


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(os, "setsid", lambda: None)


@pytest.mark.usefixtures("as_rank")
def test_rank_writes_its_failure_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: Exception) -> Any:
        def act() -> int:
            raise error

        return act

    verdict: Any = Verdict(value=-1)
    assert run_rank(lambda: 143, verdict, str(tmp_path), "train") == 143
    with pytest.raises(SystemExit):
        run_rank(fail_with(KeyError(1)), verdict, str(tmp_path), "train")
    assert verdict.value == -1, "what is no user's error may be tried again"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(SystemExit):
        run_rank(fail_with(ValueError("no such file")), verdict, str(tmp_path), "train")
    stderr = capsys.readouterr().err
    assert (
        "rank 3 failed first:" in stderr and "KeyError: 1" in stderr and "restarting all ranks, 1 of 2 times" in stderr
    )
    bug, users = read_failures(tmp_path)
    assert (bug.rank, bug.attempt, bug.is_user_error) == (3, 0, False) and bug.text.endswith("KeyError: 1\n")
    assert (users.attempt, users.is_user_error, users.text) == (1, True, "no such file")
    # Ranks that are started afterwards end at once.
    assert run_rank(fail_with(AssertionError()), verdict, str(tmp_path), "train") == 1
    verdict.value = -1
    with pytest.raises(SystemExit):
        run_rank(fail_with(UsageError("holds a run")), verdict, str(tmp_path), "train")
    [usage] = read_failures(tmp_path)[1:]
    assert verdict.value == 2 and (usage.is_usage_error, usage.is_user_error, usage.text) == (True, True, "holds a run")


def launched_with(
    monkeypatch: pytest.MonkeyPatch, outcome: int | str, failures: list[RankFailure], sent: int | None = None
) -> int:
    def agent(arguments: Any, *_: Any) -> int | str:
        for failure in failures:
            (Path(arguments[2]) / f"{failure.rank}.json").write_text(json.dumps(vars(failure)), encoding="utf-8")
        if sent is not None:
            signal.raise_signal(sent)
        return outcome

    monkeypatch.setattr(module, "_run_agent", agent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return launch(lambda: 0, 2, name="train")


def test_exit_codes_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched_with(monkeypatch, 0, []) == 0
    assert launched_with(monkeypatch, 143, []) == 143
    assert capsys.readouterr().err == ""
    assert launched_with(monkeypatch, "rank 1 was killed by SIGKILL", []) == 1
    assert capsys.readouterr().err == "train: rank 1 was killed by SIGKILL\n"
    assert launched_with(monkeypatch, 1, [failure(0, "no such file", is_user_error=True)]) == 1
    assert capsys.readouterr().err == "train: error: no such file\n"
    used = [replace(failure(0, "holds a run", is_user_error=True), is_usage_error=True)]
    followed = failure(1, "holds a run", is_user_error=True)
    assert launched_with(monkeypatch, "rank 1 ended with exit code 1", [*used, followed]) == 2
    assert capsys.readouterr().err == "train: error: holds a run\n"
