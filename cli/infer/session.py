"""One call of ``diffusionlm-infer``: the inputs batch by batch, or a chat in the terminal."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from cli.infer.answers import Answer, answer_record, build_answers, build_page
from cli.infer.inputs import EncodedInput, build_question
from cli.infer.terminal import LiveView, print_answer
from config.infer import InferConfig, InferInputConfig
from diffusionlm.inference.generate import decode, stream
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from files.terminal_text import escape_control_characters, print_line
from logger.console import ProgressMeter
from logger.pages.html import render_html
from tokenizer import Tokenizer

IMAGE_COMMAND = "/image "
"""In a chat in the terminal; the path of a file follows."""


def answer(model: Transformer, builder: RequestBuilder, inputs: Sequence[EncodedInput], config: InferConfig) -> None:
    """Decode every input, and print and write the answers in order, after each batch.

    If decoding fails, the replay page is written with the batches that are complete.

    Raises:
        ValueError: the model's probabilities are not finite.
        OSError: a file cannot be written.
    """
    output, tokenizer = config.output, builder.tokenizer
    params = {
        **builder.settings.config.model_dump(mode="json"),
        "stop_token_ids": sorted(builder.settings.stop_token_ids),
        # Without the ids that have no text: a model may have thousands.
        "suppress_token_ids": list(config.generation.suppress_token_ids),
    }
    is_json = output.format == "json" or output.file is not None
    for path in (output.file, output.html):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    # A bar and the canvases of --show would overwrite each other.
    meter = ProgressMeter(sys.stderr, style="lines" if output.show else "auto")
    if output.file is not None:
        meter.begin("decoding", "inputs", len(inputs))
    try:
        with closing(meter):
            for start in range(0, len(inputs), config.input.batch_size):
                batch = inputs[start : start + config.input.batch_size]
                stream = (sys.stderr if is_json else sys.stdout) if output.show else None
                new_answers = _decode_batch(model, tokenizer, batch, stream)
                answers += new_answers
                if is_json:
                    _write_lines([answer_record(item, params) for item in new_answers], output.file)
                else:
                    for item in new_answers:
                        print_answer(tokenizer, item, shows_name=len(inputs) > 1)
                if output.file is not None:
                    meter.set_postfix(f"{new_answers[0].metrics['tokens_per_second']:.1f} tokens/s")
                    meter.set(len(answers))
    finally:
        if output.html is not None and answers:
            model_name = "model" if config.model.path is None else config.model.path.resolve().name
            write_text_atomic(output.html, render_html(build_page(tokenizer, model_name, params, answers)))


def _decode_batch(
    model: Transformer, tokenizer: Tokenizer, batch: Sequence[EncodedInput], stream: TextIO | None
) -> list[Answer]:
    """Decode a batch, and show its canvases on a stream, if there is one."""
    start = time.perf_counter()
    with nullcontext() if stream is None else closing(LiveView(tokenizer, batch, stream)) as view:
        results = decode(model, [encoded.prepared for encoded in batch], view)
    return build_answers(tokenizer, batch, results, time.perf_counter() - start)


def _write_lines(records: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """Append JSON lines to a file, or print them."""
    lines = "".join(json.dumps(record, default=str) + "\n" for record in records)
    if path is None:
        print(lines, end="", flush=True)
    else:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(lines)


def run_chat(model: Transformer, builder: RequestBuilder, config: InferInputConfig) -> None:
    """Read questions and print answers until the input ends (Ctrl-D). Ctrl-C ends an answer or, between answers, the
    chat. ``/image FILE`` adds an image to the next question.

    A turn that fails, for example because the chat exceeds the model's context, is reported and dropped.
    """
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    with suppress(ImportError):
        importlib.import_module("readline")  # lets input() edit lines
    images = [*config.images]
    for number in count():
        question = _read_question()
        if question is None:
            print()
            return
        turn_messages = [*messages, build_question(question, images)]
        try:
            if question.startswith(IMAGE_COMMAND):
                path = Path(question.removeprefix(IMAGE_COMMAND).strip()).expanduser()
                builder.encode_chat([build_question("", [path])])  # refuses what cannot be read
                images.append(path)
                continue
            prompt, seed = builder.encode_chat(turn_messages), config.seed + number
            answer = _print_answer(stream(model, builder.tokenizer, prompt, builder.settings.config, seed))
        except ValueError as error:
            print_line(f"failed; the conversation continues without this turn: {error}")
            continue
        messages, images = [*turn_messages, {"role": "assistant", "content": answer}], []


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
