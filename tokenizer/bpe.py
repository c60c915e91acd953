"""Byte-level BPE: lossless encoding of text to token ids."""

import codecs
import hashlib
import heapq
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.chat_templates import ChatTemplate
from tokenizer.patterns import make_splitter, pattern_regex
from tokenizer.special_tokens import SpecialTokens, TokenOptions

Normalization = Literal["NFC"] | None

_NO_RANK = 1 << 62
# Above this many bytes the linked list is faster than the quadratic loop, most of which runs in C.
_LONG_WORD = 50
# Longer words are encoded in parts, as by Llama 3's tokenizer: time and memory of a word stay bounded.
_LONGEST_WORD = 1 << 20
_CACHED_WORDS = 1 << 18
_LONGEST_CACHED_WORD = 512
_LARGEST_ID = (1 << 24) - 1
# These bytes occur in no UTF-8 text, so a vocabulary may lack them.
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_LATER_OPTIONS = ("lstrip_tokens", "rstrip_tokens", "single_word_tokens", "bos_token", "adds_bos")


class _WordCache(dict[str, tuple[int, ...]]):
    """A cache of words to ids, which computes missing words. It is emptied when full, so that memory is bounded."""

    def __init__(self, compute: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._compute(word)
        if len(word) <= _LONGEST_CACHED_WORD:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        vocab: ordinary tokens (bytes) to ids. Every byte that UTF-8 text can contain must be a token.
        merges: pairs of tokens by rank, best first; a pair that is listed twice has the last rank (as in `tokenizers`).
        special_tokens: text to id. They are not in `vocab`, and text yields them only with
            `encode(allow_special=True)`.
        pattern: a name in `PATTERNS` or a regular expression, see `make_splitter`.
        normalization: applied to text before it is split into words; with "NFC" the round trip gives NFC(text).
        mask_token, eos_token, pad_token: special tokens with a role, by their text.

    Ids may have gaps (in some Hugging Face files). Instances are immutable and picklable.

    Raises:
        ValueError: the parts contradict each other; the message names the token.
    """

    def __init__(
        self,
        vocab: Mapping[bytes, int],
        merges: Iterable[tuple[bytes, bytes]],
        special_tokens: Mapping[str, int],
        pattern: str,
        normalization: Normalization = None,
        mask_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ) -> None:
        if normalization not in (None, "NFC"):
            raise ValueError(f"normalization {normalization!r} is unknown: use 'NFC' or None")
        self.vocab: Mapping[bytes, int] = dict(vocab)
        self.merges = tuple(merges)
        self.special_tokens: Mapping[str, int] = dict(special_tokens)
        self.pattern = pattern
        self.normalization: Normalization = normalization
        self.mask_token, self.eos_token, self.pad_token = mask_token, eos_token, pad_token
        self.options = TokenOptions()
        self.chat_template: ChatTemplate | None = None
        self.strips_first_space, self._adds_space_inside = False, False
        self._check()
        self._ranks, self._products = self._rank_merges()
        self._byte_ids = [self.vocab.get(bytes([byte]), -1) for byte in range(256)]
        self._prepare()

    def with_options(self, options: TokenOptions) -> "Tokenizer":
        """Return a copy with these options instead of its own.

        Raises:
            ValueError: a token in the options is not among the special tokens.
        """
        options.check(self.special_tokens)
        return self._change(options=options)

    def with_visible_tokens(self, tokens: Iterable[str]) -> "Tokenizer":
        """Return a copy to which these special tokens are what they are in the messages of a chat, too.

        Raises:
            ValueError: one is not among the special tokens.
        """
        return self.with_options(replace(self.options, visible_tokens=self.options.visible_tokens.union(tokens)))

    def with_chat_template(self, template: ChatTemplate | None) -> "Tokenizer":
        """Return a copy with this chat template, which is saved with it. It does not change the fingerprint."""
        tokenizer = object.__new__(type(self))
        tokenizer.__dict__.update(self.__dict__, chat_template=template)
        return tokenizer

    def with_mask_token(self, text: str, token_id: int) -> "Tokenizer":
        """Return a copy with this mask token, which is added to the special tokens if it is missing.

        Raises:
            ValueError: the id belongs to another token, or the file cannot represent another one.
        """
        return self._change(special_tokens={**self.special_tokens, text: token_id}, mask_token=text)

    def _change(self, **attributes: Any) -> "Tokenizer":
        tokenizer = object.__new__(type(self))
        tokenizer.__dict__.update({**self.__getstate__(), **attributes})
        tokenizer._check()
        tokenizer._prepare()
        return tokenizer

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, pattern={self.pattern!r}, special={list(self.special_tokens)})"

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_bytes_of", "_cache", "_split", "_added", "_control", "hidden_ids", "_lengths", "fingerprint")
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, special tokens included."""
        return len(self._lengths)

    @property
    def mask_token_id(self) -> int | None:
        return None if self.mask_token is None else self.special_tokens[self.mask_token]

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.special_tokens[self.eos_token]

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.special_tokens[self.pad_token]

    @property
    def bos_token(self) -> str | None:
        return self.options.bos_token

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.special_tokens[self.bos_token]

    @property
    def prefix_ids(self) -> list[int]:
        """Ids before a text that is not a chat: the `bos_token`, if it is added. A chat template writes its own."""
        return [self.special_tokens[self.bos_token]] if self.options.adds_bos and self.bos_token else []

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that determines ids and text, independent of the file format."""
        options = self.options.to_json()
        contents = [
            sorted((token_id, bytes_to_chars(token)) for token, token_id in self.vocab.items()),
            [(bytes_to_chars(a), bytes_to_chars(b)) for a, b in self.merges],
            sorted(self.special_tokens.items()),
            [pattern_regex(self.pattern), self.normalization, options["ignore_merges"], options["visible_tokens"]],
            [self.mask_token, self.eos_token, self.pad_token],
            *([options["normalized_tokens"]] if options["normalized_tokens"] else []),
        ]
        # Options that were added later appear only if they are set, so that older files keep their fingerprints.
        contents += [[name, options[name]] for name in _LATER_OPTIONS if options[name]]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encode a text.

        Special tokens in the text are ordinary text, unless `allow_special`: then they become their ids. The search is
        leftmost and longest first and precedes normalization, as in Hugging Face.

        Raises:
            ValueError: the text contains a lone surrogate, which has no UTF-8 form.
        """
        if not allow_special:
            return self._encode_words(self._normalize(text))
        return self.encode_marked(text, "")

    def mark_control_tokens(self, text: str, marker: str) -> str:
        """Insert `marker`, a character that occurs nowhere, into every special token that is not visible, so that
        `encode_marked` encodes it as ordinary text.

        Raises:
            ValueError: the text contains a special token of one character, into which nothing can be inserted.
        """
        for token in self.special_tokens.keys() - self.options.visible_tokens:
            if len(token) == 1 and token in text:
                raise ValueError(
                    f"{token!r} is a special token of one character, which cannot be encoded as text: remove it"
                )
        return self._control.insert_marker(text, marker)

    def find_control_token(self, text: str) -> tuple[int, int] | None:
        """Find the first special token that is not visible: its start and end in the text, or None."""
        match = self._control.regex.search(text)
        return None if match is None else match.span()

    def encode_marked(
        self,
        text: str,
        marker: str,
        *,
        is_continuation: bool = False,
        encoded_pieces: dict[tuple[str, ...], list[int]] | None = None,
    ) -> list[int]:
        """Encode a text with special tokens, except those that `mark_control_tokens` has marked.

        Args:
            marker: the character of `mark_control_tokens`; "": nothing is marked.
            is_continuation: the text follows another one. It matters only where a tokenizer adds a space before texts.
            encoded_pieces: tokens of pieces between special tokens, which texts with the same pieces share.
        """
        encoded_pieces = {} if encoded_pieces is None else encoded_pieces
        ids: list[int] = []
        for piece, special in self._added.split_text(text):
            if piece:
                adds_space = self._adds_space_inside if ids else not is_continuation
                key = (piece.replace(marker, "") if marker else piece, str(adds_space))
                if key not in encoded_pieces:
                    encoded_pieces[key] = self._encode_words(self._normalize(key[0]), adds_space)
                ids += encoded_pieces[key]
            ids += special
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Decode ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self.hidden_ids]
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes; a special token becomes its text in UTF-8.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        try:
            return b"".join(map(self._bytes_of.__getitem__, ids))
        except KeyError as error:
            raise ValueError(
                f"token id {error.args[0]} is not in the vocabulary (ids 0..{self.vocab_size - 1}); wrong tokenizer?"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """Decode one id, as `decode_bytes` does."""
        return self.decode_bytes([token_id])

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of text of each id, ``[vocab_size]``: 0 for special tokens and gaps. Read-only."""
        return self._lengths

    def _check(self) -> None:
        missing = [b for b in range(256) if b not in _NEVER_IN_UTF8 and bytes([b]) not in self.vocab]
        if missing:
            raise ValueError(f"vocab lacks {len(missing)} single-byte tokens, first byte {missing[0]:#04x}: add them")
        if "" in self.special_tokens or b"" in self.vocab:
            raise ValueError("the empty token '' is not allowed: remove it from vocab and special_tokens")
        owners: dict[int, str] = {}
        named = [(bytes_to_chars(token), token_id) for token, token_id in self.vocab.items()]
        for text, token_id in chain(named, self.special_tokens.items()):
            if not 0 <= token_id <= _LARGEST_ID:
                raise ValueError(f"token {text!r} has the id {token_id}: ids start at 0 and end at {_LARGEST_ID}")
            if token_id in owners:
                raise ValueError(f"id {token_id} belongs to two tokens, {owners[token_id]!r} and {text!r}")
            owners[token_id] = text
        # Both kinds share one namespace in Hugging Face's files.
        for text in self.special_tokens.keys() & {name for name, _ in named}:
            raise ValueError(f"special token {text!r} is spelled like an ordinary token: rename it")
        for role in ("mask_token", "eos_token", "pad_token"):
            text = getattr(self, role)
            if text is not None and text not in self.special_tokens:
                raise ValueError(f"{role} {text!r} is not among the special tokens {sorted(self.special_tokens)}")

    def _rank_merges(self) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Compute the rank of each pair of ids, and the id that the merge of each rank produces."""
        ranks: dict[tuple[int, int], int] = {}
        products: list[int] = []
        vocab = self.vocab
        for rank, (left, right) in enumerate(self.merges):
            try:
                ranks[vocab[left], vocab[right]] = rank
                products.append(vocab[left + right])
            except KeyError as error:
                raise ValueError(
                    f"merge {rank} ({bytes_to_chars(left)!r}, {bytes_to_chars(right)!r}) needs the token "
                    f"{bytes_to_chars(error.args[0])!r}, which vocab lacks"
                ) from None
        return ranks, products

    def _prepare(self) -> None:
        """Build the derived attributes, which are not pickled."""
        self._decode_vocab()
        self._split = make_splitter(self.pattern)
        self._cache = _WordCache(self._encode_word)
        options = self.options
        self._added = SpecialTokens(
            self.special_tokens, options.lstrip_tokens, options.rstrip_tokens, options.single_word_tokens
        )
        hidden = {
            text: token_id for text, token_id in self.special_tokens.items() if text not in options.visible_tokens
        }
        self._control = SpecialTokens(hidden)
        self.hidden_ids = frozenset(hidden.values())
        """Ids that `decode(skip_special=True)` omits."""

    def _decode_vocab(self) -> None:
        """Build the text of each id, in UTF-8, and its length."""
        self._bytes_of = {token_id: self._decode_token(token) for token, token_id in self.vocab.items()}
        self._lengths = np.zeros(max(*self._bytes_of, *self.special_tokens.values()) + 1, dtype=np.int64)
        self._lengths[list(self._bytes_of)] = list(map(len, self._bytes_of.values()))
        self._lengths.flags.writeable = False
        self._bytes_of.update((token_id, text.encode()) for text, token_id in self.special_tokens.items())

    def _decode_token(self, token: bytes) -> bytes:
        """Return the text of an ordinary token, as it stands in the vocabulary."""
        return token

    def _normalize(self, text: str) -> str:
        return text if self.normalization is None else unicodedata.normalize(self.normalization, text)

    def _encode_words(self, text: str, adds_space: bool = True) -> list[int]:
        """Encode text without special tokens. ``adds_space`` is for tokenizers that put a space before texts."""
        try:
            return list(chain.from_iterable(map(self._cache.__getitem__, self._split(text))))
        except UnicodeEncodeError:
            raise surrogate_error(text) from None

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            parts = (word[start : start + _LONGEST_WORD] for start in range(0, len(word), _LONGEST_WORD))
            return tuple(chain.from_iterable(map(self._encode_word, parts)))
        data = word.encode()
        if self.options.ignore_merges and data in self.vocab:
            return (self.vocab[data],)
        byte_ids = self._byte_ids
        ids = [byte_ids[byte] for byte in data]
        return self._merge_long(ids) if len(ids) > _LONG_WORD else self._merge_short(ids)

    def _merge_short(self, ids: list[int]) -> tuple[int, ...]:
        """Merge the best pair, leftmost first, until no pair can be merged. Quadratic, with a small constant."""
        rank_of = self._ranks.get
        ranks = [rank_of(pair, _NO_RANK) for pair in pairwise(ids)]
        while ranks:
            best = min(ranks)
            if best == _NO_RANK:
                break
            i = ranks.index(best)
            ids[i : i + 2] = [self._products[best]]
            del ranks[i]
            if i:
                ranks[i - 1] = rank_of((ids[i - 1], ids[i]), _NO_RANK)
            if i < len(ranks):
                ranks[i] = rank_of((ids[i], ids[i + 1]), _NO_RANK)
        return tuple(ids)

    def _merge_long(self, ids: list[int]) -> tuple[int, ...]:
        """Return the same as `_merge_short`, with a linked list and buckets of positions by rank. Nearly linear."""
        ranks, rank_of = self._ranks, self._ranks.get
        ids.append(-1)  # no pair contains this id; it also precedes the first position, since previous[0] is -1
        following = list(range(1, len(ids) + 1))
        previous = list(range(-1, len(ids) - 1))
        positions: dict[int, list[int]] = {}
        for i, pair in enumerate(pairwise(ids)):
            if pair in ranks:
                positions.setdefault(ranks[pair], []).append(i)
        heap = list(positions)
        heapq.heapify(heap)
        while heap:
            rank = heapq.heappop(heap)
            product = self._products[rank]
            remaining = iter(sorted(positions.pop(rank)))
            for i in remaining:
                j = following[i]
                # A position stays in its bucket when its pair is gone: a neighbor changed, or its own id became -1.
                if rank_of((ids[i], ids[j])) != rank:
                    continue
                ids[i], ids[j] = product, -1
                h, k = previous[i], following[j]
                following[i], previous[k] = k, i
                for position, new_rank in ((i, rank_of((product, ids[k]))), (h, rank_of((ids[h], product)))):
                    if new_rank is None:
                        continue
                    if new_rank not in positions:
                        positions[new_rank] = []
                        heapq.heappush(heap, new_rank)
                    positions[new_rank].append(position)
                if heap and heap[0] < rank:  # a merge outranks the one that creates its parts; training never does
                    positions[rank] = list(remaining)
                    heapq.heappush(heap, rank)
                    break
        return tuple(token_id for token_id in ids if token_id >= 0)


class IncrementalDecoder:
    """Decodes a stream of ids to pieces of text that never split a UTF-8 character.

    The concatenated pieces are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._should_strip_space = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes; may be empty.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        return self._strip_first_space(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, else an empty string."""
        return self._strip_first_space(self._decoder.decode(b"", final=True))

    def _strip_first_space(self, piece: str) -> str:
        if not (self._should_strip_space and piece):
            return piece
        self._should_strip_space = False
        return piece.removeprefix(" ")


def surrogate_error(text: str) -> ValueError:
    """Build the error for a text with lone surrogates; it names the first one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offender = f"a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start})"
        return ValueError(f"text contains {offender}, which UTF-8 cannot express: read the source as UTF-8")
    raise AssertionError("text is valid Unicode")
