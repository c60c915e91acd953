"""The text of one generation while it grows: what is final from the left, as soon as it is.

Diffusion settles positions in any order, so a piece comes when everything before it is settled, too; with blocks at the
latest when its block is done. Where a strategy takes tokens back, which it does within the current block alone, a block
comes when the next one has begun.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from config.generation import GenerationConfig
from diffusionlm.inference.blocks import block_causal_length
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep, generate
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.inference.stopping import resolve_stop_token_ids
from diffusionlm.inference.strategies import build_strategy
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    config: GenerationConfig,
    seed: int = 0,
) -> Iterator[str]:
    """The pieces of the text that `generate` continues a prompt by; none is empty, and none splits a character.

    Decoding begins with the first piece that is asked for, in a thread of its own, and ends with its next forward when
    the iterator is closed.

    Raises:
        ValueError: as in `generate`, when the next piece is asked for.
    """
    updates: SimpleQueue[Sequence[int] | Exception | None] = SimpleQueue()
    is_closed = threading.Event()
    thread = threading.Thread(
        target=_decode,
        args=(model, prompt_ids, config, seed, updates, is_closed),
        name="diffusionlm-stream",
        daemon=True,
    )
    thread.start()
    try:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        num_told = 0
        while (ids := updates.get()) is not None:
            if isinstance(ids, Exception):
                raise ids
            piece = decoder.decode(tokenizer.decode_bytes(ids[num_told:]))
            num_told = len(ids)
            if piece:
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest
    finally:
        is_closed.set()
        thread.join()


class _ReaderClosedError(Exception):
    """Nobody reads on."""


def _decode(
    model: Transformer,
    prompt_ids: Sequence[int],
    config: GenerationConfig,
    seed: int,
    updates: SimpleQueue[Sequence[int] | Exception | None],
    is_closed: threading.Event,
) -> None:
    """Put the new tokens that are final, all of them each time, then None or what went wrong."""
    try:
        finality = _FinalTokenTracker(model, fill_defaults(config, model.config), len(prompt_ids))

        def tell(step: DecodingStep) -> None:
            if is_closed.is_set():
                raise _ReaderClosedError
            updates.put(finality.of(step.canvases[0]))

        [result] = generate(model, [prompt_ids], config, [seed], tell)
        updates.put(result.token_ids)
        updates.put(None)
    except _ReaderClosedError:
        pass
    except Exception as error:
        updates.put(error)


class _FinalTokenTracker:
    """Which new tokens of a canvas will not change any more."""

    def __init__(self, model: Transformer, config: GenerationConfig, start: int) -> None:
        self._start = start
        self._can_remask = build_strategy(config).can_remask
        self._stop_ids = resolve_stop_token_ids(config, model.config)
        causal = block_causal_length(config, model.config)
        self._origin = start if causal is None else 0
        self._size = causal or config.block_length

    def of(self, canvas: CanvasSnapshot) -> tuple[int, ...]:
        """Ids from the first new one on, up to the first that is not final, or to a stop token."""
        ids = canvas.token_ids[self._start : max(self._end(canvas), self._start)]
        stop = next((place for place, token in enumerate(ids) if token in self._stop_ids), len(ids))
        return ids[:stop]

    def _end(self, canvas: CanvasSnapshot) -> int:
        if not self._can_remask:
            new = enumerate(canvas.is_masked[self._start :], self._start)
            return next((place for place, is_masked in new if is_masked), len(canvas.token_ids))
        # Blocks are decoded in order, so those before the last one that has anything are done.
        places = range(len(canvas.is_masked) - 1, self._start - 1, -1)
        last = next((place for place in places if not canvas.is_masked[place]), self._start)
        if self._size is None:
            return self._start
        return self._origin + (last - self._origin) // self._size * self._size
