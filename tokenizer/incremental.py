"""Text of a stream of token ids."""

import codecs

from tokenizer.bpe import Tokenizer


class IncrementalDecoder:
    """Text of a stream of ids, piece by piece; no piece splits a UTF-8 character.

    The pieces' concatenation is `tokenizer.decode` of all ids. After `finish` it starts anew.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._should_strip_space = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """The characters that this id completes, perhaps none.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._hidden else self._strip_first_space(self._decoder.decode(data))

    def finish(self) -> str:
        """U+FFFD for an unfinished character, or nothing."""
        rest = self._strip_first_space(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._should_strip_space = self._tokenizer.strips_first_space
        return rest

    def _strip_first_space(self, piece: str) -> str:
        if not (self._should_strip_space and piece):
            return piece
        self._should_strip_space = False
        return piece.removeprefix(" ")
