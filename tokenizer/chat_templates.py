"""Chat templates, and those of model families that are built in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ChatTemplate:
    """A template that renders messages to one text.

    Args:
        source: Jinja, as in the `chat_template` of a tokenizer_config.json.
        tokens: special tokens that the source may use, by role: `bos_token`, `eos_token` and so on.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)


def _read_source(name: str) -> str:
    return Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")


CHAT_TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": ChatTemplate(_read_source("chatml")),
    "qwen3": ChatTemplate(_read_source("qwen3")),
    "llama3": ChatTemplate(_read_source("llama3"), {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "llada": ChatTemplate(_read_source("llama3"), {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}),
}
"""Templates of model families; they render the same text as the templates of the checkpoints. chatml and qwen3 write
tools in the format of Hermes, the others have none."""
