"""The sources of documents. Each is a section of `config.data` and a class or function that opens a split."""

from __future__ import annotations

import json
from importlib import import_module

from config.data import TextSource
from diffusionlm.data.chat.conversation import Conversation, describe_images
from diffusionlm.data.reader import DocumentSource, Split, iterate


def open_source(config: TextSource, split: Split, key: str) -> DocumentSource:
    """Open the documents of one split with the section's `opener`, whose module is imported now.

    Args:
        key: the config key of the section, such as ``data.source``; errors name it.

    Raises:
        ValueError: a path or dataset cannot be read or holds no documents.
    """
    module, _, name = config.opener.partition(":")
    source: DocumentSource = getattr(import_module(f"diffusionlm.data.sources.{module}"), name)(config, split, key)
    return source


def read_reference_answers(config: TextSource, split: Split, key: str, limit: int) -> list[Conversation]:
    """Read the first conversations of a split, each up to its last learned answer: a prompt, and the right answer.

    A prompt that comes again is left out, since its answer would be no new evidence.

    Raises:
        ValueError: the source has no conversations, or cannot be read.
    """
    if getattr(config, "chat", None) is None:
        raise ValueError(f"{key} has text, not conversations: set {key}.chat, or name another source")
    conversations: dict[str, Conversation] = {}
    for conversation in map(Conversation.up_to_answer, iterate(open_source(config, split, key), 1)):
        prompt = json.dumps([describe_images(conversation.messages[:-1]), conversation.tools], sort_keys=True)
        conversations.setdefault(prompt, conversation)
        if len(conversations) == limit:
            break
    if not conversations:
        raise ValueError(f"{key} has no conversations for split = {split!r}; name other files, or another split")
    return list(conversations.values())
