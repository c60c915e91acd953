"""From ``[data]`` to rows: its sources, each with its weight, and the readers over them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from config.data import DataConfig, Shards
from diffusionlm.data.packing import PackedRowReader, PaddedRowReader, Row, RowFormat, pack_best_fit
from diffusionlm.data.reader import (
    REPAIRED_PREFIX,
    DocumentSource,
    ReaderPosition,
    ResumableReader,
    Split,
    Tokens,
    shuffle_windows,
)
from diffusionlm.data.shards import ShardDocuments, ShardReader
from diffusionlm.data.sources import open_source
from diffusionlm.data.tokenization import InlineTextEncoder, TextEncoder, tokenize_reader
from diffusionlm.diffusion.rng import RngStream
from tokenizer import Tokenizer

MAX_PASSES_PER_EPOCH = 1 << 20
"""Most often that a part is read within one epoch of the mixture; its own epochs are counted through."""


@dataclass
class MixedRowReader:
    """Rows of several readers, in turns that follow from what was read: the next row comes from the part that has had
    the fewest tokens for its weight, the first of equals.

    So at any place the tokens of each part are its share of all, to a row. No chance is in it, and a position holds
    the tokens, passes and position of each part.
    """

    parts: list[ResumableReader[Row]]
    weights: list[float]
    names: list[str]
    repeat: bool
    """Parts begin again, in a new order, until each was read to its end once. False: each is read once, and the
    others go on without it."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Up to ``limit`` rows.

        Raises:
            ValueError: a part has no rows.
        """
        states = (
            [_ComponentState(**state) for state in position] if position else [_ComponentState() for _ in self.parts]
        )
        rows: list[Row] = []
        while len(rows) < limit:
            open_components = [index for index, state in enumerate(states) if self.repeat or state.passes == 0]
            if all(state.passes for state in states) or not open_components:
                return rows, None
            index = min(open_components, key=lambda part: states[part].tokens / self.weights[part])
            rows += self._read_row(epoch, index, states[index])
        return rows, [vars(state) for state in states]

    def _read_row(self, epoch: int, index: int, state: _ComponentState) -> list[Row]:
        """The next row of a part, if its pass has one more."""
        started = state.position is None
        rows, state.position = self.parts[index].read(epoch * MAX_PASSES_PER_EPOCH + state.passes, state.position, 1)
        if started and not rows and self.repeat:
            raise ValueError(f"data.mixture: {self.names[index]} has no documents to train on; remove it")
        state.tokens += sum(int((row.document_ids_L >= 0).sum()) for row in rows)
        state.passes += state.position is None
        return rows


@dataclass
class _ComponentState:
    """Of one part within an epoch."""

    tokens: int = 0
    passes: int = 0
    """Times that it was read to its end."""
    position: ReaderPosition = None


@dataclass(frozen=True)
class MixtureComponent:
    """One source of a run's data."""

    name: str
    weight: float
    source: DocumentSource | ShardDocuments

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out or mended so far, counted by reason."""
        return {} if isinstance(self.source, ShardDocuments) else self.source.skipped

    @property
    def num_skipped(self) -> int:
        """Rows left out so far."""
        return sum(count for reason, count in self.skipped.items() if not reason.startswith(REPAIRED_PREFIX))


def open_components(config: DataConfig, split: Split) -> list[MixtureComponent]:
    """The sources of a split.

    Raises:
        ValueError: nothing to read; names the path or dataset.
    """
    opened = []
    for index, part in enumerate(config.parts):
        section = part.source
        source = ShardDocuments.open(section, split) if isinstance(section, Shards) else open_source(section, split)
        opened.append(MixtureComponent(part.name or f"{section.kind}-{index}", part.weight, source))
    names = [part.name for part in opened]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"data.mixture: two parts are called {double!r}: give each a name of its own")
    return opened


def compute_data_identity(parts: list[MixtureComponent]) -> str:
    """Changes when the documents of a source do, or their weights."""
    if len(parts) == 1:
        return parts[0].source.identity
    told = "\n".join(f"{part.name} {part.weight} {part.source.identity}" for part in parts)
    return f"mixture/{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def check_shard_tokenizer(parts: list[MixtureComponent], tokenizer: Tokenizer) -> None:
    """See that shards were made with this tokenizer.

    Raises:
        ValueError: with another one.
    """
    for part in parts:
        source = part.source
        if isinstance(source, ShardDocuments) and source.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"data: the shards of {part.name} were made with another tokenizer, the one in "
                f"{source.tokenizer_directory}: set tokenizer.path to it, or make the shards again with the run's"
            )


def build_token_reader(
    part: MixtureComponent,
    tokenizer: Tokenizer,
    window: int,
    seed: int,
    key: tuple[int, ...] = (),
    encoder: TextEncoder | None = None,
) -> ResumableReader[Tokens]:
    """The tokens of a source's documents, shuffled within windows of so many (0, 1: in their order)."""
    source = part.source
    if isinstance(source, ShardDocuments):
        return ShardReader(source, seed, window > 1, key)
    texts: ResumableReader[str] = source
    if window > 1:
        texts = shuffle_windows(texts, window, seed, RngStream.DOCUMENT_ORDER, *key)
    return tokenize_reader(texts, encoder or InlineTextEncoder(tokenizer.encode))


def build_row_reader(
    parts: list[MixtureComponent],
    config: DataConfig,
    tokenizer: Tokenizer,
    row_length: int,
    seed: int,
    *,
    repeat: bool = True,
    encoder: TextEncoder | None = None,
) -> ResumableReader[Row]:
    """The rows of all parts: documents shuffled, cut into rows, rows shuffled.

    Args:
        repeat: parts of a mixture begin again until each was read once.
        encoder: who tokenises; None: this process.

    Raises:
        ValueError: no end-of-text token, rows too short, or shards of another tokenizer.
    """
    check_shard_tokenizer(parts, tokenizer)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, which rows are padded with; give one that has")
    row_format = RowFormat(row_length, tokenizer.eos_token_id, config.begin_with_eos, config.end_with_eos)
    readers: list[ResumableReader[Row]] = []
    for index, part in enumerate(parts):
        key = (index,) if len(parts) > 1 else ()
        documents = build_token_reader(part, tokenizer, config.document_shuffle_window, seed, key, encoder)
        rows: ResumableReader[Row]
        match config.rows:
            case "packed":
                rows = PackedRowReader(documents, row_format)
            case "best_fit":
                rows = pack_best_fit(documents, row_format, config.packing_window)
            case "padded":
                rows = PaddedRowReader(documents, row_format)
        if config.row_shuffle_window > 1:
            rows = shuffle_windows(rows, config.row_shuffle_window, seed, RngStream.SEQUENCE_ORDER, *key)
        readers.append(rows)
    if len(readers) == 1:
        return readers[0]
    return MixedRowReader(readers, [part.weight for part in parts], [part.name for part in parts], repeat)


def read_training_tokens(
    parts: list[MixtureComponent], tokenizer: Tokenizer, limit: int, end_with_eos: bool = True
) -> Tokens:
    """The first tokens of the training documents, each ended by end-of-text or not, up to ``limit`` and a document.

    Those of a mixture are there by their weights.
    """
    end = np.array([tokenizer.eos_token_id] if end_with_eos else [], dtype=np.int32)
    total = sum(part.weight for part in parts)
    documents: list[Tokens] = []
    for part in parts:
        reader = build_token_reader(part, tokenizer, window=0, seed=0)
        wanted, position = limit * part.weight / total, None
        while wanted > 0:
            some, position = reader.read(0, position, 64)
            documents += [each for tokens in some for each in (tokens, end)]
            wanted -= sum(len(tokens) + len(end) for tokens in some)
            if position is None:
                break
    return np.concatenate(documents)
