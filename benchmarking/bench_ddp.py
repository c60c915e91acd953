"""Training on two ranks of one machine: our data parallelism (with and without sharded optimizer state) and our FSDP
against torch's DistributedDataParallel and FSDP2.

    python -m benchmarking.bench_ddp

All implementations take turns in the same two processes, connected by gloo. A turn is some optimizer steps and the wait
for communication that is still running after them.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarking.harness import (
    MEBIBYTE,
    collect_environment,
    compare,
    describe_model,
    make_parser,
    make_report,
    make_table,
    run_benchmark,
)
from config.model import ModelConfig
from config.training.parallel import DDP, FSDP, MultiProcessOptions
from ddp.launch import launch
from ddp.parallelism import local_values
from ddp.process_group import World, process_group
from ddp.strategies import apply_parallelism
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.setup import parameter_units
from logger.pages import Page, Table
from profiling.memory import count_tensor_bytes

NAME = "bench_ddp"
OURS: dict[str, MultiProcessOptions] = {
    "ours, ddp": DDP(shard_optimizer=False, backend="gloo"),
    "ours, ddp, optimizer sharded": DDP(backend="gloo"),
    "ours, fsdp": FSDP(backend="gloo"),
}
TORCH_DDP, TORCH_FSDP = "torch DistributedDataParallel", "torch FSDP2"
MAX_NORM = 1.0
STEPS_BEFORE_LOSS = 4
"""The losses of all implementations are stated after this step: later, rounding on one repeated batch is large."""
NUM_RANKS = 2
SENT_BYTES = Path("/sys/class/net/lo/statistics/tx_bytes")
"""The bytes that the loopback interface has sent."""
WARMUP = 2


@dataclass(frozen=True)
class DistributedCase:
    """The model, the batch and the length of a turn."""

    model: ModelConfig
    batch_size: int = 4
    """Sequences of a rank in a step."""
    bucket_mib: float = 4.0
    steps: int = 3
    """Optimizer steps of a turn."""

    def build_model(self) -> Transformer:
        """A model with the same weights on every call and rank."""
        model = Transformer(self.model)
        init_weights(model, 0)
        return model


CASE = DistributedCase(
    ModelConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=704,
        max_position_embeddings=128,
        vocab_size=4096,
    )
)


@dataclass
class DistributedImplementation:
    """The model of this rank and its optimizer step."""

    step: Callable[[], Tensor]
    """Returns this rank's summand of the loss."""
    finish: Callable[[], None]
    """Waits for communication."""
    optimizer: torch.optim.Optimizer

    def turn(self, steps: int) -> Tensor:
        """Take some steps, wait for communication and return the last loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self.step()
        self.finish()
        return loss

    def optimizer_bytes(self) -> int:
        """Size of the optimizer state on this rank."""
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return count_tensor_bytes(local_values(value) for value in values if isinstance(value, torch.Tensor))


def compute_loss(model: Callable[..., Tensor], tokens_BL: Tensor, world: World) -> Tensor:
    """This rank's summand of the loss, which is the mean over the tokens of all ranks."""
    logits_BLV = model(tokens_BL, pattern=Bidirectional())
    total = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL.flatten(), reduction="sum")
    return total / (tokens_BL.numel() * world.size)


def build_ours(
    case: DistributedCase, options: MultiProcessOptions, world: World, tokens_BL: Tensor
) -> DistributedImplementation:
    """Build a model and its step with `apply_parallelism`, as the training loop does."""
    if isinstance(options, DDP):
        options = options.model_copy(update={"bucket_mib": case.bucket_mib})
    assert isinstance(options, DDP | FSDP)
    model = case.build_model()
    parallel = apply_parallelism(
        model, options, world, torch.device("cpu"), parameter_units(model), requires_whole_matrix=lambda name: False
    )
    optimizer = torch.optim.AdamW(parallel.trainable_parameters().values(), lr=1e-3)

    def step() -> Tensor:
        with parallel.backward(is_last=True):
            loss = compute_loss(model, tokens_BL, world)
            loss.backward()  # type: ignore[no-untyped-call]
        parallel.clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        parallel.start_weight_gather()
        return loss.detach()

    return DistributedImplementation(step, parallel.wait_for_weights, optimizer)


def build_torch(case: DistributedCase, name: str, world: World, tokens_BL: Tensor) -> DistributedImplementation:
    """Build a model and its step as torch's documentation describes.

    Torch averages gradients over ranks, so that the loss is multiplied by the number of ranks before the backward.
    """
    model: Any = case.build_model()
    if name == TORCH_DDP:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=case.bucket_mib, gradient_as_bucket_view=True)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = compute_loss(model, tokens_BL, world)
        (loss * world.size).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return DistributedImplementation(step, lambda: None, optimizer)


def build_all(case: DistributedCase, world: World) -> dict[str, DistributedImplementation]:
    """Build all implementations, with the same batch."""
    generator = torch.Generator().manual_seed(world.rank)
    size = (case.batch_size, case.model.max_position_embeddings)
    tokens_BL = torch.randint(0, case.model.vocab_size, size, generator=generator)
    ours = {name: build_ours(case, options, world, tokens_BL) for name, options in OURS.items()}
    return ours | {name: build_torch(case, name, world, tokens_BL) for name in (TORCH_DDP, TORCH_FSDP)}


def measure_sent_bytes(implementation: DistributedImplementation, world: World, steps: int) -> float:
    """Measure the bytes that a rank sends in a step, TCP headers and other loopback traffic of the machine included."""
    world.barrier()
    before = int(SENT_BYTES.read_text())
    world.barrier()
    implementation.turn(steps)
    world.barrier()
    return (int(SENT_BYTES.read_text()) - before) / (steps * world.size)


def measure(case: DistributedCase, world: World, rounds: int) -> Table:
    """Compare all implementations; a collective call of all ranks."""
    implementations = build_all(case, world)

    def turn(implementation: DistributedImplementation) -> None:
        implementation.turn(case.steps)
        world.barrier()

    losses = {
        name: world.sum(float(implementation.turn(STEPS_BEFORE_LOSS)))[0]
        for name, implementation in implementations.items()
    }
    turns = {name: partial(turn, implementation) for name, implementation in implementations.items()}
    times = compare(turns, rounds=rounds, warmup=WARMUP, label="turn" if world.is_first else "")
    tokens = case.batch_size * case.model.max_position_embeddings * world.size * case.steps
    rows = []
    for name, implementation in implementations.items():
        sent = measure_sent_bytes(implementation, world, case.steps)
        state_bytes = max(world.all_gather_objects(implementation.optimizer_bytes()))
        peer = TORCH_FSDP if "fsdp" in name.lower() else TORCH_DDP
        ratio = times.format_speedup(name, peer) if name != peer else "-"
        sizes = [f"{size / MEBIBYTE:.2f}" for size in (state_bytes, sent)]
        rows.append([name, f"{tokens / times.median(name):,.0f}", ratio, *sizes, f"{losses[name]:.6f}"])
    header = ["implementation", "tok/s", "speedup over torch's [quartiles]", "optimizer MiB per rank", "sent MiB"]
    return make_table([*header, "loss"], rows)


def _describe_case(case: DistributedCase) -> str:
    model = case.model
    parameters = sum(parameter.numel() for parameter in case.build_model().parameters())
    # All gradients in float32 are reduced, and all sums or weights gathered.
    minimum = 2 * 4 * parameters * (NUM_RANKS - 1) / NUM_RANKS / MEBIBYTE
    return (
        f"{describe_model(model)}, vocabulary {model.vocab_size:,}, {parameters:,} parameters; "
        f"{NUM_RANKS} ranks with {case.batch_size} sequences of {model.max_position_embeddings} tokens each. Sent: by "
        f"a rank in a step; the minimum is {minimum:.2f} MiB. Loss: of step {STEPS_BEFORE_LOSS}."
    )


def run_rank(case: DistributedCase, rounds: int, threads: int, table_file: Path) -> int:
    """Run one rank; the first one writes the table."""
    torch.set_num_threads(threads)
    with process_group(DDP(backend="gloo"), "cpu") as world:
        table = measure(case, world, rounds)
        if world.is_first:
            table_file.write_bytes(pickle.dumps(table))
        world.barrier()
    return 0


def run(options: argparse.Namespace) -> Page:
    """Start the ranks and return the report of the first one."""
    environment = collect_environment(threads=options.threads, packages=["torch"], rounds=options.rounds, warmup=WARMUP)
    with tempfile.TemporaryDirectory() as folder:
        table_file = Path(folder) / "table"
        exit_code = launch(partial(run_rank, CASE, options.rounds, options.threads, table_file), NUM_RANKS, name=NAME)
        if exit_code:
            raise ValueError(f"the ranks ended with exit code {exit_code}")
        table: Table = pickle.loads(table_file.read_bytes())
    return make_report("Training on two ranks", [_describe_case(CASE), table], environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run the benchmark."""
    parser = make_parser("Compare data parallelism and FSDP on two ranks with torch's.", rounds=8, threads=1)
    return run_benchmark(run, parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
