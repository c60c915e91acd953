"""One call of ``diffusionlm-infer``: decode the inputs batch by batch, print and write the answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import groupby
from typing import Any

from cli.infer.answers import Answer, answer_record, build_answers, build_page
from cli.infer.inputs import EncodedInput
from cli.infer.preparation import PreparedRun
from cli.infer.terminal import LiveView, print_answer
from config.infer import InferConfig, InferOutputConfig
from diffusionlm.inference.generate import decode
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from logger.pages.html import render_html
from logger.progress import ProgressMeter
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
