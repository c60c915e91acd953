from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from tokenizer import train_bpe


def test_special_tokens_come_last(sources: list[str]) -> None:
    tokenizer = train_bpe(sources[:1], vocab_size=300, special_tokens=["<|pad|>", "<|mask|>"], eos_token=None)
    assert dict(tokenizer.special_tokens) == {"<|pad|>": 298, "<|mask|>": 299}
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (299, None)
    assert list(tokenizer.vocab.values()) == list(range(298))


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


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["a"], {"vocab_size": 257}, "vocab_size 257 is out of range: at least 258"),
        (["a"], {"vocab_size": 2_000_000}, "at most 1114112"),
        (["", ""], {}, "corpus is empty"),
        ("text", {}, "texts is one string"),
        (["a"], {"special_tokens": ["<s>", "<s>"]}, "distinct"),
        (["a"], {"special_tokens": ["<s>"]}, "mask_token '<|mask|>' is not among the special tokens"),
        (["a"], {"special_tokens": ["", "<|mask|>", "<|endoftext|>"]}, "the empty token ''"),
    ],
)
def test_errors(texts: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        train_bpe(texts, **{"vocab_size": 300, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)
