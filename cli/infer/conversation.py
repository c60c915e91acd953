"""A chat in a terminal: a person asks, the model answers while it decodes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from cli.infer.inputs import needed
from cli.infer.session import usable
from cli.infer.terminal import styled
from config.infer import InferConfig
from diffusionlm.inference.streaming import stream
from diffusionlm.models.transformer import Transformer
from tokenizer import ChatTemplate, Tokenizer, encode_chat


def converse(model: Transformer, tokenizer: Tokenizer, config: InferConfig, template: ChatTemplate | None) -> None:
    """Ask and answer until the input ends (Ctrl-D). Ctrl-C ends an answer, and between answers the chat.

    A turn that goes wrong, as when the chat gets longer than the model's context, is told and taken back.

    Raises:
        ValueError: there is no chat template, or the settings do not suit the model.
    """
    template = needed(template)
    generation = usable(config.generation, tokenizer, model)
    messages = [] if config.input.system is None else [{"role": "system", "content": config.input.system}]
    with suppress(ImportError):
        importlib.import_module("readline")  # with it, input() lets lines be edited
    for number in count():
        question = _asked()
        if question is None:
            print()
            return
        asked = [*messages, {"role": "user", "content": question}]
        try:
            ids = encode_chat(tokenizer, template, asked, add_generation_prompt=True)
            answer = _answered(stream(model, tokenizer, ids, generation, config.input.seed + number))
        except ValueError as error:
            print(f"that did not work, and is forgotten: {error}")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _asked() -> str | None:
    """A line that is not empty; None: there are no more."""
    try:
        while not (line := input("> ")).strip():
            pass
    except EOFError:
        return None
    return line


def _answered(pieces: Iterator[str]) -> str:
    """Print the pieces as they come; the answer, or what there is of it when it is interrupted."""
    said = []
    try:
        for piece in pieces:
            said.append(piece)
            print(styled(piece, ""), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print()
    return "".join(said)
