"""One call of ``diffusionlm-infer``: the inputs batch by batch, or a chat in the terminal."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from itertools import count, groupby
from typing import Any

from cli.infer.answers import Answer, answer_record, build_answers, build_page
from cli.infer.inputs import EncodedInput, PreparedRun
from cli.infer.terminal import LiveView, print_answer
from config.infer import InferConfig, InferOutputConfig
from diffusionlm.inference.generate import decode, stream
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from files.terminal_text import escape_control_characters, print_line
from logger.console import ProgressMeter
from logger.pages.html import render_html
from tokenizer import Tokenizer


def answer(model: Transformer, prepared: PreparedRun, config: InferConfig) -> None:
    """Decode every input, and print and write the answers in order, after each batch.

    If decoding fails, the replay page is written with the batches that are complete.

    Raises:
        ValueError: the model's probabilities are not finite.
        OSError: a file cannot be written.
    """
    output, inputs, tokenizer = config.output, prepared.inputs, prepared.builder.tokenizer
    params = _describe_settings(prepared, config)
    done: list[Answer] = []
    # A bar and the canvases of --show would overwrite each other.
    meter = ProgressMeter(sys.stderr, style="lines" if output.show else "auto")
    if output.file is not None:
        meter.begin("decoding", "inputs", len(inputs))
    try:
        with closing(meter):
            for batch in _split_into_batches(inputs, config.input.batch_size):
                answers = _decode_batch(model, tokenizer, batch, output)
                done += answers
                _emit_answers(answers, tokenizer, params, output, shows_names=len(inputs) > 1)
                if output.file is not None:
                    meter.set_postfix(f"{answers[0].tokens_per_second:.1f} tokens/s")
                    meter.set(len(done))
    finally:
        if output.html is not None and done:
            model_name = "model" if config.model.path is None else config.model.path.resolve().name
            write_text_atomic(output.html, render_html(build_page(tokenizer, model_name, params, done)))


def _describe_settings(prepared: PreparedRun, config: InferConfig) -> dict[str, Any]:
    """Keys of the generation config with their effective values."""
    settings = prepared.builder.settings
    return {
        **settings.config.model_dump(mode="json"),
        "stop_token_ids": sorted(settings.stop_token_ids),
        # Without the ids that have no text: a model may have thousands.
        "suppress_token_ids": list(config.generation.suppress_token_ids),
    }


def _split_into_batches(encoded_inputs: Sequence[EncodedInput], size: int) -> Iterator[list[EncodedInput]]:
    """Split inputs into batches, keeping order; a batch is all infills or none."""
    for _, group in groupby(encoded_inputs, key=lambda encoded: encoded.source.kind == "infill"):
        inputs = list(group)
        for start in range(0, len(inputs), size):
            yield inputs[start : start + size]


def _decode_batch(
    model: Transformer, tokenizer: Tokenizer, batch: Sequence[EncodedInput], output: InferOutputConfig
) -> list[Answer]:
    """Decode a batch, and show its canvases if the config says so."""
    view = LiveView(tokenizer, batch, sys.stderr if _prints_json(output) else sys.stdout) if output.show else None
    start = time.perf_counter()
    with nullcontext() if view is None else closing(view):
        results = decode(model, [encoded.prepared for encoded in batch], view)
    return build_answers(tokenizer, batch, results, time.perf_counter() - start)


def _prints_json(output: InferOutputConfig) -> bool:
    return output.format == "json" or output.file is not None


def _emit_answers(
    answers: Sequence[Answer],
    tokenizer: Tokenizer,
    params: Mapping[str, Any],
    output: InferOutputConfig,
    *,
    shows_names: bool,
) -> None:
    """Append answers to the file, else print them."""
    if not _prints_json(output):
        for answer in answers:
            print_answer(tokenizer, answer, shows_name=shows_names)
        return
    lines = "".join(json.dumps(answer_record(answer, params)) + "\n" for answer in answers)
    if output.file is None:
        print(lines, end="", flush=True)
        return
    with output.file.open("a", encoding="utf-8", newline="\n") as file:
        file.write(lines)


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
