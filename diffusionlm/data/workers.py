"""Processes that tokenise, pack and draw noise while the model trains.

The first worker runs the loader and sends the draws of one step after the other; the others tokenise for it. What is
read and drawn is the same as without them. A process ends when its pipe does, so that none outlives the training,
whatever ends that.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from diffusionlm.data.loader import LoaderMetrics, LoaderSpec
from diffusionlm.data.tokenization import TokenizerPool, block_signals
from diffusionlm.diffusion.noised_batch import NoisedBatch

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
