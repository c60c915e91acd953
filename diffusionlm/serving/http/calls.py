"""A request while the engine decodes it: its choices, what is new of them, and how it ends.

The engine's thread wakes the event loop after each forward; the loop then reads the latest state of each choice. A slow
reader so skips states, and costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise

from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.text import AnswerText, AnswerToken
from diffusionlm.serving.engine import Engine
from diffusionlm.serving.http.bodies import find_key
from diffusionlm.serving.http.errors import ApiError, to_api_error
from diffusionlm.serving.http.preparation import PreparedCall, Submission
from diffusionlm.serving.requests import EngineRequest, RequestState
from tokenizer import Tokenizer


@dataclass(frozen=True)
class TextPiece:
    """New text of a hole; a prompt has one hole."""

    hole: int
    text: str
    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True)
class ChoiceUpdate:
    """What is new of a choice."""

    choice: Choice
    pieces: tuple[TextPiece, ...]
    is_first: bool
    canvas: tuple[str | None, ...] | None
    """Text of each new token, None where it is masked; of a call with `diffusing`."""


class Choice:
    """One choice of an answer: follows a request of the engine.

    Args:
        hole_lengths: tokens of each hole; empty: one hole of any length.
    """

    def __init__(
        self,
        index: int,
        submission: Submission,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        hole_lengths: Sequence[int] = (),
    ) -> None:
        self.index, self.submission = index, submission
        repeated_bytes = submission.repeated_bytes
        self.holes = [AnswerText(tokenizer, stop, num_repeated) for num_repeated in repeated_bytes]
        self.finish_reason: str | None = None
        self.state: RequestState | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.chunk_gaps: list[float] = []
        """Seconds between two arrivals of tokens."""
        self._tokenizer = tokenizer
        self._hole_ends = [sum(hole_lengths[: number + 1]) for number in range(len(hole_lengths))]
        self._num_read = 0
        self._num_sent = [0] * len(self.holes)
        self._num_sent_tokens = [0] * len(self.holes)
        self._is_sent = [False] * len(self.holes)
        self._has_sent = False

    @property
    def num_tokens(self) -> int:
        """New tokens, with a stop string through the one that completes it."""
        return sum(len(hole.tokens) for hole in self.holes)

    @property
    def num_forwards(self) -> int:
        """Forwards that it took part in. With a stop string through the one that completes it: how many more the engine
        computes until it is told to stop is chance."""
        if self.state is None:
            return 0
        if self.holes[-1].is_stopped:
            return max(self.state.steps[: self.num_tokens])
        return self.state.num_forwards

    @property
    def visible_tokens(self) -> list[AnswerToken]:
        """Tokens of the text, without those of a stop string."""
        return [token for hole in self.holes for token in hole.visible_tokens()]

    def read(self, state: RequestState) -> bool:
        """Read a state of the request. Returns whether a stop string has ended the choice.

        Raises:
            ApiError: the request has ended with an error.
        """
        if self.finish_reason is not None:
            return False
        if state.error is not None:
            raise to_api_error(state.error)
        self.state = state
        if len(state.token_ids) > self._num_read:
            self._note_arrival()
        for number in range(self._num_read, len(state.token_ids)):
            self._push(number, state)
        self._num_read = len(state.token_ids)
        if self.holes[-1].is_stopped:
            self.finish_reason = "stop"
            return not state.is_done
        if state.is_done:
            assert state.generation is not None, "a request ends with an answer or an error"
            for hole in self.holes:
                hole.finish()
            is_stopped = self.holes[-1].is_stopped
            self.finish_reason = "stop" if is_stopped else state.generation.finish_reason
        return False

    def _push(self, number: int, state: RequestState) -> None:
        hole = bisect_right(self._hole_ends[:-1], number)
        top_logprobs = state.top_logprobs[number] if state.top_logprobs else ()
        self.holes[hole].push(state.token_ids[number], state.logprobs[number], tuple(top_logprobs))
        if self._hole_ends and number + 1 == self._hole_ends[hole]:
            self.holes[hole].finish()

    def _note_arrival(self) -> None:
        now = time.monotonic()
        if self.last_token_time is not None:
            self.chunk_gaps.append(now - self.last_token_time)
        self.first_token_time = self.first_token_time or now
        self.last_token_time = now

    def take_update(self) -> ChoiceUpdate | None:
        """Return what may be sent and was not yet; None: nothing."""
        pieces = []
        for number, hole in enumerate(self.holes):
            if self._is_sent[number]:
                continue
            self._is_sent[number] = hole.is_complete
            end, tokens = hole.sendable_length, hole.sendable_tokens(self._num_sent_tokens[number])
            text = hole.text[self._num_sent[number] : end]
            if text or tokens:
                pieces.append(TextPiece(number, text, tuple(tokens)))
            self._num_sent[number] = max(end, self._num_sent[number])
            self._num_sent_tokens[number] += len(tokens)
        canvas = self._canvas()
        if not pieces and canvas is None and self.finish_reason is None:
            return None
        is_first, self._has_sent = not self._has_sent, True
        return ChoiceUpdate(self, tuple(pieces), is_first, canvas)

    def _canvas(self) -> tuple[str | None, ...] | None:
        """What each new token adds to the text, None where it is masked."""
        snapshot = None if self.state is None else self.state.canvas
        if snapshot is None:
            return None
        if self.finish_reason is not None:
            return tuple(token.text for token in self.visible_tokens)
        positions = self.submission.hole_positions or range(len(self.submission.token_ids), len(snapshot.token_ids))
        texts: list[str | None] = []
        hole_bounds = pairwise([0, *(self._hole_ends or [len(positions)])])
        for (start, end), num_repeated in zip(hole_bounds, self.submission.repeated_bytes, strict=True):
            for is_masked, group in groupby(positions[start:end], snapshot.is_masked.__getitem__):
                run = list(group)
                if is_masked:
                    texts += [None] * len(run)
                    continue
                text = AnswerText(self._tokenizer, (), num_repeated if run[0] == positions[start] else 0)
                for position in run:
                    text.push(snapshot.token_ids[position], 0.0)
                text.finish()
                texts += [token.text for token in text.visible_tokens()]
        return tuple(texts)


class Call:
    """A request in the engine. `abort` must be called at its end, whatever has happened."""

    def __init__(self, engine: Engine, prepared: PreparedCall, tokenizer: Tokenizer) -> None:
        self.prepared = prepared
        self.choices = [
            Choice(index, submission, tokenizer, prepared.stop, prepared.hole_lengths)
            for index, submission in enumerate(prepared.submissions)
        ]
        self._engine = engine
        self._handles: list[EngineRequest] = []
        self._lock = threading.Lock()
        self._is_aborted = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    @property
    def is_submitted(self) -> bool:
        """The engine has accepted every choice of the call."""
        return len(self._handles) == len(self.choices)

    def submit(self) -> None:
        """Submit all choices, or none; runs in any thread.

        Raises:
            ApiError: the engine refuses one.
        """
        try:
            self._engine.check_capacity(len(self.choices))
            requests = []
            for choice in self.choices:
                if self._is_aborted:
                    return
                submission = choice.submission
                settings = resolve_settings(submission.config, self._engine.model.config)
                requests.append(
                    prepare_request(settings, submission.token_ids, submission.seed, submission.options, "the text")
                )
            # Not before: preparation takes long, and `abort` waits for the lock in the event loop.
            with self._lock:
                if self._is_aborted:
                    return
                self._handles = self._engine.submit_prepared(requests)
            for handle in self._handles:
                handle.add_listener(self._wake)
        except ValueError as error:
            self.abort()
            raise _describe_refusal(error, self.prepared) from None
        except Exception as error:
            self.abort()
            raise to_api_error(error) from error

    def abort(self) -> None:
        """End the choices that are not done; also those that are still to be submitted."""
        with self._lock:
            self._is_aborted = True
        for handle in self._handles:
            self._engine.abort(handle)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._changed.set)

    async def updates(self) -> AsyncIterator[list[ChoiceUpdate]]:
        """Iterate over what is new until every choice is done; a reader that is slow gets it together.

        Raises:
            ApiError: a choice has ended with an error.
        """
        async for choices in self._read_changes():
            updates = [update for choice in choices if (update := choice.take_update()) is not None]
            if updates:
                yield updates

    async def finish(self) -> None:
        """Wait until every choice is done.

        Raises:
            ApiError: a choice has ended with an error.
        """
        async for _ in self._read_changes():
            pass

    async def _read_changes(self) -> AsyncIterator[list[Choice]]:
        """Iterate over the choices that have changed, until every choice is done.

        Raises:
            ApiError: a choice has ended with an error.
        """
        while True:
            changed = []
            for choice, handle in zip(self.choices, self._handles, strict=True):
                state, before = handle.state, None if choice.state is None else choice.state.version
                if choice.finish_reason is None and state.version != before:
                    if choice.read(state):
                        self._engine.abort(handle)
                    changed.append(choice)
            yield changed
            if all(choice.finish_reason is not None for choice in self.choices):
                return
            await self._changed.wait()
            self._changed.clear()


def _describe_refusal(error: ValueError, prepared: PreparedCall) -> ApiError:
    message, fields = str(error), prepared.fields
    if "max_position_embeddings" in message or "pages of" in message:
        return ApiError(400, message, param=fields.text_key, code="context_length_exceeded")
    if "constraint" in message:
        param = "structured_outputs" if fields.response_format is None else "response_format"
    else:
        param = find_key(message.removeprefix("the canvas"), prepared.overrides) or fields.text_key
    return ApiError(400, message, param=param)
