"""An engine that decodes requests of many callers together, in a thread of its own.

Callers submit token ids and follow a request by its latest state, so a slow reader costs the engine nothing. Each
request has its own settings and seed; its answer is that of `generate` with this request alone.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from config.generation import GenerationConfig
from config.serving.server import EngineLimits
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.model_runner import build_pattern
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import DEFAULT_OPTIONS, ActiveRequest, PreparedRequest, RequestOptions
from diffusionlm.inference.scheduler import PAGE_SIZE, DecoderCounts
from diffusionlm.inference.settings import MAX_KEPT_SETTINGS, resolve_settings
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.patterns import DenseBias
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.requests import (
    EngineError,
    EngineRequest,
    EngineStoppedError,
    QueueFullError,
    UnknownAdapterError,
)

if TYPE_CHECKING:
    from diffusionlm.serving.followers import Followers

LOGGER = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Time between two messages of an idle engine to the processes of its model."""
SOFT_PAUSE = 1
"""``omp_pause_soft`` of OpenMP 5.0: threads may be ended, and begin again with the next parallel region."""


@dataclass(frozen=True)
class EngineStatus:
    """What an engine is doing."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_owned_pages: int
    busy_seconds: float
    """Time in which there was work. What `DecoderCounts.model_seconds` lacks of it was spent on the host."""
    counts: DecoderCounts


class Engine:
    """Decodes requests of many callers together. Its methods may be called from any thread."""

    def __init__(
        self,
        model: Transformer,
        limits: EngineLimits | None = None,
        *,
        adapters: Mapping[str, ModelAdapter] | None = None,
        device: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        **keys: Any,
    ) -> None:
        """Allocate the cache and start the thread.

        Args:
            limits: None: those that ``keys`` set.
            adapters: name -> adapter of this model (`diffusionlm.read_adapter`), which requests may name; more by
                `load_adapter`.
            device: of the processes of ``tensor_parallel`` > 1, "cpu" or "cuda". None: that of the model, which may be
                whole on the CPU even if theirs are GPUs.
            clock: seconds, for `step_seconds`.
            keys: of `EngineLimits`. With ``deterministic``, log-probabilities are the same bits, whatever is decoded at
                the same time and whatever the limits are (`inference.model_runner`).

        Raises:
            ValueError: a limit is unknown or not positive, the memory does not hold a page, the model's attention
                backend has no cached form, autocast is on, an adapter is of another model, or the model cannot be
                deterministic.
        """
        if limits is not None and keys:
            raise ValueError(f"{', '.join(keys)} and limits exclude each other: pass one of them")
        limits = limits or EngineLimits.model_validate(keys)
        _check_model(model)
        self.model = model
        self._max_unfinished = limits.max_requests + limits.max_waiting
        self._deterministic = limits.deterministic
        # It reads a bias: what is wrong with it is the caller's, not the thread's.
        self._check_pattern = lru_cache(MAX_KEPT_SETTINGS)(build_pattern)
        self._condition = threading.Condition()
        self._adapters: dict[str, ModelAdapter] = {}
        self._load_lock = threading.Lock()
        self._start_decoder(limits, device, adapters or {})
        self._submitted: list[EngineRequest] = []
        """Requests that the thread has not seen yet."""
        self._aborted: list[EngineRequest] = []
        self._handles: dict[int, EngineRequest] = {}
        """Identity of a request that the decoder has -> the caller's handle."""
        self._is_closing, self._drains = False, True
        self._busy_since, self._busy_seconds = 0.0, 0.0
        self._clock = clock
        self._step_start: float | None = None
        """None: no step is computed."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="diffusionlm-engine", daemon=True)
        release_team()  # of the caller, who has loaded the model
        self._thread.start()

    def _start_decoder(self, limits: EngineLimits, device: str | None, adapters: Mapping[str, ModelAdapter]) -> None:
        """Start the other processes of the model, allocate the cache on all of them, and load adapters."""
        model = self.model
        self._followers: Followers | None = None
        if limits.tensor_parallel > 1:
            # Imported here: it loads the distributed package of torch.
            from diffusionlm.serving.followers import Followers

            self._followers = Followers(model, limits.tensor_parallel, device or model.lm_head.weight.device.type)
            model = self._followers.model
        try:
            num_pages, limits = _size_cache(model, limits)
            self._decoder = Decoder(model, num_pages, limits, pauses_slow_constraints=True)
            if self._followers is not None:
                assert limits.page_size is not None
                self._followers.start_cache(num_pages, limits.page_size)
                self._decoder.runner.announce = self._followers.announce
            for name, adapter in adapters.items():
                self.load_adapter(name, adapter)
        except BaseException:
            if self._followers is not None:
                self._followers.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the thread decodes requests: no error and no `close` has ended it."""
        return self._thread.is_alive() and self._error is None

    @property
    def step_seconds(self) -> float:
        """Time that the current step has taken so far; 0 between steps."""
        start = self._step_start
        return 0.0 if start is None else self._clock() - start

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may name."""
        with self._condition:
            return tuple(self._adapters)

    def load_adapter(self, name: str, adapter: ModelAdapter) -> None:
        """Add an adapter, or replace the one of this name. Requests that were submitted are finished with theirs.

        Raises:
            ValueError: it is of another model, or the model has an adapter itself.
        """
        adapter.check_model(self.model, name)
        if self._followers is not None:
            adapter = self._followers.divide(adapter)
        with self._load_lock:
            self._decoder.runner.prepare_adapter(adapter)
        with self._condition:
            self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Accept no more requests of an adapter. Those that were submitted are finished with it.

        Raises:
            UnknownAdapterError: there is no adapter of this name.
        """
        with self._condition:
            self._check_adapter(name)
            del self._adapters[name]

    def _check_adapter(self, name: str) -> None:
        if name not in self._adapters:
            names = ", ".join(map(repr, self._adapters)) or "no adapters"
            raise UnknownAdapterError(f"adapter = {name!r} does not exist: this engine has {names}")

    @property
    def status(self) -> EngineStatus:
        pool, counts = self._decoder.pool, self._decoder.counts
        counts = replace(counts, steps_by_tokens=[*counts.steps_by_tokens])
        with self._condition:
            num_waiting = len(self._submitted) + len(self._decoder.scheduler.waiting)
            is_busy = self._step_start is not None
            busy_seconds = self._busy_seconds + (time.perf_counter() - self._busy_since if is_busy else 0.0)
        return EngineStatus(
            len(self._decoder.scheduler.active),
            num_waiting,
            pool.num_pages,
            pool.num_owned,
            busy_seconds,
            counts,
        )

    def submit(
        self,
        token_ids: Sequence[int],
        config: GenerationConfig,
        seed: int = 0,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> EngineRequest:
        """Let a request be decoded; does not wait for the answer.

        Args:
            token_ids: a prompt, or with ``options.is_infill`` a canvas whose mask tokens are filled.

        Raises:
            ValueError: like `generate`, an option is wrong, or the text can never fit into the cache.
            QueueFullError: too many requests wait.
            EngineStoppedError: the engine was closed, or an error has ended it.
        """
        settings = resolve_settings(config, self.model.config)
        [handle] = self.submit_prepared([prepare_request(settings, token_ids, seed, options)])
        return handle

    def submit_prepared(self, requests: Sequence[PreparedRequest]) -> list[EngineRequest]:
        """Let requests be decoded, all or none; does not wait for the answers.

        Raises:
            UnknownAdapterError: there is no such adapter.
            ValueError: an attention bias is wrong, or a text can never fit into the cache.
            QueueFullError: too many requests wait.
            EngineStoppedError: the engine was closed, or an error has ended it.
        """
        handles = []
        for prepared in requests:
            pattern = self._check_pattern(prepared.settings)
            if self._followers is not None and isinstance(pattern, DenseBias) and pattern.bias.dim() == 4:
                raise ValueError(
                    "attention_bias has a matrix for each head, and tensor_parallel > 1 divides the heads: name one "
                    "for all heads"
                )
            request = ActiveRequest(prepared)
            self._decoder.scheduler.pages.check_size(request)
            handles.append(EngineRequest(request))
        with self._condition:
            self.check_capacity(len(handles))
            for handle in handles:
                if (name := handle._request.prepared.options.adapter) is not None:
                    self._check_adapter(name)
                    handle._request.adapter = self._adapters[name]
            self._submitted += handles
            self._condition.notify_all()
        return handles

    def check_capacity(self, count: int) -> None:
        """Check that so many more requests would be accepted now.

        Raises:
            QueueFullError: too many requests wait.
            EngineStoppedError: the engine was closed, or an error has ended it.
        """
        with self._condition:
            if self._is_closing or not self.is_alive:
                raise EngineStoppedError("the engine was closed" if self._error is None else "an error has ended it")
            num_unfinished = len(self._submitted) + len(self._handles)
            if num_unfinished + count > self._max_unfinished:
                raise QueueFullError(
                    f"{num_unfinished} requests are not done yet, and the limit is {self._max_unfinished}: try "
                    "again later"
                )

    def abort(self, handle: EngineRequest) -> None:
        """End a request in any state; nothing happens if it is done."""
        with self._condition:
            if not handle.state.is_done:
                self._aborted.append(handle)
                self._condition.notify_all()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests and end the thread: with ``drain`` when all requests are done, else at once.

        Requests that are not done after ``timeout`` seconds end with `EngineStoppedError`. A listener, which is called
        in the thread, does not wait for its end.
        """
        with self._condition:
            self._is_closing, self._drains = True, self._drains and drain
            self._condition.notify_all()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._condition:
                self._drains = False
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _run(self) -> None:
        """The thread: steps while there is work."""
        stopped = EngineStoppedError("the engine was closed before the request was done")
        try:
            if self._deterministic:
                _use_one_thread()
            while self._take_commands():
                self._step_start = self._clock()
                result = self._decoder.step()
                for request in result.decoded:
                    self._update(request)
                for request in result.finished:
                    self._update(request, is_done=True)
                with self._condition:
                    self._step_start = None
                    self._busy_seconds += time.perf_counter() - self._busy_since
        except BaseException as error:
            self._error = error
            LOGGER.exception("an error has ended the engine")
            stopped = EngineStoppedError(f"an error has ended the engine: {error}")
            stopped.__cause__ = error
        with self._condition:
            self._is_closing, self._step_start = True, None
            unfinished = [*self._handles.values(), *self._submitted]
            self._submitted, self._aborted, self._handles = [], [], {}
        for handle in unfinished:
            handle._fail(stopped)
        for handle in unfinished:
            try:
                self._decoder.remove(handle._request)
            except Exception:  # the decoder may be in any state after an error
                LOGGER.exception("the pages of a request could not be freed")
        if self._followers is not None:
            self._followers.close(is_healthy=self._error is None)

    def _update(self, request: ActiveRequest, *, is_done: bool = False) -> None:
        """Let the caller see the state of a request. If that fails, this request ends, and the others go on."""
        handle, error = self._handles.get(id(request)), request.error
        if handle is None:  # it has failed in this step
            return
        if error is None:
            try:
                handle._update(is_done=is_done)
            except Exception as failure:
                LOGGER.exception("reading the state of a request has failed")
                error = failure
                self._decoder.remove(request)
        if error is not None:
            handle._fail(error)
        if is_done or error is not None:
            del self._handles[id(request)]

    def _take_commands(self) -> bool:
        """Wait for work, then add and remove requests; False: the thread ends."""
        with self._condition:
            if not (self._submitted or self._decoder.has_work):
                release_team()  # of this thread, while others compute
            while not self._condition.wait_for(
                lambda: self._submitted or self._aborted or self._decoder.has_work or self._is_closing,
                None if self._followers is None else HEARTBEAT_SECONDS,
            ):
                assert self._followers is not None
                self._followers.ping()
            self._busy_since = time.perf_counter()
            submitted, aborted = self._submitted, self._aborted
            self._submitted, self._aborted = [], []
            for handle in submitted:
                self._decoder.add(handle._request)
                self._handles[id(handle._request)] = handle
            is_over = self._is_closing and not (self._drains and self._decoder.has_work)
        for handle in aborted:
            if self._handles.pop(id(handle._request), None) is not None:
                self._decoder.remove(handle._request)
                handle._fail(EngineError("the request was aborted"))
        return not is_over


def _use_one_thread() -> None:
    """Compute in this thread alone, and leave the number of threads of all others as it is."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # It is also the default of threads that begin later.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()


def _size_cache(model: Transformer, limits: EngineLimits) -> tuple[int, EngineLimits]:
    """Number of pages that the memory holds, and the limits with the size of a page, which holds whole blocks."""
    config, itemsize = model.config, compute_dtype(model.lm_head.weight).itemsize
    block_length = config.block_length or 1
    page_size = limits.page_size or -(-PAGE_SIZE // block_length) * block_length
    page_bytes = 2 * config.num_hidden_layers * model.num_key_value_heads * config.head_dim * itemsize * page_size
    num_pages = limits.cache_memory // page_bytes
    if num_pages < 1:
        raise ValueError(
            f"cache_memory = {limits.cache_memory} does not hold a page of {page_size} positions, {page_bytes} bytes: "
            "raise it"
        )
    return num_pages, limits.model_copy(update={"page_size": page_size})


def _check_model(model: Transformer) -> None:
    """Check that a thread can decode with a model."""
    if model.attention_backend not in ("auto", "eager", "sdpa"):
        raise ValueError(
            f'attention_backend = "{model.attention_backend}" has no cached form: use "auto", "eager" or "sdpa"'
        )
    if torch.is_autocast_enabled(model.lm_head.weight.device.type):
        raise ValueError(
            "autocast is on, and the thread of the engine would not have it: load the model with the dtype instead"
        )


def release_team() -> bool:
    """End the idle OpenMP threads of the calling thread. Returns whether the runtime has done it.

    Each thread that computes has a team of its own. With more threads than cores, GNU's runtime lets them sleep between
    two parallel regions almost at once, and a small forward has hundreds of regions: an idle team of the thread that
    has loaded the model makes the steps of an engine on two cores a third longer.
    """
    # torch has loaded the runtime for all; elsewhere than on Linux it is another one.
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
    return pause is not None and pause(SOFT_PAUSE) == 0
