"""A conversation: what the records of a chat source become, from its reader to the encoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusionlm.vision.messages import IMAGE_PLACEHOLDER, split_images

Message = dict[str, Any]
"""Its content is a text, or with images a list of parts, as `identify_images` returns them."""

EMPTY_TEXT = {"type": "text", "text": ""}


def identify_images(messages: Sequence[Mapping[str, Any]], folder: Path | None = None) -> tuple[Message, ...]:
    """Check the images of messages, and return them as parts ``{"type": "image", "image": Path or bytes, "id": ...}``
    between ``{"type": "text", "text": ...}``. The id is the path below the folder, or the SHA-256 of the file.

    Raises:
        ValueError: as in `split_images`.
    """
    split, images = split_images(messages, folder)
    remaining = iter(images)
    identified = []
    for message in split:
        first, *texts = message["content"].split(IMAGE_PLACEHOLDER) if images else [message["content"]]
        parts = [{"type": "text", "text": first}]
        for text in texts:
            parts += [_identify_image(next(remaining), folder), {"type": "text", "text": text}]
        identified.append({**message, "content": [part for part in parts if part != EMPTY_TEXT] if texts else first})
    return tuple(identified)


def _identify_image(image: Any, folder: Path | None) -> Message:
    if isinstance(image, Path):
        return {"type": "image", "image": image, "id": str(image.relative_to(folder.resolve()) if folder else image)}
    return {"type": "image", "image": image, "id": hashlib.sha256(image).hexdigest()}


def describe_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as JSON values, with the ids of images in place of their files."""

    def describe(part: Message) -> Message:
        return {key: value for key, value in part.items() if key != "image"}

    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": list(map(describe, message["content"]))}
        for message in messages
    ]


def join_texts(message: Message, key: str = "content") -> str:
    """Return the text of a message, without its images."""
    content = message.get(key) or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


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
    def has_images(self) -> bool:
        return any(not isinstance(message["content"], str) for message in self.messages)

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
        return f"{self.location}: " if self.location else ""

    def __str__(self) -> str:
        """Join the contents, a message after the other, without roles and templates: text to train a tokenizer on."""
        texts = (join_texts(message, key) for message in self.messages for key in ("reasoning_content", "content"))
        return "\n\n".join(text for text in texts if text)

    def to_json(self, refuse_value: Callable[[Any], Any] | None = None) -> str:
        """Format as JSON with sorted keys. Its hash decides about the validation split.

        Args:
            refuse_value: called with a value that JSON does not have; raises the error.
        """
        value: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        if self.rejected is None:
            value["messages"] = describe_images(self.messages)
            if self.task is not None:
                value["task"] = self.task
            if self.context_answers:
                value["context_answers"] = self.context_answers
            if self.is_desirable is not None:
                value["label"] = self.is_desirable
        else:
            value |= {
                "prompt": describe_images(self.messages[: self.prompt_length]),
                "chosen": self.messages[self.prompt_length :],
                "rejected": self.rejected[self.prompt_length :],
            }
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=refuse_value)


Record = str | Conversation
"""What a source reads: a text or a conversation."""
