"""The config of the load generator for servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Section
from config.bench.training import BenchFileSection

LengthRange = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
"""Shortest and longest; lengths between them are equally likely."""

FIELDS_OF_OTHER_KEYS = {
    "model": "server.model",
    "prompt": "requests.file",
    "messages": "requests.file",
    "max_tokens": "requests.answer_length",
    "max_completion_tokens": "requests.answer_length",
    "seed": "requests.seed",
    "stream": None,
    "stream_options": None,
    "n": None,
}
"""Fields of a request that the load generator sets -> the key that sets them; None: there is none."""


class ServerSection(Section):
    """``[server]``: where requests go."""

    url: NonEmptyStr = "http://127.0.0.1:8000/v1"
    """Address of an OpenAI-compatible server, up to its version."""
    model: NonEmptyStr | None = None
    """Name of the model. Not set: the first one that the server lists."""
    endpoint: Literal["completions", "chat"] = "completions"
    """completions: texts or token ids are continued; chat: a message of a user is answered."""
    api_key_file: ConfigPath | None = None
    """A file whose first line is the API key."""
    timeout_seconds: PositiveFloat = 600.0
    """Longest wait for a connection, and for each further piece of an answer."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'{url!r} must begin with "http://" or "https://", as in "http://127.0.0.1:8000/v1"')
        return url.rstrip("/")


class RequestsSection(Section):
    """``[requests]``: what is sent."""

    file: ConfigPath | None = None
    """JSON lines, each with "prompt" (text or token ids), "messages" (chat) or "prompt_length", and if wanted with
    "max_tokens" and "seed". Not set: prompts are drawn."""
    count: PositiveInt | None = None
    """Requests that are measured; a shorter file is repeated. Not set: each line of the file once, or 100."""
    prompt_length: LengthRange = (8, 32)
    """Words of a drawn prompt. The default fits the smallest contexts."""
    answer_length: LengthRange = (16, 64)
    """Largest number of new tokens of a request, where the file does not say it."""
    seed: NonNegativeInt = 0
    """Seed of all that is drawn; request i is sent with seed + i."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, such as temperature or confidence_threshold."""

    @field_validator("prompt_length", "answer_length")
    @classmethod
    def _check_range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError(f"{list(value)}: the shortest length comes first")
        return value

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: dict[str, Any]) -> dict[str, Any]:
        for name in body:
            if name in FIELDS_OF_OTHER_KEYS:
                key = FIELDS_OF_OTHER_KEYS[name]
                remedy = "remove it" if key is None else f"remove it, and set {key}"
                raise ValueError(f'the field "{name}" is set by the load generator: {remedy}')
        return body


class LoadSection(Section):
    """``[load]``: when requests are sent."""

    rate: PositiveFloat | None = None
    """Requests per second, on average, at random times (Poisson). Not set: as soon as one of `concurrency` is done."""
    concurrency: PositiveInt | None = None
    """Requests under way at most. Not set: 1 without a rate, any number with one."""
    warmup: NonNegativeInt = 1
    """Requests before the measurement, one after another, which are in no result."""


class GoodputSection(Section):
    """``[goodput]``: limits of a good request, in milliseconds. Goodput is the number of good ones per second."""

    ttft: PositiveFloat | None = None
    """Time to the first text."""
    tpot: PositiveFloat | None = None
    """Time per further token."""
    e2el: PositiveFloat | None = None
    """Time to the end of the answer."""


class AnswerCheckSection(Section):
    """``[check]``: requests are sent again after the measurement, each alone, and must get the same answer."""

    max_requests: NonNegativeInt | None = None
    """Different requests that are sent again. Not set: all; 0: none."""
    allow_mismatches: bool = False
    """Different answers are counted, and no error."""


class BenchServeConfig(Section):
    """Load for a server."""

    server: ServerSection = ServerSection()
    requests: RequestsSection = RequestsSection()
    load: LoadSection = LoadSection()
    goodput: GoodputSection = GoodputSection()
    check: AnswerCheckSection = AnswerCheckSection()
    output: BenchFileSection = BenchFileSection()
