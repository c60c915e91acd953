"""A request while the engine decodes it: its choices, what is new of them, and how it ends.

The engine's thread wakes the event loop after each forward; the loop then reads the latest state of each choice. A slow
reader so skips states, and costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from diffusionlm.inference.text import AnswerText, AnswerToken
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.errors import ApiError, to_api_error
from diffusionlm.serving.http.preparation import PreparedCall
from diffusionlm.serving.requests import EngineError, RequestState, UnknownAdapterError
from tokenizer import Tokenizer


@dataclass(frozen=True)
class TextPiece:
    """New text of a masked span; a prompt has one span."""

    span: int
    text: str
    tokens: list[AnswerToken]


class Choice:
    """One choice of an answer: follows a request of the engine, which may be a prompt that is scored."""

    prompt: Choice | None = None
    """The prompt with its log-probabilities, if they are asked for."""

    def __init__(self, index: int, call: PreparedCall, tokenizer: Tokenizer) -> None:
        self.index, self.prepared = index, call.requests[index]
        self.num_prompt_tokens = call.num_prompt_tokens[index] if index < call.num_choices else 0
        options, body = self.prepared.options, call.body
        # Calls of tools may begin with special tokens.
        hides_special = body.skip_special_tokens and call.tool_format is None
        self._hidden_ids = tokenizer.hidden_ids if hides_special else frozenset[int]()
        self._span_ends = list(accumulate(options.span_lengths))
        """Of a prompt there is one span of any length."""
        num_spans = len(options.span_lengths) or 1
        self._num_repeated = [len(repeated) for repeated in options.repeated_bytes] or [0] * num_spans
        self.spans = [
            AnswerText(
                tokenizer,
                body.stop if index < call.num_choices else (),
                count,
                hidden_ids=self._hidden_ids,
                includes_stop=body.include_stop_str_in_output,
                min_new_tokens=self.prepared.settings.config.min_new_tokens,
            )
            for count in self._num_repeated
        ]
        if index >= call.num_choices:
            for token in np.delete(self.prepared.canvas_L, self.prepared.masked_positions).tolist():
                self.spans[0].push(token)  # the first one has no log-probability if outputs are shifted
        self.finish_reason: str | None = None
        self.state: RequestState | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.chunk_gaps: list[float] = []
        """Seconds between two arrivals of tokens."""
        self._tokenizer = tokenizer
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        """New tokens, with a stop string through the one that completes it."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def num_forwards(self) -> int:
        """Forwards that it took part in. With a stop string through the one that completes it: how many more the engine
        computes until it is told to stop is chance."""
        if self.state is None:
            return 0
        if self.spans[-1].is_stopped:
            return max(self.state.steps[: self.num_tokens])
        return self.state.num_forwards

    @property
    def visible_tokens(self) -> list[AnswerToken]:
        """Tokens of the text, without those of a stop string."""
        return [token for span in self.spans for token in span.visible_tokens()]

    def read(self, state: RequestState) -> None:
        """Read a state of the request.

        Raises:
            ApiError: the request has ended with an error.
        """
        if state.error is not None:
            raise to_api_error(state.error)
        self.state = state
        if len(state.token_ids) > self._num_read:
            self._note_arrival()
        for number in range(self._num_read, len(state.token_ids)):
            self._push(number, state)
        self._num_read = len(state.token_ids)
        if self.spans[-1].is_stopped:
            self.finish_reason = "stop"
        elif state.is_done:
            assert state.generation is not None, "a request ends with an answer or an error"
            for span in self.spans:
                span.finish()
            is_stopped = self.spans[-1].is_stopped
            self.finish_reason = "stop" if is_stopped else state.generation.finish_reason

    def _push(self, number: int, state: RequestState) -> None:
        span = bisect_right(self._span_ends[:-1], number)
        top_logprobs = state.top_logprobs[number] if state.top_logprobs else ()
        self.spans[span].push(state.token_ids[number], state.logprobs[number], tuple(top_logprobs))
        if self._span_ends and number + 1 == self._span_ends[span]:
            self.spans[span].finish()

    def _note_arrival(self) -> None:
        now = time.monotonic()
        if self.last_token_time is not None:
            self.chunk_gaps.append(now - self.last_token_time)
        self.first_token_time = self.first_token_time or now
        self.last_token_time = now

    def take_new(self) -> list[TextPiece]:
        """Return the text that may be sent and was not yet."""
        pieces = [TextPiece(number, *span.take_new()) for number, span in enumerate(self.spans)]
        return [piece for piece in pieces if piece.text or piece.tokens]

    def build_canvas(self) -> list[str | None] | None:
        """What each new token adds to the text, None where it is masked; only of a call with `diffusing`."""
        snapshot = None if self.state is None else self.state.canvas
        if snapshot is None:
            return None
        if self.finish_reason is not None:
            return [token.text for token in self.visible_tokens]
        positions = self.prepared.masked_positions[self.prepared.masked_positions < len(snapshot.token_ids)].tolist()
        texts: list[str | None] = []
        span_bounds = pairwise([0, *(self._span_ends or [len(positions)])])
        for (start, end), num_repeated in zip(span_bounds, self._num_repeated, strict=True):
            for is_masked, group in groupby(positions[start:end], snapshot.is_masked.__getitem__):
                run = list(group)
                if is_masked:
                    texts += [None] * len(run)
                    continue
                num_bytes = num_repeated if run[0] == positions[start] else 0
                text = AnswerText(self._tokenizer, (), num_bytes, hidden_ids=self._hidden_ids)
                for position in run:
                    text.push(snapshot.token_ids[position])
                text.finish()
                texts += [token.text for token in text.visible_tokens()]
        return texts


async def decode(engine: Engine, call: PreparedCall, choices: Sequence[Choice]) -> AsyncGenerator[list[Choice], None]:
    """Submit all choices of a call, or none, and iterate over those that have changed until every one is done.

    The first item is empty: the engine has accepted them. A reader that is slow gets what is new together. One that
    stops early closes the iterator, which ends the choices.

    Raises:
        ApiError: the engine refuses a choice, or one has ended with an error.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(changed.set)

    try:
        handles = engine.submit_prepared(call.requests)
    except (EngineError, UnknownAdapterError) as error:
        raise to_api_error(error) from error
    except ValueError as error:
        code, param = "context_length_exceeded", call.body.text_key
        raise ApiError(400, str(error), param=param, code=code) from None
    try:
        for handle in handles:
            handle.add_listener(wake)
        yield []
        while any(choice.finish_reason is None for choice in choices):
            await changed.wait()
            changed.clear()
            changed_choices = []
            for choice, handle in zip(choices, handles, strict=True):
                if choice.finish_reason is None and (state := handle.state) is not choice.state:
                    choice.read(state)
                    if choice.finish_reason is not None:
                        engine.abort(handle)  # a stop string may have ended it
                    changed_choices.append(choice)
            yield changed_choices
    finally:
        for handle in handles:
            engine.abort(handle)
