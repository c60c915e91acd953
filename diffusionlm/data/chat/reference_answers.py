"""Prompts of conversations with the answers that are right, for evaluation by exact match."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from config.data import TextSource
from diffusionlm.data.chat.conversation import Conversation, Message
from diffusionlm.data.reader import Split, iterate
from diffusionlm.data.sources import open_source


@dataclass(frozen=True)
class ReferenceAnswer:
    """A prompt and the answer that is right."""

    messages: tuple[Message, ...]
    """Of the prompt."""
    answer: str
    task: str = ""
    """Group of the prompt in tables."""
    tools: tuple[Any, ...] | None = None


def read_reference_answers(config: TextSource, split: Split, key: str, limit: int) -> list[ReferenceAnswer]:
    """Read the last answers of the first conversations of a split: of the validation split, held-out ones.

    A prompt that comes again is left out, since its answer would be no new evidence.

    Args:
        key: config key of the source's section, for errors.

    Raises:
        ValueError: the source has no conversations, or cannot be read.
    """
    if getattr(config, "chat", None) is None:
        raise ValueError(f"{key} has text, not conversations: set {key}.chat, or name another source")
    source = open_source(config, split, key)
    answers: dict[str, ReferenceAnswer] = {}
    for answer in map(last_answer, iterate(source, 1)):
        answers.setdefault(json.dumps([answer.messages, answer.tools], sort_keys=True), answer)
        if len(answers) == limit:
            break
    if not answers:
        raise ValueError(f"{key} has no conversations for split = {split!r}; name other files, or another split")
    return list(answers.values())


def last_answer(conversation: Conversation) -> ReferenceAnswer:
    """Split a conversation before its last learned answer."""
    messages, last = conversation.messages, conversation.learned_answers[-1]
    return ReferenceAnswer(messages[:last], messages[last]["content"], conversation.task or "", conversation.tools)
