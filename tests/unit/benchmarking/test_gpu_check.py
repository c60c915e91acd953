"""The check of a GPU machine: parts by themselves, verdicts, and a rehearsal without a GPU."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarking.gpu import check, parts
from benchmarking.gpu.check import format_page, run_part, run_parts
from benchmarking.gpu.parts import Part, PartVerdict, Site, build_parts

ROOT = Path(__file__).parents[3]
HEAD_TABLE = """| implementation | ms | useful TFLOP/s | peak MiB |
| --- | ---: | ---: | ---: |
| diffusionlm | 21.5 | {rate} | 1,200 |
| full logits | 60.0 | 250 | 9,000 |
"""
SPEED_TABLE = """| shape | tok/s |
| --- | ---: |
| 124m | 600,000 |

| shape | step, ms | MFU |
| --- | ---: | ---: |
| 124m | 110.0 | {mfu} |

text
"""


def accept(output: str) -> PartVerdict:
    return PartVerdict(True, output.strip())


def part(code: str, *, seconds: int = 20, judge: Callable[[str], PartVerdict] = accept) -> Part:
    return Part("part", [sys.executable, "-I", "-c", code], seconds, "a goal", judge)


@pytest.mark.parametrize(
    ("code", "status", "result"),
    [
        ("print('done')", "passed", "done"),
        ("import sys; print('no', file=sys.stderr); sys.exit(3)", "failed", "exit code 3"),
        ("import os; os.abort()", "failed", "exit code -6"),
    ],
)
def test_a_part_is_judged_by_its_exit_code(code: str, status: str, result: str) -> None:
    done = run_part(part(code), 20.0)
    assert (done.status, done.result) == (status, result)


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "written-late"
    child = f"import time; time.sleep(2); open({str(path)!r}, 'w')"
    code = f"""import subprocess, sys, time
print("started", flush=True)
subprocess.Popen([sys.executable, "-I", "-c", {child!r}])
time.sleep(60)"""
    start = time.monotonic()
    done = run_part(part(code), 1.0)
    assert done.status == "too slow" and done.output == "started\n"
    assert time.monotonic() - start < 20
    time.sleep(2.0)
    assert not path.exists()


def test_what_a_part_left_behind_is_a_failure_of_that_part_alone() -> None:
    def refuse(output: str) -> PartVerdict:
        raise KeyError("loss")

    def fail() -> None:
        raise ValueError("no checkpoint")

    missing = Part("missing", ["/nonexistent/program"], 5, "", accept)
    unprepared = Part("unprepared", [sys.executable], 5, "", accept, fail)
    missed = part("", judge=lambda output: PartVerdict(False, "40%"))
    results = run_parts([missing, unprepared, part("", judge=refuse), missed, part("print(1)")], 60.0)
    assert [each.status for each in results] == ["failed", "failed", "goal missed", "goal missed", "passed"]
    assert "program" in results[0].result and results[1].result == "no checkpoint" and "loss" in results[2].result


def test_no_part_runs_after_the_total_time() -> None:
    results = run_parts([part("import time; time.sleep(30)"), part("")], 0.5)
    assert [each.status for each in results] == ["too slow", "not run"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_limits_of_all_parts_are_within_nine_minutes(device: str, tmp_path: Path) -> None:
    built = build_parts(Site(tmp_path, device, "NVIDIA H200", 8))
    assert sum(each.seconds for each in built) <= parts.TOTAL_SECONDS <= 9 * 60
    assert len({each.name for each in built}) == len(built)
    configs = [Path(word) for each in built for word in each.command if word.startswith("config/")]
    assert configs and all((ROOT / path).is_file() for path in configs)


def test_tests_that_were_skipped_do_not_count() -> None:
    assert parts.judge_tests("......\n23 passed, 4 deselected in 26.38s") == PartVerdict(True, "23 passed")
    assert not parts.judge_tests("20 passed, 3 skipped in 9.1s").is_met
    assert not parts.judge_tests("1 failed, 20 passed in 9.1s").is_met
    assert not parts.judge_tests("no tests ran in 0.1s").is_met


def test_a_training_must_learn(tmp_path: Path) -> None:
    def judge(*losses: float) -> PartVerdict:
        records = [{"step": 0, "event": "data"}, {"step": 9, "metrics": {"val_bound": 1.0}}]
        records += [{"step": step, "metrics": {"loss": loss}} for step, loss in enumerate(losses)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        return parts.judge_training(tmp_path)

    assert judge(5.0, 4.0, 4.2, 4.4, 4.6) == PartVerdict(True, "loss 5.000 -> 4.400")
    assert not judge(5.0, 4.6, 4.6, 4.6).is_met


def test_a_resumed_run_must_end_where_the_first_did() -> None:
    before = {2: 5.0, 4: 4.0}
    assert parts.judge_resume(before, {2: 5.0, 4: 4.04}, "going on from step-2").is_met
    assert not parts.judge_resume(before, {2: 5.0, 4: 4.4}, "going on from step-2").is_met
    assert not parts.judge_resume(before, {2: 5.0, 4: 4.0}, "is complete").is_met
    assert not parts.judge_resume(before, {2: 5.0}, "going on from step-2").is_met


def test_decoding_must_agree_with_the_cpu() -> None:
    assert parts.judge_decoding([-1.0, -2.0], [-1.001, -2.0]).is_met
    assert not parts.judge_decoding([-1.0, -2.0], [-1.0, -2.1]).is_met


def test_goals_of_speed() -> None:
    peak = 989.4e12
    assert parts.judge_head(HEAD_TABLE.format(rate="712"), peak) == PartVerdict(
        True, "21.5 ms, 72% of the peak, 1,200 MiB"
    )
    assert not parts.judge_head(HEAD_TABLE.format(rate="500"), peak).is_met
    assert not parts.judge_head(HEAD_TABLE.format(rate="712"), None).is_met
    assert not parts.judge_head("nothing", peak).is_met
    goals = {"124m": 0.45}
    assert parts.judge_speed(SPEED_TABLE.format(mfu="46.1%"), goals).is_met
    assert parts.judge_speed(SPEED_TABLE.format(mfu="unknown peak"), {}).result == "124m: 110.0 ms, MFU unknown peak"
    assert not parts.judge_speed(SPEED_TABLE.format(mfu="44.9%"), goals).is_met
    assert not parts.judge_speed(SPEED_TABLE.format(mfu="unknown peak"), goals).is_met
    assert not parts.judge_speed("nothing", {}).is_met


def test_the_report_has_verdicts_and_the_output_of_failures(tmp_path: Path) -> None:
    failing = part("print('line\\n' * 100 + 3 * chr(96)); raise SystemExit(2)")
    results = run_parts([part("print('done')"), failing], 30.0)
    page = format_page(results, Site(tmp_path, "cuda", "NVIDIA H200", 2), {})
    assert "1 of 2 parts passed" in page and "- device: 2 x NVIDIA H200" in page
    assert re.search(r"\| part \| failed \| exit code 2 \| a goal \| \d+ \|", page)
    assert page.count("\nline") == check.SHOWN_LINES - 1 and page.count("```") == 2


def test_without_a_gpu_the_check_names_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        check.main([])
    assert "--device cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu", "--parts", "trainin"])
    assert "'trainin' is not one of doctor" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_trains_resumes_and_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a GPU machine, with tiny models on the CPU."""
    monkeypatch.chdir(ROOT)
    names = ["training", "resume", "decoding on the CPU", "decoding"]
    output = tmp_path / "gpu.md"
    assert check.main(["--device", "cpu", "--output", str(output), "--parts", *names]) == 0
    page = output.read_text(encoding="utf-8")
    assert "4 of 4 parts passed" in page and "A rehearsal" in page
    assert all(f"| {name} | passed |" in page for name in names)
