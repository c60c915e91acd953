"""Training speed and peak memory of masked diffusion: this project, and peers that train the same shapes.

Speed is measured in one process, one optimizer step of each contestant in turn. Peak memory is measured in a fresh
process for each contestant and case, since allocators keep what they once had.

Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarking.harness import (
    Seconds,
    environment,
    is_installed,
    markdown_list,
    markdown_table,
    say,
    speedup,
    time_in_turns,
)
from config.bench_train import BenchSection, BenchTrainConfig, Precision, Shape
from config.objective import MaskedDiffusion, NextToken, Objective
from config.optimizer import AdamW
from diffusionlm.diffusion.batch import Batch, DrawKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.optim import build_optimizers
from profiling.cores import usable_cores
from profiling.memory import PeakGrowth

OURS = "diffusionlm"
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-4
LEAST_PROBABILITY = 1e-3
"""Of masking, in the peer's draws (LLaDA's epsilon)."""
MEMORY_STEPS = 3
"""The first makes the optimizer's state, the others have their peak with it."""
MEBIBYTE = 1 << 20

METHODS = {
    OURS: "masked counts drawn on the CPU within the step; the last block's queries and feed-forward, the head and the "
    "loss on masked positions only; AdamW, fused",
    "transformers": "Qwen3ForCausalLM (sdpa attention, no cache), bidirectional by a 4-D additive mask of zeros; "
    "logits of all positions; cross-entropy of `logits.float()` with `ignore_index`, LLaDA's draws and weights; "
    "`torch.optim.AdamW` at its defaults (neither foreach nor fused on a CPU)",
}
METHOD = f"""\
One step is draws, forward, backward, `clip_grad_norm_` to {MAX_GRAD_NORM:g} and the update, on the same tokens; \
weights are float32, bfloat16 is autocast. The contestants take turns, step by step, in one process. \
tok/s: tokens of the batch by the median step. \
Speedup: ratio of the median steps, then median and quartiles of the ratios within a round. \
Peak: in a fresh process of {MEMORY_STEPS} steps, the growth of the resident set (on CUDA, of allocated memory) over \
what it was before the model was built, with the libraries already in use."""


@dataclass(frozen=True)
class Case:
    """A shape in a precision, on a device."""

    shape: Shape
    precision: Precision
    device: str
    threads: int
    seed: int

    @property
    def label(self) -> str:
        return f"{self.shape.name}, {self.precision}"

    def tokens(self) -> Tensor:
        """Random tokens [B, L] without the mask token, on the CPU; the same for all contestants."""
        size = (self.shape.batch_size, self.shape.max_position_embeddings)
        return torch.randint(self.shape.mask_token, size, generator=torch.Generator().manual_seed(self.seed))

    def autocast(self) -> torch.autocast:
        """The context of the forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")


@dataclass(frozen=True)
class Contestant:
    """A model, and one optimizer step of it: done when it returns, with the loss."""

    model: nn.Module
    step: Callable[[], Tensor]


def build_ours(case: Case, objective_config: Objective | None = None) -> Contestant:
    """This project's model, draws, score and optimizer; masked diffusion unless said otherwise."""
    objective_config = objective_config or MaskedDiffusion()
    shifted = isinstance(objective_config, NextToken)
    alignment = {"logit_alignment": "shifted"} if shifted else {}
    model = Transformer(case.shape.complete().model_copy(update=alignment))
    init_weights(model, case.seed)
    model.to(case.device)
    optimizers = build_optimizers(AdamW(learning_rate=LEARNING_RATE), model)
    objective = build_objective(objective_config, model.config)
    tokens_BL = case.tokens()
    batch = Batch(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    steps = itertools.count()

    def step() -> Tensor:
        key = DrawKey(case.seed, next(steps), first_row=0, rows_in_step=len(tokens_BL))
        draw = objective.draw(batch, key).to(torch.device(case.device))
        score = objective.score(draw, draw.denominator)
        with case.autocast():
            scored = model(draw.inputs_BS, pattern=draw.pattern, rows=draw.rows_R, score=score)
        scored.loss_sum.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizers.step(1.0)
        return _finished(scored.loss_sum)

    return Contestant(model, step)


def build_transformers(case: Case) -> Contestant:
    """A Qwen3 of the same shape, trained the usual way."""
    # By name and untyped: the group `bench` need not be installed to run or to check this file.
    transformers: Any = importlib.import_module("transformers")
    shape, device = case.shape, case.device
    torch.manual_seed(case.seed)
    settings = shape.model_dump(exclude={"name", "batch_size", "qk_norm", "logit_alignment"})
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    model = transformers.Qwen3ForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens_BL = case.tokens().to(device)
    B, L = tokens_BL.shape
    everyone_B1LL = torch.zeros(B, 1, L, L, device=device)

    def step() -> Tensor:
        probability_B1 = (1 - LEAST_PROBABILITY) * torch.rand(B, 1, device=device) + LEAST_PROBABILITY
        masked_BL = torch.rand(B, L, device=device) < probability_B1
        labels_BL = tokens_BL.masked_fill(~masked_BL, -100)
        inputs_BL = tokens_BL.masked_fill(masked_BL, shape.mask_token)
        with case.autocast():
            logits_BLV = model(inputs_BL, attention_mask=everyone_B1LL, use_cache=False).logits
        logits = logits_BLV.float().flatten(0, 1)
        nll_BL = F.cross_entropy(logits, labels_BL.flatten(), ignore_index=-100, reduction="none").view(B, L)
        loss = (nll_BL / probability_B1).sum() / (B * L)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _finished(loss)

    return Contestant(model, step)


BUILDERS: Mapping[str, Callable[[Case], Contestant]] = {OURS: build_ours, "transformers": build_transformers}


def _finished(loss: Tensor) -> Tensor:
    """The loss, once the device has done all of its work."""
    if loss.device.type == "cuda":
        torch.cuda.synchronize()
    return loss.detach()


@dataclass(frozen=True)
class Result:
    """A case as measured, by contestant."""

    case: Case
    seconds: Seconds
    peak_bytes: dict[str, int]
    parameters: dict[str, int]

    def tokens_per_second(self, name: str) -> float:
        """At the median step."""
        return self.case.shape.tokens / statistics.median(self.seconds[name])

    def json_lines(self) -> str:
        """One line for each contestant."""
        about = {"shape": self.case.shape.model_dump(), "precision": self.case.precision, "device": self.case.device}
        return "".join(
            json.dumps(
                {
                    "contestant": name,
                    **about,
                    "threads": self.case.threads,
                    "parameters": self.parameters[name],
                    "peak_bytes": self.peak_bytes[name],
                    "seconds": [round(value, 6) for value in times],
                }
            )
            + "\n"
            for name, times in self.seconds.items()
        )


def measure_case(case: Case, names: list[str], *, rounds: int, warmup: int) -> Result:
    """Speed in this process, then peak memory in fresh ones."""
    say(f"{case.label}: warm-up")
    contestants = {name: BUILDERS[name](case) for name in names}
    parameters = {name: count_parameters(contestant.model) for name, contestant in contestants.items()}

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        speeds = ", ".join(f"{name} {case.shape.tokens / value:,.0f} tok/s" for name, value in seconds.items())
        say(f"{case.label}: round {number}/{rounds}: {speeds}")

    steps = {name: contestant.step for name, contestant in contestants.items()}
    seconds = time_in_turns(steps, rounds=rounds, warmup=warmup, after_round=after_round)
    del contestants, steps
    gc.collect()
    peak_bytes = {}
    for name in names:
        peak_bytes[name] = measure_peak(case, name)
        say(f"{case.label}: peak memory of {name} {_mebibytes(peak_bytes[name])}")
    return Result(case, seconds, peak_bytes, parameters)


def count_parameters(model: nn.Module) -> int:
    """Numbers that are trained; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def measure_peak(case: Case, name: str) -> int:
    """Peak memory of a contestant in bytes, measured in a process of its own.

    Raises:
        ValueError: the process was killed.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak_here, case, name).result()
        except BrokenProcessPool:
            raise ValueError(
                f"{name} was killed while its memory was measured ({case.label}); "
                "if the machine ran out of memory, lower shapes.batch_size"
            ) from None


def _peak_here(case: Case, name: str) -> int:
    torch.set_num_threads(case.threads)
    # A first step of a tiny model loads what libraries load at first use.
    BUILDERS[name](replace(case, shape=_tiny(case.shape))).step()
    gc.collect()
    peak = PeakGrowth(case.device)
    contestant = BUILDERS[name](case)
    for _ in range(MEMORY_STEPS):
        contestant.step()
    return peak.bytes()


def _tiny(shape: Shape) -> Shape:
    least = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "batch_size": 2}
    return shape.model_copy(update=least | {"max_position_embeddings": min(16, shape.max_position_embeddings)})


def bench_train(config: BenchTrainConfig) -> str:
    """Measure all cases; progress on stderr, files in the output directory.

    Returns:
        The report in Markdown.

    Raises:
        ValueError: a peer or a device that is not there.
    """
    bench = config.bench
    device, threads = check_machine(bench)
    cases = [
        Case(shape, precision, device, threads, bench.seed) for shape in config.shapes for precision in bench.precisions
    ]
    names = [OURS, *bench.peers]
    folder = config.output.directory
    torch.set_num_threads(threads)
    accelerator = torch.cuda.get_device_name() if device == "cuda" else None
    where = environment(threads=threads, packages=["torch", *bench.peers], accelerator=accelerator)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "training_speed.jsonl").write_text("", encoding="utf-8")
    results = []
    for case in cases:
        results.append(measure_case(case, names, rounds=bench.rounds, warmup=bench.warmup))
        _append(folder, results[-1])
    where["rounds"] = f"{bench.rounds} after {bench.warmup} of warm-up"
    text = report(results, where)
    if folder is not None:
        (folder / "training_speed.md").write_text(text + "\n", encoding="utf-8")
    return text


def check_machine(bench: BenchSection) -> tuple[str, int]:
    """Device and number of threads.

    Raises:
        ValueError: a peer or a device that is not there.
    """
    for peer in bench.peers:
        if not is_installed(peer):
            raise ValueError(
                f'bench.peers has "{peer}", which is not installed; install the group bench '
                f"(uv sync --group bench), or measure without it: --set bench.peers=[]"
            )
    has_cuda = torch.cuda.is_available()
    if bench.device == "cuda" and not has_cuda:
        raise ValueError('bench.device = "cuda", but torch finds no CUDA device; set bench.device = "cpu" or "auto"')
    device = "cuda" if has_cuda and bench.device != "cpu" else "cpu"
    return device, bench.threads or usable_cores()


def _append(folder: Path | None, result: Result) -> None:
    if folder is not None:
        with (folder / "training_speed.jsonl").open("a", encoding="utf-8") as file:
            file.write(result.json_lines())


def report(results: list[Result], where: dict[str, str]) -> str:
    """Table, method and conditions."""
    names = list(results[0].seconds)
    peers = names[1:]
    header = ["shape", "precision", *[f"{name} tok/s" for name in names]]
    header += [cell for peer in peers for cell in (f"speedup over {peer}", "in a round [quartiles]")]
    header += [f"{name} peak" for name in names]
    rows = []
    for result in results:
        ratios = [speedup(result.seconds[OURS], result.seconds[peer]) for peer in peers]
        row = [result.case.shape.name, result.case.precision]
        row += [f"{result.tokens_per_second(name):,.0f}" for name in names]
        row += [cell for ratio in ratios for cell in (f"{ratio.of_medians:.2f}", ratio.within_rounds())]
        rows.append(row + [_mebibytes(result.peak_bytes[name]) for name in names])
    shapes = {result.case.shape.name: _describe(result) for result in results}
    methods = {name: METHODS[name] for name in names}
    return "\n\n".join([markdown_table(header, rows), METHOD, markdown_list(methods | shapes | where)])


def _describe(result: Result) -> str:
    shape = result.case.shape
    head = "tied" if shape.tie_word_embeddings else "untied"
    return (
        f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads "
        f"({shape.num_key_value_heads} of keys and values) of {shape.head_dim}, SwiGLU {shape.intermediate_size}, "
        f"vocabulary {shape.vocab_size:,}, {head} head, {result.parameters[OURS]:,} parameters; "
        f"{shape.batch_size} rows of {shape.max_position_embeddings} tokens a step"
    )


def _mebibytes(size: int) -> str:
    return f"{size / MEBIBYTE:,.0f} MiB"
