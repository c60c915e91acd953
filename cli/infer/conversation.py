"""A chat in a terminal: a person asks, the model answers while it decodes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from cli.infer.inputs import require_template
from cli.infer.terminal import style_text
from config.infer import InferConfig
from diffusionlm.inference.streaming import stream
from diffusionlm.inference.text import suppress_ids_without_text
from diffusionlm.models.transformer import Transformer
from tokenizer import ChatTemplate, Tokenizer, encode_chat


def run_chat(model: Transformer, tokenizer: Tokenizer, config: InferConfig, template: ChatTemplate | None) -> None:
    """Ask and answer until the input ends (Ctrl-D). Ctrl-C ends an answer, and between answers the chat.

    A turn that goes wrong, as when the chat gets longer than the model's context, is told and taken back.

    Raises:
        ValueError: there is no chat template, or the settings do not suit the model.
    """
    template = require_template(template)
    generation = suppress_ids_without_text(config.generation, tokenizer, model.config.vocab_size)
    messages = [] if config.input.system is None else [{"role": "system", "content": config.input.system}]
    with suppress(ImportError):
        importlib.import_module("readline")  # with it, input() lets lines be edited
    for number in count():
        question = _read_question()
        if question is None:
            print()
            return
        asked = [*messages, {"role": "user", "content": question}]
        try:
            ids = encode_chat(tokenizer, template, asked, add_generation_prompt=True)
            answer = _print_answer(stream(model, tokenizer, ids, generation, config.input.seed + number))
        except ValueError as error:
            print(f"failed; the conversation continues without this turn: {error}")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _read_question() -> str | None:
    """A line that is not empty; None: there are no more."""
    try:
        while not (line := input("> ")).strip():
            pass
    except EOFError:
        return None
    return line


def _print_answer(pieces: Iterator[str]) -> str:
    """Print the pieces as they come; the answer, or what there is of it when it is interrupted."""
    said = []
    try:
        for piece in pieces:
            said.append(piece)
            print(style_text(piece, ""), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print()
    return "".join(said)
