"""One call of ``diffusionlm-infer``: its requests, decoded batch by batch, and what is printed and written of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from cli.infer.answers import Answer, answer_record, append_json_lines, build_answers, check_output_paths
from cli.infer.inputs import EncodedInput, Input, encode_inputs
from cli.infer.replay_page import ReplayRecorder, RequestReplay, write_page
from cli.infer.terminal import LiveView, print_answer
from config.generation import GenerationConfig
from config.infer import InferConfig
from diffusionlm.inference.generate import DecodingStep, Generation, check_generate, check_infill, generate, infill
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.inference.stopping import resolve_stop_token_ids
from diffusionlm.inference.text import find_ids_without_text
from diffusionlm.models.transformer import Transformer
from tokenizer import ChatTemplate, Tokenizer


def answer(
    model: Transformer,
    tokenizer: Tokenizer,
    inputs: Sequence[Input],
    config: InferConfig,
    template: ChatTemplate | None = None,
) -> None:
    """Decode every input, and print and write the answers in order, as each batch is done.

    What can be known before is checked before. A page for the browser is also written when decoding breaks off: with
    the batches that were done.

    Args:
        template: of chats; None: the checkpoint has none.

    Raises:
        ValueError: a text that is too long for the model, a hole that cannot be read, a chat that the template does not
            take, settings that do not suit the model, or a file that cannot be written.
        OSError: a file that cannot be written after all.
    """
    check_output_paths(config.output)
    generation = fill_defaults(config.generation, model.config)
    requests = encode_inputs(inputs, tokenizer, model.config, template, config.input.seed)
    session = _InferenceRun(model, tokenizer, config, generation, len(requests))
    session.check(requests)
    try:
        for batch in _split_into_batches(requests, config.input.batch_size):
            session.decode(batch)
    finally:
        session.write_page()


def resolve_generation(config: GenerationConfig, tokenizer: Tokenizer, model: Transformer) -> GenerationConfig:
    """The settings with the model's defaults, and without the ids that have no text."""
    filled = fill_defaults(config, model.config)
    unknown = find_ids_without_text(tokenizer, model.config.vocab_size)
    return filled.model_copy(update={"suppress_token_ids": (*filled.suppress_token_ids, *unknown)})


class _InferenceRun:
    """What the batches have in common, and the replays so far."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: InferConfig,
        generation: GenerationConfig,
        num_requests: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._num_requests = num_requests
        stop_ids = sorted(resolve_stop_token_ids(generation, model.config))
        # Without the ids that no text has: a model may have thousands of them.
        self._settings: dict[str, Any] = {**generation.model_dump(mode="json"), "stop_token_ids": stop_ids}
        self._generation = resolve_generation(generation, tokenizer, model)
        self._replays: list[tuple[RequestReplay, Answer]] = []
        self._num_done = 0

    def check(self, requests: Sequence[EncodedInput]) -> None:
        """Say now what `decode` would refuse later.

        Raises:
            ValueError: a request that does not fit the model; the message names it.
        """
        context = self._model.config.max_position_embeddings
        for request in requests:
            what = request.source.place or f"{request.name} of {self._num_requests}"
            length = len(request.token_ids)
            if request.source.kind == "infill":
                check_infill(self._model, [request.token_ids], self._generation)
                continue
            total, new = self._generation.total_length, self._generation.max_new_tokens
            if total is not None and not length < total:
                raise ValueError(
                    f"{what}: its {length} tokens leave nothing of total_length = {total}; shorten the prompt or raise "
                    "total_length"
                )
            wanted = f"total_length = {total}" if total is not None else f"max_new_tokens = {new}"
            whole = total if total is not None else length + (new or 0)
            if whole > context:
                raise ValueError(
                    f"{what} ({length} tokens) and {wanted}: {whole} tokens are more than the model's context, "
                    f"max_position_embeddings = {context}; shorten the prompt or lower {wanted.split()[0]}"
                )
        texts = [request.token_ids for request in requests if request.source.kind != "infill"]
        check_generate(self._model, texts, self._generation)

    def decode(self, requests: Sequence[EncodedInput]) -> None:
        """One batch, of requests that are all infills or none."""
        output = self._config.output
        view = LiveView(self._tokenizer, requests, sys.stderr if self._is_json else sys.stdout) if output.show else None
        recorder = ReplayRecorder(requests) if output.html is not None else None
        is_infill = requests[0].source.kind == "infill"
        start = time.perf_counter()
        results = (infill if is_infill else generate)(
            self._model,
            [request.token_ids for request in requests],
            self._generation,
            [request.seed for request in requests],
            _combine_callbacks(view, recorder),
        )
        seconds = time.perf_counter() - start
        if view is not None:
            view.close()
        self._emit_answers(requests, results, recorder, seconds)

    @property
    def _is_json(self) -> bool:
        return self._config.output.format == "json" or self._config.output.file is not None

    def _emit_answers(
        self,
        requests: Sequence[EncodedInput],
        results: Sequence[Generation],
        recorder: ReplayRecorder | None,
        seconds: float,
    ) -> None:
        """Print and write the answers of a batch."""
        answers = build_answers(self._tokenizer, requests, results, seconds)
        self._num_done += len(answers)
        if recorder is not None:
            self._replays += zip(recorder.recordings, answers, strict=True)
        records = [answer_record(each, self._settings) for each in answers] if self._is_json else []
        if self._config.output.file is not None:
            append_json_lines(self._config.output.file, records)
            rate = answers[0].batch.tokens_per_second
            progress = f"{self._num_done} of {self._num_requests} done, {rate:.1f} tokens per second"
            print(progress, file=sys.stderr, flush=True)
        elif self._is_json:
            for line in map(json.dumps, records):
                print(line, flush=True)
        else:
            for each in answers:
                print_answer(self._tokenizer, each, is_one_of_many=self._num_requests > 1)

    def write_page(self) -> None:
        """The replays so far, if a page is wanted and there are any."""
        path, html = self._config.model.path, self._config.output.html
        if html is not None and self._replays:
            name = "model" if path is None else path.resolve().name
            write_page(html, self._tokenizer, name, self._settings, self._replays)


def _split_into_batches(requests: Sequence[EncodedInput], size: int) -> Iterator[list[EncodedInput]]:
    """Neighbours that are decoded together, in order."""
    for _, group in groupby(requests, key=lambda request: request.source.kind == "infill"):
        alike = list(group)
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _combine_callbacks(view: LiveView | None, recorder: ReplayRecorder | None) -> Callable[[DecodingStep], None] | None:
    """One listener for those that are there."""
    listeners: list[Callable[[DecodingStep], None]] = [each for each in (view, recorder) if each is not None]
    if not listeners:
        return None

    def tell(step: DecodingStep) -> None:
        for listener in listeners:
            listener(step)

    return tell
