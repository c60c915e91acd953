"""The parts of the check of a GPU machine: their commands, seconds and goals. See `benchmarking.gpu.check`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from profiling.flops import peak_flops

TOTAL_SECONDS = 540
"""The parts' limits together, so that the whole check takes at most nine minutes."""
RESOURCES = Path("config/resources")
HEAD_SHARE = 0.70
"""Goal: useful FLOPs of head and loss, as a share of the peak of the GPU (docs/performance.md)."""
MFU_GOALS = {"124m": 0.45, "qwen3-0.6b": 0.43, "qwen3-1.7b": 0.50}
"""Goal for a step of training, by shape."""
MAX_RESUME_DIFFERENCE = 0.02
"""Relative, between the last losses of a run and of one that resumed: fused attention adds in any order on a GPU."""
MAX_DECODING_DIFFERENCE = 0.01
"""Nats, between mean log-probabilities of greedy tokens in float32 on the GPU and on the CPU."""

TINY_RUN = (
    "model.num_hidden_layers=1", "model.hidden_size=32", "model.intermediate_size=32", "tokenizer.vocab_size=300",
    "training.batch_size=4", "validation.final_rows=8", "validation.ngrams=false", "samples.infills=[]",
)  # fmt: skip


@dataclass(frozen=True)
class PartVerdict:
    """What a part that ended in order has shown."""

    is_met: bool
    """Whether its goal is met."""
    result: str


@dataclass(frozen=True)
class Part:
    """A command of the check, which runs by itself."""

    name: str
    command: Sequence[str]
    seconds: int
    """After this time it is ended."""
    goal: str
    judge: Callable[[str], PartVerdict]
    """Reads the output of a command that ended with code 0, and its files."""
    prepare: Callable[[], None] | None = None
    """Runs before the command; an error is the part's failure."""


@dataclass(frozen=True)
class Site:
    """Where the parts run."""

    directory: Path
    """Scratch directory of runs and configs."""
    device: str
    """``cuda``, or ``cpu`` for a rehearsal with tiny models."""
    device_name: str
    num_gpus: int

    @property
    def is_rehearsal(self) -> bool:
        return self.device != "cuda"

    def run_directory(self, name: str) -> Path:
        return self.directory / name


def build_parts(site: Site) -> list[Part]:
    """All parts, those first that show most: a later one may find no time left.

    A rehearsal has other tests, tiny models and no benchmark of the head, which has no tiny case.
    """
    parts = [
        Part(
            "doctor", [_program("doctor")], 20, "no problem that stops a run", lambda _: PartVerdict(True, "no problem")
        ),
        _tests("kernels against eager", 55, ["tests/kernels"], site),
        _tests("losses against the golden record", 25, ["tests/golden"], site),
        _training("training", "train", 90, site),
        _resume(site),
        _training("ranks", "train-ddp", 65, site),
        _decoding("decoding on the CPU", "cpu", site),
        _decoding("decoding", site.device, site),
        _tests("other GPU tests", 65, ["tests", "--ignore=tests/kernels", "--ignore=tests/golden"], site),
        _training_benchmark(site),
    ]
    return parts if site.is_rehearsal else [*parts, _head_benchmark(site)]


def _program(name: str) -> str:
    """A command of the project in the environment of this Python."""
    return str(Path(sys.executable).with_name(f"diffusionlm-{name}"))


def _settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def _tests(name: str, seconds: int, paths: list[str], site: Site) -> Part:
    if site.is_rehearsal:  # a test that needs no GPU, in place of those that do
        marker, paths = "not gpu and not slow", ["tests/kernels/test_triton_check.py"]
    else:
        marker = "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marker, *paths]
    return Part(name, command, seconds, "all pass, none is skipped", judge_tests)


def judge_tests(output: str) -> PartVerdict:
    """Read the last line of pytest: passed tests, and none that was skipped."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)", output)}
    is_met = counts.get("passed", 0) > 0 and set(counts) == {"passed"}
    return PartVerdict(is_met, ", ".join(f"{number} {word}" for word, number in counts.items()) or "no tests")


def _training(name: str, program: str, seconds: int, site: Site) -> Part:
    """The quickstart of one process, or of a rank for each GPU."""
    directory = site.run_directory(program)
    config = RESOURCES / ("train_ddp.toml" if program == "train-ddp" else "train.toml")
    steps, interval = (12, 6) if site.is_rehearsal else (300, 150)
    values = [f"run.directory={directory}", f"run.device={site.device}", f"training.max_steps={steps}"]
    values += [f"checkpoint.every_steps={interval}", "logging.every_steps=2", "samples.every_steps=0"]
    if program == "train-ddp":
        values.append(f"parallel.local_ranks={max(1, site.num_gpus)}")
    command = [
        _program(program),
        "--config",
        str(config),
        *_settings(*values, *(TINY_RUN if site.is_rehearsal else ())),
    ]
    ranks = f"{max(1, site.num_gpus)} rank(s): " if program == "train-ddp" else ""

    def judge(output: str) -> PartVerdict:
        verdict = judge_training(directory)
        return PartVerdict(verdict.is_met, ranks + verdict.result)

    return Part(name, command, seconds, "the loss falls by a tenth", judge)


def read_losses(path: Path) -> dict[int, float]:
    """Step -> loss, from a run's metrics.jsonl."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {record["step"]: record["metrics"]["loss"] for record in records if "loss" in record.get("metrics", {})}


def judge_training(directory: Path) -> PartVerdict:
    """Compare the mean of the last three losses with the first."""
    losses = list(read_losses(directory / "metrics.jsonl").values())
    last = sum(losses[-3:]) / 3
    return PartVerdict(last < 0.9 * losses[0], f"loss {losses[0]:.3f} -> {last:.3f}")


def _resume(site: Site) -> Part:
    """The training again, without its last checkpoint: the second half is computed anew."""
    part = _training("resume", "train", 40, site)
    directory = site.run_directory("train")
    metrics, copy = directory / "metrics.jsonl", directory.with_name("before-resume.jsonl")

    def prepare() -> None:
        checkpoints = sorted((directory / "checkpoints").glob("step-*"))
        if len(checkpoints) < 2:
            raise ValueError(f"{directory} has no two checkpoints: the training failed")
        shutil.copy(metrics, copy)
        shutil.rmtree(checkpoints[-1])

    def judge(output: str) -> PartVerdict:
        return judge_resume(read_losses(copy), read_losses(metrics), output)

    goal = f"resumes; the last loss differs by at most {MAX_RESUME_DIFFERENCE:.0%}"
    return Part(part.name, part.command, part.seconds, goal, judge, prepare)


def judge_resume(before: dict[int, float], after: dict[int, float], output: str) -> PartVerdict:
    """Compare the last losses; the output must say that the run resumed."""
    last = max(before)
    if "going on from" not in output or last not in after:
        return PartVerdict(False, "the run did not resume")
    difference = abs(after[last] / before[last] - 1.0)
    return PartVerdict(difference <= MAX_RESUME_DIFFERENCE, f"{before[last]:.4f}, resumed {after[last]:.4f}")


def _decoding(name: str, device: str, site: Site) -> Part:
    """Greedy continuations in float32 by the model that the training left."""
    output = site.directory / f"decoded-{device}.jsonl"
    reference = site.directory / "decoded-cpu.jsonl"
    command = [
        _program("infer"),
        "--model",
        str(site.run_directory("train")),
        "--prompt",
        "def ",
        "--prompt",
        "import ",
    ]
    command += ["--max-new-tokens", "32", "--output", str(output)]
    command += _settings(f"model.device={device}", "model.dtype=float32", "generation.block_length=8")

    def judge(_: str) -> PartVerdict:
        return judge_decoding(read_logprobs(output), read_logprobs(reference))

    goal = f"mean log-probabilities within {MAX_DECODING_DIFFERENCE} nats of the CPU's"
    return Part(name, command, 15, goal, judge, lambda: output.unlink(missing_ok=True))


def read_logprobs(path: Path) -> list[float]:
    """Mean log-probability of each answer in a file of diffusionlm-infer."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"]["mean_logprob"] for line in lines]


def judge_decoding(values: list[float], reference: list[float]) -> PartVerdict:
    """Compare answers with those of the CPU."""
    difference = max(abs(value - expected) for value, expected in zip(values, reference, strict=True))
    return PartVerdict(
        difference <= MAX_DECODING_DIFFERENCE, f"{len(values)} answers, difference {difference:.1e} nats"
    )


def _head_benchmark(site: Site) -> Part:
    command = [sys.executable, "-m", "benchmarking.bench_kernels", "--rounds", "5"]

    def judge(output: str) -> PartVerdict:
        return judge_head(output, peak_flops(site.device_name))

    return Part("head and loss", command, 50, f"{HEAD_SHARE:.0%} of the peak in useful FLOPs", judge)


def read_table(output: str, column: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table that has a column, by header."""
    header: list[str] = []
    rows = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if column in cells:
            header = cells
        elif header and len(cells) == len(header) and not cells[0].startswith("---"):
            rows.append(dict(zip(header, cells, strict=True)))
        elif header and not line.startswith("|"):
            break
    return rows


def judge_head(output: str, peak: float | None) -> PartVerdict:
    """Compare the rate of the project's head and loss with the peak of the GPU."""
    rows = [row for row in read_table(output, "useful TFLOP/s") if row["implementation"] == "diffusionlm"]
    if not rows or peak is None:
        return PartVerdict(
            False, "not measured" if not rows else f"{rows[0]['ms']} ms; the peak of this GPU is not known"
        )
    share = float(rows[0]["useful TFLOP/s"].replace(",", "")) * 1e12 / peak
    return PartVerdict(share >= HEAD_SHARE, f"{rows[0]['ms']} ms, {share:.0%} of the peak, {rows[0]['peak MiB']} MiB")


def _training_benchmark(site: Site) -> Part:
    path = site.directory / "bench_train.toml"
    shape: dict[str, Any] = {"shape": "tiny" if site.is_rehearsal else "124m"}
    if site.is_rehearsal:
        shape |= {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, "batch_size": 2, "intermediate_size": 32}
    bench = {"precisions": ["bfloat16"], "objectives": ["masked_diffusion"], "device": site.device, "warmup": 3}
    config = {"bench": {**bench, "rounds": 2 if site.is_rehearsal else 10}, "shapes": [shape]}

    def prepare() -> None:
        path.write_text(tomli_w.dumps(config), encoding="utf-8")

    def judge(output: str) -> PartVerdict:
        return judge_speed(output, {} if site.is_rehearsal else MFU_GOALS)

    command = [_program("bench-train"), "--config", str(path)]
    goals = ", ".join(f"{name} {goal:.0%}" for name, goal in MFU_GOALS.items() if name == shape["shape"]) or "none"
    return Part("speed of training", command, 100, f"MFU of {goals}", judge, prepare)


def judge_speed(output: str, goals: Mapping[str, float]) -> PartVerdict:
    """Compare the MFU of each shape with its goal; a shape that has a goal needs one."""
    rows = read_table(output, "MFU")
    shares = {row["shape"]: float(row["MFU"].rstrip("%")) / 100 for row in rows if row["MFU"].endswith("%")}
    is_met = bool(rows) and all(shares.get(row["shape"], 0.0) >= goals.get(row["shape"], 0.0) for row in rows)
    texts = [f"{row['shape']}: {row['step, ms']} ms, MFU {row['MFU']}" for row in rows]
    return PartVerdict(is_met, "; ".join(texts) or "not measured")
