"""What is asked of a model: texts, files of prompts, chats and texts with holes, and their token ids.

Nothing here loads torch: mistakes in a file are told before a model is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from config.infer import InferInputConfig
    from config.model import ModelConfig
    from tokenizer import ChatTemplate, Tokenizer

InputKind = Literal["prompt", "chat", "infill"]

_KEYS: dict[str, InputKind] = {"prompt": "prompt", "messages": "chat", "infill": "infill"}


@dataclass(frozen=True)
class Input:
    """One thing that is asked."""

    kind: InputKind
    text: str = ""
    """Of a prompt or an infill."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Of a chat."""
    place: str = ""
    """File and line, for errors; empty where it was given as such."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of its line."""


@dataclass(frozen=True)
class EncodedInput:
    """An input in the model's tokens."""

    source: Input
    number: int
    """Among those of its kind, from 1 on."""
    text: str
    """Of a prompt or an infill as it was given, of a chat as the template writes it."""
    token_ids: tuple[int, ...]
    """A prompt that is continued, or the canvas of an infill."""
    masked_positions: frozenset[int]
    """Positions of an infill that are filled."""
    num_hidden: int
    """Tokens at the beginning that are not shown: what every text of the model begins with."""
    seed: int

    @property
    def name(self) -> str:
        """``prompt 1``."""
        return f"{self.source.kind} {self.number}"

    def is_new(self, length: int) -> list[bool]:
        """Which positions of its canvas of so many tokens are decoded."""
        if self.source.kind == "infill":
            return [position in self.masked_positions for position in range(length)]
        return [position >= len(self.token_ids) for position in range(length)]


def read_inputs(config: InferInputConfig) -> list[Input]:
    """All inputs of a config, infills last; none of an interactive chat.

    Raises:
        ValueError: there are none, or a line of the file is no request; it names file and line.
        OSError: the file cannot be read.
    """
    if config.interactive:
        if not sys.stdin.isatty():
            raise ValueError(
                "a chat without a text (--chat alone, input.interactive) needs a terminal: give --chat TEXT, or chats "
                "in a file with --prompts FILE.jsonl"
            )
        return []
    inputs = [Input("prompt", text) for text in config.prompts]
    if config.prompts_file is not None:
        inputs += _read_file(config.prompts_file, config.prompts_format)
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    inputs += [Input("chat", messages=(*system, {"role": "user", "content": text})) for text in config.chats]
    inputs += [Input("infill", text) for text in config.infills]
    if not inputs:
        raise ValueError(
            'nothing to do: add --prompt "TEXT", --chat "TEXT", --infill "TEXT with [MASK:4] holes" or --prompts FILE'
        )
    return inputs


def encode_inputs(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    model: ModelConfig,
    template: ChatTemplate | None,
    seed: int,
) -> list[EncodedInput]:
    """The inputs in tokens.

    Plain texts begin with what the model's texts begin with, or, where it has no opinion, with the tokenizer's
    beginning; a chat template writes its own.

    Args:
        template: of chats; None: the checkpoint has none.
        seed: of the first one; each further one has the next.

    Raises:
        ValueError: a hole that cannot be read, no template for a chat, or what the template has against it.
    """
    begin = tuple(model.prefix_ids or tokenizer.prefix_ids)
    counts = dict.fromkeys(_KEYS.values(), 0)
    requests = []
    for index, source in enumerate(inputs):
        counts[source.kind] += 1
        with _prefix_errors(source.place):
            text, ids, num_hidden = _encode(source, tokenizer, model, template, begin)
        is_infill = source.kind == "infill"
        masked_positions = frozenset(
            place for place, token in enumerate(ids) if is_infill and token == model.mask_token_id
        )
        requests.append(
            EncodedInput(source, counts[source.kind], text, ids, masked_positions, num_hidden, seed + index)
        )
    return requests


def _encode(
    source: Input,
    tokenizer: Tokenizer,
    model: ModelConfig,
    template: ChatTemplate | None,
    begin: tuple[int, ...],
) -> tuple[str, tuple[int, ...], int]:
    """Text, token ids and how many of them are hidden."""
    from diffusionlm.inference.text import parse_infill
    from tokenizer import encode_chat, render_chat

    if source.kind == "prompt":
        return source.text, (*begin, *tokenizer.encode(source.text)), len(begin)
    if source.kind == "infill":
        return source.text, (*begin, *parse_infill(source.text, tokenizer, model.mask_token_id)), len(begin)
    template = require_template(template)
    text = render_chat(template, source.messages, add_generation_prompt=True)
    ids = encode_chat(tokenizer, template, source.messages, add_generation_prompt=True)
    return text, tuple(ids), 0


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, if there is one.

    Raises:
        ValueError: there is none.
    """
    if template is None:
        raise ValueError(
            "this model brings no chat template: choose one with --set input.chat_template=chatml (qwen3, llama3, "
            "llada), or write the whole text as --prompt"
        )
    return template


@contextmanager
def _prefix_errors(place: str) -> Iterator[None]:
    """Errors begin with the place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


def _read_file(path: Path, file_format: str | None) -> list[Input]:
    is_standard = str(path) == "-"
    name = "standard input" if is_standard else str(path)
    data = sys.stdin.buffer.read() if is_standard else path.read_bytes()
    is_json = path.suffix == ".jsonl" if file_format is None else file_format == "jsonl"
    inputs = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        with _prefix_errors(f"{name}:{number}"):
            text = _decode_utf8(line.removesuffix(b"\r"))
            if text.strip():
                place = f"{name}:{number}"
                inputs.append(_parse_json_line(text, place) if is_json else Input("prompt", text, place=place))
    if not inputs:
        raise ValueError(f"{name}: has no prompts: write one a line")
    return inputs


def _decode_utf8(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1} of the line); convert the file") from None


def _parse_json_line(line: str, place: str) -> Input:
    """What a line of a .jsonl file asks."""
    try:
        value = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if isinstance(value, str):
        return Input("prompt", value, place=place)
    names = [key for key in _KEYS if isinstance(value, dict) and key in value]
    if len(names) != 1:
        what = f"has {' and '.join(names)}" if names else f"is {_shorten(line)}"
        raise ValueError(f'{what}: expected a string, or an object with one of "prompt", "messages" and "infill"')
    [name] = names
    extra = {key: item for key, item in value.items() if key != name}
    if name == "messages":
        return Input("chat", messages=_parse_messages(value[name]), place=place, extra=extra)
    if not isinstance(value[name], str):
        raise ValueError(f'"{name}" is {_shorten(json.dumps(value[name]))}: expected a string')
    return Input(_KEYS[name], value[name], place=place, extra=extra)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parse_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError(
            f'"messages" is {_shorten(json.dumps(value))}: expected a list of objects such as '
            '{"role": "user", "content": "..."}'
        )
    return tuple(messages)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
