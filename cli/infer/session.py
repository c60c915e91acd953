"""One call of ``diffusionlm-infer``: decode the inputs batch by batch, print and write the answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import groupby
from typing import Any

from cli.infer.answers import Answer, answer_record, append_json_lines, build_answers
from cli.infer.inputs import EncodedInput
from cli.infer.preparation import PreparedRun
from cli.infer.replay_page import ReplayRecorder, RequestReplay, render_replay
from cli.infer.terminal import LiveView, print_answer
from config.infer import InferConfig
from diffusionlm.inference.generate import DecodingStep, Generation, StepCallback, decode
from diffusionlm.models.transformer import Transformer
from files.atomic import write_text_atomic
from logger.progress import ProgressMeter


def answer(model: Transformer, prepared: PreparedRun, config: InferConfig) -> None:
    """Decode every input, and print and write the answers in order, after each batch.

    If decoding fails, the replay page is written with the batches that are complete.

    Raises:
        ValueError: the model's probabilities are not finite.
        OSError: a file cannot be written.
    """
    # A bar and the canvases of --show would overwrite each other.
    meter = ProgressMeter(sys.stderr, style="lines" if config.output.show else "auto")
    run = _InferenceRun(model, prepared, config, meter)
    try:
        with closing(meter):
            for batch in _split_into_batches(prepared.inputs, config.input.batch_size):
                run.decode_batch(batch)
    finally:
        run.write_replay_page()


def _split_into_batches(encoded_inputs: Sequence[EncodedInput], size: int) -> Iterator[list[EncodedInput]]:
    """Split inputs into batches, keeping order; a batch is all infills or none."""
    for _, group in groupby(encoded_inputs, key=lambda encoded: encoded.source.kind == "infill"):
        inputs = list(group)
        for start in range(0, len(inputs), size):
            yield inputs[start : start + size]


class _InferenceRun:
    """Decodes batches and presents their answers."""

    def __init__(
        self,
        model: Transformer,
        prepared: PreparedRun,
        config: InferConfig,
        meter: ProgressMeter,
    ) -> None:
        self.num_done = 0
        self._model = model
        self._tokenizer = prepared.builder.tokenizer
        self._config = config
        settings = prepared.builder.settings
        self._num_inputs = num_inputs = len(prepared.inputs)
        self._meter = meter
        if config.output.file is not None:
            meter.begin("decoding", "inputs", num_inputs)
        self._replays: list[tuple[RequestReplay, Answer]] = []
        self._params: dict[str, Any] = {
            **settings.config.model_dump(mode="json"),
            "stop_token_ids": sorted(settings.stop_token_ids),
            # Without the ids that have no text: a model may have thousands.
            "suppress_token_ids": list(config.generation.suppress_token_ids),
        }

    @property
    def _prints_json(self) -> bool:
        return self._config.output.format == "json" or self._config.output.file is not None

    def decode_batch(self, encoded_inputs: Sequence[EncodedInput]) -> None:
        output = self._config.output
        stream = sys.stderr if self._prints_json else sys.stdout
        view = LiveView(self._tokenizer, encoded_inputs, stream) if output.show else None
        recorder = ReplayRecorder(encoded_inputs) if output.html is not None else None
        start = time.perf_counter()
        with nullcontext() if view is None else closing(view):
            requests = [encoded.prepared for encoded in encoded_inputs]
            results = decode(self._model, requests, _combine_callbacks(view, recorder))
        seconds = time.perf_counter() - start
        self._emit_answers(encoded_inputs, results, recorder, seconds)

    def _emit_answers(
        self,
        encoded_inputs: Sequence[EncodedInput],
        results: Sequence[Generation],
        recorder: ReplayRecorder | None,
        seconds: float,
    ) -> None:
        answers = build_answers(self._tokenizer, encoded_inputs, results, seconds)
        self.num_done += len(answers)
        if recorder is not None:
            self._replays += zip(recorder.replays, answers, strict=True)
        records = [answer_record(answer, self._params) for answer in answers] if self._prints_json else []
        if self._config.output.file is not None:
            append_json_lines(self._config.output.file, records)
            self._meter.set_postfix(f"{answers[0].batch.tokens_per_second:.1f} tokens/s")
            self._meter.set(self.num_done)
        elif self._prints_json:
            for record in records:
                print(json.dumps(record), flush=True)
        else:
            for answer in answers:
                print_answer(self._tokenizer, answer, shows_name=self._num_inputs > 1)

    def write_replay_page(self) -> None:
        """Write the replays so far, if the config asks for a page and there are any."""
        path, html = self._config.model.path, self._config.output.html
        if html is not None and self._replays:
            model_name = "model" if path is None else path.resolve().name
            write_text_atomic(html, render_replay(self._tokenizer, model_name, self._params, self._replays))


def _combine_callbacks(*callbacks: StepCallback | None) -> StepCallback | None:
    """Combine the callbacks that are enabled; None if there are none."""
    enabled = [callback for callback in callbacks if callback is not None]
    if not enabled:
        return None

    def call_all(step: DecodingStep) -> None:
        for callback in enabled:
            callback(step)

    return call_all
