"""Byte-level BPE: training, encoding, Hugging Face's files, chat templates."""

from tokenizer.bpe import IncrementalDecoder, Tokenizer
from tokenizer.chat import encode_chat, render_chat
from tokenizer.chat_answers import (
    EncodedAnswer,
    encode_answer,
    encode_answers,
    encode_prompt,
    join_answers,
)
from tokenizer.chat_templates import CHAT_TEMPLATES, ChatTemplate
from tokenizer.files import load_chat_template, load_tokenizer, save_chat_template, save_tokenizer
from tokenizer.patterns import PATTERNS
from tokenizer.sentencepiece import SentencePieceTokenizer
from tokenizer.special_tokens import TokenOptions
from tokenizer.trainer import train_bpe

__all__ = [
    "CHAT_TEMPLATES",
    "PATTERNS",
    "ChatTemplate",
    "EncodedAnswer",
    "IncrementalDecoder",
    "SentencePieceTokenizer",
    "TokenOptions",
    "Tokenizer",
    "encode_answer",
    "encode_answers",
    "encode_chat",
    "encode_prompt",
    "join_answers",
    "load_chat_template",
    "load_tokenizer",
    "render_chat",
    "save_chat_template",
    "save_tokenizer",
    "train_bpe",
]
