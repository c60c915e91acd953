"""Answers of requests, their JSON lines and their page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.infer.inputs import EncodedInput
from logger.pages import Example, Examples, Output, Page, Part, Token, tabulate_settings
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
    batch_size: int
    batch_seconds: float
    tokens_per_second: float
    """New tokens of the whole batch, by its duration."""

    @property
    def num_tokens(self) -> int:
        """New tokens without the stop token; of an infill the filled positions."""
        return len(self.result.step_map)

    @property
    def mean_logprob(self) -> float | None:
        """Mean log-probability of the new tokens in nats; None if there are none."""
        logprobs = [value for value in self.result.logprobs if math.isfinite(value)]
        return sum(logprobs) / len(logprobs) if logprobs else None


def build_answers(
    tokenizer: Tokenizer, requests: Sequence[EncodedInput], results: Sequence[Generation], seconds: float
) -> list[Answer]:
    """Answers of one batch that took ``seconds``."""
    speed = sum(len(result.step_map) for result in results) / seconds if seconds > 0.0 else 0.0
    return [
        Answer(request, result, _output_text(tokenizer, request, result), len(requests), seconds, speed)
        for request, result in zip(requests, results, strict=True)
    ]


def _output_text(tokenizer: Tokenizer, request: EncodedInput, result: Generation) -> str:
    from diffusionlm.inference.text import decode_continuation

    if request.num_repeated_bytes:
        repeated_and_new = tokenizer.decode_bytes(result.token_ids)
        return repeated_and_new[request.num_repeated_bytes :].decode("utf-8", errors="replace")
    if request.source.kind == "prompt" and len(request.token_ids) > request.num_hidden:
        return decode_continuation(tokenizer, result.token_ids)
    return tokenizer.decode(result.token_ids[request.num_hidden if request.source.kind == "infill" else 0 :])


def answer_record(answer: Answer, params: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of an answer.

    Args:
        params: keys of the generation config with their defaults.
    """
    request, result = answer.request, answer.result
    text: dict[str, Any] = {"prompt": request.text, "output": answer.output}
    if request.source.messages:
        text["messages"] = list(request.source.messages)
    return {
        "kind": request.source.kind,
        "text": text,
        "params": {**params, "seed": request.seed},
        "metrics": {
            "finish_reason": result.finish_reason,
            "num_tokens": answer.num_tokens,
            "num_forwards": result.num_forwards,
            "tokens_per_forward": round(result.tokens_per_forward, 6),
            "mean_logprob": answer.mean_logprob,
            "batch_size": answer.batch_size,
            "seconds": round(answer.batch_seconds, 6),
            "tokens_per_second": round(answer.tokens_per_second, 3),
        },
        "tokens": {
            "token_ids": list(result.token_ids),
            "logprobs": [value if math.isfinite(value) else None for value in result.logprobs],
            "step_map": list(result.step_map),
            "num_repeated_bytes": request.num_repeated_bytes,
        },
        **({"extra": dict(request.source.extra)} if request.source.extra else {}),
    }


def build_page(tokenizer: Tokenizer, model_name: str, params: Mapping[str, Any], answers: Sequence[Answer]) -> Page:
    """The page that replays the answers, forward by forward.

    Args:
        params: keys of the generation config with their defaults.
    """
    examples = [
        Example(
            answer.request.text,
            [Output("", _trace_tokens(tokenizer, answer), list(_list_facts(answer)))],
            title=answer.request.name,
        )
        for answer in answers
    ]
    settings = {key: value for key, value in params.items() if value is not None}
    sections: dict[str, list[Part]] = {
        "Answers": [Examples(examples)],
        "Settings": tabulate_settings([(model_name, settings)]),
    }
    return Page(f"{model_name}: a replay", sections)


def _trace_tokens(tokenizer: Tokenizer, answer: Answer) -> tuple[Token, ...]:
    """The whole text, of a chat the answer alone, with the forward that committed each token last."""
    from diffusionlm.inference.text import token_texts

    request, result = answer.request, answer.result
    is_infill, is_chat = request.source.kind == "infill", request.source.kind == "chat"
    ids = result.token_ids if is_infill else (*request.token_ids, *result.token_ids)
    first = len(request.token_ids) if is_chat else request.num_hidden
    new_positions = [position for position, is_new in enumerate(request.is_new(len(ids))) if is_new]
    forwards = dict(zip(new_positions, result.step_map, strict=True))
    logprobs = {
        position: value for position, value in zip(new_positions, result.logprobs, strict=True) if math.isfinite(value)
    }
    return join_tokens(
        (text, forwards.get(position), logprobs.get(position))
        for position, text in enumerate(token_texts(tokenizer, ids[first:]), first)
    )


def _list_facts(answer: Answer) -> Iterator[tuple[str, str]]:
    result = answer.result
    yield "finished by", {"stop": "a stop token", "length": "its length"}[result.finish_reason]
    yield "new tokens", f"{answer.num_tokens:,}"
    yield "forwards", f"{result.num_forwards:,}"
    yield "tokens per forward", f"{result.tokens_per_forward:.2f}"
    if answer.mean_logprob is not None:
        yield "probability (geometric mean)", f"{math.exp(answer.mean_logprob):.1%}"
    yield "seconds", f"{answer.batch_seconds:.2f}" + f" (batch of {answer.batch_size})" * (answer.batch_size > 1)
    yield "seed", str(answer.request.seed)
