"""The decoding loop: requests join and leave between two forwards, each with its own settings, block and step.

The scheduler selects the requests of a step (`scheduler.py`), gives them pages of the cache (`pages.py`), the model
runner computes their logits (`model_runner.py`), and the sampler predicts tokens, which the requests commit.

An error ends the requests that cause it. A forward that fails is repeated with each half of its requests, down to a
request alone; if even that one fails and no other has succeeded, a forward of two tokens decides whether the model can
still be computed. A forward in which other ranks take part is not repeated: the decoder fails.
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from config.serving.server import EngineLimits
from diffusionlm.inference.constraints.sampler import constrain_predictions
from diffusionlm.inference.cuda_graphs import GraphedForward, keep_graphs, select_graph_pool, take_graphs
from diffusionlm.inference.model_runner import FixedShapeRunner, ModelRunner, ScheduledRequest, prepare_for_tiles
from diffusionlm.inference.requests import ActiveRequest, Predictions
from diffusionlm.inference.sampling.sharded_sampling import plan_sharded_sampling
from diffusionlm.inference.sampling.token_sampler import BatchSampler, LogitRows, read_samples
from diffusionlm.inference.scheduler import (
    PAGE_SIZE,
    TOKEN_BOUNDS,
    DecoderCounts,
    Scheduler,
    end_with_error,
    free_frames,
)
from diffusionlm.inference.speculation.adaptive import DraftPolicy
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """What a step has done."""

    has_forward: bool
    decoded: tuple[ActiveRequest, ...]
    """Requests whose step was taken; with an error, in vain."""
    finished: tuple[ActiveRequest, ...]
    """Requests that are done, or have an error: the decoder has forgotten them."""


class Decoder:
    """Decodes requests together. Not thread-safe."""

    def __init__(
        self, model: Transformer, num_pages: int, limits: EngineLimits, *, pauses_slow_constraints: bool = False
    ) -> None:
        """Allocate the cache.

        Args:
            num_pages: of the cache, in place of the memory that the limits name.
            limits: with ``deterministic`` the caller sees to it that torch uses one thread.
            pauses_slow_constraints: of the `Scheduler`.

        Raises:
            ValueError: the model cannot be deterministic.
        """
        self.counts, self._draft_policy = DecoderCounts(), DraftPolicy()
        self.scheduler = Scheduler(num_pages, limits, self.counts, pauses_slow_constraints=pauses_slow_constraints)
        page_size, deterministic = limits.page_size or PAGE_SIZE, limits.deterministic
        self.pool = self.scheduler.pages.pool
        self._model, weight = model, model.lm_head.weight
        make_pool = None if deterministic else select_graph_pool(model)
        self.cache: PagedCache | None = None
        self._graphed_forward: GraphedForward | None = None
        if num_pages and make_pool is not None:
            self._graphed_forward = take_graphs(self._model, num_pages, page_size, make_pool)
            self.cache = self._graphed_forward.cache
        elif num_pages:
            dtype, num_heads = compute_dtype(weight), model.num_key_value_heads
            self.cache = PagedCache(model.config, num_pages, page_size, weight.device, dtype, num_heads)
        build_runner = FixedShapeRunner if deterministic else ModelRunner
        model = prepare_for_tiles(model) if deterministic else model
        self.runner = build_runner(model, self.cache, self._graphed_forward)
        self._sampler = BatchSampler(weight.device, samples_alone=deterministic, share=model.values_of_first_rank)

    @classmethod
    def for_requests(
        cls, model: Transformer, requests: Sequence[ActiveRequest], max_requests: int | None = None
    ) -> Self:
        """A decoder to which these requests were added: its cache holds the largest ones at the same time, and no step
        is limited.

        Args:
            max_requests: that are decoded at a time. None: all.
        """
        sizes = sorted(
            (-(-len(request.tokens_L) // PAGE_SIZE) * request.num_texts * request.uses_cache for request in requests),
            reverse=True,
        )
        max_requests = max_requests or max(len(requests), 1)
        limits = EngineLimits(max_requests=max_requests, max_num_batched_tokens=sys.maxsize, prefix_cache=False)
        decoder = cls(model, sum(sizes[:max_requests]), limits)
        for request in requests:
            decoder.add(request)
        return decoder

    def steps(self) -> Iterator[StepOutput]:
        """Take steps while there is work, and then leave the CUDA graphs and the cache to the model's next decoder.

        Raises:
            Exception: that of a request, or the model cannot be computed.
        """
        while self.has_work:
            output = self.step()
            for request in output.finished:
                if request.error is not None:
                    raise request.error
            yield output
        if self._graphed_forward is not None:
            keep_graphs(self._model, self._graphed_forward)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.active)

    def add(self, request: ActiveRequest) -> None:
        """Let a request wait for its first step.

        Raises:
            ValueError: it can never fit into the cache.
        """
        # Ranks that each decode the same requests run the same forwards, so none of them can go by its own clock.
        is_decoded_here = not self._model.has_collective_forwards or self.runner.announce is not None
        if request.speculation is not None and request.settings.config.speculation == "auto" and is_decoded_here:
            request.speculation.policy = self._draft_policy
        self.scheduler.add(request)

    def remove(self, request: ActiveRequest) -> None:
        """Forget a request in any state, and free its pages."""
        self.scheduler.remove(request)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Admit what waits, run one forward if there is anything to do, and retire what is done.

        Raises:
            Exception: the model cannot be computed, whatever the request.
        """
        selected, start = self.scheduler.schedule(), time.perf_counter()
        scheduled = [item for item in selected if self._read_images(item)]
        if scheduled:
            results = self._predict(scheduled)
            # Other ranks would not take part in a forward of two tokens.
            is_alone = not self._model.has_collective_forwards
            if is_alone and all(isinstance(result, Exception) for result in results):
                self._check_model()
            self._count(scheduled, time.perf_counter() - start)
            self._commit(scheduled, results)
        # The next step of the requests that go on is prepared when their callers have seen this one.
        decoded = tuple(item.request for item in scheduled if item.is_decoded)
        return StepOutput(bool(scheduled), decoded, tuple(self.scheduler.take_finished()))

    def _read_images(self, item: ScheduledRequest) -> bool:
        """Compute the features that the forward needs of a request; False: that has failed, and it is retired."""
        try:
            self.runner.read_images(item)
        except Exception as error:
            end_with_error(item.request, error)
            self.scheduler.retire(item.request)
        return item.request.error is None

    def _count(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        num_tokens = sum(item.num_tokens for item in scheduled)
        self.counts.model_seconds += seconds
        self.counts.num_steps += 1
        self.counts.num_batched_tokens += num_tokens
        self.counts.steps_by_tokens[bisect_left(TOKEN_BOUNDS, num_tokens)] += 1
        self.counts.num_request_steps += sum(item.is_decoded for item in scheduled)
        if all(item.num_tokens <= item.request.num_short_inputs for item in scheduled):
            self._draft_policy.record_step(len(scheduled), num_tokens, seconds)

    def _predict(self, scheduled: Sequence[ScheduledRequest]) -> list[Predictions | Exception | None]:
        """Run a forward: predictions for each request that is decoded, None for one whose text is read, or its error.

        A forward that fails is repeated with each half of the requests, so that only those fail that cannot be computed
        alone. Keys and values are written again, to the same places.

        Raises:
            Exception: the forward failed, and other ranks take part in it, which would not repeat it.
        """
        decoded = [item.request for item in scheduled if item.is_decoded]
        sampling = None if self.runner.announce is None else plan_sharded_sampling(decoded)
        try:
            outputs = self.runner(scheduled, sampling)
        except Exception as error:
            if self._model.has_collective_forwards:
                raise
            if len(scheduled) == 1:
                return [error]
            LOGGER.warning("a forward of %d requests has failed (%r): each half is repeated", len(scheduled), error)
            free_frames(error)
        else:
            sampled: Iterator[Predictions | Exception]
            if sampling is None:
                sampled = iter(self._sample(LogitRows(outputs, decoded)))
            else:
                sampled = iter(read_samples(outputs, decoded))
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
            free_frames(error)
        return [result for request in logits.requests for result in self._sample(logits.only(request))]

    def _check_model(self) -> None:
        """Run a forward of two tokens: what fails then is not the fault of a request."""
        tokens_12 = torch.zeros(1, 2, dtype=torch.long, device=self._model.lm_head.weight.device)
        self._model(tokens_12, pattern=VarlenBatch([SequenceSlice(0, 2, 2, Bidirectional())])).cpu()

    def _commit(self, scheduled: Sequence[ScheduledRequest], results: Sequence[Predictions | Exception | None]) -> None:
        """Commit the predictions of each request, publish what has become final of its text, and retire it if it is
        done."""
        for item, result in zip(scheduled, results, strict=True):
            request = item.request
            try:
                if isinstance(result, Exception):
                    raise result
                if result is not None:
                    request.commit(result)
                request.last_step = self.counts.num_steps
                self.scheduler.pages.publish(request)
            except Exception as error:
                end_with_error(request, error)
        for item in scheduled:
            self.scheduler.retire(item.request)
