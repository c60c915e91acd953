"""The check of a GPU machine: parts by themselves, verdicts, and a rehearsal without a GPU."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarking.gpu import check, judges, parts
from benchmarking.gpu.check import PartResult, format_page, run_part, run_parts
from benchmarking.gpu.judges import PartVerdict
from benchmarking.gpu.parts import Part, Site, build_parts
from config.generation import GenerationConfig
from diffusionlm.inference import decoder
from diffusionlm.inference.generate import decode
from diffusionlm.inference.requests import prepare_prompt
from diffusionlm.inference.settings import resolve_settings
from tests.conftest import MakeModel
from tests.recorded_graph import RecordedGraph

ROOT = Path(__file__).parents[3]
HEAD_TABLE = """| implementation | ms | useful TFLOP/s | peak MiB |
| --- | ---: | ---: | ---: |
| diffusionlm | 21.5 | {rate} | 1,200 |
| full logits | 60.0 | 250 | 9,000 |
"""
MFU_TABLES = """| shape | diffusionlm tok/s |
| --- | ---: |
| 124m | 600,000 |

| shape | step, ms | MFU |
| --- | ---: | ---: |
| 124m | 110.0 | {mfu} |

text
"""
DECODING_TABLE = """| strategy | batch | tok/s | forwards/s |
| --- | ---: | ---: | ---: |
| static | 128 | {rate} | 60.2 |
"""
GARBAGE = [
    "",
    "\x00\ufffd\n" * 40,
    "| a | b |\n| --- | --- |\n| nan | x |",
    "Traceback (most recent call last):\n 5 files",
]


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
    assert done.status == "no verdict" and done.output == "started\n"
    assert time.monotonic() - start < 20
    time.sleep(2.0)
    assert not path.exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("hangs", [True, False])
def test_no_process_of_a_part_lives_on(hangs: bool) -> None:
    """Also not one in a session of its own that ignores signals, as a rank that finishes its step."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    code = f"""import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep({60 if hangs else 0})"""
    done = run_part(part(code), 2.0)
    assert done.status == ("no verdict" if hangs else "passed")
    assert not Path("/proc", done.output.strip() or done.result, "exe").exists()


def test_a_part_that_hangs_is_asked_to_end_first() -> None:
    """A launcher of ranks ends them in order, and says why."""
    code = """import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True) or exit(0))
time.sleep(60)"""
    assert run_part(part(code), 1.0).output == "asked\n"


def test_the_check_starts_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = parts.find_gpu_tests()
    monkeypatch.chdir(tmp_path)
    assert parts.find_gpu_tests() == files and len(files["unit"]) > 2
    assert run_part(part("import os; print(os.getcwd())"), 20.0).result == str(ROOT)


def test_what_a_part_left_behind_is_a_failure_of_that_part_alone() -> None:
    def refuse(output: str) -> PartVerdict:
        raise KeyError("loss")

    def fail() -> None:
        raise ValueError("no checkpoint")

    def break_off() -> None:
        raise KeyError("rows")

    missing = Part("missing", ["/nonexistent/program"], 5, "", accept)
    unprepared = Part("unprepared", [sys.executable], 5, "", accept, fail)
    broken = Part("broken", [sys.executable], 5, "", accept, break_off)
    missed = part("", judge=lambda output: PartVerdict(False, "40%"))
    results = run_parts([missing, unprepared, broken, part("", judge=refuse), missed, part("print(1)")], 60.0)
    assert [each.status for each in results] == ["failed"] * 3 + ["goal missed"] * 2 + ["passed"]
    assert "program" in results[0].result and results[1].result == "ValueError: no checkpoint"
    assert results[2].result == "KeyError: 'rows'" and "loss" in results[3].result


def test_no_part_runs_after_the_total_time() -> None:
    results = run_parts([part("import time; time.sleep(30)"), part("")], 0.5)
    assert [each.status for each in results] == ["no verdict", "not run"]


def test_an_interrupted_check_has_the_results_so_far() -> None:
    pages: list[list[str]] = []

    def interrupt(results: Sequence[PartResult]) -> None:
        pages.append([each.status for each in results])
        if len(pages) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parts([part(""), part("raise SystemExit(1)"), part("")], 60.0, interrupt)
    assert pages == [["passed", "not run", "not run"], ["passed", "failed", "not run"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_of_a_machine_and_of_a_rehearsal(device: str, tmp_path: Path) -> None:
    """The limits of all are within nine minutes; a rehearsal has the same parts."""
    built = build_parts(Site(tmp_path, device, "NVIDIA H200", 8))
    factor = 1 if device == "cuda" else parts.REHEARSAL_FACTOR
    assert sum(each.seconds for each in built) <= factor * parts.TOTAL_SECONDS <= factor * 9 * 60
    names = [each.name for each in built]
    assert len(set(names)) == len(names)
    assert names == [each.name for each in build_parts(Site(tmp_path, "cuda", "NVIDIA H200", 1))]
    strategies = [word for each in built for word in each.command if word.startswith("parallel.strategy=")]
    assert strategies == ["parallel.strategy=ddp", "parallel.strategy=fsdp"]
    configs = [Path(word) for each in built for word in each.command if word.startswith("config/")]
    assert len(configs) >= 4 and all((ROOT / path).is_file() for path in configs)


def test_all_tests_that_need_a_gpu_are_run(tmp_path: Path) -> None:
    """Files by name: to collect all tests takes long, and some need packages that a GPU machine may not have."""
    built = build_parts(Site(tmp_path, "cuda", "NVIDIA H200", 1))
    named = [word for each in built for word in each.command if word.startswith("tests/")]
    mark = "pytest.mark." + "gpu"
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if mark in path.read_text(encoding="utf-8")]
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in marked)
    assert len(named) >= 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("output", GARBAGE)
def test_no_part_passes_with_garbage(output: str, device: str, tmp_path: Path) -> None:
    """Whatever a command prints that ends with code 0: without results its part has not passed."""
    for each in build_parts(Site(tmp_path, device, "NVIDIA H200", 1)):
        try:
            verdict = each.judge(output)
        except Exception:  # `run_part` reports it as unexpected output
            continue
        assert not verdict.is_met, each.name


def test_tests_that_were_skipped_do_not_count() -> None:
    assert judges.judge_tests("......\n23 passed, 4 deselected in 26.38s") == PartVerdict(True, "23 passed")
    assert not judges.judge_tests("20 passed, 3 skipped in 9.1s").is_met
    assert not judges.judge_tests("1 failed, 20 passed in 9.1s").is_met
    assert not judges.judge_tests("no tests ran in 0.1s").is_met
    assert not judges.judge_tests("3 passed, and then\nSegmentation fault").is_met


def test_a_training_must_learn(tmp_path: Path) -> None:
    def judge(*losses: float) -> PartVerdict:
        records = [{"step": 0, "event": "data"}, {"step": 9, "metrics": {"val_bound": 1.0}}]
        records += [{"step": step, "metrics": {"loss": loss}} for step, loss in enumerate(losses)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        return judges.judge_training(tmp_path)

    assert judge(5.0, 4.0, 4.2, 4.4, 4.6) == PartVerdict(True, "loss 5.000 -> 4.400")
    assert not judge(5.0, 4.6, 4.6, 4.6).is_met


def test_a_resumed_run_must_end_where_the_first_did() -> None:
    before = {2: 5.0, 4: 4.0}
    assert judges.judge_resume(before, {2: 5.0, 4: 4.04}, "going on from step-2").is_met
    assert not judges.judge_resume(before, {2: 5.0, 4: 4.4}, "going on from step-2").is_met
    assert not judges.judge_resume(before, {2: 5.0, 4: 4.0}, "is complete").is_met
    assert not judges.judge_resume(before, {2: 5.0}, "going on from step-2").is_met


def test_decoding_uses_graphs(
    tmp_path: Path, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the settings of the check most rounds of a bidirectional model have a graph; the CPU has the same settings.

    A graph that cannot be recorded fails the part: the answers alone would not tell.
    """
    built = {each.name: each for each in build_parts(Site(tmp_path, "cuda", "NVIDIA H200", 1))}
    words = built["decoding"].command
    on_cpu = [word.replace("decoded-cpu", "decoded-cuda") for word in built["decoding on the CPU"].command]
    assert [word.replace("=cpu", "=cuda") for word in on_cpu] == list(words)
    options = dict(word.removeprefix("generation.").split("=") for word in words if word.startswith("generation."))
    options["max_new_tokens"] = words[words.index("--max-new-tokens") + 1]
    model = tiny_model(vocab_size=23, mask_token_id=22, max_position_embeddings=128).eval()
    settings = resolve_settings(GenerationConfig.model_validate_strings(options), model.config)
    graphs: list[RecordedGraph] = []

    def make_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    def decode_two() -> None:
        decode(model, settings, [prepare_prompt(settings, [1] * length) for length in (1, 2)])

    monkeypatch.setattr(decoder, "select_graph_factory", lambda model: make_graph)
    decode_two()
    assert len(graphs) > 0 and sum(graph.num_replays for graph in graphs) > 30
    monkeypatch.setattr(RecordedGraph, "capture", Mock(side_effect=RuntimeError("no memory")))
    decode_two()
    assert not built["decoding"].judge(caplog.text).is_met


def test_decoding_must_agree_with_the_cpu() -> None:
    assert judges.judge_decoding([-1.0, -2.0], [-1.001, -2.0]).is_met
    assert not judges.judge_decoding([-1.0, -2.0], [-1.0, -2.1]).is_met


def test_the_doctor_must_see_the_gpu() -> None:
    report = "GPU\n  GPU  NVIDIA H200\nnothing is broken; 1 to mend for speed"
    assert judges.judge_doctor(report, "NVIDIA H200").result == "nothing is broken; 1 to mend for speed"
    assert judges.judge_doctor(report, "NVIDIA H200").is_met
    assert not judges.judge_doctor(report, "NVIDIA B200").is_met
    assert not judges.judge_doctor(report + "\nkilled", "NVIDIA H200").is_met


def test_goal_of_the_head() -> None:
    peak, goal = 989.4e12, 0.7
    assert judges.judge_head(HEAD_TABLE.format(rate="712"), peak, goal) == PartVerdict(
        True, "21.5 ms, 72% of the peak, 1,200 MiB"
    )
    assert not judges.judge_head(HEAD_TABLE.format(rate="500"), peak, goal).is_met
    assert not judges.judge_head(HEAD_TABLE.format(rate="712"), None, goal).is_met
    assert judges.judge_head(HEAD_TABLE.format(rate="712"), None, 0.0).is_met


def test_goals_of_training() -> None:
    goals = {"124m": 0.45}
    verdict = judges.judge_mfu(MFU_TABLES.format(mfu="46.1%"), goals)
    assert verdict == PartVerdict(True, "124m: 110.0 ms, MFU 46.1%, 600,000 tok/s")
    assert judges.judge_mfu(MFU_TABLES.format(mfu="unknown peak"), {}).is_met
    assert not judges.judge_mfu(MFU_TABLES.format(mfu="44.9%"), goals).is_met
    assert not judges.judge_mfu(MFU_TABLES.format(mfu="unknown peak"), goals).is_met


def test_goal_of_decoding() -> None:
    verdict = judges.judge_throughput(DECODING_TABLE.format(rate="7,705.1"), 5_000.0)
    assert verdict == PartVerdict(True, "7,705.1 tok/s with 128 requests, 60.2 forwards/s")
    assert not judges.judge_throughput(DECODING_TABLE.format(rate="4,999.9"), 5_000.0).is_met


def test_the_report_has_verdicts_and_the_output_of_failures(tmp_path: Path) -> None:
    failing = part("print('line\\n' * 100 + 3 * chr(96)); raise SystemExit(2)")
    results = run_parts([part("print('done')"), failing], 30.0)
    page = format_page(results, Site(tmp_path, "cuda", "NVIDIA H200", 2), {})
    assert "Not asked for: doctor, compiled against plain," in page
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
def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a GPU machine, with tiny models on the CPU. Left out: parts that differ by an argument alone."""
    monkeypatch.chdir(ROOT)
    left_out = {"compiled against plain", "losses against the golden record", "other GPU tests"}
    left_out.add("speed of training with blocks")
    names = [each.name for each in build_parts(Site(tmp_path, "cpu", "cpu", 0)) if each.name not in left_out]
    output = tmp_path / "gpu.md"
    assert check.main(["--device", "cpu", "--output", str(output), "--parts", *names]) == 0
    page = output.read_text(encoding="utf-8")
    assert f"{len(names)} of {len(names)} parts passed" in page and "A rehearsal" in page
    assert all(f"| {name} | passed |" in page for name in names)
