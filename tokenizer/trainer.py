"""Train a byte-level BPE with incremental pair counts; the merges are those of `BpeTrainer` of `tokenizers`."""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from tokenizer.bpe import Tokenizer, surrogate_error
from tokenizer.byte_alphabet import BYTE_ORDER, bytes_to_chars
from tokenizer.patterns import make_splitter

_CHUNK_CHARACTERS = 1 << 20
_MAX_VOCAB_SIZE = 0x110000
_ID_OF_BYTE = bytes(sorted(range(256), key=BYTE_ORDER.__getitem__))


def train_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|endoftext|>", "<|mask|>"),
    pattern: str = "qwen",
    mask_token: str | None = "<|mask|>",
    eos_token: str | None = "<|endoftext|>",
    num_workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Train a tokenizer on a stream of texts.

    Order of ids: the 256 bytes (as in GPT-2's alphabet), the learned tokens, the special tokens. If the corpus is too
    small for `vocab_size`, the `vocab_size` of the result is smaller. Special tokens in a text are ordinary text.

    Args:
        texts: consumed once; words never span two texts.
        vocab_size: number of ids, including bytes and special tokens.
        pattern: a name in `PATTERNS` or a regular expression.
        num_workers: processes that split texts into words; the result does not depend on it. More than one need an
            importable `__main__`, because they are spawned.
        on_progress: called with (learned tokens, tokens to learn) after each token.

    Raises:
        ValueError: an argument is invalid, the corpus is empty, a text contains a lone surrogate, or a worker was
            killed.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: pass a list or a generator of texts")
    if isinstance(special_tokens, str) or len(set(special_tokens)) < len(special_tokens):
        raise ValueError(f"special_tokens {special_tokens!r}: pass a list of distinct strings")
    minimum = 256 + len(special_tokens)
    if not minimum <= vocab_size <= _MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size {vocab_size} is out of range: at least {minimum} (256 bytes and {len(special_tokens)} special "
            f"tokens), at most {_MAX_VOCAB_SIZE}"
        )
    word_counts = _count_words_in_chunks(texts, pattern, num_workers)
    if not word_counts:
        raise ValueError("the training corpus is empty: texts contain no characters")
    tokens, merges = _learn_merges(word_counts, vocab_size - minimum, frozenset(special_tokens), on_progress)
    return Tokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=merges,
        special_tokens={token: len(tokens) + i for i, token in enumerate(special_tokens)},
        pattern=pattern,
        mask_token=mask_token,
        eos_token=eos_token,
    )


def _count_words_in_chunks(texts: Iterable[str], pattern: str, num_workers: int) -> Counter[str]:
    if num_workers == 1:
        return _count_words(texts, pattern)
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        pending: deque[Future[Counter[str]]] = deque()
        try:
            for chunk in _chunks(texts):
                if len(pending) > 2 * num_workers:  # bounds memory when reading is faster than counting
                    total.update(pending.popleft().result())
                pending.append(pool.submit(_count_words, chunk, pattern))
            for future in pending:
                total.update(future.result())
        except BrokenProcessPool:
            raise ValueError(
                f"one of the num_workers = {num_workers} processes was killed; if memory ran out, use fewer"
            ) from None
    return total


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _count_words(texts: Iterable[str], pattern: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    split = make_splitter(pattern)
    for text in texts:
        counts.update(split(text))
    return counts


def _learn_merges(
    word_counts: Mapping[str, int],
    num_merges: int,
    reserved: frozenset[str],
    on_progress: Callable[[int, int], None] | None,
) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Return tokens by id and merges by rank.

    A token is represented by the character chr(id), a word by a string and a pair by a string of two characters.
    Replacing a pair is then `str.replace`, and the order of strings is the order of pairs of ids, which breaks ties
    between equal counts. `reserved` spellings (special tokens) are never learned.
    """
    words = [_to_byte_ids(word) for word in word_counts]
    counts = list(word_counts.values())
    pair_counts, where = _count_pairs(words, counts)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    tokens = [bytes([byte]) for byte in BYTE_ORDER]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < num_merges and heap:
        negative_count, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        # The count fell after the push. It never rises: a pair gains words only in the step that creates it.
        if count != -negative_count:
            if count > 0:
                heapq.heappush(heap, (-count, pair))
            continue
        left, right = (tokens[ord(char)] for char in pair)
        if bytes_to_chars(left + right) in reserved:
            continue
        # This token is always new: equal bytes are merged in the same order everywhere (unless a token crosses their
        # ends), so each string of bytes has one derivation.
        merges.append((left, right))
        tokens.append(left + right)
        new_pairs = _replace_pair(words, counts, where.pop(pair), pair, chr(len(tokens) - 1), pair_counts, where)
        for new_pair in new_pairs:
            if pair_counts[new_pair] > 0:
                heapq.heappush(heap, (-pair_counts[new_pair], new_pair))
        if on_progress is not None:
            on_progress(len(merges), num_merges)
    return tokens, merges


def _to_byte_ids(word: str) -> str:
    try:
        return word.encode().translate(_ID_OF_BYTE).decode("latin-1")
    except UnicodeEncodeError:
        raise surrogate_error(word) from None


def _count_pairs(words: list[str], counts: list[int]) -> tuple[defaultdict[str, int], defaultdict[str, list[int]]]:
    """Count the pairs, and list the words that contain each of them (an index may repeat)."""
    pair_counts: defaultdict[str, int] = defaultdict(int)
    where: defaultdict[str, list[int]] = defaultdict(list)
    for index, (word, count) in enumerate(zip(words, counts, strict=True)):
        for i in range(len(word) - 1):
            pair = word[i : i + 2]
            pair_counts[pair] += count
            indices = where[pair]
            if not indices or indices[-1] != index:
                indices.append(index)
    return pair_counts, where


def _replace_pair(
    words: list[str],
    counts: list[int],
    indices: list[int],
    pair: str,
    token: str,
    pair_counts: defaultdict[str, int],
    where: defaultdict[str, list[int]],
) -> set[str]:
    """Replace `pair` by `token` in the words at `indices`, and update the counts of the adjacent pairs.

    The count of `pair` itself is not updated, because it never occurs again. Returns the pairs that a word gained.
    """
    new_pairs: set[str] = set()
    first, second = pair[0], pair[1]
    for index in indices:
        word, count = words[index], counts[index]
        start = word.find(pair)
        if start < 0:  # removed by another merge, or a repeated index
            continue
        pairs: list[str] = []
        previous_end = 0
        while start >= 0:
            if start > 0:
                # An adjacent occurrence before this one is the new token already.
                before = token if start == previous_end else word[start - 1]
                pair_counts[before + first] -= count
                pairs.append(before + token)
            previous_end = start + 2
            if previous_end < len(word):
                after = word[previous_end]
                pair_counts[second + after] -= count
                pairs.append(token + after)
            start = word.find(pair, previous_end)
        for new_pair in pairs:
            pair_counts[new_pair] += count
            holders = where[new_pair]
            if not holders or holders[-1] != index:
                holders.append(index)
        new_pairs.update(pairs)
        words[index] = word.replace(pair, token)
    return new_pairs
