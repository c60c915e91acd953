"""Rows in, draws out: the loader of a training run, exactly resumable."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch

from config.data import DataConfig
from config.model import ModelConfig
from config.objective import ObjectiveConfig
from diffusionlm.data.packing import Row, split_row_randomly
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader, open_components
from diffusionlm.data.reader import ReaderPosition, ResumableReader
from diffusionlm.data.tokenization import TextEncoder, TokenizerPool, block_signals
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import Objective, build_objective
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from tokenizer import Tokenizer


def collate_rows(rows: Sequence[Row]) -> CleanBatch:
    """Rows, stacked."""
    return CleanBatch(
        tokens_BL=torch.from_numpy(np.stack([row.tokens_L for row in rows])).long(),
        loss_mask_BL=torch.from_numpy(np.stack([row.loss_mask_L for row in rows])),
        document_BL=torch.from_numpy(np.stack([row.document_ids_L for row in rows])),
    )


def count_rows(rows: ResumableReader[Row]) -> int:
    """Rows of one epoch, by reading it."""
    total, position = 0, None
    while True:
        some, position = rows.read(0, position, 1_024)
        total += len(some)
        if position is None:
            return total


@dataclass(frozen=True)
class LoaderMetrics:
    """How the loader is doing."""

    epoch: int
    padding_share: float
    """Share of the places of the rows so far that hold padding."""
    skipped: int
    """Documents that were left out by this process so far; a run that resumes reads some again."""
    tokens_per_second: float
    """Tokens of rows, padding not counted, by the time that reading, packing and drawing took."""
    wait_seconds: float
    """What the last step waited for its draws."""
    buffered_steps: int
    """Steps that workers had ready when the last one was asked for; 0 without workers."""


class StepLoader(Protocol):
    """Where a run's draws come from: this process or workers."""

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step, in order."""

    def prefetch(self, step: int) -> None:
        """Prepare the next step while the device computes, if the loader can."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next step reads; JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first step."""

    def metrics(self) -> LoaderMetrics:
        """After a step."""

    def close(self) -> None:
        """No more steps are asked for."""


@dataclass
class Loader:
    """The draws of each optimizer step, epoch after epoch, made when they are asked for.

    All ranks read the same rows, and each keeps its part of every step: so rows and draws are the same for any number
    of ranks, and a state serves any number of them.
    """

    rows: ResumableReader[Row]
    objective: Objective
    batch_size: int
    """Rows of a step, over all ranks."""
    micro_batch_size: int
    """Rows of one forward."""
    seed: int
    random_length_probability: float = 0.0
    """Of a step whose rows are cut at random places."""
    rank: int = 0
    world_size: int = 1
    parts: Sequence[MixtureComponent] = ()
    """The sources behind the rows, for their counters."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"training.batch_size = {self.batch_size} must be a multiple of the {self.world_size} ranks"
            )
        self.epoch = 0
        self.position: ReaderPosition = None
        self._num_positions = 0
        self._num_padding = 0
        self._num_timed_tokens = 0
        self._seconds = 0.0
        self._last_seconds = 0.0

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step: this rank's.

        Raises:
            ValueError: the source has no rows at all.
        """
        started = time.perf_counter()
        own = self.batch_size // self.world_size
        first_own = self.rank * own
        rows = self._next_rows()
        self._count_positions(rows)
        rows = rows[first_own : first_own + own]
        if keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step).random() < self.random_length_probability:
            chances = (keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step, first_own + row) for row in range(own))
            rows = [split_row_randomly(row, rng) for row, rng in zip(rows, chances, strict=True)]
        noised_batches = []
        for first in range(0, own, self.micro_batch_size):
            key = NoiseKey(self.seed, step, first_own + first, self.batch_size)
            noised_batches.append(
                self.objective.build_noised_batch(collate_rows(rows[first : first + self.micro_batch_size]), key)
            )
        self._last_seconds = time.perf_counter() - started
        self._seconds += self._last_seconds
        return noised_batches

    def prefetch(self, step: int) -> None:
        pass

    def _next_rows(self) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < self.batch_size:
            started = self.position is None
            some, self.position = self.rows.read(self.epoch, self.position, self.batch_size - len(rows))
            if started and not some:
                raise ValueError("data.source has no documents to train on")
            rows += some
            if self.position is None:
                self.epoch += 1
        return rows

    def _count_positions(self, rows: list[Row]) -> None:
        places = sum(len(row.document_ids_L) for row in rows)
        padding = sum(int((row.document_ids_L < 0).sum()) for row in rows)
        self._num_positions += places
        self._num_padding += padding
        self._num_timed_tokens += places - padding

    def metrics(self) -> LoaderMetrics:
        """Of the steps so far."""
        return LoaderMetrics(
            epoch=self.epoch,
            padding_share=self._num_padding / max(1, self._num_positions),
            skipped=sum(part.num_skipped for part in self.parts),
            tokens_per_second=self._num_timed_tokens / self._seconds if self._seconds else 0.0,
            wait_seconds=self._last_seconds,
            buffered_steps=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the next step reads; JSON."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "places": self._num_positions,
            "padding": self._num_padding,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._num_positions, self._num_padding = state["places"], state["padding"]

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class LoaderSpec:
    """Everything that a loader is made of; can be sent to another process."""

    data: DataConfig
    tokenizer: Tokenizer
    row_length: int
    objective: ObjectiveConfig
    model: ModelConfig
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def open(self, parts: list[MixtureComponent] | None = None, encoder: TextEncoder | None = None) -> Loader:
        """The loader.

        Args:
            parts: the sources, where they are open already.
            encoder: who tokenises; None: this process.

        Raises:
            ValueError: nothing to read, or rows that do not fit.
        """
        parts = open_components(self.data, "train") if parts is None else parts
        return Loader(
            build_row_reader(parts, self.data, self.tokenizer, self.row_length, self.seed, encoder=encoder),
            build_objective(self.objective, self.model),
            self.batch_size,
            self.micro_batch_size,
            self.seed,
            self.data.random_length_probability,
            self.rank,
            self.world_size,
            parts,
        )


SPAWN_CONTEXT = get_context("spawn")
"""Forked children of a process with threads may hang, and CUDA does not survive a fork."""


SECONDS_TO_JOIN = 5.0


@dataclass(frozen=True)
class _StepMessage:
    """What the loader's process sends of a step."""

    noised_batches: list[NoisedBatch]
    state: dict[str, Any]
    metrics: LoaderMetrics


@dataclass(frozen=True)
class _FailureMessage:
    """What it sends in place of a step, as its last word."""

    error: Exception


class WorkerLoader:
    """A loader in another process, some steps ahead."""

    def __init__(self, spec: LoaderSpec) -> None:
        if spec.data.workers < 1:
            raise ValueError(f"data.workers = {spec.data.workers}: a loader in another process needs at least 1")
        self._spec = spec
        self._state: dict[str, Any] | None = None
        self._metrics: LoaderMetrics | None = None
        self._ready: queue.Queue[bytes | Exception] = queue.Queue(spec.data.prefetch_steps)
        self._receiver: threading.Thread | None = None
        self._connection: Connection | None = None
        self._process: Any = None
        self._next_step = 0
        self._closed = False

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step; steps come one after the other.

        Raises:
            ValueError: as the loader does.
            ChildProcessError: the process ended before its work did.
        """
        if self._process is None:
            self._start(step)
        assert step == self._next_step, "workers draw the steps in order"
        started, buffered = time.perf_counter(), self._ready.qsize()
        received = self._ready.get()
        message = received if isinstance(received, Exception) else pickle.loads(received)
        if not isinstance(message, _StepMessage):
            error = message.error if isinstance(message, _FailureMessage) else message
            self.close()
            raise error
        waited = time.perf_counter() - started
        self._next_step, self._state = step + 1, message.state
        self._metrics = replace(message.metrics, wait_seconds=waited, buffered_steps=buffered)
        return message.noised_batches

    def prefetch(self, step: int) -> None:
        pass  # the worker process is ahead already

    def metrics(self) -> LoaderMetrics:
        """Of the last step that was asked for."""
        assert self._metrics is not None, "there was no step yet"
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Behind the last step that was asked for, not behind the last one that was drawn."""
        assert self._state is not None, "there was no step yet"
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first step."""
        assert self._process is None, "the workers have started already"
        self._state = state

    def close(self) -> None:
        """End the processes; what they had ready is dropped."""
        self._closed = True
        if self._process is None:
            return
        assert self._connection is not None and self._receiver is not None
        self._process.kill()
        while self._receiver.is_alive():  # it may wait for room
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.05)
        self._process.join()
        self._connection.close()

    def _start(self, step: int) -> None:
        ours, theirs = SPAWN_CONTEXT.Pipe()
        # Not a daemon: those may have no processes of their own.
        self._process = SPAWN_CONTEXT.Process(target=_run_loader, args=(theirs,), name="diffusionlm loader")
        with block_signals():  # the training makes its last step with what it gets from here
            self._process.start()
        theirs.close()
        self._connection, self._next_step = ours, step
        work = pickle.dumps((self._spec, self._state, step), pickle.HIGHEST_PROTOCOL)
        self._receiver = threading.Thread(target=self._receive, args=(work,), daemon=True)
        self._receiver.start()

    def _receive(self, work: bytes) -> None:
        """Hand over the work (to a process that ends while it starts, one would write for ever), and keep the queue
        filled; memory is bounded by its size."""
        assert self._connection is not None
        with contextlib.suppress(OSError):  # what comes back tells
            self._connection.send_bytes(work)
        while not self._closed:
            try:
                self._ready.put(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._process.join(SECONDS_TO_JOIN)
                self._ready.put(_process_ended_error("loads data", self._process.exitcode))
                return


def _process_ended_error(what: str, code: int | None) -> ChildProcessError:
    return ChildProcessError(
        f"the process that {what} ended (exit code {code}); if the system ran out of memory, lower "
        "data.prefetch_steps, data.document_shuffle_window or data.row_shuffle_window"
    )


def _run_loader(connection: Connection) -> None:
    """The first worker."""
    torch.set_num_threads(1)
    try:
        spec, state, step = pickle.loads(connection.recv_bytes())
        with TokenizerPool(spec.tokenizer, spec.data.workers - 1) as encoder:
            loader = spec.open(encoder=encoder)
            if state is not None:
                loader.load_state_dict(state)
            while True:
                sent = _StepMessage(loader.next_step(step), loader.state_dict(), loader.metrics())
                connection.send_bytes(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))
                step += 1
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return  # the training ended
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(_FailureMessage(_picklable_error(error))))


def _picklable_error(error: Exception) -> Exception:
    """The error itself where it is the user's; else one with its place in the text."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError("the process that loads data failed:\n" + "".join(traceback.format_exception(error)))
