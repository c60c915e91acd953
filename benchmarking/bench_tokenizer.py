"""Training, encoding and decoding speed of the tokenizer, against other libraries, and of reading rows with it.

All implementations run on one thread of one process and are timed by its CPU time, one pass of each in turn. After
every measured round their outputs are compared: merges, ids and text must be equal.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from benchmarking.harness import (
    Comparison,
    ResultFiles,
    check_installed,
    collect_environment,
    compare,
    make_report,
    make_speed_table,
)
from config.bench.training import BenchTokenizerConfig, BenchTokenizerSection
from config.data import DataConfig
from diffusionlm.data.packing import Row
from diffusionlm.data.pipeline import build_row_reader, open_components
from diffusionlm.data.reader import read_first_documents
from diffusionlm.data.sources import open_source
from logger.pages import Page, Part, Table
from tokenizer import PATTERNS, Tokenizer, train_bpe
from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.huggingface import to_huggingface

OURS = "diffusionlm"
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that make the peers run on one thread."""
ROW_LENGTH = 1024
"""Tokens of the rows that are read."""
MEAN_TOKEN_BYTES = 4
"""About as much text is read into rows as is encoded."""

METHODS = {
    OURS: "train_bpe, Tokenizer.encode and Tokenizer.decode; Python's re splits ASCII documents into words, "
    "regex all others, at half its speed",
    "tokenizers": "train_from_iterator with a BpeTrainer, encode of each document and decode of its ids, from "
    "the tokenizer.json that we write; it also computes the offsets of tokens",
    "tiktoken": "Encoding.encode_ordinary and Encoding.decode with the same vocabulary; it has no cache of words, "
    "so cold and warm are the same; it cannot train",
}
METHOD = """\
MB/s: 10^6 bytes of UTF-8 text per second of the process's CPU time, at the median round; one thread; documents one by \
one. Speedup: ratio of the medians, then median and quartiles of the ratios within a round. \
Reading rows: documents of the source read, shuffled, encoded and packed into rows of 1,024 tokens, as for training. \
Cold: a tokenizer with empty caches. Warm: one that has encoded the same documents before. \
After each round the merges, ids and texts of all implementations were compared, and were equal."""


@dataclass(frozen=True)
class Codec:
    """A tokenizer, loaded by one of the libraries."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TokenizerTask:
    """Calls that process all documents once, one for each implementation."""

    name: str
    calls: Mapping[str, Callable[[], Any]]
    as_list: Callable[[Any], list[Any]] = list
    """Makes the outputs comparable, outside the clock."""


@dataclass(frozen=True)
class TokenizerSpeed:
    """The measurements of a task."""

    task: str
    vocab_size: int
    text_bytes: int
    times: Comparison

    def to_records(self) -> list[dict[str, Any]]:
        """One record for each implementation."""
        facts = {"task": self.task, "vocab_size": self.vocab_size, "text_bytes": self.text_bytes}
        return [
            {"implementation": name, **facts, "cpu_seconds": [round(value, 6) for value in seconds]}
            for name, seconds in self.times.seconds.items()
        ]


@dataclass(frozen=True)
class Corpus:
    """The documents of all measurements."""

    texts: list[str]
    text_bytes: int

    @classmethod
    def read(cls, config: BenchTokenizerConfig) -> Corpus:
        """Read the first training documents of the source.

        Raises:
            ValueError: there are none.
        """
        source = open_source(config.source, "train", "source")
        texts = list(read_first_documents(source, config.bench.max_bytes))
        if not texts:
            raise ValueError(f"[source] has no training documents ({source.provenance}); choose one that contains text")
        return cls(texts, sum(len(text.encode()) for text in texts))

    def __str__(self) -> str:
        ascii_bytes = sum(len(text) for text in self.texts if text.isascii())
        share = f"{ascii_bytes / self.text_bytes:.0%} of it in ASCII documents"
        return f"{self.text_bytes:,} bytes in {len(self.texts):,} documents, {share}"


def train_ours(texts: Sequence[str], vocab_size: int, pattern: str) -> Tokenizer:
    """Train our tokenizer without special tokens, because the peers would search for them in the text."""
    return train_bpe(texts, vocab_size=vocab_size, pattern=pattern, special_tokens=(), mask_token=None, eos_token=None)


def train_tokenizers(texts: Sequence[str], vocab_size: int, pattern: str) -> Any:
    """Train a tokenizer of the `tokenizers` library with the same options."""
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
    """Load our tokenizer with one of the libraries; its caches are empty."""
    if name == OURS:
        ours: Tokenizer = pickle.loads(pickle.dumps(tokenizer))  # the copy has an empty cache
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


def check_equal_outputs(label: str, outputs: Mapping[str, list[Any]]) -> None:
    """Compare the outputs of the peers with ours.

    Raises:
        ValueError: an item differs; names the first one.
    """
    ours = outputs[OURS]
    for name, theirs in outputs.items():
        if theirs != ours:
            pairs = zip(ours, theirs, strict=False)
            index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            raise ValueError(
                f"{label}: {name} and {OURS} returned different results, first in item {index}; their speeds cannot be "
                "compared"
            )


def measure_task(task: TokenizerTask, label: str, bench: BenchTokenizerSection) -> Comparison:
    """Measure CPU seconds of a task, and compare the outputs of each round.

    Raises:
        ValueError: the implementations returned different outputs.
    """

    def check(outputs: Mapping[str, Any]) -> None:
        check_equal_outputs(label, {name: task.as_list(output) for name, output in outputs.items()})

    return compare(task.calls, rounds=bench.rounds, warmup=bench.warmup, clock="process", label=label, check=check)


def build_tasks(texts: Sequence[str], vocab_size: int, bench: BenchTokenizerSection) -> Iterator[TokenizerTask]:
    """Build the tasks for a vocabulary size, each when it is next: training, encoding and decoding."""
    names = [OURS, *bench.peers]
    tokenizer = train_ours(texts, vocab_size, bench.pattern)
    ids = [tokenizer.encode(text) for text in texts]
    warm = {name: load(name, tokenizer) for name in names}

    trainers: dict[str, Callable[[], Any]] = {OURS: lambda: train_ours(texts, vocab_size, bench.pattern)}
    if "tokenizers" in names:
        trainers["tokenizers"] = lambda: train_tokenizers(texts, vocab_size, bench.pattern)
    yield TokenizerTask("training", trainers, extract_merges)

    def build_cold_call(name: str) -> Callable[[], Any]:
        # All are loaded before the clock starts, and stay referenced so that none is freed while it runs.
        codecs, turn = [load(name, tokenizer) for _ in range(bench.warmup + bench.rounds)], count()
        return lambda: encode_texts(codecs[next(turn)], texts)

    yield TokenizerTask("encoding, cold", {name: build_cold_call(name) for name in names})
    yield TokenizerTask("encoding, warm", {name: partial(encode_texts, warm[name], texts) for name in names})
    yield TokenizerTask("decoding", {name: partial(decode_texts, warm[name], ids) for name in names})


def measure_vocabulary(corpus: Corpus, vocab_size: int, bench: BenchTokenizerSection) -> list[TokenizerSpeed]:
    """Measure training, encoding and decoding with a vocabulary size."""
    results = []
    for task in build_tasks(corpus.texts, vocab_size, bench):
        times = measure_task(task, f"vocabulary {vocab_size:,}, {task.name}", bench)
        results.append(TokenizerSpeed(task.name, vocab_size, corpus.text_bytes, times))
    return results


def measure_reading(config: BenchTokenizerConfig, corpus: Corpus, vocab_size: int) -> TokenizerSpeed:
    """Measure reading the source into packed rows, as training does: reading, shuffling, encoding and packing."""
    tokenizer = train_bpe(corpus.texts, vocab_size=vocab_size, pattern=config.bench.pattern)
    data = DataConfig(source=config.source)
    num_rows = max(1, corpus.text_bytes // (MEAN_TOKEN_BYTES * ROW_LENGTH))

    def read_rows() -> list[Row]:
        # A new reader each time, because a reader keeps the rows that it returned last.
        reader = build_row_reader(open_components(data, "train"), data, tokenizer, ROW_LENGTH, seed=0)
        return reader.read(0, None, num_rows)[0]

    text_bytes = sum(len(tokenizer.decode(row.tokens_L.tolist()).encode()) for row in read_rows())
    task = TokenizerTask("reading rows", {OURS: read_rows})
    times = measure_task(task, f"vocabulary {vocab_size:,}, {task.name}", config.bench)
    return TokenizerSpeed(task.name, vocab_size, text_bytes, times)


def encode_texts(codec: Codec, texts: Sequence[str]) -> list[Sequence[int]]:
    encode = codec.encode
    return [encode(text) for text in texts]


def decode_texts(codec: Codec, ids: Sequence[Sequence[int]]) -> list[str]:
    return list(map(codec.decode, ids))


def extract_merges(trained: Any) -> list[Any]:
    """Merges of one of our tokenizers or of one of `tokenizers`, in the order in which they were learned."""
    if isinstance(trained, Tokenizer):
        return [[bytes_to_chars(left), bytes_to_chars(right)] for left, right in trained.merges]
    merges: list[Any] = json.loads(trained.to_str())["model"]["merges"]
    return merges


def bench_tokenizer(config: BenchTokenizerConfig) -> Page:
    """Measure all vocabularies; progress goes to stderr, files to the output directory.

    Raises:
        ValueError: a peer is not installed, there is no text, or the implementations returned different outputs.
    """
    bench = config.bench
    check_installed(bench.peers)
    os.environ.update(ONE_THREAD)
    corpus = Corpus.read(config)
    packages = ["regex", *bench.peers]
    environment = collect_environment(threads=1, packages=packages, rounds=bench.rounds, warmup=bench.warmup)
    environment["threads"] = "one for each implementation" + environment["threads"].removeprefix("1 of torch")
    files = ResultFiles(config.output.directory, "tokenizer_speed")
    parts: list[Part] = []
    for vocab_size in bench.vocab_sizes:
        results = [*measure_vocabulary(corpus, vocab_size, bench), measure_reading(config, corpus, vocab_size)]
        files.append(record for result in results for record in result.to_records())
        parts += [f"Vocabulary of {vocab_size:,}:", build_table(results, [OURS, *bench.peers])]
    facts = {
        **{name: METHODS[name] for name in (OURS, *bench.peers)},
        "text": f"{corpus}; pattern {bench.pattern}",
        **environment,
    }
    report = make_report("Tokenizer", [*parts, METHOD], facts)
    files.write_report(report)
    return report


def build_table(results: Sequence[TokenizerSpeed], names: Sequence[str]) -> Table:
    """The tasks of one vocabulary: throughput of each implementation, and our speedup over each peer."""
    rows = [([result.task], result.text_bytes / 1e6, result.times) for result in results]
    return make_speed_table(["task"], rows, names, unit="MB/s", style=".2f")
