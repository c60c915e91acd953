"""Conversations as plain text, to learn a tokenizer's merges from them."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionlm.data.chat.formats import Conversation
from diffusionlm.data.reader import DocumentSource, ReaderPosition


@dataclass(frozen=True)
class ConversationTexts:
    """A `DocumentSource` of the contents of conversations, a message after the other, without roles and templates."""

    source: DocumentSource

    @property
    def identity(self) -> str:
        return self.source.identity

    @property
    def provenance(self) -> str:
        return self.source.provenance

    @property
    def skipped(self) -> dict[str, int]:
        return self.source.skipped

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        documents, position = self.source.read(epoch, position, limit)
        return [_join_contents(Conversation.from_text(text)) for text in documents], position


def _join_contents(conversation: Conversation) -> str:
    texts = (message.get(key) for message in conversation.messages for key in ("reasoning_content", "content"))
    return "\n\n".join(text for text in texts if text)
