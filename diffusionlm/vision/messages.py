"""Separate the images of a conversation from its text. No torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
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
                    if message.get("role") != "user":
                        raise ValueError(f"only user messages may have images, not those of {message.get('role')!r}")
                    images.append(_read_image(part, folder))
                texts.append(IMAGE_PLACEHOLDER if text is None else text)
        split.append({**message, "content": "".join(texts)})
    for token in IMAGE_TOKENS if images else ():
        count = sum(str(message.get("content")).count(token) for message in split)
        if count != len(images):
            raise ValueError(
                f"the texts contain {token} {count - len(images)} times, which marks an image: remove it, and pass "
                "images as content parts"
            )
    return split, images


def locate_images(messages: Sequence[Message]) -> list[str]:
    """Return the places of the images that `split_images` finds, such as ``messages[0].content[1]``."""
    return [
        f"messages[{number}].content[{index}]"
        for number, message in enumerate(messages)
        if _is_list(message.get("content"))
        for index, part in enumerate(message["content"])
        if _read_text(part) is None
    ]


def place_images(messages: Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Put the images of a record into its messages, as content parts for `split_images`.

    An image stands where a user text has ``<image>``, or a part ``{"type": "image"}`` without an image. Without any of
    these, all stand before the first user text.

    Args:
        images: values as in ``{"type": "image", "image": ...}``.

    Raises:
        ValueError: there are more or fewer marks than images, no user message, or images in the messages as well.
    """
    contents = {
        number: _divide_at_marks(message.get("content"), f"messages[{number}]")
        for number, message in enumerate(messages)
        if message.get("role") == "user"
    }
    parts = [part for content in contents.values() for part in content if part["type"] != "text"]
    marks = [part for part in parts if part["type"] == "image" and "image" not in part]
    if images and len(parts) > len(marks):
        raise ValueError(f"the record has {len(images)} images, and its messages have images too: remove one of both")
    if images and contents and not marks:
        marks = [{"type": "image"} for _ in images]
        contents[min(contents)][:0] = marks
    if len(marks) != len(images):
        raise ValueError(
            f"the record has {len(images)} images, and its {len(contents)} user messages have {len(marks)} marks "
            f"{IMAGE_MARK}: write one mark for each image, or none"
        )
    for mark, image in zip(marks, images, strict=True):
        mark["image"] = image
    return [
        {**message, "content": contents[number]} if images and number in contents else message
        for number, message in enumerate(messages)
    ]


def _divide_at_marks(content: Any, place: str) -> list[dict[str, Any]]:
    """Return the parts of a user message, with an image part for each mark in its texts."""
    divided: list[dict[str, Any]] = []
    for part in content if _is_list(content) else [content]:
        with prefix_errors(place):
            text = _read_text(part)
        if text is None:
            divided.append({key: value for key, value in part.items() if value is not None})
            continue
        for index, piece in enumerate(text.split(IMAGE_MARK)):
            divided += [{"type": "image"}] * bool(index) + [{"type": "text", "text": piece}]
    return divided


def _is_list(content: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(content, Sequence) and not isinstance(content, str | bytes)


def _read_text(part: Any) -> str | None:
    """Return the text of a part; None: it is an image."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind not in ("image", "image_url"):
        raise ValueError(
            f'the part {_shorten(part)} is not supported: expected {{"type": "text", "text": ...}}, or type "image" or '
            '"image_url"'
        )
    return None


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
