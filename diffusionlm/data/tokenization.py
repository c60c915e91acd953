"""Processes that do nothing but tokenise. No torch, so that they are small and start at once."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.reader import ItemsFuture, ResumableReader, Tokens, WindowedReader
from tokenizer import Tokenizer

CHUNK = 64
"""Documents that are tokenised together; a run that resumes does at most so many again."""


EncodeFunction = Callable[[str], list[int]]


class TextEncoder(Protocol):
    """Who tokenises."""

    @property
    def prefetch_depth(self) -> int:
        """Chunks that are worth handing over before they are needed."""

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Take over a chunk. What comes back waits for its tokens."""


class InlineTextEncoder:
    """Tokenises in this process, when the tokens are asked for."""

    prefetch_depth = 0

    def __init__(self, encode: EncodeFunction) -> None:
        self._encode = encode

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Nothing yet."""
        return lambda: encode_texts(self._encode, texts)


def encode_texts(encode: EncodeFunction, texts: list[str]) -> list[Tokens]:
    """Tokens of each text."""
    return [np.array(encode(text), dtype=np.int32) for text in texts]


def tokenize_reader(upstream: ResumableReader[str], encoder: TextEncoder) -> WindowedReader[str, Tokens]:
    """The documents of a reader, tokenised."""
    return WindowedReader(upstream, CHUNK, lambda _epoch, _number, texts: encoder.submit(texts), encoder.prefetch_depth)


SPAWN_CONTEXT = get_context("spawn")
"""Forked children of a process with threads may hang."""


CHUNKS_AHEAD = 2
"""Chunks in flight for each process: one in work, one waiting."""


class TokenizerPool:
    """An `TextEncoder` of some processes, or without any, of this one; a context, which ends them.

    They end with the pipe to them as well, so that none outlives this process, whatever ends it.
    """

    def __init__(self, tokenizer: Tokenizer, num_processes: int) -> None:
        self._tokenizer = tokenizer
        self._num_processes = num_processes
        self._workers: list[tuple[Any, Connection]] = []
        self._idle: queue.SimpleQueue[tuple[Any, Connection]] = queue.SimpleQueue()
        # A thread for each process: both ends of a pipe may be busy writing to each other.
        self._threads = ThreadPoolExecutor(max(1, num_processes))

    @property
    def prefetch_depth(self) -> int:
        """Chunks that are worth handing over before they are needed."""
        return CHUNKS_AHEAD * self._num_processes

    def __enter__(self) -> TokenizerPool:
        try:
            with block_signals():
                self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process, _connection in self._workers:
            process.kill()  # they have nothing to lose, and hold back gentler signals
        for process, _connection in self._workers:
            process.join()
        self._threads.shutdown()
        for _process, connection in self._workers:
            connection.close()

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Take over a chunk. What comes back waits for its tokens.

        Raises:
            ValueError: (when waiting) a text that has no UTF-8 form, or the process was killed.
        """
        if not self._num_processes:
            return lambda: _split_by_length(*_encode_flat(self._tokenizer, texts))
        return self._threads.submit(self._encode_in_process, texts).result

    def _start(self) -> None:
        for number in range(self._num_processes):
            ours, theirs = SPAWN_CONTEXT.Pipe()
            process = SPAWN_CONTEXT.Process(
                target=_run_tokenizer, args=(theirs,), name=f"tokeniser {number}", daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        tokenizer = pickle.dumps(self._tokenizer, pickle.HIGHEST_PROTOCOL)
        for process, connection in self._workers:
            self._threads.submit(self._send_tokenizer, process, connection, tokenizer)

    def _send_tokenizer(self, process: Any, connection: Connection, tokenizer: bytes) -> None:
        """Not as an argument of the process: to one that ends while it starts, `start` would write for ever."""
        with contextlib.suppress(OSError):  # its first chunk tells
            connection.send_bytes(tokenizer)
        self._idle.put((process, connection))

    def _encode_in_process(self, texts: list[str]) -> list[Tokens]:
        process, connection = self._idle.get()
        try:
            connection.send(texts)
            answer = connection.recv()
        except (EOFError, OSError):
            process.join()
            raise ValueError(
                f"a process that tokenises ended (exit code {process.exitcode}); if the system ran out of memory, "
                "use fewer workers"
            ) from None
        finally:
            self._idle.put((process, connection))
        if isinstance(answer, Exception):
            raise answer
        return _split_by_length(*answer)


def _run_tokenizer(connection: Connection) -> None:
    """What a process does."""
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        tokenizer: Tokenizer = connection.recv()
        while True:
            texts = connection.recv()
            try:
                connection.send(_encode_flat(tokenizer, texts))
            except ValueError as error:
                connection.send(ValueError(str(error)))


def _encode_flat(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tokens, NDArray[np.int64]]:
    """Ids of all texts, and how many each has: two arrays are sent faster than one for each text."""
    documents = [tokenizer.encode(text) for text in texts]
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    return np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths


def _split_by_length(ids: Tokens, lengths: NDArray[np.int64]) -> list[Tokens]:
    return [ids[start:end] for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Processes that start now never see Ctrl-C, SIGTERM and SIGUSR1, which reach the whole group of processes: whoever
    started them decides when they end. This process sees them behind the block."""
    resource_tracker.ensure_running()  # else the first process to start brings it along, and that lets signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
