"""The text of one generation as a stream: tokens are passed on from the left as soon as they are final.

Positions are committed in any order, so a piece of text is final when everything before it is committed too; with
blocks at the latest when its block is complete. A strategy that remasks does so within the current block alone, so its
blocks are final when the next one has begun.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from config.generation import GenerationConfig
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep, decode
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.requests import PreparedRequest, prepare_prompt
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int] | HealedText,
    config: GenerationConfig,
    seed: int = 0,
    segment_starts: Sequence[int] = (),
) -> Iterator[str]:
    """Iterate over the pieces of text by which `generate` continues a prompt; none is empty or splits a character.

    Pieces do not repeat the text that a `HealedText` has taken back.

    Decoding runs in a thread of its own. It starts with the request for the first piece, and stops at its next forward
    when the iterator is closed.

    Args:
        segment_starts: of the prompt, as in `generate`.

    Raises:
        ValueError: like `generate`, when a piece is requested.
    """
    healed = prompt if isinstance(prompt, HealedText) else HealedText(tuple(prompt))
    settings = resolve_settings(config, model.config)
    request = prepare_prompt(settings, healed.token_ids, seed, "the prompt", healed.allowed_token_ids, segment_starts)
    updates: SimpleQueue[Sequence[int] | Exception | None] = SimpleQueue()
    is_closed = threading.Event()
    thread = threading.Thread(
        target=_decode_into_queue,
        args=(model, settings, request, len(healed.token_ids), updates, is_closed),
        name="diffusionlm-stream",
        daemon=True,
    )
    thread.start()
    try:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        num_decoded = 0
        while (final_ids := updates.get()) is not None:
            if isinstance(final_ids, Exception):
                raise final_ids
            skipped = healed.num_repeated_bytes if num_decoded == 0 else 0
            piece = decoder.decode(tokenizer.decode_bytes(final_ids[num_decoded:])[skipped:])
            num_decoded = len(final_ids)
            if piece:
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece
    finally:
        is_closed.set()
        thread.join()


class _ReaderClosedError(Exception):
    """The iterator was closed."""


def _decode_into_queue(
    model: Transformer,
    settings: DecodingSettings,
    request: PreparedRequest,
    prompt_length: int,
    updates: SimpleQueue[Sequence[int] | Exception | None],
    is_closed: threading.Event,
) -> None:
    """After each forward put all final new tokens into the queue; at the end None, or an error."""
    tracker = _FinalTokenTracker(settings, prompt_length, request.segments)

    def put_final_tokens(step: DecodingStep) -> None:
        if is_closed.is_set():
            raise _ReaderClosedError
        updates.put(tracker.final_tokens(step.canvases[0]))

    try:
        [result] = decode(model, settings, [request], put_final_tokens)
        updates.put(result.token_ids)
        updates.put(None)
    except _ReaderClosedError:
        pass
    except Exception as error:
        updates.put(error)


class _FinalTokenTracker:
    """Finds the new tokens of a canvas that will not change anymore."""

    def __init__(self, settings: DecodingSettings, prompt_length: int, segments: TextSegments) -> None:
        self._prompt_length = prompt_length
        self._can_remask = settings.strategy.can_remask
        self._stop_token_ids = settings.stop_token_ids
        self._first_block_start = prompt_length if settings.block_causal_length is None else segments.starts[-1]
        self._block_length = settings.config.block_length

    def final_tokens(self, canvas: CanvasSnapshot) -> tuple[int, ...]:
        """New tokens up to the first one that is not final, or to a stop token."""
        new_ids = canvas.token_ids[self._prompt_length : max(self._final_end(canvas), self._prompt_length)]
        stop = next((index for index, token in enumerate(new_ids) if token in self._stop_token_ids), len(new_ids))
        return new_ids[:stop]

    def _final_end(self, canvas: CanvasSnapshot) -> int:
        new_positions = range(self._prompt_length, len(canvas.is_masked))
        if not self._can_remask:
            return next((position for position in new_positions if canvas.is_masked[position]), len(canvas.is_masked))
        if self._block_length is None:
            return self._prompt_length
        # Blocks are decoded in order, so all before the last one with a committed token are complete.
        committed = (position for position in reversed(new_positions) if not canvas.is_masked[position])
        last_committed = next(committed, self._prompt_length)
        offset = last_committed - self._first_block_start
        return self._first_block_start + offset // self._block_length * self._block_length
