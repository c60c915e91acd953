"""Which requests a forward serves, and with which part of their texts.

Requests that decode a block take part in every step; those that read a long text first take turns within a budget of
inputs, so a prompt of thousands of tokens delays its neighbors by at most one step's share. Pages of the cache are
given as a text grows. If there are none left, the youngest request returns its pages, waits, and later takes the same
step again: its tokens, step map and number of forwards do not change.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from config.serving.server import EngineLimits
from diffusionlm.inference.model_runner import ScheduledRequest, count_final_tokens, schedule_prompt_part, schedule_step
from diffusionlm.inference.pages import PageManager
from diffusionlm.inference.requests import ActiveRequest

LOGGER = logging.getLogger(__name__)

PAGE_SIZE = 16
"""Default number of positions of a page."""
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inputs of a step, by which steps are counted (`DecoderCounts.steps_by_tokens`)."""


@dataclass
class DecoderCounts:
    """What a decoder has done so far."""

    num_steps: int = 0
    num_batched_tokens: int = 0
    """Inputs of all forwards."""
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(TOKEN_BOUNDS) + 1))
    """Steps of at most as many inputs as each of `TOKEN_BOUNDS` and more than the bound before, then larger ones."""
    num_request_steps: int = 0
    """Decoding steps of requests: a forward takes one of each request that it decodes."""
    model_seconds: float = 0.0
    """Time of the forwards and of sampling from their logits, until the predictions are on the host."""
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Tokens that the prefix cache was asked for."""
    num_prefix_hits: int = 0
    """Those of them that it had."""


class Scheduler:
    """Queues of requests, and the choice of those that the next forward serves. Not thread-safe."""

    def __init__(
        self, num_pages: int, limits: EngineLimits, counts: DecoderCounts, *, pauses_slow_constraints: bool
    ) -> None:
        """
        Args:
            pauses_slow_constraints: a request whose constraint takes long lets others go ahead. Its forwards then
                depend on the clock.
        """
        self._limits, self._counts, self._pauses_slow_constraints = limits, counts, pauses_slow_constraints
        self.pages = PageManager(num_pages, limits.page_size or PAGE_SIZE, has_prefix_cache=limits.prefix_cache)
        self.waiting: list[ActiveRequest] = []
        self.active: list[ActiveRequest] = []
        """Both in order of arrival."""
        self._finished: list[ActiveRequest] = []
        """Requests that have been retired since the last step."""
        self._num_arrivals = 0

    def add(self, request: ActiveRequest) -> None:
        """Let a request wait for its first step.

        Raises:
            ValueError: it can never fit into the cache.
        """
        self.pages.check_size(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def remove(self, request: ActiveRequest) -> None:
        """Forget a request in any state, and free its pages."""
        self.waiting = [other for other in self.waiting if other is not request]
        self.active = [other for other in self.active if other is not request]
        self.pages.release(request)

    def schedule(self) -> list[ScheduledRequest]:
        """Admit what waits, and select the requests of the next forward, with pages for what they read."""
        for request in list(self.active):
            self._prepare(request)
        self._admit()
        # Without pages for anyone else, the youngest gives way until someone can be served.
        while not (scheduled := self._select()) and any(request.is_prepared for request in self.active):
            pass
        return scheduled

    def retire(self, request: ActiveRequest) -> bool:
        """Remove a request if it is done, or has an error, and free the features of its images; whether it was."""
        is_over = request.error is not None or request.is_done
        if is_over:
            self.remove(request)
            request.image_features.clear()
            self._finished.append(request)
        return is_over

    def take_finished(self) -> list[ActiveRequest]:
        """The requests that were retired since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _prepare(self, request: ActiveRequest) -> bool:
        """Prepare the next step of a request, unless many steps before it have no forward; False: it is retired."""
        if not request.is_prepared:
            try:
                request.prepare_step()
            except Exception as error:
                end_with_error(request, error)
        return not self.retire(request)

    def _admit(self) -> None:
        """Admit waiting requests in order of arrival, as long as there is room."""
        while self.waiting:
            request = self.waiting[0]
            if not self._prepare(request):
                continue
            if len(self.active) >= self._limits.max_requests:
                break
            # What the next step reads is not known yet if many steps before it have no forward: it gets pages later.
            needs_pages = request.uses_cache and (request.is_prepared or not request.uses_blocks)
            try:
                if needs_pages and not self.pages.allocate_prompt_pages(request, self.active):
                    break
            except Exception as error:
                end_with_error(request, error)
                self.retire(request)
                continue
            self.waiting.pop(0)
            if request.last_step is None and self.pages.can_share(request):
                self._counts.num_prefix_queries += count_final_tokens(request)
                self._counts.num_prefix_hits += request.cached_length
                request.num_cached_tokens = request.cached_length
            request.last_step = self._counts.num_steps
            self.active.append(request)
            self.active.sort(key=lambda other: other.arrival)

    def _select(self) -> list[ScheduledRequest]:
        """Requests of the next forward, in order of arrival."""
        short: list[ScheduledRequest] = []
        long: list[ScheduledRequest] = []
        for request in self._take_turns():
            try:
                item = schedule_step(request)
            except Exception as error:
                end_with_error(request, error)
                self.retire(request)
                continue
            is_first_reading = request.needs_prefill and item.num_tokens > request.num_short_inputs
            (long if is_first_reading or not request.uses_cache else short).append(item)
        scheduled = short + self._take_within_budget(long, sum(item.num_tokens for item in short))
        scheduled.sort(key=lambda item: item.request.arrival)
        return [
            item
            for item in scheduled
            if item.request in self.active and self._preempt_until_allocated(item.request, item.num_visible)
        ]

    def _take_turns(self) -> list[ActiveRequest]:
        """Requests that may take a step: with ``pauses_slow_constraints`` those whose constraint has just taken long
        only if there are no others."""
        prepared = [request for request in self.active if request.is_prepared]
        if not self._pauses_slow_constraints:
            return prepared
        now = time.perf_counter()
        return [request for request in prepared if request.paused_until <= now] or prepared

    def _take_within_budget(self, scheduled: Sequence[ScheduledRequest], num_tokens: int) -> list[ScheduledRequest]:
        """Those within the budget, the least recently served first; a long prompt is read in parts."""
        taken: list[ScheduledRequest] = []
        budget = self._limits.max_num_batched_tokens - num_tokens
        for item in sorted(scheduled, key=lambda item: (item.request.last_step or 0, item.request.arrival)):
            if item.num_tokens > budget and item.request.uses_blocks:
                part = schedule_prompt_part(item.request, max(budget // item.request.num_texts, 0 if taken else 1))
                if part is None:
                    continue
                item = part
            elif item.num_tokens > budget and taken:
                continue
            taken.append(item)
            budget -= item.num_tokens
        return taken

    def _preempt_until_allocated(self, request: ActiveRequest, length: int) -> bool:
        """Give a request its pages, if need be those of the youngest ones, which have to wait; False if it is the
        youngest itself."""
        if not request.uses_cache:
            return True
        while not self.pages.allocate(request, length):
            victim = next(other for other in reversed(self.active) if other.uses_blocks)
            self.remove(victim)
            self.waiting.insert(0, victim)
            self._counts.num_preemptions += 1
            if victim is request:
                return False
        return True


def end_with_error(request: ActiveRequest, error: Exception) -> None:
    """End one request; the others go on."""
    if not isinstance(error, ValueError):  # its caller did not cause it
        LOGGER.error("decoding a request has failed", exc_info=error)
    free_frames(error)
    request.error = error


def free_frames(error: Exception) -> None:
    """Free what the frames of an error refer to, such as the activations of a forward."""
    traceback.clear_frames(error.__traceback__)
