"""Estimate training on many GPUs: memory of a rank, communication and time of a step.

Nothing here is measured: times follow from the assumptions in `Cluster`. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from config.model import Architecture
from profiling.flops import AttentionKind, count_parameters, feed_forward_width, flops_per_token

ParallelStrategy = Literal["ddp", "ddp, sharded", "fsdp"]
PARALLEL_STRATEGIES: tuple[ParallelStrategy, ...] = ("ddp", "ddp, sharded", "fsdp")


@dataclass(frozen=True)
class Cluster:
    """GPUs and their interconnect. Defaults: machines of eight H200, data-sheet values times usual utilization."""

    gpus_per_node: int = 8
    memory: float = 141e9
    """Memory of a GPU, in bytes."""
    usable: float = 0.9
    """Usable share of the memory; the rest is the CUDA context, NCCL and fragmentation."""
    peak_flops: float = 989.4e12
    """Dense bfloat16 FLOPs per second."""
    model_flops_share: float = 0.4
    """Share of the peak during computation (MFU without communication)."""
    memory_bandwidth: float = 4.8e12 * 0.7
    """Bytes per second during the optimizer's update."""
    intra_node_bandwidth: float = 450e9 * 0.8
    """Bytes per second of a rank in a collective within a machine (NVLink 4)."""
    inter_node_bandwidth: float = 8 * 50e9 * 0.8
    """Bytes per second between machines: rings use all adapters at once (400 Gbit/s for each GPU)."""
    hop_latency: float = 5e-6
    """Seconds for each machine or GPU in the ring of a collective."""

    def bandwidth(self, ranks: int) -> float:
        """Return the bandwidth of a collective over ``ranks`` ranks, in bytes per second."""
        if ranks <= self.gpus_per_node:
            return self.intra_node_bandwidth
        return min(self.intra_node_bandwidth, self.inter_node_bandwidth)


@dataclass(frozen=True)
class TrainingJob:
    """A model, its batch and its parallel strategy."""

    model: Architecture
    vocab_size: int
    ranks: int
    strategy: ParallelStrategy
    row_length: int = 4096
    batch_size: int = 512
    """Sequences of a step, over all ranks."""
    micro_batch_size: int = 1
    """Sequences of a forward on one rank."""
    pattern: AttentionKind = "block_diffusion"
    block_length: int = 4
    floats_per_parameter: float = 2.0
    """float32 values that the optimizer keeps for each parameter: AdamW 2, Muon 1."""
    keeps_all_activations: bool = True
    """False: full activation checkpointing; only block inputs are kept and blocks are recomputed."""
    reshards_after_forward: bool = True
    """`parallel.reshard_after_forward` of FSDP."""
    bucket: float = 32 * 2**20
    """Bucket size in bytes."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.model, self.vocab_size)[0]

    @property
    def rows(self) -> int:
        """Sequences of a rank in a step."""
        return self.batch_size // self.ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.rows // self.micro_batch_size

    @property
    def block_parameters(self) -> int:
        """Parameters of a block, on average."""
        return (self.parameters - self.root_parameters) // self.model.num_hidden_layers

    @property
    def root_parameters(self) -> int:
        """Parameters of embedding, head and final norm, which FSDP gathers with the root module."""
        return count_parameters(self.model, self.vocab_size)[1] + self.model.hidden_size


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights that are gathered temporarily, and their gradients."""
    activations: float
    """Activations of one micro-batch."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def estimate_rank_memory(job: TrainingJob) -> RankMemory:
    """Estimate the memory of a rank; weights, gradients and optimizer state are float32.

    ``ddp``: gradients are in the buckets alone. Sharded, a rank has its part of weights and gradients once more, which
    the optimizer works on. ``fsdp``: two blocks are gathered in bfloat16, that which runs and the next one, with the
    gradients of one; embedding and head in float32, with their gradients.
    """
    whole, part = 4.0 * job.parameters, 4.0 * job.parameters / job.ranks
    activations = activation_bytes(job)
    match job.strategy:
        case "ddp":
            return RankMemory(whole, whole, job.floats_per_parameter * whole, 0.0, activations)
        case "ddp, sharded":
            return RankMemory(whole + part, whole + part, job.floats_per_parameter * part, 0.0, activations)
        case "fsdp":
            blocks = job.block_parameters * (2 if job.reshards_after_forward else job.model.num_hidden_layers)
            gathered = 2.0 * (blocks + job.block_parameters) + 8.0 * job.root_parameters
            return RankMemory(part, part, job.floats_per_parameter * part, gathered, activations)


def activation_bytes(job: TrainingJob) -> float:
    """Estimate activations that the backward of a micro-batch needs: bfloat16, fused attention, fused head and loss.

    `estimate.ResourceEstimate` differs on purpose: it assumes float32, eager attention and all logits.

    Of a block: what goes into both norms and comes out of them, queries, keys, values and their mixture, gate, up and
    their product (of a mixture those of the experts that a token meets). With checkpointing one block at a time.
    """
    model = job.model
    positions = job.micro_batch_size * job.row_length * (2 if job.pattern == "block_diffusion" else 1)
    q_width, kv_width = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    numbers_per_layer = []
    for layer in range(model.num_hidden_layers):
        inner = feed_forward_width(model, layer, model.num_experts_per_tok)
        numbers_per_layer.append(4 * model.hidden_size + 2 * q_width + 2 * kv_width + 3 * inner)
    numbers = (
        sum(numbers_per_layer)
        if job.keeps_all_activations
        else model.num_hidden_layers * model.hidden_size + max(numbers_per_layer)
    )
    return 2.0 * positions * numbers


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends, and receives, in a step: those of a ring, the minimum of any algorithm."""

    gradients: float
    weights: float
    """Bytes of all weight gathers of a step."""
    collectives: int

    @property
    def total(self) -> float:
        """Bytes of gradients and weights together."""
        return self.gradients + self.weights


def estimate_traffic(job: TrainingJob) -> Traffic:
    """Gradients and weights travel in float32, once a step. With fsdp gradients travel for each micro-batch, and
    weights of blocks in bfloat16 for each forward and, where they are dropped between, each backward."""
    share = (job.ranks - 1) / job.ranks
    whole = 4.0 * job.parameters * share
    if job.strategy == "ddp":
        # An all-reduce is a reduce-scatter and an all-gather of the sums.
        return Traffic(2.0 * whole, 0.0, -(-4 * job.parameters // int(job.bucket)))
    if job.strategy == "ddp, sharded":
        return Traffic(whole, whole, 2 * -(-4 * job.parameters // int(job.bucket)))
    layers = job.model.num_hidden_layers
    gathers = job.micro_batches * (2 if job.reshards_after_forward else 1)
    blocks = 2.0 * layers * job.block_parameters * share * (gathers if job.reshards_after_forward else 1)
    root = 4.0 * job.root_parameters * share
    collectives = layers * ((gathers if job.reshards_after_forward else 1) + job.micro_batches) + 1 + job.micro_batches
    return Traffic(whole * job.micro_batches, blocks + root, collectives)


@dataclass(frozen=True)
class StepTime:
    """Time of a step, in seconds."""

    compute: float
    """Forward and backward of all micro-batches of a rank."""
    traffic: float
    """Duration of all collectives without overlap."""
    exposed: float
    """Part of the collectives that computation does not hide."""
    update: float

    @property
    def total(self) -> float:
        """Duration of the step."""
        return self.compute + self.exposed + self.update


def estimate_step_time(job: TrainingJob, cluster: Cluster) -> StepTime:
    """A forward is a third of the computation (a quarter, where blocks are computed again).

    ``ddp``: gradients hide behind the backward of the last micro-batch, but for the last bucket; of ``ddp, sharded``
    weights hide behind the next step's first forward, but for the first bucket. ``fsdp``: gathers hide behind the block
    before, in forward and backward, and gradients behind the backward; the first gather of a pass does not.
    """
    parts = 3 if job.keeps_all_activations else 4
    per_token = flops_per_token(job.model, job.vocab_size, job.row_length, 0.5, job.pattern, job.block_length)
    flops = per_token * job.rows * job.row_length * parts / 3
    compute = flops / (cluster.peak_flops * cluster.model_flops_share)
    forward = compute / parts / job.micro_batches
    backward = forward * (parts - 1)
    moved, rate = estimate_traffic(job), cluster.bandwidth(job.ranks)
    latency = cluster.hop_latency * (min(job.ranks, cluster.gpus_per_node) + job.ranks / cluster.gpus_per_node)
    share = (job.ranks - 1) / job.ranks
    bucket = job.bucket * share / rate + latency
    half = moved.collectives / 2 * latency
    if job.strategy == "ddp":
        exposed = max(2 * bucket, moved.gradients / rate + 2 * half - backward)
    elif job.strategy == "ddp, sharded":
        exposed = max(bucket, moved.gradients / rate + half - backward)
        exposed += max(bucket, moved.weights / rate + half - forward)
    else:
        exposed = _fsdp_exposed_seconds(job, forward, backward, rate, latency)
    owned = job.parameters if job.strategy == "ddp" else job.parameters / job.ranks
    # Weights and moments are read and written, gradients read.
    update = 4.0 * owned * (3 + 2 * job.floats_per_parameter) / cluster.memory_bandwidth
    return StepTime(compute, moved.total / rate + moved.collectives * latency, exposed, update)


def _fsdp_exposed_seconds(job: TrainingJob, forward: float, backward: float, rate: float, latency: float) -> float:
    """Seconds of a step in which a rank waits for weights or gradients."""
    share = (job.ranks - 1) / job.ranks
    layers, block = job.model.num_hidden_layers, job.block_parameters * share
    gather, scatter = 2.0 * block / rate + latency, 4.0 * block / rate + latency
    root = 4.0 * job.root_parameters * share / rate + latency
    # Per micro-batch: the first block's gather of each pass, and what of the others exceeds the computation.
    ahead = gather + max(0.0, layers * gather - forward)
    again = gather + max(0.0, layers * gather - backward) if job.reshards_after_forward else 0.0
    passes = job.micro_batches if job.reshards_after_forward else 1
    gathers_behind = layers * gather if job.reshards_after_forward else 0.0
    last = scatter + root + max(0.0, layers * scatter - max(0.0, backward - gathers_behind))
    return root + passes * (ahead + again) + job.micro_batches * last


def find_fastest_job(job: TrainingJob, cluster: Cluster) -> TrainingJob | None:
    """Return the fastest micro-batch size and checkpointing that fit into memory; None: none fits."""
    fitting = []
    for keeps_all_activations in (True, False):
        for size in (1, 2, 4, 8, 16):
            candidate = replace(job, micro_batch_size=size, keeps_all_activations=keeps_all_activations)
            if job.rows % size == 0 and estimate_rank_memory(candidate).total <= cluster.memory * cluster.usable:
                fitting.append(candidate)
    return min(
        fitting,
        key=lambda candidate: (estimate_step_time(candidate, cluster).total, candidate.micro_batch_size),
        default=None,
    )
