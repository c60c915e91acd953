"""Training on two ranks of one machine: our data parallelism, with and without sharded optimizer state, and our FSDP,
beside torch's own of both kinds.

    python -m benchmarking.bench_ddp

All take their turns in the same two processes, joined by gloo, one thread each. A turn is some steps and the wait for
what still travels after them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarking.harness import (
    collect_environment,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from config.model import ModelConfig
from config.parallel import DDP, FSDP, MultiProcessOptions
from ddp.launch import launch
from ddp.parallelism import Parallelism, apply_parallelism
from ddp.process_group import World, process_group
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.checkpointing.async_checkpointer import AsyncCheckpointer
from diffusionlm.training.checkpointing.save_coordinator import SaveCoordinator
from diffusionlm.training.checkpointing.staging import StagedCheckpoint, stage_checkpoint
from diffusionlm.training.checkpointing.store import CheckpointStore
from diffusionlm.training.setup import parameter_units
from profiling.memory import count_tensor_bytes

NAME = "bench_ddp"
OURS: dict[str, MultiProcessOptions] = {
    "ours, ddp": DDP(shard_optimizer=False, backend="gloo"),
    "ours, ddp, optimizer sharded": DDP(backend="gloo"),
    "ours, fsdp": FSDP(backend="gloo"),
}
TORCH_DDP, TORCH_FSDP = "torch DistributedDataParallel", "torch FSDP2"
MAX_NORM = 1.0
FIRST_STEPS = 4
"""After so many, losses are compared."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class DistributedBenchOptions:
    """What is measured."""

    hidden_size: int = 256
    layers: int = 4
    vocab_size: int = 4096
    length: int = 128
    rows: int = 4
    """Of a rank and step."""
    bucket_mib: float = 4.0
    rounds: int = 8
    warmup: int = 2
    steps: int = 3
    """Of a turn."""
    ranks: int = 2

    def model(self) -> Transformer:
        """The same on every call and rank."""
        model = Transformer(
            ModelConfig(
                hidden_size=self.hidden_size,
                num_hidden_layers=self.layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=self.hidden_size // 4,
                intermediate_size=self.hidden_size * 11 // 4,
                max_position_embeddings=self.length,
                vocab_size=self.vocab_size,
                mask_token_id=self.vocab_size - 1,
                eos_token_id=self.vocab_size - 2,
                pad_token_id=self.vocab_size - 2,
            )
        )
        init_weights(model, 0)
        return model


@dataclass
class DistributedImplementation:
    """A model on this rank, and how it takes a step."""

    step: Callable[[], Tensor]
    """Returns the rank's part of the loss."""
    finish: Callable[[], None]
    """Waits for what travels."""
    optimizer: torch.optim.Optimizer
    parallel: Parallelism | None = None

    def turn(self, steps: int) -> Tensor:
        """The last step's loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self.step()
        self.finish()
        return loss

    def optimizer_bytes(self) -> int:
        """Of this rank."""
        kept = (value for state in self.optimizer.state.values() for value in state.values())
        return count_tensor_bytes(_to_local(value) for value in kept if isinstance(value, torch.Tensor))


def _to_local(value: Tensor) -> Tensor:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def compute_loss(model: Callable[..., Tensor], tokens_BL: Tensor, ranks: World) -> Tensor:
    """This rank's part of the mean over all ranks: the sum over ranks is the loss."""
    logits_BLV = model(tokens_BL, pattern=Bidirectional())
    total = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL.flatten(), reduction="sum")
    return total / (tokens_BL.numel() * ranks.size)


def build_ours(
    options: DistributedBenchOptions, parallel: MultiProcessOptions, ranks: World, tokens_BL: Tensor
) -> DistributedImplementation:
    """By `apply_parallelism`, as the training loop does it."""
    if isinstance(parallel, DDP):
        parallel = parallel.model_copy(update={"bucket_mib": options.bucket_mib})
    assert isinstance(parallel, DDP | FSDP)
    model = options.model()
    spread = apply_parallelism(
        model, parallel, ranks, torch.device("cpu"), parameter_units(model), requires_whole_matrix=lambda name: False
    )
    optimizer = torch.optim.AdamW(spread.trainable_parameters().values(), lr=1e-3)

    def step() -> Tensor:
        with spread.backward(is_last=True):
            loss = compute_loss(model, tokens_BL, ranks)
            loss.backward()  # type: ignore[no-untyped-call]
        spread.clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        spread.start_weight_gather()
        return loss.detach()

    return DistributedImplementation(step, spread.wait_for_weights, optimizer, spread)


def build_torch(
    options: DistributedBenchOptions, name: str, ranks: World, tokens_BL: Tensor
) -> DistributedImplementation:
    """As torch's documentation has it: gradients are means over ranks, so each rank's loss is that of its own rows."""
    model: Any = options.model()
    if name == TORCH_DDP:
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=options.bucket_mib, gradient_as_bucket_view=True
        )
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = compute_loss(model, tokens_BL, ranks)
        (loss * ranks.size).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return DistributedImplementation(step, lambda: None, optimizer)


def build_all(options: DistributedBenchOptions, ranks: World) -> dict[str, DistributedImplementation]:
    """All of them, on the same rows."""
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens_BL = torch.randint(0, options.vocab_size, (options.rows, options.length), generator=generator)
    ours = {name: build_ours(options, parallel, ranks, tokens_BL) for name, parallel in OURS.items()}
    return ours | {name: build_torch(options, name, ranks, tokens_BL) for name in (TORCH_DDP, TORCH_FSDP)}


def loopback_bytes(text: str) -> int:
    """Sent over the loopback interface since the machine started, by what /proc/net/dev says."""
    for line in text.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise ValueError("/proc/net/dev names no interface lo, whose bytes were to be counted")


def wire_bytes(implementation: DistributedImplementation, ranks: World, steps: int) -> float:
    """Sent by a rank in a step, with what TCP adds. Whatever else on the machine talks to itself is counted too."""
    counters = Path("/proc/net/dev")
    ranks.barrier()
    before = loopback_bytes(counters.read_text(encoding="ascii")) if ranks.is_first else 0
    ranks.barrier()
    implementation.turn(steps)
    ranks.barrier()
    after = loopback_bytes(counters.read_text(encoding="ascii")) if ranks.is_first else 0
    return (after - before) / (steps * ranks.size)


def minimum_bytes(parameters: int, ranks: int) -> float:
    """What a rank has to send in a step so that all have the sums of float32 gradients, or the weights made of them."""
    return 2 * 4 * parameters * (ranks - 1) / ranks


@dataclass(frozen=True)
class CheckpointStall:
    """Seconds that training stands still for a checkpoint."""

    copy: float
    """To take the snapshot, which no way of saving can do without."""
    background: float
    """Until training goes on, while a thread writes."""
    foreground: float
    """Until training goes on, where it waits for the disk."""


def checkpoint_stall(implementation: DistributedImplementation, ranks: World, folder: Path) -> CheckpointStall:
    """Medians of three saves each."""
    parallel = implementation.parallel
    assert parallel is not None
    group = SaveCoordinator.join(ranks, 60.0)
    names: dict[Tensor, str] = {parameter: name for name, parameter in parallel.trainable_parameters().items()}

    def snapshot(step: int) -> StagedCheckpoint:
        state = {
            f"{names[parameter]}.{key}": value
            for parameter, values in implementation.optimizer.state.items()
            for key, value in values.items()
        }
        weights = dict(parallel.iterate_whole_parameters())
        return stage_checkpoint(step, _write_weights, {}, weights, parallel.to_checkpoint_state(state))

    def timed(saves: AsyncCheckpointer, step: int) -> tuple[float, float]:
        ranks.barrier()
        begun = time.perf_counter()
        taken = snapshot(step)
        copied = time.perf_counter()
        saves.start(taken)
        ended = time.perf_counter()
        saves.wait()
        return copied - begun, ended - begun

    measured = {}
    for index, background in enumerate((True, False)):
        saves = AsyncCheckpointer(CheckpointStore(folder / str(index), 1), group, background=background)
        measured[background] = [timed(saves, step) for step in range(1, 4)]
    copies = [copy for each in measured.values() for copy, _ in each]
    stalls = {background: statistics.median(whole for _, whole in each) for background, each in measured.items()}
    return CheckpointStall(statistics.median(copies), stalls[True], stalls[False])


def _write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def measure(options: DistributedBenchOptions, ranks: World, folder: Path) -> str:
    """On every rank: all contestants in turn. Returns the report on the first rank."""
    implementations = build_all(options, ranks)
    tell = print_message if ranks.is_first else lambda text: None

    def turn(implementation: DistributedImplementation) -> None:
        implementation.turn(options.steps)
        ranks.barrier()

    # Early: many steps on one batch make rounding large.
    losses = {name: ranks.sum(float(each.turn(FIRST_STEPS)))[0] for name, each in implementations.items()}
    turns = {name: partial(turn, implementation) for name, implementation in implementations.items()}
    seconds = time_in_turns(
        turns, rounds=options.rounds, warmup=options.warmup, after_round=lambda number, _: tell(f"round {number}")
    )
    wire = {name: wire_bytes(implementation, ranks, options.steps) for name, implementation in implementations.items()}
    held = {name: max(ranks.all_gather_objects(each.optimizer_bytes())) for name, each in implementations.items()}
    stalls = {
        name: checkpoint_stall(implementations[name], ranks, folder / str(index)) for index, name in enumerate(OURS)
    }
    parameters = sum(parameter.numel() for parameter in options.model().parameters())
    least = minimum_bytes(parameters, ranks.size)
    rows = []
    for name in implementations:
        peer = TORCH_FSDP if "fsdp" in name.lower() else TORCH_DDP
        speed = options.rows * options.length * ranks.size * options.steps / statistics.median(seconds[name])
        ratio = speedup(seconds[name], seconds[peer]).format_ratio() if name != peer else "-"
        size = f"{held[name] / MEBIBYTE:.2f}"
        rows.append([name, f"{speed:,.0f}", ratio, size, f"{wire[name] / MEBIBYTE:.2f}", f"{losses[name]:.6f}"])
    header = ["", "tok/s", "speed over torch's [quartiles]", "optimizer MiB a rank", "sent MiB", "loss"]
    saving = [[name, *(f"{1e3 * value:.1f}" for value in vars(stall).values())] for name, stall in stalls.items()]
    about = (
        f"{parameters:,} parameters, {options.layers} layers of {options.hidden_size}, vocabulary "
        f"{options.vocab_size:,}; {options.rows} rows of {options.length} tokens a rank, {ranks.size} ranks. "
        f"Sent: by a rank in a step; sums of gradients, or the weights made of them, need {least / MEBIBYTE:.2f} MiB. "
        f"Loss: of step {FIRST_STEPS}."
    )
    table = markdown_table(["checkpoint", "copy ms", "stall ms, background", "stall ms, foreground"], saving)
    return f"{about}\n\n{markdown_table(header, rows)}\n\n{table}"


def run_rank(options: DistributedBenchOptions) -> int:
    """What each rank runs."""
    torch.set_num_threads(1)
    with process_group(DDP(backend="gloo"), "cpu") as ranks, tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.run_on_first(lambda: own))
        report = measure(options, ranks, folder)
        if ranks.is_first:
            print(f"{report}\n\n{markdown_list(collect_environment(threads=1, packages=['torch']))}", flush=True)
        ranks.barrier()
    return 0


def main() -> int:
    """Parse, start the ranks."""
    parser = argparse.ArgumentParser(description="Compare two ranks with torch's own.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=8, help="measured turns of each (default: 8, at least 2)")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model (default: 256)")
    parser.add_argument("--rows", type=int, default=4, help="of a rank and step (default: 4)")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.hidden_size % 8 or arguments.hidden_size < 8 or arguments.rows < 1:
        parser.error("--rounds must be at least 2, --hidden-size a multiple of 8, --rows at least 1")
    options = DistributedBenchOptions(rounds=arguments.rounds, hidden_size=arguments.hidden_size, rows=arguments.rows)
    return launch(partial(run_rank, options), options.ranks, name=NAME)


if __name__ == "__main__":
    raise SystemExit(main())
