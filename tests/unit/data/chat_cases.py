"""A tokenizer of bytes with a chat template, pictures, and documents of conversations spelled as text."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from config.model import VisionConfig
from diffusionlm.data.packing import Document
from diffusionlm.vision.messages import IMAGE_TOKENS
from diffusionlm.vision.processor import ImageProcessor
from tokenizer import CHAT_TEMPLATES, Tokenizer
from tokenizer.byte_alphabet import BYTE_ORDER

EOS, STOP = "<|endoftext|>", "<|im_end|>"
SPECIAL = (EOS, "<|mask|>", "<|im_start|>", STOP)


VISION = VisionConfig(
    depth=1, hidden_size=8, num_heads=1, intermediate_size=8, patch_size=4, num_position_embeddings=4,
    mrope_section=(4, 2, 2),
)  # fmt: skip
"""A position of the text has 8 x 8 pixels."""


def chat_tokenizer(template: str | None = "chatml", extra: tuple[str, ...] = ()) -> Tokenizer:
    """Each byte is a token; end-of-text is 256, the stop token of ChatML 259, and the tokens of images 260 to 262."""
    vocab = {bytes([byte]): byte for byte in BYTE_ORDER}
    special = {text: 256 + index for index, text in enumerate((*SPECIAL, *extra))}
    tokenizer = Tokenizer(vocab, [], special, "qwen", None, mask_token="<|mask|>", eos_token=EOS)
    return tokenizer.with_chat_template(None if template is None else CHAT_TEMPLATES[template])


def image_tokenizer(template: str | None = "chatml") -> Tokenizer:
    return chat_tokenizer(template, IMAGE_TOKENS)


def image_processor() -> ImageProcessor:
    return ImageProcessor.for_model(VISION, min_pixels=64, max_pixels=64 * 16)


def picture(rows: int, columns: int, seed: int = 0) -> bytes:
    """A PNG file of noise that takes so many rows and columns of positions."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8 * rows, 8 * columns, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def chat(*texts: Any) -> dict[str, Any]:
    """A row of questions and answers in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]}


def spell(document: Document, tokenizer: Tokenizer) -> list[tuple[str, str, str]]:
    """Context, answer and EOS padding of each segment."""
    segments = []
    for number in range(int(document.segment_ids[-1]) + 1):
        mine = document.segment_ids == number
        parts = (
            mine & ~document.loss_mask,
            mine & document.loss_mask & ~document.is_eos_padding,
            mine & document.is_eos_padding,
        )
        context, answer, padding = (tokenizer.decode(document.tokens[part].tolist()) for part in parts)
        segments.append((context, answer, padding))
    return segments
