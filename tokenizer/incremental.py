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
        self._takes_space = tokenizer.takes_first_space

    def push(self, token_id: int) -> str:
        """The characters that this id completes, perhaps none.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._hidden else self._begun(self._decoder.decode(data))

    def finish(self) -> str:
        """U+FFFD for an unfinished character, or nothing."""
        rest = self._begun(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._takes_space = self._tokenizer.takes_first_space
        return rest

    def _begun(self, piece: str) -> str:
        if not (self._takes_space and piece):
            return piece
        self._takes_space = False
        return piece.removeprefix(" ")
