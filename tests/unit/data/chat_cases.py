"""A tokenizer of bytes with a chat template, and documents of conversations spelled as text."""

from __future__ import annotations

from typing import Any

from diffusionlm.data.packing import Document
from tokenizer import CHAT_TEMPLATES, Tokenizer
from tokenizer.byte_alphabet import BYTE_ORDER

EOS, STOP = "<|endoftext|>", "<|im_end|>"
SPECIAL = (EOS, "<|mask|>", "<|im_start|>", STOP)


def chat_tokenizer(template: str | None = "chatml") -> Tokenizer:
    """Each byte is a token; end-of-text is 256, and the stop token of ChatML 259."""
    vocab = {bytes([byte]): byte for byte in BYTE_ORDER}
    special = {text: 256 + index for index, text in enumerate(SPECIAL)}
    tokenizer = Tokenizer(vocab, [], special, "qwen", None, mask_token="<|mask|>", eos_token=EOS)
    return tokenizer.with_chat_template(None if template is None else CHAT_TEMPLATES[template])


def chat(*texts: str) -> dict[str, Any]:
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
