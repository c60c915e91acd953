"""Infilled samples over the steps of a run, with the forward in which each token was unmasked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from logger.pages import Example, Examples, Output, Part, Token
from logger.report.reading import LoggedRun, RunEvent

MAX_SAMPLES_PER_TEXT = 12
"""Samples of each text and run: the first, the last and evenly spaced ones between."""


def collect_samples(runs: Sequence[LoggedRun]) -> list[Part]:
    """Collect an example for each text, with the samples of each run by step."""
    outputs: dict[tuple[str, tuple[str, ...]], list[Output]] = {}
    """By text and pictures."""
    plain: list[Part] = []
    for run in runs:
        texts: dict[tuple[str, tuple[str, ...]], list[Output]] = {}
        for event in run.events_of("sample"):
            tokens = read_tokens(event)
            if tokens is None:
                plain.append(event.text)
            else:
                label = f"{run.name}, step {event.step:,}" if len(runs) > 1 else f"step {event.step:,}"
                label += f", reward {event.values['reward']:g}" if "reward" in event.values else ""
                key = event.values["given"], read_pictures(event)
                texts.setdefault(key, []).append(Output(label, tokens))
        for key, filled in texts.items():
            outputs.setdefault(key, []).extend(_subsample(filled))
    examples = [Example(text, filled, pictures=pictures) for (text, pictures), filled in outputs.items()]
    return [*([Examples(examples)] if examples else []), *plain[:MAX_SAMPLES_PER_TEXT]]


def _subsample(filled: list[Output]) -> list[Output]:
    """Select at most `MAX_SAMPLES_PER_TEXT` samples, evenly spaced."""
    number = min(len(filled), MAX_SAMPLES_PER_TEXT)
    return [filled[round(index * (len(filled) - 1) / max(1, number - 1))] for index in range(number)]


def read_tokens(event: RunEvent) -> tuple[Token, ...] | None:
    """Read the tokens of a sample event; None: its values are damaged or missing."""
    try:
        columns = zip(*(event.values[key] for key in ("tokens", "step_map", "logprobs")), strict=True)
        return join_tokens(columns) if isinstance(event.values["given"], str) else None
    except (KeyError, TypeError, ValueError):
        return None


def read_pictures(event: RunEvent) -> tuple[str, ...]:
    """Read the pictures of a sample event; none but images that are part of the page."""
    pictures = event.values.get("pictures")
    values = pictures if isinstance(pictures, list) else ()
    return tuple(value for value in values if isinstance(value, str) and value.startswith("data:image/"))


def join_tokens(columns: Iterable[tuple[str, int | None, float | None]]) -> tuple[Token, ...]:
    """Join the tokens of a text that form one character.

    Args:
        columns: text, forward and log-probability in nats of each token; None: it was given. A character of several
            tokens is the text of the last of them.
    """
    tokens: list[Token] = []
    rest: list[tuple[int | None, float | None]] = []
    for text, forward, logprob in columns:
        rest.append((forward, logprob))
        if text:
            # Earlier tokens without text are bytes of this token's first character.
            latest = max((number or 0 for number, _ in rest), default=0)
            logprobs = [value for _, value in rest if value is not None]
            size = 1 if latest and forward is None else len(text)
            tokens.append(Token(text[:size], latest or None, math.exp(min(0.0, sum(logprobs))) if logprobs else None))
            tokens += [Token(text[size:])] if text[size:] else []
            rest = []
    return tuple(tokens)
