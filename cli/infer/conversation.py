"""A chat in the terminal; answers are printed while they are decoded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from cli.infer.preparation import PreparedRun
from config.infer import InferConfig
from diffusionlm.inference.generate import stream
from diffusionlm.models.transformer import Transformer
from files.terminal_text import escape_control_characters, print_line


def run_chat(model: Transformer, prepared: PreparedRun, config: InferConfig) -> None:
    """Read questions and print answers until the input ends (Ctrl-D). Ctrl-C ends an answer or, between answers, the
    chat.

    A turn that fails, for example because the chat exceeds the model's context, is reported and dropped.
    """
    builder = prepared.builder
    messages = [] if config.input.system is None else [{"role": "system", "content": config.input.system}]
    with suppress(ImportError):
        importlib.import_module("readline")  # lets input() edit lines
    for number in count():
        question = _read_question()
        if question is None:
            print()
            return
        turn_messages = [*messages, {"role": "user", "content": question}]
        try:
            prompt, seed = builder.encode_chat(turn_messages), config.input.seed + number
            answer = _print_answer(stream(model, builder.tokenizer, prompt, builder.settings.config, seed))
        except ValueError as error:
            print_line(f"failed; the conversation continues without this turn: {error}")
            continue
        messages = [*turn_messages, {"role": "assistant", "content": answer}]


def _read_question() -> str | None:
    """The next line that is not empty; None at the end of the input."""
    try:
        while not (line := input("> ")).strip():
            pass
    except EOFError:
        return None
    return line


def _print_answer(pieces: Iterator[str]) -> str:
    """Print the pieces as they are decoded. Returns the answer, or its beginning if Ctrl-C interrupts it."""
    answer, is_terminal = [], sys.stdout.isatty()
    try:
        for piece in pieces:
            answer.append(piece)
            print(escape_control_characters(piece) if is_terminal else piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print()
    return "".join(answer)
