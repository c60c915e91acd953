"""Loading a model directory, against transformers: wall time and memory, each load in a fresh process (Linux only).

    python -m benchmarking.bench_load

Without ``--directory`` the model has the shape of Qwen3-0.6B and random weights in bfloat16. A process first loads a
tiny model, so that imports are not measured. Then it measures the load and a read of one value of each page of each
parameter, because pages of a mapped file are read at their first use. The file is in the page cache for both.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarking.harness import (
    Benchmark,
    Report,
    Settings,
    Table,
    main,
    run_in_fresh_process,
    run_in_turns,
    speedup,
)
from config.model import ModelConfig
from diffusionlm.checkpoints.huggingface import load_model, save_model
from diffusionlm.models.transformer import Transformer
from files.terminal_text import print_message

OURS, THEIRS = "diffusionlm", "transformers"
STATUS = Path("/proc/self/status")
READ_STRIDE_BYTES = 1024
"""Bytes between two values that are read, at most the size of a page."""
SAMPLE_SECONDS = 0.002
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
    """One load, measured in its process. Memory is in bytes, above what the process had before."""

    seconds: float
    """Time of the call."""
    seconds_with_read: float
    """Time until a value of each page has been read."""
    anonymous: int
    """Anonymous memory after the load."""
    mapped: int
    """Resident pages of mapped files."""
    peak_anonymous: int
    """Peak of anonymous memory, sampled by a thread."""
    parameters: int
    checksum: float
    """Sum of all parameters."""


def write_model(directory: Path, shape: str) -> None:
    """Write a model directory with random weights in bfloat16, a tied head and one weight file."""
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


def weight_file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def parse_resident(text: str) -> dict[str, int]:
    """Read RssAnon and RssFile, in bytes, from a text like /proc/self/status."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in ("RssAnon", "RssFile")}


@dataclass
class MemorySampler:
    """Samples the anonymous memory of this process in a thread; a context manager."""

    peak: int = 0
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, parse_resident(STATUS.read_text())["RssAnon"])

    def __enter__(self) -> MemorySampler:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()


def get_loader(library: str, dtype: str) -> Callable[[Path], Any]:
    """The function of a library that loads a directory."""
    if library == OURS:
        return lambda directory: load_model(directory, dtype=dtype)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    auto_model = transformers.AutoModelForCausalLM
    return lambda directory: auto_model.from_pretrained(directory, dtype=dtype)


def read_all_pages(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.detach().flatten()[:: READ_STRIDE_BYTES // parameter.element_size()].sum()


def measure_load(library: str, directory: Path, dtype: str, threads: int = 1) -> LoadMeasurement:
    """Load once in this process, which should be a fresh one."""
    torch.set_num_threads(threads)
    load = get_loader(library, dtype)
    with TemporaryDirectory() as tiny:
        write_model(Path(tiny), "tiny")
        read_all_pages(load(Path(tiny)).parameters())
    gc.collect()
    before = parse_resident(STATUS.read_text())
    with MemorySampler() as sampler:
        start = time.perf_counter()
        model = load(directory)
        load_end = time.perf_counter()
        read_all_pages(model.parameters())
        end = time.perf_counter()
    after = parse_resident(STATUS.read_text())
    return LoadMeasurement(
        seconds=load_end - start,
        seconds_with_read=end - start,
        anonymous=after["RssAnon"] - before["RssAnon"],
        mapped=after["RssFile"] - before["RssFile"],
        peak_anonymous=max(sampler.peak, after["RssAnon"]) - before["RssAnon"],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checksum=sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in model.parameters()),
    )


Loads = Mapping[str, Sequence[LoadMeasurement]]


def measure_rounds(calls: Mapping[str, Callable[[], LoadMeasurement]], settings: Settings) -> Loads:
    """Measure loads of both libraries in turn.

    Raises:
        ValueError: they loaded different weights.
    """

    def after_round(number: int, loads: Mapping[str, LoadMeasurement]) -> None:
        check_equal_parameters(loads)
        times = ", ".join(f"{library} {load.seconds_with_read:.2f} s" for library, load in loads.items())
        print_message(f"round {number}/{settings.rounds}: {times}")

    return run_in_turns(calls, rounds=settings.rounds, warmup=settings.warmup, after_round=after_round)


def check_equal_parameters(loads: Mapping[str, LoadMeasurement]) -> None:
    """Compare the number of parameters and their sum.

    Raises:
        ValueError: one of them differs.
    """
    ours, theirs = loads[OURS], loads[THEIRS]
    if ours.parameters != theirs.parameters or not math.isclose(ours.checksum, theirs.checksum, rel_tol=1e-9):
        raise ValueError(
            f"{OURS} loaded {ours.parameters:,} parameters with sum {ours.checksum!r}, {THEIRS} {theirs.parameters:,} "
            f"with sum {theirs.checksum!r}; their times cannot be compared"
        )


def compare_loads(loads: Loads, file_bytes: int) -> Table:
    """Medians of each library, and speedups over transformers. ``file_bytes``: size of the weight files."""
    rows = []
    for library, measurements in loads.items():
        cells = [library]
        ratios = []
        for name in ("seconds", "seconds_with_read"):
            values, theirs = ([getattr(load, name) for load in group] for group in (measurements, loads[THEIRS]))
            cells.append(f"{statistics.median(values):.2f}")
            # Seconds over the seconds of transformers: its speedup over this library.
            ratios.append(speedup(theirs, values).format_ratio())
        memory = [
            f"{statistics.median(getattr(load, name) for load in measurements) / file_bytes:.2f}"
            for name in ("anonymous", "peak_anonymous", "mapped")
        ]
        rows.append([*cells, *ratios, *memory])
    header = ["library", "load s", "load and read s", "load / transformers", "load and read / transformers"]
    return Table([*header, "anonymous / file", "peak anonymous / file", "mapped / file"], rows)


def run(settings: Settings) -> Report:
    """Compare loads of one directory, which is written first if it does not exist."""
    options = settings.options
    with TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary) / "model"
        if not (directory / "config.json").is_file():
            print_message(f"writing {directory}")
            write_model(directory, options.shape)

        def measure(library: str) -> LoadMeasurement:
            arguments = (library, directory, options.dtype, settings.threads)
            return run_in_fresh_process(
                measure_load, *arguments, description=f"loading {directory} with {library}", key="--shape"
            )

        loads = measure_rounds({library: partial(measure, library) for library in (OURS, THEIRS)}, settings)
        size = weight_file_bytes(directory)
    weights = f"{size:,} bytes, {loads[OURS][0].parameters:,} parameters, loaded as {options.dtype}"
    return Report([compare_loads(loads, size)], {"weights": weights, "each load": "in a fresh process"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    note = "model to load; written if it does not exist (default: a temporary one)"
    parser.add_argument("--directory", type=Path, help=note)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of a model that is written")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")


def check_arguments(options: argparse.Namespace) -> str | None:
    return None if STATUS.is_file() else f"{STATUS} does not exist: memory is measured on Linux only"


BENCHMARK = Benchmark(
    "Compare loading a model directory with that of transformers.",
    run,
    rounds=10,
    warmup=1,
    packages=("torch", "transformers", "safetensors"),
    required_packages=("transformers",),
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
