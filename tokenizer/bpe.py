"""Byte-level BPE: text to token ids and back, exactly."""

import copy
import hashlib
import heapq
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.patterns import make_splitter, pattern_regex
from tokenizer.special_tokens import SpecialTokens

Normalization = Literal["NFC"] | None

_NO_RANK = 1 << 62
# Above this many bytes the quadratic loop, though it runs in C for the most part, loses to the linked list.
_LONG_WORD = 50
_CACHED_WORDS = 1 << 18
_LONGEST_CACHED_WORD = 512
_LARGEST_ID = (1 << 24) - 1
# These bytes occur in no UTF-8 text, so a vocabulary may lack them.
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_TOKEN_OPTIONS = ("visible_tokens", "normalized_tokens", "lstrip_tokens", "rstrip_tokens", "single_word_tokens")


class _WordCache(dict[str, tuple[int, ...]]):
    """Words to ids; a missing word is computed. Emptied when full, so memory is bounded."""

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
        merges: pairs of tokens, best first; of a pair that is listed twice the last rank counts (as in `tokenizers`).
        special_tokens: text to id. They are no part of `vocab`, and text never yields them unless `encode` is asked to.
        pattern: a name in `PATTERNS` or a regular expression, see `make_splitter`.
        normalization: applied to text before it is cut into words; with "NFC" the round trip gives NFC(text).
        mask_token, eos_token, pad_token: roles; names among the special tokens.

    Ids may have holes (in files from elsewhere). Instances are immutable and may be pickled.

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
        self._vocab = dict(vocab)
        self._merges = tuple(merges)
        self._special = dict(special_tokens)
        self.pattern = pattern
        self.normalization: Normalization = normalization
        self.mask_token, self.eos_token, self.pad_token = mask_token, eos_token, pad_token
        self.ignore_merges = False
        self.bos_token: str | None = None
        self.adds_bos = False
        self.strips_first_space = False
        self.visible_tokens: frozenset[str] = frozenset()
        self.normalized_tokens: frozenset[str] = frozenset()
        self.lstrip_tokens: frozenset[str] = frozenset()
        self.rstrip_tokens: frozenset[str] = frozenset()
        self.single_word_tokens: frozenset[str] = frozenset()
        self._check()
        self._bytes_of = {token_id: token for token, token_id in self._vocab.items()}
        self._bytes_of.update((token_id, text.encode()) for text, token_id in self._special.items())
        self._ranks, self._products = self._rank_merges()
        self._byte_ids = [self._vocab.get(bytes([byte]), -1) for byte in range(256)]
        self._fingerprint: str | None = None
        self._prepare()

    def with_options(
        self,
        *,
        ignore_merges: bool = False,
        visible_tokens: Iterable[str] = (),
        normalized_tokens: Iterable[str] = (),
        lstrip_tokens: Iterable[str] = (),
        rstrip_tokens: Iterable[str] = (),
        single_word_tokens: Iterable[str] = (),
        bos_token: str | None = None,
        adds_bos: bool = False,
    ) -> "Tokenizer":
        """A copy with habits of files from elsewhere.

        `ignore_merges`: a word that is itself a token becomes that token, whatever the merges say (Llama 3).
        `visible_tokens`: special tokens that `decode(skip_special=True)` keeps, as Hugging Face does with added
        tokens that are not marked special, such as Qwen3's `<think>`.
        `normalized_tokens`: special tokens that `encode(allow_special=True)` looks for last, in what the others leave
        and after normalization, as Hugging Face does with added tokens that are marked normalized.
        `lstrip_tokens`, `rstrip_tokens`, `single_word_tokens`: special tokens that swallow the whitespace on that side
        of them, or that are looked for only as whole words. Swallowed whitespace does not come back from `decode`.
        `bos_token`, `adds_bos`: the special token that texts begin with, and whether the model expects it before a
        text that is no chat. `encode` never adds it: see `beginning`.

        Raises:
            ValueError: a token that is named is not among the special tokens.
        """
        other = copy.copy(self)  # through __getstate__: nothing that changes is shared
        other.ignore_merges = ignore_merges
        other.visible_tokens = frozenset(visible_tokens)
        other.normalized_tokens = frozenset(normalized_tokens)
        other.lstrip_tokens = frozenset(lstrip_tokens)
        other.rstrip_tokens = frozenset(rstrip_tokens)
        other.single_word_tokens = frozenset(single_word_tokens)
        other.bos_token, other.adds_bos = bos_token, adds_bos
        for name in _TOKEN_OPTIONS:
            for text in getattr(other, name) - self._special.keys():
                raise ValueError(f"{name}: {text!r} is not among the special tokens {sorted(self._special)}")
        if (bos_token is not None or adds_bos) and bos_token not in self._special:
            raise ValueError(f"bos_token {bos_token!r} is not among the special tokens {sorted(self._special)}")
        other._fingerprint = None
        other._prepare()
        return other

    def with_mask_token(self, text: str, token_id: int) -> "Tokenizer":
        """A copy in which a special token stands for noise; it is added if it is not there.

        Raises:
            ValueError: the id belongs to another token, or the file has no place for one more.
        """
        other = copy.copy(self)
        other._special = {**self._special, text: token_id}
        other.mask_token = text
        other._check()
        other._bytes_of = {**self._bytes_of, token_id: text.encode()}
        other._fingerprint = None
        other._prepare()
        return other

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, pattern={self.pattern!r}, special={list(self._special)})"

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_cache", "_split", "_early", "_late", "_control", "_hidden_ids", "_lengths")
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def vocab(self) -> Mapping[bytes, int]:
        """Ordinary tokens to ids; special tokens are not among them."""
        return MappingProxyType(self._vocab)

    @property
    def merges(self) -> tuple[tuple[bytes, bytes], ...]:
        """Pairs of tokens, best first."""
        return self._merges

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens' text to ids."""
        return MappingProxyType(self._special)

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, special tokens included."""
        return len(self._lengths)

    @property
    def mask_token_id(self) -> int | None:
        return None if self.mask_token is None else self._special[self.mask_token]

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._special[self.eos_token]

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self._special[self.pad_token]

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._special[self.bos_token]

    @property
    def prefix_ids(self) -> list[int]:
        """Ids that belong before a text that is no chat: the `bos_token`, if `adds_bos`. A chat template writes its
        own."""
        return [self._special[self.bos_token]] if self.adds_bos and self.bos_token is not None else []

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides ids and text, however it is stored."""
        if self._fingerprint is None:
            contents = [
                sorted((token_id, bytes_to_chars(token)) for token, token_id in self._vocab.items()),
                [(bytes_to_chars(a), bytes_to_chars(b)) for a, b in self._merges],
                sorted(self._special.items()),
                [pattern_regex(self.pattern), self.normalization, self.ignore_merges, sorted(self.visible_tokens)],
                [self.mask_token, self.eos_token, self.pad_token],
                *([sorted(self.normalized_tokens)] if self.normalized_tokens else []),
            ]
            # What few files have comes last and by name, so that the others keep their fingerprints.
            rare: dict[str, Any] = {name: sorted(getattr(self, name)) for name in _TOKEN_OPTIONS[2:]}
            rare |= {"bos_token": self.bos_token, "adds_bos": self.adds_bos}
            contents += [[name, value] for name, value in rare.items() if value]
            self._fingerprint = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
        return self._fingerprint

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        A special token written in the text is ordinary text, unless `allow_special`: then it becomes its id, the
        first and the longest one first, looked for before normalization (as Hugging Face does; see `adapted`).

        Raises:
            ValueError: the text contains a lone surrogate, which has no UTF-8 form.
        """
        if not allow_special:
            return self._encode_words(self._normalize(text))
        return self._encode_with_special(text)

    def mark_control_tokens(self, text: str, marker: str) -> str:
        """The text with `marker`, a character that occurs nowhere, inside of every special token that is not visible,
        so that `encode_marked` takes it for ordinary text.

        Raises:
            ValueError: a special token of one character, which has no inside.
        """
        for token in self._special.keys() - self.visible_tokens:
            if len(token) == 1 and token in text:
                raise ValueError(f"{token!r} is a special token of one character, which cannot be kept as text")
        marked = self._control.insert_marker(text, marker)
        if self.normalized_tokens <= self.visible_tokens:
            return marked
        return self._control.insert_marker(self._normalize(marked), marker)  # normalization may have made more of them

    def encode_marked(self, text: str, marker: str) -> list[int]:
        """`encode(allow_special=True)` of a text in which `mark_control_tokens` has marked what stays text."""
        return self._encode_with_special(text, marker)

    def _encode_with_special(self, text: str, marker: str | None = None) -> list[int]:
        ids: list[int] = []
        for piece, early in self._early.split_text(text):
            for part, late in self._late.split_text(self._normalize(piece)):
                # A marker may have kept a letter and its accent apart.
                ids += self._encode_words(part if marker is None else self._normalize(part.replace(marker, "")))
                ids += late
            ids += early
        return ids

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text, allow_special=allow_special) for text in texts]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self._hidden_ids]
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of ids; a special token gives its text in UTF-8.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        try:
            return b"".join(map(self._bytes_of.__getitem__, ids))
        except KeyError as error:
            raise self._unknown_id(error.args[0]) from None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id, as in `decode_bytes`."""
        try:
            return self._bytes_of[token_id]
        except KeyError:
            raise self._unknown_id(token_id) from None

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Ids that `decode(skip_special=True)` leaves out."""
        return self._hidden_ids

    def num_bytes(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
        """Bytes of text behind ids; special tokens count 0.

        Raises:
            ValueError: an id is outside 0..vocab_size-1.
        """
        id_array = np.asarray(ids, dtype=np.int64)
        if id_array.size and not 0 <= int(id_array.min()) <= int(id_array.max()) < self.vocab_size:
            raise self._unknown_id(int(id_array.min()) if int(id_array.min()) < 0 else int(id_array.max()))
        return int(self._lengths[id_array].sum())

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """[vocab_size] bytes of text of each id: 0 for special tokens and holes. Read-only."""
        return self._lengths

    def _unknown_id(self, token_id: int) -> ValueError:
        return ValueError(
            f"token id {token_id} is not in the vocabulary (ids 0..{self.vocab_size - 1}); wrong tokenizer?"
        )

    def _check(self) -> None:
        missing = [b for b in range(256) if b not in _NEVER_IN_UTF8 and bytes([b]) not in self._vocab]
        if missing:
            raise ValueError(f"vocab lacks {len(missing)} single-byte tokens, first byte {missing[0]:#04x}: add them")
        if "" in self._special or b"" in self._vocab:
            raise ValueError("the empty token '' is not allowed: remove it from vocab and special_tokens")
        owners: dict[int, str] = {}
        named = [(bytes_to_chars(token), token_id) for token, token_id in self._vocab.items()]
        for text, token_id in chain(named, self._special.items()):
            if not 0 <= token_id <= _LARGEST_ID:
                raise ValueError(f"token {text!r} has the id {token_id}: ids start at 0 and end at {_LARGEST_ID}")
            if token_id in owners:
                raise ValueError(f"id {token_id} belongs to two tokens, {owners[token_id]!r} and {text!r}")
            owners[token_id] = text
        # Both kinds share one name space in Hugging Face's files.
        for text in self._special.keys() & {name for name, _ in named}:
            raise ValueError(f"special token {text!r} is spelled like an ordinary token: rename it")
        for role in ("mask_token", "eos_token", "pad_token"):
            text = getattr(self, role)
            if text is not None and text not in self._special:
                raise ValueError(f"{role} {text!r} is not among the special tokens {sorted(self._special)}")

    def _rank_merges(self) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Rank of each pair of ids, and the id that the merge of each rank produces."""
        ranks: dict[tuple[int, int], int] = {}
        products: list[int] = []
        vocab = self._vocab
        for rank, (left, right) in enumerate(self._merges):
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
        """(Re)build what is derived and not pickled."""
        self._split = make_splitter(self.pattern)
        self._cache = _WordCache(self._encode_word)
        late = self._special.keys() & self.normalized_tokens
        self._early = self._build_special_tokens({text: self._special[text] for text in self._special.keys() - late})
        self._late = self._build_special_tokens({self._normalize(text): self._special[text] for text in late})
        hidden = self._special.keys() - self.visible_tokens
        # Looked for in both forms: normalization comes before the search for the late ones.
        spellings = hidden | {self._normalize(text) for text in hidden & late}
        self._control = SpecialTokens(dict.fromkeys(spellings, 0))
        self._hidden_ids = frozenset(self._special[text] for text in hidden)
        self._lengths = self._compute_byte_lengths(self._vocab.values())

    def _compute_byte_lengths(self, ordinary_ids: Iterable[int]) -> npt.NDArray[np.int64]:
        lengths = np.zeros(max(self._bytes_of) + 1, dtype=np.int64)
        for token_id in ordinary_ids:
            lengths[token_id] = len(self._bytes_of[token_id])
        lengths.flags.writeable = False
        return lengths

    def _build_special_tokens(self, ids: Mapping[str, int]) -> SpecialTokens:
        options = (self.lstrip_tokens, self.rstrip_tokens, self.single_word_tokens)
        return SpecialTokens(ids, *(frozenset(map(self._normalize, tokens)) | tokens for tokens in options))

    def _normalize(self, text: str) -> str:
        return text if self.normalization is None else unicodedata.normalize(self.normalization, text)

    def _encode_words(self, text: str) -> list[int]:
        try:
            return list(chain.from_iterable(map(self._cache.__getitem__, self._split(text))))
        except UnicodeEncodeError:
            raise surrogate_error(text) from None

    def _encode_word(self, word: str) -> tuple[int, ...]:
        data = word.encode()
        if self.ignore_merges and data in self._vocab:
            return (self._vocab[data],)
        byte_ids = self._byte_ids
        ids = [byte_ids[byte] for byte in data]
        return self._merge_long(ids) if len(ids) > _LONG_WORD else self._merge_short(ids)

    def _merge_short(self, ids: list[int]) -> tuple[int, ...]:
        """Merge the best pair, leftmost first, until none is left. Quadratic, with a small constant."""
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
        """The same result over a linked list, with the places of each pair in one bucket by rank: nearly linear."""
        ranks, rank_of = self._ranks, self._ranks.get
        ids.append(-1)  # no pair has this id; before the first place as well, since previous[0] is -1
        following = list(range(1, len(ids) + 1))
        previous = list(range(-1, len(ids) - 1))
        places: dict[int, list[int]] = {}
        for i, pair in enumerate(pairwise(ids)):
            if pair in ranks:
                places.setdefault(ranks[pair], []).append(i)
        heap = list(places)
        heapq.heapify(heap)
        while heap:
            rank = heapq.heappop(heap)
            product = self._products[rank]
            waiting = iter(sorted(places.pop(rank)))
            for i in waiting:
                j = following[i]
                # A place stays in its bucket when its pair is gone: a neighbour changed, or it died and its id is -1.
                if rank_of((ids[i], ids[j])) != rank:
                    continue
                ids[i], ids[j] = product, -1
                h, k = previous[i], following[j]
                following[i], previous[k] = k, i
                for place, new_rank in ((i, rank_of((product, ids[k]))), (h, rank_of((ids[h], product)))):
                    if new_rank is None:
                        continue
                    if new_rank not in places:
                        places[new_rank] = []
                        heapq.heappush(heap, new_rank)
                    places[new_rank].append(place)
                if heap and heap[0] < rank:  # a merge outranks one that makes its parts: no training gives that
                    places[rank] = list(waiting)
                    heapq.heappush(heap, rank)
                    break
        return tuple(token_id for token_id in ids if token_id >= 0)


def surrogate_error(text: str) -> ValueError:
    """The error for a text that has no UTF-8 form; it names the first offender."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offender = f"a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start})"
        return ValueError(f"text contains {offender}, which UTF-8 cannot express: read the source as UTF-8")
    raise AssertionError("text is valid Unicode")
