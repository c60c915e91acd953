"""A conversation: what the records of a chat source become, from its reader to the encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A chat. With a preference, `messages` is the prompt and the chosen answer. ``str`` gives its contents."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    rejected: tuple[Message, ...] | None = None
    """Prompt and rejected answer of a preference."""
    prompt_length: int | None = None
    """Messages of the prompt that the chosen and the rejected answer have in common."""
    task: str | None = None
    """Group of the conversation in tables of results: the column `task`."""
    context_answers: tuple[int, ...] = ()
    """Indices of answers that are not learned."""
    is_desirable: bool | None = None
    """Label of the last answer. None: there is none."""
    location: str = field(default="", compare=False)
    """Place of its record, such as a file and a line, for errors."""

    @property
    def learned_answers(self) -> list[int]:
        """Indices of the other answers."""
        answers = (index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        return [index for index in answers if index not in self.context_answers]

    def up_to_answer(self) -> Conversation:
        """Return the conversation up to its last learned answer, without what follows."""
        return replace(self, messages=self.messages[: self.learned_answers[-1] + 1])

    @property
    def error_prefix(self) -> str:
        """The location, for the beginning of a message."""
        return f"{self.location}: " if self.location else ""

    def __str__(self) -> str:
        """Join the contents, a message after the other, without roles and templates: text to train a tokenizer on."""
        texts = (message.get(key) for message in self.messages for key in ("reasoning_content", "content"))
        return "\n\n".join(text for text in texts if text)

    def to_json(self, refuse_value: Callable[[Any], Any] | None = None) -> str:
        """Format as JSON with sorted keys. Its hash decides about the validation split.

        Args:
            refuse_value: called with a value that JSON does not have; raises the error.
        """
        value: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        if self.rejected is None:
            value["messages"] = self.messages
            if self.task is not None:
                value["task"] = self.task
            if self.context_answers:
                value["context_answers"] = self.context_answers
            if self.is_desirable is not None:
                value["label"] = self.is_desirable
        else:
            value |= {
                "prompt": self.messages[: self.prompt_length],
                "chosen": self.messages[self.prompt_length :],
                "rejected": self.rejected[self.prompt_length :],
            }
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=refuse_value)


Record = str | Conversation
"""What a source reads: a text or a conversation."""
