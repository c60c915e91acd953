"""A tiny model that reads images, and pictures in requests."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from diffusionlm.vision.messages import find_image_tokens
from tests.unit.data.chat_cases import VISION, image_processor, image_tokenizer, picture

TOKENIZER, PROCESSOR = image_tokenizer(), image_processor()
RED, BLUE = (picture(2, 3, seed) for seed in (1, 2))
"""Two files of the same size, each of ``NUM_TOKENS`` positions."""
NUM_TOKENS = 6

MODEL_KEYS: dict[str, Any] = {
    "vocab_size": TOKENIZER.vocab_size,
    "mask_token_id": TOKENIZER.mask_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.eos_token_id,
    "head_dim": 16,
    "qk_norm": True,
    "max_position_embeddings": 384,
    "vision": VISION,
    **find_image_tokens(TOKENIZER.special_tokens),
}
"""Of a model with this tokenizer, for ``tiny_model``."""


def to_jpeg(file: bytes) -> bytes:
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(file)).save(jpeg, "JPEG")
    return jpeg.getvalue()


def to_data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def url_part(url: str, **fields: str) -> dict[str, Any]:
    """A content part of OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def image_part(file: bytes) -> dict[str, Any]:
    return url_part(to_data_url(file))
