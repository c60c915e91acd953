"""Tokenize documents chunk by chunk, in this process or in others. No torch, so that the processes start fast."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from config.tokenizer import TokenizerConfig
from diffusionlm.data.reader import ItemsFuture, ResumableReader, Tokens, WindowedReader
from files.stop_signals import STOP_SIGNALS
from tokenizer import Tokenizer, train_bpe

CHUNK_DOCUMENTS = 64
"""Documents that are tokenized together. A resumed run tokenizes at most this many again."""

CHUNKS_PER_PROCESS = 2
"""Chunks in flight for each process: one in work, one waiting."""

SPAWN_CONTEXT = get_context("spawn")
"""Forked children of a process with threads may hang, and CUDA does not survive a fork."""


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, log: Callable[[str], None]) -> Tokenizer:
    """Train a byte-level BPE tokenizer; messages go to ``log``."""
    log(f"training a byte-level BPE tokenizer of {config.vocab_size:,} tokens ...")
    tokenizer = train_bpe(
        texts, vocab_size=config.vocab_size, special_tokens=config.all_special_tokens, pattern=config.pattern
    )
    if tokenizer.vocab_size < config.vocab_size:
        log(f"the text has no more pairs to merge: the tokenizer has {tokenizer.vocab_size:,} tokens")
    return tokenizer


class TextEncoder(Protocol):
    """Tokenizes chunks of documents, possibly in other processes."""

    @property
    def prefetch_depth(self) -> int:
        """Number of chunks to submit ahead of time."""

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Start to tokenize a chunk. Call the result to wait for the tokens."""


class InlineTextEncoder:
    """Tokenizes in this process, when the tokens are requested."""

    prefetch_depth = 0

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        return lambda: [np.array(self._encode(text), dtype=np.int32) for text in texts]


def tokenize_reader(upstream: ResumableReader[str], encoder: TextEncoder) -> WindowedReader[str, Tokens]:
    return WindowedReader(
        upstream, CHUNK_DOCUMENTS, lambda _epoch, _index, texts: encoder.submit(texts), encoder.prefetch_depth
    )


@contextlib.contextmanager
def open_text_encoder(tokenizer: Tokenizer, num_processes: int) -> Iterator[TextEncoder]:
    """Yield an encoder with this many processes (0: this process), and end them afterwards."""
    if not num_processes:
        yield InlineTextEncoder(tokenizer.encode)
        return
    with TokenizerPool(tokenizer, num_processes) as pool:
        yield pool


class TokenizerPool:
    """A `TextEncoder` with several processes; a context manager.

    A process also ends when the pipe to it closes, so that none outlives this process.
    """

    def __init__(self, tokenizer: Tokenizer, num_processes: int) -> None:
        self._tokenizer = tokenizer
        self._num_processes = num_processes
        self._workers: list[tuple[Any, Connection]] = []
        self._idle: queue.SimpleQueue[tuple[Any, Connection]] = queue.SimpleQueue()
        # One thread per process: both ends of a pipe may be busy writing to each other.
        self._threads = ThreadPoolExecutor(num_processes)

    @property
    def prefetch_depth(self) -> int:
        return CHUNKS_PER_PROCESS * self._num_processes

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
            process.kill()  # they have nothing to save, and they block gentler signals
        for process, _connection in self._workers:
            process.join()
        self._threads.shutdown()
        for _process, connection in self._workers:
            connection.close()

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Start to tokenize a chunk.

        Raises:
            ValueError: (when waiting) a text has no UTF-8 form, or the process ended.
        """
        return self._threads.submit(self._encode_in_process, texts).result

    def _start(self) -> None:
        for index in range(self._num_processes):
            connection, child_connection = SPAWN_CONTEXT.Pipe()
            process = SPAWN_CONTEXT.Process(
                target=_run_tokenizer, args=(child_connection,), name=f"tokenizer {index}", daemon=True
            )
            process.start()
            child_connection.close()
            self._workers.append((process, connection))
        tokenizer = pickle.dumps(self._tokenizer, pickle.HIGHEST_PROTOCOL)
        for process, connection in self._workers:
            self._threads.submit(self._send_tokenizer, process, connection, tokenizer)

    def _send_tokenizer(self, process: Any, connection: Connection, tokenizer: bytes) -> None:
        """Send the tokenizer from a thread: as a process argument, `start` would hang if the process ends early."""
        with contextlib.suppress(OSError):  # the first chunk reports that the process ended
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
                f"a tokenizer process ended (exit code {process.exitcode}); if the system ran out of memory, "
                "use fewer workers"
            ) from None
        finally:
            self._idle.put((process, connection))
        if isinstance(answer, Exception):
            raise answer
        token_ids, lengths = answer
        return [token_ids[start:end] for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


def _run_tokenizer(connection: Connection) -> None:
    """Tokenize chunks in a child process until the pipe closes."""
    with contextlib.suppress(EOFError, OSError):
        tokenizer: Tokenizer = connection.recv()
        while True:
            texts = connection.recv()
            try:
                connection.send(_encode_flat(tokenizer, texts))
            except ValueError as error:
                connection.send(ValueError(str(error)))


def _encode_flat(tokenizer: Tokenizer, texts: list[str]) -> tuple[Tokens, NDArray[np.int64]]:
    """Return the token ids of all texts and the length of each: two arrays are sent faster than one per text."""
    documents = [tokenizer.encode(text) for text in texts]
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    return np.fromiter(chain.from_iterable(documents), np.int32, int(lengths.sum())), lengths


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block the stop signals while child processes start; they inherit the mask.

    These signals reach the whole process group, but the parent decides when its children end. The parent receives
    signals after the block.
    """
    resource_tracker.ensure_running()  # started with the first process, it would unblock the signals
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
