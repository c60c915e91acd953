"""Tokenize documents chunk by chunk, in this process or in others. No torch, so that the processes start fast."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from config.tokenizer import TokenizerConfig
from diffusionlm.data.reader import ItemsFuture, ResumableReader, Tokens, WindowedReader
from files.atomic import temporary_path
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


@dataclass(frozen=True)
class TextEncoder:
    """Tokenizes chunks of documents, possibly in other processes."""

    submit: Callable[[list[str]], ItemsFuture[Tokens]]
    """Start to tokenize a chunk. Call the result to wait for the tokens."""
    prefetch_depth: int = 0
    """Number of chunks to submit ahead of time."""


def encode_inline(encode: Callable[[str], list[int]]) -> TextEncoder:
    """Return an encoder that tokenizes in this process, when the tokens are requested."""
    return TextEncoder(lambda texts: lambda: [np.array(encode(text), dtype=np.int32) for text in texts])


def tokenize_reader(upstream: ResumableReader[str], encoder: TextEncoder) -> WindowedReader[str, Tokens]:
    return WindowedReader(
        upstream, CHUNK_DOCUMENTS, lambda _epoch, _index, texts: encoder.submit(texts), encoder.prefetch_depth
    )


@contextlib.contextmanager
def open_text_encoder(tokenizer: Tokenizer, num_processes: int) -> Iterator[TextEncoder]:
    """Yield an encoder with this many processes (0: this process), and end them afterwards.

    Raises:
        ValueError: (when waiting) a text has no UTF-8 form, or a process ended.
    """
    if not num_processes:
        yield encode_inline(tokenizer.encode)
        return
    death = ValueError("a tokenizer process ended; if the system ran out of memory, use fewer workers")
    with contextlib.closing(WorkerPool(num_processes, tokenizer, death)) as pool:

        def submit(texts: list[str]) -> ItemsFuture[Tokens]:
            future = pool.submit(_encode_texts, texts)
            return lambda: pool.wait(future)

        yield TextEncoder(submit, CHUNKS_PER_PROCESS * num_processes)


def _encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    return [np.array(tokenizer.encode(text), dtype=np.int32) for text in texts]


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """Processes that call functions of an object, which each of them has from the start.

    They end when the pool is closed or this process dies, whatever they are doing, and ignore stop signals: these reach
    the whole process group, but this process decides when its children end. What they share and return passes through
    files: a pipe would block this process forever if one of them ends in the middle of it.

    Args:
        shared: the first argument of each call; it is sent to each process once and stays there.
        death: raised in place of a result when a process has ended.
    """

    def __init__(self, num_processes: int, shared: object, death: Exception) -> None:
        self._death = death
        self._folder = tempfile.TemporaryDirectory(prefix="diffusionlm-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name, "shared.pickle")
        self._path.write_bytes(pickle.dumps(shared, pickle.HIGHEST_PROTOCOL))
        reader, self._lifeline = SPAWN_CONTEXT.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(num_processes, SPAWN_CONTEXT, _watch_lifeline, (reader, self._path.parent))
        resource_tracker.ensure_running()  # started with the first process, it would unblock the signals
        _open_pools.add(self)

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[Path]:
        """Start a call in a process that is free; `wait` for its result."""
        # Each call may start a process, which inherits the mask.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return self._executor.submit(_call, function, self._path, *arguments)
        except (BrokenProcessPool, OSError):  # OSError: a process ends just now
            raise self._death from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def wait(self, future: Future[Path]) -> Any:
        """Wait for the result of a call; an error of the call is raised here."""
        try:
            path = future.result()
        except BrokenProcessPool:
            raise self._death from None
        result = pickle.loads(path.read_bytes())
        path.unlink()
        return result

    def close(self) -> None:
        _open_pools.discard(self)
        self._lifeline.close()
        self._executor.shutdown(cancel_futures=True)
        self._folder.cleanup()


@functools.cache
def _load_shared(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _call(function: Callable[..., object], path: Path, *arguments: object) -> Path:
    """Return the path of the pickled result."""
    content = pickle.dumps(function(_load_shared(path), *arguments), pickle.HIGHEST_PROTOCOL)
    result = temporary_path(path)
    result.write_bytes(content)
    return result


def _watch_lifeline(lifeline: Connection, folder: Path) -> None:
    """Let this process end with the other end of the pipe, and without an interpreter that tears down open readers."""
    atexit.register(os._exit, 0)
    threading.Thread(target=_exit_at_end, args=(lifeline, folder), daemon=True).start()


def _exit_at_end(lifeline: Connection, folder: Path) -> None:
    """Exit when the other end of the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    for pool in [*_open_pools]:  # else Python would warn of semaphores that nobody has removed
        pool.close()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
