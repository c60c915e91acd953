import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tokenizer import PATTERNS, Tokenizer, train_bpe
from tokenizer.byte_alphabet import bytes_to_chars


def reference(texts: Sequence[str], vocab_size: int, pattern: str) -> tuple[list[list[str]], dict[str, int]]:
    """Merges and vocabulary by the `tokenizers` library; `vocab_size` without special tokens."""
    theirs = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(texts, trainer)
    return json.loads(theirs.to_str())["model"]["merges"], theirs.get_vocab()


def assert_equals_reference(tokenizer: Tokenizer, texts: Sequence[str], vocab_size: int, pattern: str) -> None:
    merges, vocab = reference(texts, vocab_size - len(tokenizer.special_tokens), pattern)
    assert [[bytes_to_chars(left), bytes_to_chars(right)] for left, right in tokenizer.merges] == merges
    assert {bytes_to_chars(token): token_id for token, token_id in tokenizer.vocab.items()} == vocab


@pytest.mark.parametrize(
    "pattern", [pytest.param(name, marks=[] if name == "gpt2" else pytest.mark.slow) for name in PATTERNS]
)
def test_merges_and_ids_equal_tokenizers_library(pattern: str, sources: list[str]) -> None:
    tokenizer = train_bpe(sources, vocab_size=3000, pattern=pattern)
    assert tokenizer.vocab_size == 3000
    assert_equals_reference(tokenizer, sources, 3000, pattern)


def test_equal_on_ties_and_runs() -> None:
    # A small alphabet makes equal counts, overlapping pairs and tokens with several derivations the rule.
    rng = random.Random(0)
    for _ in range(20):
        texts = [" ".join("".join(rng.choices("ab-", k=rng.randrange(1, 9))) for _ in range(60)) for _ in range(3)]
        assert_equals_reference(train_bpe(texts, vocab_size=300, pattern="qwen"), texts, 300, "qwen")


def test_special_tokens_come_last(sources: list[str]) -> None:
    tokenizer = train_bpe(sources[:1], vocab_size=300, special_tokens=["<|pad|>", "<|mask|>"], eos_token=None)
    assert dict(tokenizer.special_tokens) == {"<|pad|>": 298, "<|mask|>": 299}
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (299, None)


def test_special_tokens_are_never_learned() -> None:
    tokenizer = train_bpe(["MASK"] * 9, vocab_size=300, special_tokens=["MASK"], mask_token="MASK", eos_token=None)
    assert b"MASK" not in tokenizer.vocab
    assert tokenizer.mask_token_id not in tokenizer.encode("MASK")


def test_a_small_corpus_gives_a_small_tokenizer() -> None:
    calls: list[tuple[int, int]] = []
    tokenizer = train_bpe(
        iter(["ab ab", ""]), vocab_size=500, on_progress=lambda done, total: calls.append((done, total))
    )
    assert tokenizer.vocab_size == 256 + 2 + 2
    assert calls == [(1, 242), (2, 242)]
    assert tokenizer.decode(tokenizer.encode("ab ab")) == "ab ab"


def test_workers_do_not_change_the_result(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer.trainer._CHUNK_CHARACTERS", 1 << 16)  # more chunks than may be pending
    fingerprint = train_bpe(sources, vocab_size=400).fingerprint
    assert train_bpe(sources, vocab_size=400, num_workers=2).fingerprint == fingerprint


class DeadPool(ProcessPoolExecutor):
    """A pool whose process was killed."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise BrokenProcessPool


def test_a_killed_worker_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer.trainer.ProcessPoolExecutor", DeadPool)
    with pytest.raises(ValueError, match="num_workers = 2"):
        train_bpe(["a b"], vocab_size=300, num_workers=2)


def test_errors_come_back_from_workers() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        train_bpe(["fine", "bad \udc80"], vocab_size=300, num_workers=2)


def test_a_long_run_can_be_trained_on() -> None:
    tokenizer = train_bpe(["=" * 200_000], vocab_size=256 + 2 + 12)
    assert max(map(len, tokenizer.vocab)) == 2**12


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["a"], {"vocab_size": 257}, "vocab_size 257 is out of range: at least 258"),
        (["a"], {"vocab_size": 2_000_000}, "at most 1114112"),
        ([], {}, "corpus is empty"),
        (["", ""], {}, "corpus is empty"),
        ("text", {}, "texts is one string"),
        (["a"], {"special_tokens": ["<s>", "<s>"]}, "distinct"),
        (["a"], {"special_tokens": ["<s>"]}, "mask_token '<|mask|>' is not among special_tokens"),
        (["a"], {"special_tokens": ["", "<|mask|>", "<|endoftext|>"]}, "'' is empty or spelled like a byte token"),
        (["a"], {"num_workers": 0}, "num_workers 0"),
        (["a"], {"pattern": "nope"}, "pattern 'nope' is unknown"),
        (["a \udc80"], {}, "lone surrogate"),
    ],
)
def test_errors(texts: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        train_bpe(texts, **{"vocab_size": 300, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)
