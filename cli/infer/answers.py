"""Answers of requests, their JSON lines and their page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.infer.inputs import EncodedInput
from logger.pages import Example, Examples, Output, Page, Part, Token, format_cell, tabulate_settings
from logger.report.samples import join_tokens

if TYPE_CHECKING:
    from diffusionlm.inference.generate import Generation
    from tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """An input and its result."""

    request: EncodedInput
    result: Generation
    output: str
    """The new text; of an infill the whole text, its masked spans filled."""
    metrics: Mapping[str, Any]
    """New tokens (without the stop token; of an infill the filled positions) and forwards of the answer, the mean
    log-probability of the tokens in nats; size and duration of its batch, and the batch's new tokens by its duration.
    """


def build_answers(
    tokenizer: Tokenizer, requests: Sequence[EncodedInput], results: Sequence[Generation], seconds: float
) -> list[Answer]:
    """Answers of one batch that took ``seconds``."""
    num_tokens = sum(len(result.step_map) for result in results)
    batch = {
        "batch_size": len(requests),
        "seconds": round(seconds, 6),
        "tokens_per_second": round(num_tokens / seconds, 3) if seconds > 0.0 else 0.0,
    }
    answers = []
    for request, result in zip(requests, results, strict=True):
        logprobs = [value for value in result.logprobs if math.isfinite(value)]
        metrics = {
            "finish_reason": result.finish_reason,
            "num_tokens": len(result.step_map),
            "num_forwards": result.num_forwards,
            "tokens_per_forward": round(result.tokens_per_forward, 6),
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            **batch,
        }
        answers.append(Answer(request, result, _output_text(tokenizer, request, result), metrics))
    return answers


def _output_text(tokenizer: Tokenizer, request: EncodedInput, result: Generation) -> str:
    num_repeated = request.num_repeated_bytes
    if num_repeated or (request.source.kind == "prompt" and len(request.token_ids) > request.num_hidden):
        return tokenizer.decode_bytes(result.token_ids)[num_repeated:].decode("utf-8", errors="replace")
    return tokenizer.decode(result.token_ids[request.num_hidden if request.source.kind == "infill" else 0 :])


def answer_record(answer: Answer, params: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of an answer; ``params`` are the keys of the generation config with their defaults."""
    request, result = answer.request, answer.result
    text: dict[str, Any] = {"prompt": request.text, "output": answer.output}
    if request.source.messages:
        text["messages"] = list(request.source.messages)
    return {
        "kind": request.source.kind,
        "text": text,
        "params": {**params, "seed": request.seed},
        "metrics": answer.metrics,
        "tokens": {
            "token_ids": list(result.token_ids),
            "logprobs": [value if math.isfinite(value) else None for value in result.logprobs],
            "step_map": list(result.step_map),
            "num_repeated_bytes": request.num_repeated_bytes,
        },
        **({"extra": dict(request.source.extra)} if request.source.extra else {}),
    }


def build_page(tokenizer: Tokenizer, model_name: str, params: Mapping[str, Any], answers: Sequence[Answer]) -> Page:
    """The page that replays the answers, forward by forward."""
    examples = []
    for answer in answers:
        facts = {**answer.metrics, "seed": answer.request.seed}
        texts = [(name.replace("_", " "), format_cell(value)) for name, value in facts.items() if value is not None]
        output = Output("", _trace_tokens(tokenizer, answer), texts)
        examples.append(Example(answer.request.text, [output], title=answer.request.name))
    settings = {key: value for key, value in params.items() if value is not None}
    sections: dict[str, list[Part]] = {
        "Answers": [Examples(examples)],
        "Settings": tabulate_settings([(model_name, settings)]),
    }
    return Page(f"{model_name}: a replay", sections)


def _trace_tokens(tokenizer: Tokenizer, answer: Answer) -> tuple[Token, ...]:
    """The visible text, with the forward that committed each token last."""
    from diffusionlm.inference.text import token_texts

    request, result = answer.request, answer.result
    ids = result.token_ids if request.source.kind == "infill" else (*request.token_ids, *result.token_ids)
    new_positions = [position for position, is_new in enumerate(request.is_new(len(ids))) if is_new]
    logprobs = [value if math.isfinite(value) else None for value in result.logprobs]
    decoded = dict(zip(new_positions, zip(result.step_map, logprobs, strict=True), strict=True))
    texts = token_texts(tokenizer, ids[request.num_hidden :])
    return join_tokens(
        (text, *decoded.get(position, (None, None))) for position, text in enumerate(texts, request.num_hidden)
    )
