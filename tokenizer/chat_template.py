"""The chat template of a tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChatTemplate:
    """A template that renders messages to one text.

    Args:
        source: Jinja, as in the `chat_template` of a tokenizer_config.json.
        tokens: special tokens that the source may use, by role: `bos_token`, `eos_token` and so on.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
