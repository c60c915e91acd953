"""The decoding loop: requests join and leave between two forwards, each with its own settings, block and step.

A round is one forward. Requests that decode a block take part in every round; those that read a long text first take
turns within a budget of rows, so a prompt of thousands of tokens delays its neighbors by at most one round's share.
Pages of the cache are given as a text grows. If there are none left, the youngest request returns its pages, waits, and
later takes the same step again: its tokens, step map and number of forwards do not change.

An error ends the requests that cause it. A forward that fails is repeated with each half of its requests, down to a
request alone; if even that one fails and no other has succeeded, a forward of two tokens decides whether the model can
still be computed. A forward in which other ranks take part is not repeated: the decoder fails.
"""

from __future__ import annotations

import logging
import time
import traceback
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from diffusionlm.inference.constraints.sampler import constrain_predictions
from diffusionlm.inference.cuda_graphs import GraphedForward, keep_graphs, select_graph_factory, take_graphs
from diffusionlm.inference.fixed_shapes import FixedShapeRunner, prepare_for_tiles
from diffusionlm.inference.model_runner import ModelRunner, ScheduledRequest, masked_position_logits
from diffusionlm.inference.pages import PagePool, page_digests
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.sampling import BatchSampler, LogitRows
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.row_adapters import ModelAdapter, add_row_adapters
from diffusionlm.models.transformer import Transformer

LOGGER = logging.getLogger(__name__)

PAGE_SIZE = 16
"""Default number of positions of a page."""
ROW_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inputs of a round, by which rounds are counted (`DecoderCounts.rounds_by_rows`)."""
SLOW_CONSTRAINT_SECONDS = 0.02
"""Time of a request's constraint in a round, beyond which the others then go ahead for about as long."""


@dataclass(frozen=True)
class DecoderLimits:
    """Bounds of memory and of a round."""

    num_pages: int
    """Pages of the cache."""
    page_size: int = PAGE_SIZE
    """Positions of a page."""
    max_requests: int | None = None
    """Requests that are decoded at a time. None: no limit."""
    max_rows: int | None = None
    """Inputs of a round, beyond which texts that are read for the first time wait or are read in parts; a round has at
    least one. None: no limit."""
    has_prefix_cache: bool = False
    """Share pages between requests whose texts begin alike."""
    pauses_slow_constraints: bool = False
    """A request whose constraint takes long lets others go ahead. Its forwards then depend on the clock."""


@dataclass
class DecoderCounts:
    """What a decoder has done so far."""

    num_rounds: int = 0
    num_rows: int = 0
    """Inputs of all forwards."""
    rounds_by_rows: list[int] = field(default_factory=lambda: [0] * (len(ROW_BOUNDS) + 1))
    """Rounds of at most as many inputs as each of `ROW_BOUNDS` and more than the bound before, then larger ones."""
    num_request_steps: int = 0
    """Decoding steps of requests: a forward takes one of each request that it decodes."""
    model_seconds: float = 0.0
    """Time of the forwards and of sampling from their logits, until the predictions are on the host."""
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Tokens that the prefix cache was asked for."""
    num_prefix_hits: int = 0
    """Those of them that it had."""


@dataclass(frozen=True)
class Round:
    """What a round has done."""

    has_forward: bool
    decoded: tuple[ActiveRequest, ...]
    """Requests whose step was taken; with an error, in vain."""
    finished: tuple[ActiveRequest, ...]
    """Requests that are done, or have an error: the decoder has forgotten them."""


class Decoder:
    """Decodes requests together. Not thread-safe."""

    def __init__(
        self,
        model: Transformer,
        limits: DecoderLimits,
        adapters: Mapping[str, ModelAdapter] | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """Allocate the cache.

        Args:
            adapters: that requests may name (`PreparedRequest.adapter`).
            deterministic: answers, log-probabilities included, are the same bits, whatever is decoded at the same time
                and whatever the limits are. The caller sees to it that torch uses one thread.

        Raises:
            ValueError: a limit is not positive, an adapter is of another model, or the model cannot be deterministic.
        """
        for key in ("page_size", "max_requests", "max_rows"):
            value = getattr(limits, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} = {value} must be at least 1")
        self._model, adapter_rows = model, None
        if deterministic:
            model = prepare_for_tiles(model)
        if adapters:
            model, adapter_rows = add_row_adapters(model, adapters)
        weight = model.lm_head.weight
        make_graph = None if deterministic else select_graph_factory(self._model)
        self.cache: PagedCache | None = None
        self._graphed_forward: GraphedForward | None = None
        if limits.num_pages and make_graph is not None:
            self._graphed_forward = take_graphs(self._model, limits.num_pages, limits.page_size, make_graph)
            self.cache = self._graphed_forward.cache
        elif limits.num_pages:
            self.cache = PagedCache(
                model.config, limits.num_pages, limits.page_size, weight.device, compute_dtype(weight)
            )
        self.limits = limits
        self.counts = DecoderCounts()
        self.pool = PagePool(limits.num_pages)
        build_runner = FixedShapeRunner if deterministic else ModelRunner
        self._runner = build_runner(model, self.cache, adapter_rows, self._graphed_forward)
        self._sampler = BatchSampler(weight.device, samples_alone=deterministic)
        self._waiting: list[ActiveRequest] = []
        self._active: list[ActiveRequest] = []
        """Both in order of arrival."""
        self._failed: list[ActiveRequest] = []
        """Requests that an error has ended since the round began, outside of their step."""
        self._num_arrivals = 0

    def keep_graphs(self) -> None:
        """Leave the CUDA graphs and the cache to the next decoder of the model: the last call of a decoder without
        work, none of whose forwards has failed."""
        if self._graphed_forward is not None:
            keep_graphs(self._model, self._graphed_forward)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def add(self, request: ActiveRequest) -> None:
        """Let a request wait for its first round.

        Raises:
            ValueError: it can never fit into the cache.
        """
        self.check_size(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(request)

    def check_size(self, request: ActiveRequest) -> None:
        """Check that a request can fit into the cache.

        Raises:
            ValueError: it cannot.
        """
        num_pages = self._num_pages(request, len(request.tokens_L))
        if num_pages > self.limits.num_pages:
            raise ValueError(
                f"{len(request.tokens_L)} tokens need {num_pages} pages of {self.limits.page_size} positions, and the "
                f"cache has {self.limits.num_pages}: shorten the text, or give the cache more memory"
            )

    def remove(self, request: ActiveRequest) -> None:
        """Forget a request in any state, and free its pages."""
        self._waiting = [other for other in self._waiting if other is not request]
        self._active = [other for other in self._active if other is not request]
        self._release_pages(request)

    @torch.inference_mode()
    def run_round(self) -> Round:
        """Admit what waits, run one forward if there is anything to do, and retire what is done.

        Raises:
            Exception: the model cannot be computed, whatever the request.
        """
        finished = self._prepare(self._active) + self._admit()
        # Without pages for anyone else, the youngest gives way until someone can be served.
        while not (scheduled := self._schedule()) and any(request.is_prepared for request in self._active):
            pass
        finished += self._failed
        self._failed = []
        if not scheduled:
            return Round(False, (), tuple(finished))
        start = time.perf_counter()
        results = self._predict(scheduled)
        if all(isinstance(result, Exception) for result in results):
            self._check_model()
        seconds = time.perf_counter() - start
        self.counts.model_seconds += seconds
        served = {id(item.request) for item in scheduled}
        for request in self._active:
            if id(request) not in served:
                request.constraint_seconds -= seconds
        num_rows = sum(item.num_rows for item in scheduled)
        self.counts.num_rounds += 1
        self.counts.num_rows += num_rows
        self.counts.rounds_by_rows[bisect_left(ROW_BOUNDS, num_rows)] += 1
        for item, result in zip(scheduled, results, strict=True):
            self._finish_step(item.request, result)
        # The others' next step is prepared when their callers have seen this one.
        finished += self._retire([item.request for item in scheduled])
        decoded = tuple(item.request for item in scheduled if item.is_decoded)
        self.counts.num_request_steps += len(decoded)
        return Round(True, decoded, tuple(finished))

    def _predict(self, scheduled: Sequence[ScheduledRequest]) -> list[Predictions | Exception | None]:
        """Run a forward: predictions for each request that is decoded, None for one whose text is read, or its error.

        A forward that fails is repeated with each half of the requests, so that only those fail that cannot be computed
        alone. Keys and values are written again, to the same places.

        Raises:
            Exception: the forward failed, and other ranks take part in it, which would not repeat it.
        """
        try:
            logits_NV = self._runner(scheduled)
        except Exception as error:
            if self._model.has_collective_forwards:
                raise
            if len(scheduled) == 1:
                return [error]
            LOGGER.warning("a forward of %d requests has failed (%r): each half is repeated", len(scheduled), error)
            _free_frames(error)
        else:
            decoded = [item.request for item in scheduled if item.is_decoded]
            sampled = iter(self._sample(LogitRows(logits_NV, decoded)))
            return [next(sampled) if item.is_decoded else None for item in scheduled]
        # Outside of the handler, so that nothing of the failed forward is in memory anymore.
        half = len(scheduled) // 2
        return [*self._predict(scheduled[:half]), *self._predict(scheduled[half:])]

    def _sample(self, logits: LogitRows) -> list[Predictions | Exception]:
        """Predictions for each request, or its error; requests are sampled one by one if this fails together.

        Raises:
            Exception: the sampling failed, and the next forward needs the same requests on other ranks.
        """
        try:
            return constrain_predictions(logits, self._sampler.sample_predictions(logits))
        except Exception as error:
            if self._model.has_collective_forwards:
                raise
            if len(logits.requests) == 1:
                return [error]
            _free_frames(error)
        return [result for request in logits.requests for result in self._sample(logits.only(request))]

    def _check_model(self) -> None:
        """Run a forward of two tokens: what fails then is not the fault of a request."""
        masked_position_logits(self._model, [np.zeros(2, np.int64)], [np.ones(1, np.int64)], [Bidirectional()]).cpu()

    def _finish_step(self, request: ActiveRequest, result: Predictions | Exception | None) -> None:
        """Commit the predictions of a request, and publish what has become final of its text."""
        try:
            if isinstance(result, Exception):
                raise result
            if result is not None:
                request.commit(result)
            request.last_round = self.counts.num_rounds
            self._publish_pages(request)
        except Exception as error:
            _end_with_error(request, error)

    def _prepare(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Prepare the next step of requests, unless many steps before it have no forward; remove and return those that
        have none."""
        for request in requests:
            if not request.is_prepared:
                try:
                    request.prepare_step()
                except Exception as error:
                    _end_with_error(request, error)
        return self._retire(requests)

    def _retire(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Remove and return requests that are done, or have an error."""
        finished = [request for request in requests if request.error is not None or request.is_done]
        for request in finished:
            self.remove(request)
        return finished

    def _admit(self) -> list[ActiveRequest]:
        """Admit waiting requests in order of arrival, as long as there is room. Returns those that are done already."""
        finished: list[ActiveRequest] = []
        while self._waiting:
            request = self._waiting[0]
            if finished_now := self._prepare([request]):
                finished += finished_now
                continue
            if self.limits.max_requests is not None and len(self._active) >= self.limits.max_requests:
                break
            # What the next step reads is not known yet if many steps before it have no forward: it gets pages later.
            has_first_pages = request.is_prepared or not request.uses_blocks
            try:
                if request.uses_cache and has_first_pages and not self._give_first_pages(request):
                    break
            except Exception as error:
                _end_with_error(request, error)
                finished += self._retire([request])
                continue
            self._waiting.pop(0)
            request.last_round = self.counts.num_rounds
            self._active.append(request)
            self._active.sort(key=lambda other: other.arrival)
        return finished

    def _give_first_pages(self, request: ActiveRequest) -> bool:
        """Give a waiting request the pages of its first forward; False if there are not enough."""
        if self._can_share_pages(request):
            self._share_pages(request)
        length = self._runner.input_slice(request).num_visible if request.uses_blocks else len(request.tokens_L)
        # The others may need one page more at once, and would take these back.
        reserved = sum(min(other.num_texts, self._missing(other, len(other.tokens_L))) for other in self._active)
        if self._missing(request, length) + reserved <= self.pool.num_available:
            self._grow(request, length)
            if self._can_share_pages(request):
                self._count_shared_pages(request)
            return True
        self._release_pages(request)
        return False

    def _num_pages(self, request: ActiveRequest, length: int) -> int:
        """Pages of all texts of a request up to a length."""
        if not request.uses_cache:
            return 0
        return -(-length // self.limits.page_size) * request.num_texts

    def _missing(self, request: ActiveRequest, length: int) -> int:
        """Pages that a request lacks for its positions below ``length``."""
        return max(0, self._num_pages(request, length) - sum(map(len, request.pages)))

    def _grow(self, request: ActiveRequest, length: int) -> bool:
        """Give a request pages for all positions below ``length``; False if there are not enough."""
        if self._missing(request, length) > self.pool.num_available:
            return False
        request.pages = request.pages or [[] for _ in range(request.num_texts)]
        num_pages, num_later = (-(-end // self.limits.page_size) for end in (length, len(request.tokens_L)))
        for pages in request.pages:
            if num_pages > len(pages):
                after = pages[-1] if pages else None
                pages += self.pool.allocate(num_pages - len(pages), after, max(0, num_later - num_pages))
        return True

    def _release_pages(self, request: ActiveRequest) -> None:
        for pages in request.pages:
            self.pool.release(pages)
        request.pages, request.page_digests = [], []
        request.cached_length, request.needs_prefill = 0, True

    def _schedule(self) -> list[ScheduledRequest]:
        """Requests of the next forward, in order of arrival, with pages for what they read."""
        short: list[ScheduledRequest] = []
        long: list[ScheduledRequest] = []
        for request in self._take_turns():
            try:
                item = ScheduledRequest(request, self._runner.input_slice(request))
            except Exception as error:
                _end_with_error(request, error)
                self._failed += self._retire([request])
                continue
            is_first_reading = request.needs_prefill and item.num_rows > request.num_short_rows
            (long if is_first_reading or not request.uses_cache else short).append(item)
        scheduled = short + self._take_within_budget(long, sum(item.num_rows for item in short))
        scheduled.sort(key=lambda item: item.request.arrival)
        served = []
        for item in scheduled:
            if item.request in self._active and self._make_room(item.request, item.part.num_visible):
                served.append(item)
        return served

    def _take_turns(self) -> list[ActiveRequest]:
        """Requests that may take a step: with `pauses_slow_constraints` those whose constraint has just taken long only
        if there are no others."""
        prepared = [request for request in self._active if request.is_prepared]
        if not self.limits.pauses_slow_constraints:
            return prepared
        return [item for item in prepared if item.constraint_seconds <= SLOW_CONSTRAINT_SECONDS] or prepared

    def _take_within_budget(self, scheduled: Sequence[ScheduledRequest], num_rows: int) -> list[ScheduledRequest]:
        """Those within the budget, the least recently served first; a long prompt is read in parts."""
        if self.limits.max_rows is None:
            return list(scheduled)
        taken: list[ScheduledRequest] = []
        budget = self.limits.max_rows - num_rows
        for item in sorted(scheduled, key=lambda item: (item.request.last_round or 0, item.request.arrival)):
            if item.num_rows > budget and item.request.uses_blocks:
                part = self._runner.prompt_slice(item.request, max(budget // item.request.num_texts, 0 if taken else 1))
                if part is None:
                    continue
                item = ScheduledRequest(item.request, part, is_decoded=part == item.part)
            elif item.num_rows > budget and taken:
                continue
            taken.append(item)
            budget -= item.num_rows
        return taken

    def _make_room(self, request: ActiveRequest, length: int) -> bool:
        """Give a request its pages, if need be those of the youngest ones, which have to wait; False if it is the
        youngest itself."""
        if not request.uses_cache:
            return True
        while not self._grow(request, length):
            victim = next(other for other in reversed(self._active) if other.uses_blocks)
            self.remove(victim)
            self._waiting.insert(0, victim)
            self.counts.num_preemptions += 1
            if victim is request:
                return False
        return True

    def _can_share_pages(self, request: ActiveRequest) -> bool:
        """Whether keys and values of a page depend on the text up to the end of its last block alone."""
        is_causal = request.uses_blocks and request.settings.block_causal_length is not None
        return self.limits.has_prefix_cache and is_causal and not request.has_guidance

    def _count_shared_pages(self, request: ActiveRequest) -> None:
        if request.last_round is None:  # after a preemption they would be the request's own
            self.counts.num_prefix_queries += self._runner.num_final_tokens(request)
            self.counts.num_prefix_hits += request.cached_length
            request.num_cached_tokens = request.cached_length

    def _share_pages(self, request: ActiveRequest) -> None:
        """Begin a waiting request with the pages of the prefix cache."""
        digests = self._digest_pages(request, self._runner.num_final_tokens(request))
        pages = self.pool.share(digests)
        if pages:
            request.pages, request.page_digests = [pages], digests[: len(pages)]
            request.cached_length = len(pages) * self.limits.page_size

    def _publish_pages(self, request: ActiveRequest) -> None:
        """Add the pages that have become final to the prefix cache."""
        if not self._can_share_pages(request):
            return
        digests = self._digest_pages(request, self._runner.num_unchanging_tokens(request))
        for index, digest in enumerate(digests, start=len(request.page_digests)):
            self.pool.publish(request.pages[0][index], digest)
            request.page_digests.append(digest)

    def _digest_pages(self, request: ActiveRequest, num_tokens: int) -> list[bytes]:
        """Digests of the whole pages of a request's first ``num_tokens`` positions, behind those that it has.

        Keys and values of a page depend on the tokens up to the end of its last block, which may be in the next page,
        and on where blocks begin, as the turns of a chat move them.
        """
        size, num_known = self.limits.page_size, len(request.page_digests)
        ends = np.arange((num_known + 1) * size, num_tokens + 1, size)
        block_length = request.settings.block_causal_length
        if not len(ends) or block_length is None:
            return []
        block_starts_L = request.prepared.segments.block_starts(np.arange(len(request.tokens_L)), block_length)
        block_ends = np.searchsorted(block_starts_L, block_starts_L[ends - 1], side="right")
        contents_2L = np.stack([request.tokens_L, block_starts_L])
        slices = [slice(end - size, block_end) for end, block_end in zip(ends, block_ends, strict=True)]
        salt = request.page_digests[-1] if num_known else request.cache_salt
        return page_digests([contents_2L[:, part] for part in slices], salt)


def _end_with_error(request: ActiveRequest, error: Exception) -> None:
    """End one request; the others go on."""
    if not isinstance(error, ValueError):  # its caller did not cause it
        LOGGER.error("decoding a request has failed", exc_info=error)
    _free_frames(error)
    request.error = error


def _free_frames(error: Exception) -> None:
    """Free what the frames of an error refer to, such as the activations of a forward."""
    traceback.clear_frames(error.__traceback__)
