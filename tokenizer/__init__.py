"""Byte-level BPE: training, encoding, and files in our own and in Hugging Face's form."""

from tokenizer.bpe import IncrementalDecoder, Tokenizer
from tokenizer.files import load_tokenizer, save_tokenizer
from tokenizer.patterns import PATTERNS
from tokenizer.trainer import train_bpe

__all__ = ["PATTERNS", "IncrementalDecoder", "Tokenizer", "load_tokenizer", "save_tokenizer", "train_bpe"]
