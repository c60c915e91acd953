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
from diffusionlm.inference.constraints.compiler import TokenConstraint, constrain_prompt
from diffusionlm.inference.generate import decode_rounds
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.requests import ActiveRequest, prepare_prompt
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int] | HealedText,
    config: GenerationConfig,
    seed: int = 0,
    segment_starts: Sequence[int] = (),
    constraint: TokenConstraint | None = None,
) -> Iterator[str]:
    """Iterate over the pieces of text by which `generate` continues a prompt; none is empty or splits a character.

    Pieces do not repeat the text that a `HealedText` has taken back.

    Decoding runs in a thread of its own. It starts with the request for the first piece, and stops at its next forward
    when the iterator is closed.

    Args:
        segment_starts: of the prompt, as in `generate`.
        constraint: on the new text, as in `generate`.

    Raises:
        ValueError: like `generate`, when a piece is requested.
    """
    healed = prompt if isinstance(prompt, HealedText) else HealedText(tuple(prompt))
    settings = resolve_settings(config, model.config)
    prepared = prepare_prompt(settings, healed.token_ids, seed, "the prompt", healed.allowed_token_ids, segment_starts)
    if constraint is not None:
        prepared = constrain_prompt(prepared, settings, constraint.after(healed.repeated_bytes), "the prompt")
    updates: SimpleQueue[Sequence[int] | Exception | None] = SimpleQueue()
    is_closed = threading.Event()
    thread = threading.Thread(
        target=_decode_into_queue,
        args=(model, ActiveRequest(prepared, settings), updates, is_closed),
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


def _decode_into_queue(
    model: Transformer,
    request: ActiveRequest,
    updates: SimpleQueue[Sequence[int] | Exception | None],
    is_closed: threading.Event,
) -> None:
    """After each forward put all final new tokens into the queue; at the end None, or an error."""
    try:
        for _ in decode_rounds(model, [request]):
            if is_closed.is_set():
                return
            updates.put(request.final_token_ids())
        updates.put(request.final_token_ids())
        updates.put(None)
    except Exception as error:
        updates.put(error)
