"""Incremental decoding of a stream of token ids."""

import codecs

from tokenizer.bpe import Tokenizer


class IncrementalDecoder:
    """Decodes a stream of ids to pieces of text that never split a UTF-8 character.

    The concatenated pieces are `tokenizer.decode` of all ids. `finish` resets the decoder.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._should_strip_space = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes; may be empty.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._hidden else self._strip_first_space(self._decoder.decode(data))

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, else an empty string, and reset the decoder."""
        rest = self._strip_first_space(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._should_strip_space = self._tokenizer.strips_first_space
        return rest

    def _strip_first_space(self, piece: str) -> str:
        if not (self._should_strip_space and piece):
            return piece
        self._should_strip_space = False
        return piece.removeprefix(" ")
