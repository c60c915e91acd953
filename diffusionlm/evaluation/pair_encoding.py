"""Token ids of texts whose likelihood is asked for: a text, or a continuation after its context. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from config.model import ModelConfig
from tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPair:
    """A context and its continuation."""

    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


class PairEncoder:
    """Encodes texts that may contain special tokens, such as a rendered chat.

    Special tokens in a text become their ids. A text begins with the prefix of the model, or of its tokenizer, but only
    once: a chat template writes it itself.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig) -> None:
        """Use the prefix with which the model was trained, else the one that the tokenizer adds."""
        self.tokenizer = tokenizer
        self.prefix_ids = tuple(model.prefix_ids or tokenizer.prefix_ids)
        """Before each text; usually none."""
        candidates = [*self.prefix_ids[:1], tokenizer.bos_token_id, model.eos_token_id, tokenizer.eos_token_id]
        self.first_token_id = next((token for token in candidates if token is not None), None)
        """In place of an empty context: the beginning of text, else its end. None: the tokenizer has neither."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a whole text.

        Raises:
            ValueError: the text contains a lone surrogate, which has no UTF-8 form.
        """
        token_ids = self._encode_part(text)
        return token_ids if token_ids[: len(self.prefix_ids)] == self.prefix_ids else (*self.prefix_ids, *token_ids)

    def encode_pair(self, context: str, continuation: str) -> EncodedPair:
        """Encode a continuation in its context, split as in lm-evaluation-harness 0.4 (``TemplateLM``).

        Spaces at the end of the context belong to the continuation. The whole text is encoded; what follows as many
        tokens as the context alone has is the continuation. If nothing follows, because tokens join the two, the
        continuation is encoded by itself. In place of an empty context there is the prefix, or `first_token_id`; a
        continuation that begins with it loses it, unless it is all of it.

        Raises:
            ValueError: the text contains a lone surrogate, or the context is empty and there is no token for it.
        """
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            return self._encode_without_context(continuation)
        context_ids = self.encode(context)
        continuation_ids = self.encode(context + continuation)[len(context_ids) :]
        if continuation and not continuation_ids:
            continuation_ids = self._encode_part(continuation)
        return EncodedPair(context_ids, continuation_ids)

    def _encode_without_context(self, continuation: str) -> EncodedPair:
        prefix_ids = self.prefix_ids
        if not prefix_ids:
            if self.first_token_id is None:
                raise ValueError(
                    "an empty context needs a token to begin with, and the tokenizer has no token for the beginning or "
                    "the end of a text: give a context"
                )
            prefix_ids = (self.first_token_id,)
        continuation_ids = self._encode_part(continuation)
        length = len(prefix_ids)
        if continuation_ids[:length] == prefix_ids and len(continuation_ids) > length:
            continuation_ids = continuation_ids[length:]
        return EncodedPair(prefix_ids, continuation_ids)

    def _encode_part(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, allow_special=True))
