"""Separate the images of a conversation from its text. No torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from diffusionlm.vision.processor import RawImage
from files.usage_error import prefix_errors

Message = Mapping[str, Any]

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_PLACEHOLDER = "".join(IMAGE_TOKENS)
"""An image in the text that a chat template renders; the middle token is repeated after encoding."""
IMAGE_TOKEN_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
"""Of ``IMAGE_TOKENS``, in `config.model.ModelConfig`."""
IMAGE_MARK = "<image>"
"""Place of an image of the record in a text (LLaVA)."""
DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
MAX_SHOWN = 60


def find_image_tokens(special_tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of ``IMAGE_TOKENS`` in a tokenizer, by their keys in a model's config.

    Raises:
        ValueError: the tokenizer has not all of them.
    """
    missing = [token for token in IMAGE_TOKENS if token not in special_tokens]
    if missing:
        raise ValueError(
            f"the tokenizer has no special token {', '.join(missing)}, which a model with images needs: take the "
            "tokenizer of a Qwen3-VL model, or train one with these tokens in special_tokens"
        )
    return {key: special_tokens[token] for key, token in zip(IMAGE_TOKEN_KEYS, IMAGE_TOKENS, strict=True)}


def split_images(messages: Sequence[Message], folder: Path | None = None) -> tuple[list[Message], list[RawImage]]:
    """Replace content parts by text with a placeholder for each image.

    Parts are those of OpenAI and Hugging Face: a string; ``{"type": "text", "text": ...}``; ``{"type": "image",
    "image": ...}`` with a path, a data URL, bytes, a Pillow image or ``{"bytes": ..., "path": ...}``; ``{"type":
    "image_url", "image_url": {"url": ...}}`` with a data URL. Other keys of a part are ignored.

    Args:
        folder: where paths in the messages begin; they may not leave it. None: they are refused. A `pathlib.Path`,
            which no data file can contain, is used as it is.

    Returns:
        The messages, whose contents are strings (those that were are the same objects), and the images in order.

    Raises:
        ValueError: a part is not supported, an image is not in a user message or not where it may be, or the text of a
            conversation with images contains one of ``IMAGE_TOKENS``; begins with the place.
    """
    images: list[RawImage] = []
    split: list[Message] = []
    for number, message in enumerate(messages):
        parts = message.get("content")
        if not _is_list(parts):
            split.append(message)
            continue
        texts = []
        for index, part in enumerate(parts):
            with prefix_errors(f"messages[{number}].content[{index}]"):
                text = _read_text(part)
                if text is None:
                    _check_role(message)
                    images.append(_read_image(part, folder))
                else:
                    _check_text(text)
                texts.append(IMAGE_PLACEHOLDER if text is None else text)
        split.append({**message, "content": "".join(texts)})
    for number, message in enumerate(messages if images else ()):
        if isinstance(message.get("content"), str):
            with prefix_errors(f"messages[{number}].content"):
                _check_text(message["content"])
    return split, images


def place_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Put the images of a record into the messages of its conversation, as content parts for `split_images`.

    An image stands where a user text has ``<image>``, or a part ``{"type": "image"}`` without an image. Without any of
    these, all stand before the first user text.

    Args:
        images: values as in ``{"type": "image", "image": ...}``.

    Raises:
        ValueError: there are more or fewer marks than images, or the messages have images of their own.
    """
    contents = [_divide_text(message) for message in messages]
    parts = [part for content in contents for part in content or ()]
    num_marks = sum(map(_is_mark, parts))
    if images and any(_read_text(part) is None and not _is_mark(part) for part in parts):
        raise ValueError(f"the record has {len(images)} images, and its messages have images as well: keep one of them")
    if num_marks == 0 and images:
        first = next((number for number, content in enumerate(contents) if content is not None), None)
        if first is None:
            raise ValueError(f"the record has {len(images)} images and no user message: add one")
        contents[first] = [{"type": "image"}] * len(images) + (contents[first] or [])
    elif num_marks != len(images):
        raise ValueError(
            f"the record has {len(images)} images, and its user messages {num_marks} marks {IMAGE_MARK}: write "
            "one mark for each image, or none"
        )
    if not images:
        return list(messages)
    remaining = iter(images)
    return [
        message
        if content is None
        else {
            **message,
            "content": [{"type": "image", "image": next(remaining)} if _is_mark(part) else part for part in content],
        }
        for message, content in zip(messages, contents, strict=True)
    ]


def _divide_text(message: Message) -> list[Any] | None:
    """Return the parts of a user message, with a part for each mark in its texts; None: it is of another role."""
    if message.get("role") != "user":
        return None
    content = message.get("content")
    parts: Iterable[Any] = content if _is_list(content) else [content]
    divided: list[Any] = []
    for part in parts:
        text = _read_text(part)
        if text is None:
            divided.append(part)
            continue
        pieces = [[{"type": "image"}, {"type": "text", "text": piece}] for piece in text.split(IMAGE_MARK)]
        divided += [part for pair in pieces for part in pair][1:]
    return divided


def _is_list(content: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(content, Sequence) and not isinstance(content, str | bytes)


def _is_mark(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and part.get("image") is None


def _read_text(part: Any) -> str | None:
    """Return the text of a part; None: it is an image."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part["text"], str):
        return str(part["text"])
    if kind not in ("image", "image_url"):
        shown = f"type {kind!r}" if kind is not None else _shorten(part)
        raise ValueError(f'the part has {shown}: expected {{"type": "text", "text": ...}}, "image" or "image_url"')
    return None


def _check_text(text: str) -> None:
    for token in IMAGE_TOKENS:
        if token in text:
            raise ValueError(f"the text contains {token}, which marks an image: remove it, or pass images as parts")


def _check_role(message: Message) -> None:
    if message.get("role") != "user":
        raise ValueError(f"an image in a message of role {message.get('role')!r}: only user messages may have images")


def _read_image(part: Mapping[str, Any], folder: Path | None) -> RawImage:
    """Return the image of a part."""
    value = part.get(part["type"])
    if part["type"] == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        return _decode_data_url(value) if value[:5].lower() == "data:" else _resolve_path(value, folder)
    if isinstance(value, bytes | Path):
        return value
    from PIL.Image import Image

    if isinstance(value, Image):
        return value
    raise ValueError(f"the image is {_shorten(value)}: expected a path, a data URL, bytes or a Pillow image")


def _decode_data_url(url: str) -> bytes:
    prefix = DATA_URL.match(url)
    if prefix is None:
        raise ValueError(f"the data URL {_shorten(url)} is not supported: write data:image/png;base64,...")
    try:
        return base64.b64decode(url[prefix.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the data URL {_shorten(url)} is not valid base64 ({error}): encode the file again") from None


def _resolve_path(path: str, folder: Path | None) -> Path:
    """Return a path below the folder, with symbolic links followed."""
    if "://" in path:
        raise ValueError(f"the image {_shorten(path)} is not fetched: send it as data URL, data:image/png;base64,...")
    if folder is None:
        raise ValueError(f"the image {_shorten(path)} is a path, which is not read here: send the file as a data URL")
    try:
        root = folder.resolve()
        resolved = (root / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # loops of links, null characters
        raise ValueError(f"the image {_shorten(path)} is no path ({error})") from None
    if not resolved.is_relative_to(root):
        raise ValueError(f"the image {_shorten(path)} is outside of {root}: move it into that folder")
    return resolved


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
