"""torch.profiler over steps: which cycles are written, by which numbers, and what is said where none is."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from config.training.runtime import ProfilerConfig
from profiling import nvtx
from profiling.trace import StepProfiler


class Messages(list[str]):
    """What a profiler said."""

    def __call__(self, text: str) -> None:
        self.append(text)


def profile(
    config: ProfilerConfig, directory: Path, steps: int = 8, first_step: int = 0, device: str = "cpu"
) -> Messages:
    messages = Messages()
    with StepProfiler(config, directory, device, first_step, log=messages) as profiler:
        for _ in range(steps):
            with nvtx.annotate("step"):
                torch.ones(2).add(1)
            profiler.step()
    return messages


def test_cycles_are_numbered_by_the_steps_of_the_run(tmp_path: Path) -> None:
    """The run begins anew with step 11; a cycle begins when the last step is over, and is none."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        messages = profile(ProfilerConfig(active=2, wait=0, warmup=0, repeat=9), tmp_path, first_step=10)
    numbers = [12, 14, 16, 18]
    names = {f"{kind}-{number}.{end}" for number in numbers for kind, end in (("trace", "json"), ("table", "txt"))}
    assert {path.name for path in tmp_path.iterdir()} == names
    for number in numbers:
        table = (tmp_path / f"table-{number}.txt").read_text(encoding="utf-8")
        assert table.startswith("Where a step goes, by the host's clock (mean of 2):"), number
    assert messages == [
        f"profiled up to step {number}: {tmp_path}/table-{number}.txt has the table, trace-{number}.json beside it the "
        "trace"
        for number in numbers
    ]
    assert warned == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_incomplete_last_cycle_is_written(tmp_path: Path, device: str) -> None:
    """Torch records the operators of the host also where it finds no GPU."""
    profile(ProfilerConfig(active=4, wait=1, warmup=1), tmp_path, steps=3, device=device)
    table = (tmp_path / "table-3.txt").read_text(encoding="utf-8")
    assert "(mean of 1):" in table and "aten::add" in table


def test_unreached_profiler_window_is_reported(tmp_path: Path) -> None:
    for wait, first in ((20, 123), (6, 109)):
        messages = profile(ProfilerConfig(active=4, wait=wait, warmup=2), tmp_path / "profile", first_step=100)
        assert messages == [f"the profiler recorded nothing: the run ended before step {first}, its first"]
    assert not (tmp_path / "profile").exists()
    assert profile(ProfilerConfig(), tmp_path / "profile") == []


@pytest.mark.parametrize("blocked_path", ["profile", "profile/trace-2.json", "profile/table-2.txt"])
def test_unwritable_profile_is_reported_once_without_ending_the_run(blocked_path: str, tmp_path: Path) -> None:
    directory = tmp_path / "profile"
    if blocked_path == "profile":
        directory.write_text("a file")
    else:
        (tmp_path / blocked_path / "x").mkdir(parents=True)
    messages = profile(ProfilerConfig(active=2, wait=0, warmup=0, repeat=2), directory)
    assert len([text for text in messages if text.startswith("a profile could not be written: ")]) == 1
    assert str(tmp_path / blocked_path) in messages[0] and messages[0].endswith("; going on without")
    assert len(messages) == (1 if blocked_path == "profile" else 2), "the next cycle may be written again"


def test_a_trace_that_torch_gives_up_silently_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", lambda self, path: None)
    [message] = profile(ProfilerConfig(active=2, wait=0, warmup=0), tmp_path)
    assert message == f"a profile could not be written: {tmp_path}/trace-2.json was not written; going on without"


def test_why_a_run_ended_is_not_hidden(tmp_path: Path) -> None:
    """The record cannot be written either."""

    def log(text: str) -> None:
        raise OSError("no space")

    def fail() -> None:
        with StepProfiler(ProfilerConfig(active=5, wait=1, warmup=1), tmp_path, log=log) as profiler:
            for _ in range(3):
                with nvtx.annotate("step"):
                    torch.ones(2).add(1)
                profiler.step()
            with nvtx.annotate("step"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "(mean of 2):" in (tmp_path / "table-3.txt").read_text(encoding="utf-8")
