"""Training, encoding and decoding speed of the tokenizer: this project, and peers that do the same.

All run on one thread of one process and are timed by its CPU time, one pass of each contestant in turn. What they
return is compared after every measured round: merges, ids and text must be equal.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarking.harness import (
    Seconds,
    collect_environment,
    is_installed,
    markdown_list,
    markdown_table,
    print_message,
    speedup,
    time_in_turns,
)
from config.bench_tokenizer import BenchTokenizerConfig, BenchTokenizerSection
from diffusionlm.data.reader import first_documents
from diffusionlm.data.sources import open_source
from tokenizer import PATTERNS, Tokenizer, train_bpe
from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.huggingface import to_huggingface

OURS = "diffusionlm"
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What makes the peers run on one thread."""

METHODS = {
    OURS: "`train_bpe`, `Tokenizer.encode` and `Tokenizer.decode`; ASCII documents are cut into words by "
    "Python's `re`, others by `regex`, at half its speed",
    "tokenizers": "`train_from_iterator` with a `BpeTrainer`, `encode` of each document and `decode` of its ids, from "
    "the tokenizer.json that we write; it finds each token's offsets as well",
    "tiktoken": "`Encoding.encode_ordinary` and `Encoding.decode` with the same vocabulary; it keeps no words from "
    "text to text, so cold and warm are the same to it; it does not train",
}
METHOD = """\
MB/s: 10^6 bytes of UTF-8 text per second of the process's CPU time, at the median round; one thread; documents one by \
one. Speedup: ratio of the medians, then median and quartiles of the ratios within a round. \
Cold: a tokenizer that was loaded just before and has seen no text. Warm: one that has gone through the same \
documents. \
After each round the merges, ids and texts of all contestants were compared, and were equal."""


@dataclass(frozen=True)
class Codec:
    """A loaded tokenizer of one of the libraries."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TokenizerSpeed:
    """A task as measured, by contestant."""

    task: str
    vocab_size: int
    text_bytes: int
    seconds: Seconds

    def megabytes_per_second(self, name: str) -> float:
        """At the median round."""
        return self.text_bytes / 1e6 / statistics.median(self.seconds[name])

    def json_lines(self) -> str:
        """One line for each contestant."""
        about = {"task": self.task, "vocab_size": self.vocab_size, "text_bytes": self.text_bytes}
        return "".join(
            json.dumps({"contestant": name, **about, "cpu_seconds": [round(value, 6) for value in times]}) + "\n"
            for name, times in self.seconds.items()
        )


@dataclass(frozen=True)
class Corpus:
    """The documents that everything is measured on."""

    texts: list[str]
    text_bytes: int

    @classmethod
    def read(cls, config: BenchTokenizerConfig) -> Corpus:
        """The first training documents of the source.

        Raises:
            ValueError: there are none.
        """
        source = open_source(config.source, "train")
        texts = list(first_documents(source, config.bench.max_bytes))
        if not texts:
            raise ValueError(f"[source] has no training documents ({source.provenance}); give it text to measure on")
        return cls(texts, sum(len(text.encode()) for text in texts))

    def __str__(self) -> str:
        ascii_bytes = sum(len(text) for text in self.texts if text.isascii())
        share = f"{ascii_bytes / self.text_bytes:.0%} of it in ASCII ones"
        return f"{self.text_bytes:,} bytes in {len(self.texts):,} documents, {share}"


def train_ours(texts: Sequence[str], vocab_size: int, pattern: str) -> Tokenizer:
    """A tokenizer without special tokens, which the peers would look for in the text."""
    return train_bpe(texts, vocab_size=vocab_size, pattern=pattern, special_tokens=(), mask_token=None, eos_token=None)


def train_tokenizers(texts: Sequence[str], vocab_size: int, pattern: str) -> Any:
    """The same by the `tokenizers` library."""
    tokenizers: Any = importlib.import_module("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(texts, trainer)
    return theirs


def load(name: str, tokenizer: Tokenizer) -> Codec:
    """Our tokenizer, loaded anew by one of the libraries; it has seen no text."""
    if name == OURS:
        ours: Tokenizer = pickle.loads(pickle.dumps(tokenizer))  # the cache does not travel
        return Codec(ours.encode, ours.decode)
    library: Any = importlib.import_module(name)
    if name == "tokenizers":
        theirs = library.Tokenizer.from_str(json.dumps(to_huggingface(tokenizer)))
        return Codec(
            lambda text: theirs.encode(text, add_special_tokens=False).ids,
            lambda ids: theirs.decode(ids, skip_special_tokens=False),
        )
    encoding = library.Encoding(
        "ours", pat_str=PATTERNS[tokenizer.pattern], mergeable_ranks=dict(tokenizer.vocab), special_tokens={}
    )
    return Codec(encoding.encode_ordinary, encoding.decode)


def measure(
    label: str,
    calls: Mapping[str, Callable[[], object]],
    bench: BenchTokenizerSection,
    as_list: Callable[[Any], list[Any]] = list,
) -> Seconds:
    """CPU seconds of each call, round by round. `as_list` makes what they return comparable, outside the clock.

    Raises:
        ValueError: they do not return the same.
    """
    returned: dict[str, object] = {}

    def keeping(name: str, call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            returned[name] = call()

        return run

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        check_equal_outputs(label, {name: as_list(value) for name, value in returned.items()})
        times = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        print_message(f"{label}: round {number}/{bench.rounds}: {times}")

    kept = {name: keeping(name, call) for name, call in calls.items()}
    return time_in_turns(
        kept, rounds=bench.rounds, warmup=bench.warmup, after_round=after_round, clock=time.process_time
    )


def check_equal_outputs(label: str, returned: Mapping[str, list[Any]]) -> None:
    """Compare what the contestants returned with what ours did.

    Raises:
        ValueError: a difference; names the first one.
    """
    ours = returned[OURS]
    for name, theirs in returned.items():
        if theirs != ours:
            pairs = zip(ours, theirs, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            raise ValueError(f"{label}: {name} and {OURS} differ, first in item {place}; their speeds say nothing then")


def measure_vocabulary(corpus: Corpus, vocab_size: int, bench: BenchTokenizerSection) -> list[TokenizerSpeed]:
    """Training, encoding and decoding with a vocabulary of this size."""
    texts, names = corpus.texts, [OURS, *bench.peers]
    tokenizer = train_ours(texts, vocab_size, bench.pattern)
    trainers: dict[str, Callable[[], object]] = {OURS: lambda: train_ours(texts, vocab_size, bench.pattern)}
    if "tokenizers" in names:
        trainers["tokenizers"] = lambda: train_tokenizers(texts, vocab_size, bench.pattern)
    ids = [tokenizer.encode(text) for text in texts]
    warm = {name: load(name, tokenizer) for name in names}

    def encoding_cold(name: str) -> Callable[[], object]:
        # All are loaded before the clock starts, and kept so that none is freed under it.
        fresh, turn = [load(name, tokenizer) for _ in range(bench.warmup + bench.rounds)], count()
        return lambda: encode_texts(fresh[next(turn)], texts)

    def encoding_warm(name: str) -> Callable[[], object]:
        return lambda: encode_texts(warm[name], texts)

    def decoding(name: str) -> Callable[[], object]:
        return lambda: list(map(warm[name].decode, ids))

    tasks: list[tuple[str, Callable[[], dict[str, Callable[[], object]]], Callable[[Any], list[Any]]]] = [
        ("training", lambda: trainers, extract_merges),
        ("encoding, cold", lambda: {name: encoding_cold(name) for name in names}, list),
        ("encoding, warm", lambda: {name: encoding_warm(name) for name in names}, list),
        ("decoding", lambda: {name: decoding(name) for name in names}, list),
    ]
    results = []
    for task, calls, as_list in tasks:
        seconds = measure(f"vocabulary {vocab_size:,}, {task}", calls(), bench, as_list)
        results.append(TokenizerSpeed(task, vocab_size, corpus.text_bytes, seconds))
    return results


def encode_texts(codec: Codec, texts: Sequence[str]) -> list[Sequence[int]]:
    """Ids of each text."""
    encode = codec.encode
    return [encode(text) for text in texts]


def extract_merges(trained: Any) -> list[Any]:
    """Merges of a tokenizer of ours or of `tokenizers`, best first."""
    if isinstance(trained, Tokenizer):
        return [[bytes_to_chars(left), bytes_to_chars(right)] for left, right in trained.merges]
    merges: list[Any] = json.loads(trained.to_str())["model"]["merges"]
    return merges


def bench_tokenizer(config: BenchTokenizerConfig) -> str:
    """Measure all vocabularies; progress on stderr, files in the output directory.

    Returns:
        The report in Markdown.

    Raises:
        ValueError: a peer that is not there, no text, or contestants that do not agree.
    """
    bench, folder = config.bench, config.output.directory
    check_peers(bench.peers)
    os.environ.update(ONE_THREAD)
    corpus = Corpus.read(config)
    where = collect_environment(threads=1, packages=["regex", *bench.peers])
    where["threads"] = "one of each contestant" + where["threads"].removeprefix("1 of torch")
    where["rounds"] = f"{bench.rounds} after {bench.warmup} of warm-up"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer_speed.jsonl").write_text("", encoding="utf-8")
    results = []
    for vocab_size in bench.vocab_sizes:
        measured = measure_vocabulary(corpus, vocab_size, bench)
        _append(folder, measured)
        results += measured
    text = report(results, {"text": f"{corpus}; pattern {bench.pattern}", **where})
    if folder is not None:
        (folder / "tokenizer_speed.md").write_text(text + "\n", encoding="utf-8")
    return text


def check_peers(peers: Sequence[str]) -> None:
    """See that the peers are installed.

    Raises:
        ValueError: one is not.
    """
    for peer in peers:
        if not is_installed(peer):
            raise ValueError(
                f'bench.peers has "{peer}", which is not installed; install the group bench '
                f"(uv sync --group bench), or measure without it: --set bench.peers=[]"
            )


def _append(folder: Path | None, results: Sequence[TokenizerSpeed]) -> None:
    if folder is not None:
        with (folder / "tokenizer_speed.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(result.json_lines() for result in results))


def report(results: Sequence[TokenizerSpeed], where: Mapping[str, str]) -> str:
    """A table for each vocabulary, method and conditions."""
    names = list(dict.fromkeys(name for result in results for name in result.seconds))
    header = ["task", *[f"{name} MB/s" for name in names]]
    header += [cell for peer in names[1:] for cell in (f"speedup over {peer}", "in a round [quartiles]")]
    parts = []
    for vocab_size in dict.fromkeys(result.vocab_size for result in results):
        rows = [_row(result, names) for result in results if result.vocab_size == vocab_size]
        parts += [f"Vocabulary of {vocab_size:,}:", markdown_table(header, rows)]
    methods = {name: METHODS[name] for name in names}
    return "\n\n".join([*parts, METHOD, markdown_list({**methods, **where})])


def _row(result: TokenizerSpeed, names: Sequence[str]) -> list[str]:
    row = [result.task]
    row += [f"{result.megabytes_per_second(name):.2f}" if name in result.seconds else "-" for name in names]
    for peer in names[1:]:
        if peer in result.seconds:
            ratio = speedup(result.seconds[OURS], result.seconds[peer])
            row += [f"{ratio.ratio_of_medians:.2f}", ratio.format_ratio()]
        else:
            row += ["-", "-"]
    return row
