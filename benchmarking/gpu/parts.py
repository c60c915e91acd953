"""The parts of the check of a GPU machine: their commands, seconds and goals. See `benchmarking.gpu.check`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from benchmarking.gpu import judges
from benchmarking.gpu.judges import PartVerdict
from profiling.flops import peak_flops

TOTAL_SECONDS = 535
"""The parts' limits together on a GPU machine: nine minutes, less the time in which the last one ends its ranks."""
REHEARSAL_FACTOR = 5
"""Limits of a rehearsal over those of a GPU machine."""
ROOT = Path(__file__).parents[2]
"""Root of the repository. All commands run there, and their paths are relative to it."""
RESOURCES = Path("config/resources")
TESTS = ROOT / "tests"
GPU_MARK = "pytest.mark.gpu"

TINY_RUN = (
    "model.num_hidden_layers=1", "model.hidden_size=32", "model.intermediate_size=32", "tokenizer.vocab_size=300",
    "training.batch_size=4", "validation.final_rows=8", "samples.infills=[]",
)  # fmt: skip
"""Settings of the trainings of a rehearsal."""
TINY_DECODING = (
    "model.device=cpu", "model.shape.num_hidden_layers=1", "model.shape.hidden_size=32", "bench.new_tokens=8",
    "model.shape.num_attention_heads=2", "model.shape.num_key_value_heads=1", "model.shape.head_dim=16",
    "model.shape.intermediate_size=32", "model.shape.vocab_size=64", "bench.prompt_length=16", "bench.rounds=2",
)  # fmt: skip
TINY_SHAPE = {
    "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, "batch_size": 2, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
DECODING_SETTINGS = ("generation.block_length=8", "generation.cache=dual")
TINY_HEAD = ("64", "32", "16", "97")


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

    A rehearsal has the same parts with tiny models, and tests of the CPU in place of those that need a GPU. Its limits
    are longer: a processor may be slow or busy.
    """
    gpu_tests = find_gpu_tests()
    parts = [
        _doctor(site),
        _tests("compiled against plain", 60, gpu_tests["integration"], site),
        _tests("losses against the golden record", 20, gpu_tests["golden"], site),
        _tests("kernels against eager", 38, gpu_tests["kernels"], site),
        _training("training", site.run_directory("train"), 63, site),
        _resume(site),
        _decoding("decoding on the CPU", "cpu", site),
        _decoding("decoding", site.device, site),
        _head_benchmark(site),
        _training_benchmark("speed of training", "124m", "masked_diffusion", 44, site),
        _decoding_benchmark(site),
        _training("ranks", site.run_directory("ranks"), 36, site, strategy="ddp"),
        _training("ranks with FSDP", site.run_directory("fsdp"), 32, site, strategy="fsdp", steps=100),
        _training_benchmark("speed of training with blocks", "qwen3-1.7b", "block_diffusion", 48, site),
        _tests("other GPU tests", 30, gpu_tests["unit"], site),
    ]
    factor = REHEARSAL_FACTOR if site.is_rehearsal else 1
    return [replace(part, seconds=factor * part.seconds) for part in parts]


def _program(name: str) -> list[str]:
    """A command of the project, which needs no installed scripts."""
    return [sys.executable, "-m", "cli", name]


def _settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def _doctor(site: Site) -> Part:
    name = "none" if site.is_rehearsal else site.device_name

    def judge(output: str) -> PartVerdict:
        return judges.judge_doctor(output, name)

    return Part("doctor", _program("doctor"), 15, "no problem that stops a run", judge)


def find_gpu_tests() -> dict[str, list[str]]:
    """Folder below tests -> files with tests that need a GPU. Others may need packages that a machine does not have."""
    files: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if GPU_MARK in path.read_text(encoding="utf-8"):
            files.setdefault(path.relative_to(TESTS).parts[0], []).append(str(path.relative_to(ROOT)))
    return files


def _tests(name: str, seconds: int, paths: list[str], site: Site) -> Part:
    if site.is_rehearsal:  # tests that need no GPU, in place of those that do
        marker, paths = "not gpu and not slow", ["tests/unit/models/test_init.py"]
    else:
        marker = "gpu"
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]  # needs no plugins of pytest
    command = [sys.executable, "-m", "pytest", *options, "-m", marker, *paths]
    return Part(name, command, seconds, "all pass, none is skipped", judges.judge_tests)


def _training(
    name: str, directory: Path, seconds: int, site: Site, *, strategy: str = "single", steps: int = 300
) -> Part:
    """The quickstart of one process, or of a rank for each GPU."""
    program = "train" if strategy == "single" else "train-ddp"
    config = RESOURCES / ("train_ddp.toml" if strategy == "ddp" else "train.toml")
    steps = 12 if site.is_rehearsal else steps
    interval = steps // 2
    values = [f"run.directory={directory}", f"run.device={site.device}", f"training.max_steps={steps}"]
    values += [f"checkpoint.every_steps={interval}", "logging.every_steps=2", "samples.every_steps=0"]
    values += ["validation.ngrams=false"]
    if strategy != "single":
        values += [f"parallel.strategy={strategy}", f"parallel.local_ranks={max(1, site.num_gpus)}"]
    command = [*_program(program), "--config", str(config)]
    command += _settings(*values, *(TINY_RUN if site.is_rehearsal else ()))
    ranks = f"{max(1, site.num_gpus)} rank(s): " if strategy != "single" else ""

    def judge(output: str) -> PartVerdict:
        verdict = judges.judge_training(directory)
        return PartVerdict(verdict.is_met, ranks + verdict.result)

    return Part(name, command, seconds, "the loss falls by a tenth", judge)


def _resume(site: Site) -> Part:
    """The training again, without its last checkpoint: the second half is computed anew."""
    directory = site.run_directory("train")
    part = _training("resume", directory, 30, site)
    metrics, copy = directory / "metrics.jsonl", directory.with_name("before-resume.jsonl")

    def prepare() -> None:
        checkpoints = sorted((directory / "checkpoints").glob("step-*"))
        if len(checkpoints) < 2:
            raise ValueError(f"{directory} has no two checkpoints: the training failed")
        shutil.copy(metrics, copy)
        shutil.rmtree(checkpoints[-1])

    def judge(output: str) -> PartVerdict:
        return judges.judge_resume(judges.read_losses(copy), judges.read_losses(metrics), output)

    goal = f"resumes; the last loss differs by at most {judges.MAX_RESUME_DIFFERENCE:.0%}"
    return Part(part.name, part.command, part.seconds, goal, judge, prepare)


def _decoding(name: str, device: str, site: Site) -> Part:
    """Greedy continuations in float32 by the model that the training left.

    With the dual cache a forward reads one block of each text: its shape comes often enough for a CUDA graph.
    """
    output = site.directory / f"decoded-{device}.jsonl"
    reference = site.directory / "decoded-cpu.jsonl"
    command = [*_program("infer"), "--model", str(site.run_directory("train")), "--prompt", "def "]
    command += ["--prompt", "import ", "--max-new-tokens", "64", "--output", str(output)]
    command += _settings(f"model.device={device}", "model.dtype=float32", *DECODING_SETTINGS)

    def judge(log: str) -> PartVerdict:
        if "without CUDA graphs" in log:  # the warning of `GraphedForward`
            return PartVerdict(False, "a CUDA graph could not be recorded")
        return judges.judge_decoding(judges.read_logprobs(output), judges.read_logprobs(reference))

    goal = f"mean log-probabilities within {judges.MAX_DECODING_DIFFERENCE} nats of the CPU's"
    return Part(name, command, 13, goal, judge, lambda: output.unlink(missing_ok=True))


def _head_benchmark(site: Site) -> Part:
    """Head and loss of a model of 1.7 B parameters, half of 16,384 positions masked."""
    command = [sys.executable, "-m", "benchmarking.bench_kernels", "--rounds", "5", "--baseline-only"]
    command += ["--shape", *TINY_HEAD] if site.is_rehearsal else []
    goal, peak = (0.0, None) if site.is_rehearsal else (judges.HEAD_SHARE, peak_flops(site.device_name))

    def judge(output: str) -> PartVerdict:
        return judges.judge_head(output, peak, goal)

    return Part("head and loss", command, 43, f"{goal:.0%} of the peak in useful FLOPs" if goal else "none", judge)


def _training_benchmark(name: str, preset: str, objective: str, seconds: int, site: Site) -> Part:
    """Steps of a preset of the training benchmark."""
    path = site.directory / f"bench-{preset}.toml"
    shape: dict[str, Any] = {"shape": preset, **(TINY_SHAPE if site.is_rehearsal else {})}
    bench = {"precisions": ["bfloat16"], "objectives": [objective], "device": site.device, "details": False}
    bench |= {"warmup": 3, "rounds": 2 if site.is_rehearsal else 10}
    goals = {} if site.is_rehearsal else {preset: judges.MFU_GOALS[preset]}

    def prepare() -> None:
        path.write_text(tomli_w.dumps({"bench": bench, "shapes": [shape]}), encoding="utf-8")

    def judge(output: str) -> PartVerdict:
        return judges.judge_mfu(output, goals)

    goal = ", ".join(f"MFU of {preset} {goal:.0%}" for preset, goal in goals.items()) or "none"
    return Part(name, [*_program("bench-train"), "--config", str(path)], seconds, goal, judge, prepare)


def _decoding_benchmark(site: Site) -> Part:
    """128 requests, by random weights of the shape of SDAR-4B."""
    command = [*_program("bench-infer"), "--config", str(RESOURCES / "bench_infer_gpu.toml")]
    command += _settings(*(TINY_DECODING if site.is_rehearsal else ()))
    goal = 0.0 if site.is_rehearsal else judges.DECODING_GOAL

    def judge(output: str) -> PartVerdict:
        return judges.judge_throughput(output, goal)

    return Part("speed of decoding", command, 50, f"{goal:,.0f} tokens per second" if goal else "none", judge)
