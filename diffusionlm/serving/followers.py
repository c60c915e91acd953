"""Tensor parallelism of an engine: one process schedules and samples, the others compute their part of each forward.

Before each forward the first rank, the leader, sends what it reads: token ids, positions and pages. Each rank writes
the keys and values of its heads to the same pages of its own cache. The ranks sample together from the columns of the
logits that each has (`sharded_sampling`), or the leader alone from gathered logits if a request needs them whole. The
tokens of the leader are those that count.

A rank that dies or hangs ends the engine: the next message, or the next collective of the forward, fails within
`TIMEOUT_SECONDS`. An idle leader sends a message every few seconds.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from config.model import ModelConfig
from config.training.parallel import check_tensor_ranks
from config.training.runtime import AttentionBackend
from ddp.mesh import Axis, Shard
from ddp.mesh_parallel import allocate
from ddp.tensor_parallel import apply_tensor_parallel
from diffusionlm.inference.cuda_graphs import InputText
from diffusionlm.inference.images import TextImages
from diffusionlm.inference.model_runner import ModelRunner
from diffusionlm.inference.sampling.sharded_sampling import ShardedSampling
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.lora import adapter_modules
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice

LOGGER = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
"""Limit of a collective."""
LOADING_SECONDS = 600.0
"""Limit of the start of a process, and of each weight."""


@dataclass(frozen=True)
class ModelSpec:
    """What a process needs to build its part of a model."""

    config: ModelConfig
    attention_backend: AttentionBackend
    dtypes: dict[str, torch.dtype]
    """Of each parameter."""
    device_type: str
    num_threads: int

    def build(self, rank: int, size: int, group: Any) -> tuple[Transformer, dict[str, Shard]]:
        """The part of a rank on ``meta``, and where it is in the whole model. All ranks are in the group."""
        with torch.device("meta"):
            model = Transformer(self.config, attention_backend=self.attention_backend)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])
        return model.eval(), apply_tensor_parallel(model, Axis(size, rank, group))

    def device(self, rank: int) -> torch.device:
        """The GPU of a rank, or the CPU."""
        return torch.device(self.device_type, rank) if self.device_type == "cuda" else torch.device("cpu")


class Followers:
    """The other processes of a model, as the leader sees them. `model` is the leader's part.

    After `__init__` one thread uses it: that of the engine.
    """

    def __init__(self, model: Transformer, size: int, device_type: str) -> None:
        """Start the processes and send them their weights, one parameter after the other.

        Args:
            model: whole, on the CPU; its weights may be memory-mapped.
            size: processes, with this one.
            device_type: ``cpu``, or ``cuda`` for one GPU for each.

        Raises:
            ValueError: a process group exists, there are fewer GPUs, the ranks do not divide the model, or it has an
                adapter.
            RuntimeError: a process died.
        """
        self._parts: WeakKeyDictionary[ModelAdapter, list[dict[str, Any]]] = WeakKeyDictionary()
        """The parts of each rank, of the adapters that are used."""
        self._sent: set[int] = set()
        """Numbers of the adapters that the other processes have."""
        if dist.is_initialized():
            raise ValueError("tensor_parallel > 1 needs a process without a process group: start the engine alone")
        check_tensor_ranks(model.config, size, "tensor_parallel")
        if any(adapter_modules(model)):
            raise ValueError(
                "tensor_parallel > 1 divides a model without an adapter: merge it with diffusionlm-convert"
            )
        if device_type == "cuda" and torch.cuda.device_count() < size:
            raise ValueError(f"tensor_parallel = {size}, but this machine has {torch.cuda.device_count()} GPUs")
        self._directory = tempfile.TemporaryDirectory(prefix="diffusionlm-ranks-")
        store = str(Path(self._directory.name) / "store")
        parameters = dict(model.named_parameters())
        dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        num_threads = max(1, torch.get_num_threads() // size)
        self._spec = ModelSpec(model.config, model.attention_backend, dtypes, device_type, num_threads)
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=follow, args=(self._spec, rank, size, store), daemon=True) for rank in range(1, size)
        ]
        for process in self._processes:
            process.start()
        try:
            torch.set_num_threads(num_threads)
            self._group = _join(self._spec, 0, size, store)
            self.model, own = self._spec.build(0, size, self._group)
            allocate(self.model, self._spec.device(0))
            self._shards = [own, *(self._spec.build(rank, size, self._group)[1] for rank in range(1, size))]
            local = dict(self.model.named_parameters())
            for name, whole in parameters.items():
                _fill(local[name], own[name].select(whole.detach()))
                for rank in range(1, size):
                    dist.send(self._shards[rank][name].select(whole.detach()).cpu().contiguous(), dst=rank)
        except BaseException:
            self.close()
            raise

    def start_cache(self, num_pages: int, page_size: int) -> None:
        """Let all processes allocate their part of the cache."""
        self._send(("cache", num_pages, page_size))

    def announce(self, texts: Sequence[InputText], sampling: ShardedSampling | None) -> None:
        """Let all processes compute a forward, which the caller computes next, and take part in its sampling. What they
        lack of adapters is sent first, and those that are gone are forgotten."""
        for adapter in {text.adapter for text in texts if text.adapter is not None}:
            if adapter.number not in self._sent:
                self._send(("adapter", adapter.number, adapter.acts_on_masks, self._parts[adapter]))
                self._sent.add(adapter.number)
        # A list of references: another thread may add an adapter meanwhile.
        adapters = (reference() for reference in self._parts.keyrefs())
        gone = self._sent - {adapter.number for adapter in adapters if adapter is not None}
        if gone:
            self._send(("forget", gone))
            self._sent -= gone
        self._send(("forward", [_to_message(text) for text in texts], sampling))

    def divide(self, adapter: ModelAdapter) -> ModelAdapter:
        """The leader's part of an adapter of the whole model. Any thread may call this."""
        parts = [
            {name: _divide_part(part, shards.get(f"{name}.weight")) for name, part in adapter.parts.items()}
            for shards in self._shards
        ]
        own = replace(adapter, parts=_move_parts(parts[0], self._spec.device(0)))
        self._parts[own] = [_move_parts(part, torch.device("cpu")) for part in parts]
        return own

    def ping(self) -> None:
        """Find out whether all processes live.

        Raises:
            RuntimeError: one does not.
        """
        self._send(("ping",))

    def close(self, *, is_healthy: bool = False) -> None:
        """End the processes: with ``is_healthy`` by a message, else at once."""
        try:
            if is_healthy:
                self._send(("stop",))
        except RuntimeError as error:
            LOGGER.warning("a process of the model was lost: %s", error)
            is_healthy = False
        finally:
            for process in self._processes:
                process.join(TIMEOUT_SECONDS if is_healthy else 0.0)
                process.kill()
                process.join()
            if dist.is_initialized():
                dist.destroy_process_group()
            self._directory.cleanup()

    def _send(self, message: tuple[Any, ...]) -> None:
        dist.broadcast_object_list([message], src=0, group=self._group, device=torch.device("cpu"))


def follow(spec: ModelSpec, rank: int, size: int, store: str) -> None:
    """Compute the forwards that the leader announces, until it stops or is gone."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # to the whole group of processes: the leader ends this one
        signal.signal(stop, signal.SIG_IGN)
    torch.set_num_threads(spec.num_threads)
    group = _join(spec, rank, size, store)
    model, shards = spec.build(rank, size, group)
    allocate(model, spec.device(rank))
    for name, parameter in model.named_parameters():
        part = torch.empty(shards[name].shape, dtype=spec.dtypes[name])
        dist.recv(part, src=0)
        _fill(parameter, part)
    runner, adapters = ModelRunner(model, None), dict[int, ModelAdapter]()
    try:
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, src=0, group=group, device=torch.device("cpu"))
            match message[0]:
                case ("cache", int(num_pages), int(page_size)):
                    runner = ModelRunner(model, build_cache(model, num_pages, page_size))
                case ("adapter", int(number), bool(acts_on_masks), [*parts]):
                    own = _move_parts(parts[rank], spec.device(rank))
                    adapters[number] = ModelAdapter(own, own, acts_on_masks, number)
                    runner.prepare_adapter(adapters[number])
                case ("forget", set(numbers)):
                    adapters = {number: own for number, own in adapters.items() if number not in numbers}
                case ("forward", [*messages], sampling):
                    texts = [_from_message(text, adapters) for text in messages]
                    with torch.inference_mode():
                        if sampling is None:
                            runner.compute_logits(texts)
                        else:
                            runner.compute_samples(texts, sampling)
                case ("stop",):
                    break
    except RuntimeError as error:
        LOGGER.warning("rank %d ends: %s", rank, error)
    os._exit(0)  # without waiting for a group whose other members may be gone


def build_cache(model: Transformer, num_pages: int, page_size: int) -> PagedCache:
    """The cache of this rank's heads."""
    weight = model.lm_head.weight
    return PagedCache(
        model.config, num_pages, page_size, weight.device, compute_dtype(weight), model.num_key_value_heads
    )


Message = tuple[NDArray[np.int64], NDArray[np.bool_], SequenceSlice, int | None, TextImages | None]
"""The tokens of a text that are read, which of them are masks, where they are, the number of its adapter, and what of
its images is read."""


def _to_message(text: InputText) -> Message:
    start, end = text.sequence.start, text.sequence.end
    images = None if text.images is None else text.images.restrict(start, end)
    number = None if text.adapter is None else text.adapter.number
    return text.input_tokens, text.masked_inputs, text.sequence, number, images


def _from_message(message: Message, adapters: Mapping[int, ModelAdapter]) -> InputText:
    input_tokens, masked_inputs, sequence, number, images = message
    tokens_L, masked_L = np.zeros(sequence.end, np.int64), np.zeros(sequence.end, np.bool_)
    tokens_L[sequence.start :], masked_L[sequence.start :] = input_tokens, masked_inputs
    return InputText(tokens_L, sequence, None if number is None else adapters[number], images, masked_L)


def _divide_part(part: Any, shard: Shard | None) -> Any:
    """The part of a product ``s B A`` that belongs to a rank's part of its weight: rows of B, or columns of A. What
    replaces rows of a head stays as it is."""
    if shard is None or shard.is_whole or not hasattr(part, "A"):
        return part
    rows, columns = (slice(start, start + size) for start, size in zip(shard.offsets, shard.shape, strict=True))
    row_factor = None if part.row_factor is None else part.row_factor[rows]
    return replace(part, A=part.A[:, columns].contiguous(), B=part.B[rows].contiguous(), row_factor=row_factor)


def _move_parts(parts: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy what an adapter adds to a device."""
    moved = {}
    for name, part in parts.items():
        tensors = {key: value.to(device) for key, value in vars(part).items() if isinstance(value, torch.Tensor)}
        moved[name] = replace(part, **tensors)
    return moved


@torch.no_grad()
def _fill(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Copy a part; rows behind it are padding."""
    parameter.zero_()
    parameter[: len(part)].copy_(part)


def _join(spec: ModelSpec, rank: int, size: int, store: str) -> Any:
    """Join the processes. Returns the group of messages and forwards; weights have more time, as files may be slow."""
    backend = "gloo" if spec.device_type == "cpu" else "cpu:gloo,cuda:nccl"
    device = spec.device(rank) if spec.device_type == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LOADING_SECONDS),
        device_id=device,
    )
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
