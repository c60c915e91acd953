"""Training, encoding and decoding speed of the tokenizer, against other libraries.

All implementations run on one thread of one process and are timed by its CPU time, one pass of each in turn. After
every measured round their outputs are compared: merges, ids and text must be equal.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
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
from diffusionlm.data.reader import read_first_documents
from diffusionlm.data.sources import open_source
from logger.pages import Page, Part
from tokenizer import PATTERNS, Tokenizer, train_bpe
from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.huggingface import to_huggingface

OURS = "diffusionlm"
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that make the peers run on one thread."""

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
Cold: a tokenizer with empty caches. Warm: one that has encoded the same documents before. \
After each round the merges, ids and texts of all implementations were compared, and were equal."""


@dataclass(frozen=True)
class Codec:
    """A tokenizer, loaded by one of the libraries."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def read_texts(config: BenchTokenizerConfig) -> list[str]:
    """Read the first training documents of the source.

    Raises:
        ValueError: there are none.
    """
    source = open_source(config.source, "train", "source")
    texts = list(read_first_documents(source, config.bench.max_bytes))
    if not texts:
        raise ValueError(f"[source] has no training documents ({source.provenance}); choose one that contains text")
    return texts


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


def check_equal_outputs(label: str, outputs: Mapping[str, Any]) -> None:
    """Compare the outputs of the peers with ours.

    Raises:
        ValueError: an item differs; names the first one.
    """
    ours = list_items(outputs[OURS])
    for name, output in outputs.items():
        theirs = list_items(output)
        if theirs != ours:
            pairs = zip(ours, theirs, strict=False)
            index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            raise ValueError(
                f"{label}: {name} and {OURS} returned different results, first in item {index}; their speeds cannot be "
                "compared"
            )


def list_items(output: Any) -> list[Any]:
    """Items of an output that are comparable: ids or texts, or of a trained tokenizer its merges in order."""
    if isinstance(output, list):
        return output
    if isinstance(output, Tokenizer):
        return [[bytes_to_chars(left), bytes_to_chars(right)] for left, right in output.merges]
    merges: list[Any] = json.loads(output.to_str())["model"]["merges"]
    return merges


def measure_vocabulary(texts: Sequence[str], vocab_size: int, bench: BenchTokenizerSection) -> dict[str, Comparison]:
    """Measure training, encoding and decoding with a vocabulary size; returns the times by task."""
    names = [OURS, *bench.peers]
    tokenizer = train_ours(texts, vocab_size, bench.pattern)
    ids = [tokenizer.encode(text) for text in texts]
    warm = {name: load(name, tokenizer) for name in names}

    def measure(task: str, calls: Mapping[str, Callable[[], Any]]) -> Comparison:
        label = f"vocabulary {vocab_size:,}, {task}"
        check = partial(check_equal_outputs, label)
        return compare(calls, rounds=bench.rounds, warmup=bench.warmup, clock="process", label=label, check=check)

    trainers: dict[str, Callable[[], Any]] = {OURS: lambda: train_ours(texts, vocab_size, bench.pattern)}
    if "tokenizers" in names:
        trainers["tokenizers"] = lambda: train_tokenizers(texts, vocab_size, bench.pattern)

    def encode(codec: Codec) -> list[Sequence[int]]:
        return list(map(codec.encode, texts))

    def decode(codec: Codec) -> list[str]:
        return list(map(codec.decode, ids))

    def build_cold_call(name: str) -> Callable[[], Any]:
        # All are loaded before the clock starts, and stay referenced so that none is freed while it runs.
        codecs, turn = [load(name, tokenizer) for _ in range(bench.warmup + bench.rounds)], count()
        return lambda: encode(codecs[next(turn)])

    return {
        "training": measure("training", trainers),
        "encoding, cold": measure("encoding, cold", {name: build_cold_call(name) for name in names}),
        "encoding, warm": measure("encoding, warm", {name: partial(encode, warm[name]) for name in names}),
        "decoding": measure("decoding", {name: partial(decode, warm[name]) for name in names}),
    }


def bench_tokenizer(config: BenchTokenizerConfig) -> Page:
    """Measure all vocabularies; progress goes to stderr, files to the output directory.

    Raises:
        ValueError: a peer is not installed, there is no text, or the implementations returned different outputs.
    """
    bench = config.bench
    check_installed(bench.peers)
    os.environ.update(ONE_THREAD)
    texts = read_texts(config)
    packages = ["regex", *bench.peers]
    environment = collect_environment(threads=1, packages=packages, rounds=bench.rounds, warmup=bench.warmup)
    environment["threads"] = "one for each implementation" + environment["threads"].removeprefix("1 of torch")
    files = ResultFiles(config.output.directory, "tokenizer_speed")
    text_bytes, ascii_bytes = (
        sum(len(text.encode()) for text in group) for group in (texts, filter(str.isascii, texts))
    )
    parts: list[Part] = []
    for vocab_size in bench.vocab_sizes:
        results = measure_vocabulary(texts, vocab_size, bench)
        facts = {"vocab_size": vocab_size, "text_bytes": text_bytes}
        files.append(
            {"implementation": name, "task": task, **facts, "cpu_seconds": [round(value, 6) for value in seconds]}
            for task, times in results.items()
            for name, seconds in times.seconds.items()
        )
        rows = [([task], text_bytes / 1e6, times) for task, times in results.items()]
        table = make_speed_table(["task"], rows, [OURS, *bench.peers], unit="MB/s", style=".2f")
        parts += [f"Vocabulary of {vocab_size:,}:", table]
    share = f"{ascii_bytes / text_bytes:.0%} of it in ASCII documents"
    conditions = {
        **{name: METHODS[name] for name in (OURS, *bench.peers)},
        "text": f"{text_bytes:,} bytes in {len(texts):,} documents, {share}; pattern {bench.pattern}",
        **environment,
    }
    report = make_report("Tokenizer", [*parts, METHOD], conditions)
    files.write_report(report)
    return report
