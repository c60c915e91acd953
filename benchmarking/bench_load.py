"""Loading a directory beside transformers: wall time and memory, each load in a fresh process.

    python -m benchmarking.bench_load

The directory has the shape of Qwen3-0.6B, in bf16, with random weights; or it is one that is there. A process first
loads a tiny model, so that imports are over, then looks at the clock, loads, and reads one value of each page of each
parameter: what is only mapped would else be read later. The file lies in the page cache for both.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarking.harness import (
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
)
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.models.transformer import Transformer
from profiling.cores import usable_cores

OURS, THEIRS = "diffusionlm", "transformers"
STATUS = Path("/proc/self/status")
PAGE = 1024
"""Bytes between two values that are read, or less: no page is left out."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "vocab_size": 256,
    },
}


@dataclass(frozen=True)
class LoadMeasurement:
    """One load, as measured in its process."""

    seconds: float
    """Of the call."""
    seconds_with_touch: float
    """Until a value of each page has been read."""
    anonymous: int
    """Bytes of memory of the process's own that it has more than before."""
    mapped: int
    """Bytes of files that it has more in memory than before."""
    peak_anonymous: int
    """The most that ``anonymous`` was, as a thread saw it."""
    parameters: int
    checksum: float
    """Sum of all parameters."""


def write_model(directory: Path, shape: str) -> None:
    """A directory of random weights in bf16, tied, in one file."""
    config = ModelConfig(**SHAPES[shape], qk_norm=True, tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6)
    with torch.device("meta"):
        model = Transformer(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    model.lm_head.weight = model.model.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)


def file_bytes(directory: Path) -> int:
    """Of the weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def resident(text: str) -> dict[str, int]:
    """RssAnon and RssFile of a text such as /proc/self/status, in bytes."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in ("RssAnon", "RssFile")}


@dataclass
class MemorySampler:
    """Looks every two milliseconds how much anonymous memory there is."""

    peak: int = 0
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def _sample(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, resident(STATUS.read_text())["RssAnon"])

    def __enter__(self) -> MemorySampler:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()


def loader(library: str, dtype: str) -> Callable[[Path], Any]:
    """What loads a directory."""
    if library == OURS:
        return lambda directory: load_model(directory, dtype=dtype)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    automatic = transformers.AutoModelForCausalLM
    return lambda directory: automatic.from_pretrained(directory, dtype=dtype)


def touch(parameters: Iterable[torch.Tensor]) -> None:
    """Read a value of every page."""
    for parameter in parameters:
        parameter.detach().flatten()[:: PAGE // parameter.element_size()].sum()


def measure(library: str, directory: Path, dtype: str) -> LoadMeasurement:
    """Load once in this process."""
    load = loader(library, dtype)
    with TemporaryDirectory() as tiny:
        write_model(Path(tiny), "tiny")
        touch(load(Path(tiny)).parameters())
    gc.collect()
    before = resident(STATUS.read_text())
    with MemorySampler() as watch:
        start = time.perf_counter()
        model = load(directory)
        loaded = time.perf_counter()
        touch(model.parameters())
        end = time.perf_counter()
    after = resident(STATUS.read_text())
    return LoadMeasurement(
        seconds=loaded - start,
        seconds_with_touch=end - start,
        anonymous=after["RssAnon"] - before["RssAnon"],
        mapped=after["RssFile"] - before["RssFile"],
        peak_anonymous=max(watch.peak, after["RssAnon"]) - before["RssAnon"],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checksum=sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in model.parameters()),
    )


def measure_in_fresh_process(library: str, directory: Path, dtype: str, threads: int) -> LoadMeasurement:
    """`measure` there.

    Raises:
        ValueError: it failed; says what it said.
    """
    command = [sys.executable, "-m", "benchmarking.bench_load", "--measure", library, "--directory", str(directory)]
    command += ["--dtype", dtype, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{library} did not load {directory}: {done.stderr.strip()}")
    return LoadMeasurement(**json.loads(done.stdout.splitlines()[-1]))


def measure_in_turns(
    launch: Callable[[str], LoadMeasurement], *, rounds: int, warmup: int
) -> dict[str, list[LoadMeasurement]]:
    """A B A B ..., of which the first ``warmup`` rounds do not count.

    Raises:
        ValueError: they did not load the same.
    """
    loads: dict[str, list[LoadMeasurement]] = {OURS: [], THEIRS: []}
    for index in range(warmup + rounds):
        pair = {library: launch(library) for library in loads}
        check_equal_parameters(pair)
        times = ", ".join(f"{library} {load.seconds_with_touch:.2f} s" for library, load in pair.items())
        print_message(f"round {index - warmup + 1}/{rounds}: {times}" if index >= warmup else f"warm-up: {times}")
        if index >= warmup:
            for library, load in pair.items():
                loads[library].append(load)
    return loads


def check_equal_parameters(pair: Mapping[str, LoadMeasurement]) -> None:
    """Compare how many parameters there are, and their sum.

    Raises:
        ValueError: a difference; names it.
    """
    ours, theirs = pair[OURS], pair[THEIRS]
    if ours.parameters != theirs.parameters or not math.isclose(ours.checksum, theirs.checksum, rel_tol=1e-9):
        raise ValueError(
            f"{OURS} loaded {ours.parameters:,} parameters with sum {ours.checksum!r}, {THEIRS} {theirs.parameters:,} "
            f"with sum {theirs.checksum!r}; their speeds say nothing then"
        )


def table(loads: Mapping[str, list[LoadMeasurement]], size: int) -> str:
    """Medians of each, and how they compare within a round. ``size``: bytes of the weights' files."""
    rows = []
    for library, found in loads.items():
        seconds = [
            statistics.median(each) for each in zip(*((x.seconds, x.seconds_with_touch) for x in found), strict=True)
        ]
        memory = zip(*((x.anonymous, x.peak_anonymous, x.mapped) for x in found), strict=True)
        shares = [f"{statistics.median(each) / size:.2f}" for each in memory]
        times = [[getattr(x, name) for x in found] for name in ("seconds", "seconds_with_touch")]
        theirs = [[getattr(x, name) for x in loads[THEIRS]] for name in ("seconds", "seconds_with_touch")]
        ratios = [speedup(b, a).format_ratio() for a, b in zip(times, theirs, strict=True)]
        rows.append([library, *(f"{each:.2f}" for each in seconds), *ratios, *shares])
    header = ["library", "load s", "load and touch s", "load over theirs", "load and touch over theirs"]
    header += ["anonymous / file", "its peak / file", "mapped / file"]
    return markdown_table(header, rows)


def report(directory: Path, arguments: argparse.Namespace) -> str:
    """The table, and what it needs beside it."""

    def launch(library: str) -> LoadMeasurement:
        return measure_in_fresh_process(library, directory, arguments.dtype, arguments.threads)

    loads = measure_in_turns(launch, rounds=arguments.rounds, warmup=1)
    size = file_bytes(directory)
    facts = {
        "weights": f"{size:,} bytes, {loads[OURS][0].parameters:,} parameters, loaded as {arguments.dtype}",
        **collect_environment(threads=arguments.threads, packages=["torch", "transformers", "safetensors"]),
        "rounds": f"{arguments.rounds} after 1 of warm-up, each load in a process of its own",
    }
    return f"{table(loads, size)}\n\n{markdown_list(facts)}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare loading with that of transformers.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=10, help="measured loads of each (default: 10, at least 2)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="CPU threads (default: all usable cores)")
    parser.add_argument(
        "--directory", type=Path, help="model to load; made if it is not there (default: a temporary one)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of a model that is made")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")
    parser.add_argument("--measure", choices=(OURS, THEIRS), help="load once, in this process, and print that as JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error("--rounds must be at least 2 and --threads at least 1")
    if not is_installed("transformers"):
        parser.error("transformers is not installed, which this compares with: uv sync --group bench")
    if not STATUS.is_file():
        parser.error(f"{STATUS} is not there: memory is measured on Linux only")
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments.measure, arguments.directory, arguments.dtype))))
        return
    with TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary) / "model"
        if not (directory / "config.json").is_file():
            print_message(f"making {directory}")
            write_model(directory, arguments.shape)
        try:
            print(report(directory, arguments))
        except ValueError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
