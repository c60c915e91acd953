"""Requests of many callers with unequal lengths, and the ways to decode them that the benchmarks compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarking.implementations.decoding import convert_to_qwen3
from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.openmp import release_team

LENGTH_UNIT = 12
"""Lengths are multiples of it, so blocks of 3 and of 4 are whole and a longer answer begins like a shorter one."""


@dataclass(frozen=True)
class CallerRequest:
    """What a caller asks for."""

    prompt: list[int]
    new_tokens: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.new_tokens


Answers = list[tuple[int, ...]]
DecodeRequests = Callable[[], Answers]
"""Decodes all requests; returns their new tokens."""


def draw_requests(model: ModelConfig, count: int, longest: int, seed: int) -> list[CallerRequest]:
    """Requests whose prompts and answers have lengths of up to ``longest`` tokens, all multiples equally likely.

    A larger count begins with the requests of a smaller one.
    """
    requests = []
    last = model.vocab_size if model.mask_token_id is None else model.mask_token_id
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        prompt_length, new_tokens = (LENGTH_UNIT * rng.integers(1, longest // LENGTH_UNIT + 1, 2)).tolist()
        requests.append(CallerRequest(rng.integers(0, last, prompt_length).tolist(), new_tokens))
    return requests


def block_settings(block_length: int, steps: int) -> GenerationConfig:
    """Greedy decoding of blocks that ends at no token."""
    return GenerationConfig(
        attention="block_causal",
        cache="block",
        block_length=block_length,
        denoising_steps=steps,
        remasking_strategy="low_confidence_static",
        stop_token_ids=(),
    )


def decode_one_by_one(model: Transformer, requests: Sequence[CallerRequest], config: GenerationConfig) -> Answers:
    """One request at a time, in the calling thread."""
    answers = [
        generate(model, [request.prompt], _with_length(config, request.new_tokens))[0].token_ids for request in requests
    ]
    release_team()  # an engine that decodes next has a thread of its own
    return answers


def decode_by_engine(engine: Engine, requests: Sequence[CallerRequest], config: GenerationConfig) -> Answers:
    """All requests wait at once; the engine decodes as many together as it was built for."""
    handles = [engine.submit(request.prompt, _with_length(config, request.new_tokens)) for request in requests]
    return [handle.result().token_ids for handle in handles]


def decode_static_batches(
    engine: Engine, requests: Sequence[CallerRequest], config: GenerationConfig, *, size: int, is_padded: bool
) -> Answers:
    """Batches of ``size``, each begun when the one before it is complete.

    Args:
        is_padded: requests that are complete are computed until the longest one is, as decoders with rectangular
            batches do; else they leave, and nobody takes their place.
    """
    answers: Answers = []
    for batch in split_batches(requests, size):
        longest = max(request.new_tokens for request in batch)
        padded = [CallerRequest(request.prompt, longest) for request in batch] if is_padded else batch
        texts = decode_by_engine(engine, padded, config)
        answers += [text[: request.new_tokens] for text, request in zip(texts, batch, strict=True)]
    return answers


def split_batches(requests: Sequence[CallerRequest], size: int) -> list[Sequence[CallerRequest]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def static_limit(requests: Sequence[CallerRequest], size: int) -> float:
    """Rounds of padded static batches for each round in which every place is always taken: the gain of an engine whose
    rounds cost the same for any number of requests."""
    longest = sum(size * max(request.new_tokens for request in batch) for batch in split_batches(requests, size))
    return longest / sum(request.new_tokens for request in requests)


def count_equal(answers: Answers, expected: Answers) -> int:
    """Number of equal answers among those that are expected."""
    return sum(tuple(ours) == tuple(theirs) for ours, theirs in zip(answers, expected, strict=False))


class TransformersBatching:
    """Continuous batching of `transformers` with the weights of an autoregressive model, on the same requests."""

    def __init__(self, model: Transformer, concurrency: int, num_positions: int) -> None:
        """Start its thread.

        Args:
            concurrency: requests that are decoded at a time.
            num_positions: positions of its cache.
        """
        transformers: Any = importlib.import_module("transformers")
        page_size = 32
        settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        self._manager = convert_to_qwen3(model).init_continuous_batching(
            generation_config=settings,
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=-(-num_positions // page_size),
                max_batch_tokens=2048,
                max_requests_per_batch=concurrency,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        self._num_requests = 0

    def decode(self, requests: Sequence[CallerRequest]) -> Answers:
        """Decode requests that all wait at once.

        Raises:
            ValueError: it fails.
        """
        numbers = {}
        for index, request in enumerate(requests):
            name = f"request-{self._num_requests}"
            self._num_requests += 1
            numbers[name] = index
            self._manager.add_request(request.prompt, name, max_new_tokens=request.new_tokens, eos_token_id=-1)
        answers: dict[int, tuple[int, ...]] = {}
        while len(answers) < len(requests):
            output = self._manager.get_result(timeout=1.0)
            if output is None and not self._manager.is_running():
                raise ValueError("the continuous batching of transformers has ended")
            if output is not None and output.error is not None:
                raise ValueError(f"the continuous batching of transformers has failed: {output.error}")
            if output is not None and output.is_finished():
                answers[numbers[output.request_id]] = tuple(output.generated_tokens)
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        self._manager.stop(block=True)


def _with_length(config: GenerationConfig, new_tokens: int) -> GenerationConfig:
    return config.model_copy(update={"max_new_tokens": new_tokens})
