"""Build the row reader of a run: open the sources, shuffle, tokenize, pack, shuffle rows, mix."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from config.data import DataConfig, RecordSourceOptions, Shards, SyntheticChats
from diffusionlm.data.chat.encoder import ChatEncoder, ChatRecords, read_documents
from diffusionlm.data.chat.templates import hash_template_files
from diffusionlm.data.packing import (
    PackedRowReader,
    PaddedRowReader,
    Row,
    RowFormat,
    pack_conversations,
    pack_separately,
    pack_texts,
    pack_windows,
)
from diffusionlm.data.reader import (
    DOCUMENTS_PER_READ,
    DocumentSource,
    ReaderPosition,
    ResumableReader,
    SkipLog,
    Split,
    Tokens,
    shuffle_windows,
)
from diffusionlm.data.shards import ShardDocuments, ShardReader
from diffusionlm.data.sources import open_source
from diffusionlm.data.tokenization import TextEncoder, encode_inline, tokenize_reader
from diffusionlm.diffusion.rng import RngStream
from diffusionlm.vision.processor import ImageProcessor
from tokenizer import Tokenizer

MAX_CONVERSATION_ROWS = 256
"""Window in which rows of conversations are shuffled at most. They are encoded with a template before the first step,
and the conversations are shuffled already."""

MAX_PASSES_PER_EPOCH = 1 << 20
"""Upper bound on the passes over a component within one epoch of the mixture; it spaces the component's epochs."""


@dataclass(frozen=True)
class MixtureComponent:
    """One source of a run's data, with its weight. A run with one source has a mixture of one component."""

    name: str
    weight: float
    source: DocumentSource | ShardDocuments
    chat: ChatRecords | None = None
    """None: the documents are text."""

    @property
    def skip_logs(self) -> list[SkipLog]:
        """Of the source and of the encoder of its conversations. Shards have none."""
        logs = [] if isinstance(self.source, ShardDocuments) else [self.source.skip_log]
        return logs if self.chat is None else [*logs, self.chat.skip_log]


def list_skipped(name: str, logs: Sequence[SkipLog]) -> list[str]:
    """Format a line for each reason why the stages of a source have left out or repaired records."""
    return [
        f"{name}: {count:,} of {log.total:,} records: {reason}; the first: {log.examples[reason]}"
        for log in logs
        for reason, count in log.counts.items()
    ]


def count_skipped(components: Sequence[MixtureComponent]) -> dict[str, int]:
    """Numbers of records left out or repaired so far, by reason, over all components."""
    counts = Counter[str]()
    for log in (log for component in components for log in component.skip_logs):
        counts.update(log.counts)
    return dict(sorted(counts.items()))


def describe_skipped(components: Sequence[MixtureComponent]) -> str:
    """Format the records left out or repaired so far, for the end of a clause; empty if there are none."""
    lines = [line for component in components for line in list_skipped(component.name, component.skip_logs)]
    return f" (left out: {'; '.join(lines)})" if lines else ""


def open_components(
    config: DataConfig,
    split: Split,
    kinds: Collection[str] | None = None,
    processor: ImageProcessor | None = None,
) -> list[MixtureComponent]:
    """Open the sources of a split.

    Args:
        kinds: only sources of these kinds. None: all.
        processor: reads the images of conversations. None: images are refused.

    Raises:
        ValueError: a path or dataset cannot be read or holds no documents, or two components have one name.
    """
    components = []
    for index, entry in enumerate(config.components):
        section = entry.source
        if kinds is not None and section.kind not in kinds:
            continue
        key = f"data.mixture.{index}.source" if config.mixture else "data.source"
        source = (
            ShardDocuments(section, split, key) if isinstance(section, Shards) else open_source(section, split, key)
        )
        chat: ChatRecords | None = None
        if isinstance(section, RecordSourceOptions | SyntheticChats) and section.chat is not None:
            on_bad_row = "raise" if isinstance(section, SyntheticChats) else section.on_bad_row
            template_hash = hash_template_files(section.chat)
            chat = ChatRecords(section.chat, f"{key}.chat", on_bad_row, template_hash, processor)
        components.append(MixtureComponent(entry.name or f"{section.kind}-{index}", entry.weight, source, chat))
    names = [component.name for component in components]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"data.mixture: two entries are named {duplicate!r}; give each its own name")
    return components


def compute_data_identity(components: Sequence[MixtureComponent]) -> str:
    """Return a string that changes when the documents or the weights change."""
    if len(components) == 1:
        return components[0].source.identity
    lines = "\n".join(f"{component.name} {component.weight} {component.source.identity}" for component in components)
    return f"mixture/{hashlib.sha256(lines.encode()).hexdigest()[:16]}"


def hash_templates(components: Sequence[MixtureComponent]) -> dict[str, str]:
    """Hashes of the chat templates that are files, by config key and path: they decide the tokens too."""
    chats = (component.chat for component in components)
    return {
        f"{chat.key}.template = {chat.config.template}": chat.template_hash
        for chat in chats
        if chat is not None and chat.template_hash is not None
    }


def check_shard_tokenizer(components: Sequence[MixtureComponent], tokenizer: Tokenizer) -> None:
    """Check that all shards were made with this tokenizer.

    Raises:
        ValueError: shards were made with another tokenizer.
    """
    for component in components:
        source = component.source
        if isinstance(source, ShardDocuments) and source.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"data: the shards of {component.name} were made with another tokenizer, the one in "
                f"{source.tokenizer_directory}: set tokenizer.path to it, or make the shards again with the run's"
            )


def build_token_reader(
    component: MixtureComponent,
    tokenizer: Tokenizer,
    shuffle_window: int,
    seed: int,
    key: tuple[int, ...] = (),
    encoder: TextEncoder | None = None,
) -> ResumableReader[Tokens]:
    """Read the tokens of a component's documents.

    Args:
        shuffle_window: documents are shuffled within windows of this size; 0 or 1 keeps their order. Shards are
            shuffled as a whole.
    """
    source = component.source
    if isinstance(source, ShardDocuments):
        return ShardReader(source, seed, shuffle_window > 1, key)
    texts = _shuffle_documents(component, shuffle_window, seed, key)
    return tokenize_reader(texts, encoder or encode_inline(tokenizer.encode))


def build_row_reader(
    components: Sequence[MixtureComponent],
    config: DataConfig,
    tokenizer: Tokenizer,
    row_length: int,
    seed: int,
    *,
    repeat: bool = True,
    encoder: TextEncoder | None = None,
    block_length: int | None = None,
) -> ResumableReader[Row]:
    """Read the rows of all components.

    Args:
        repeat: a component that ends starts again until each was read to its end once. False: each is read once.
        encoder: None: tokenize text in this process.
        block_length: of block diffusion, the longest; 1 for next tokens. None: bidirectional. Conversations are
            prepared for it.

    Raises:
        ValueError: the tokenizer has no end-of-text token, rows are too short, shards have another tokenizer, or the
            chat template does not allow to learn answers.
    """
    check_shard_tokenizer(components, tokenizer)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-text token, which separates documents and pads rows; use one that has"
        )
    has_chats = any(component.chat is not None for component in components)
    row_format = RowFormat(row_length, tokenizer.eos_token_id, config.begin_with_eos, config.end_with_eos, has_chats)

    def read(component: MixtureComponent, key: tuple[int, ...]) -> ResumableReader[Row]:
        rows: ResumableReader[Row]
        window = config.row_shuffle_window
        if component.chat is None:
            tokens = build_token_reader(component, tokenizer, config.document_shuffle_window, seed, key, encoder)
            match config.rows:
                case "packed":
                    rows = PackedRowReader(tokens, row_format)
                case "best_fit":
                    rows = pack_windows(tokens, row_format, config.packing_window, pack_texts)
                case "padded":
                    rows = PaddedRowReader(tokens, row_format)
        else:
            window = min(window, MAX_CONVERSATION_ROWS)
            chat_encoder = ChatEncoder(component.chat, tokenizer, row_length, block_length)
            conversations = _shuffle_documents(component, config.document_shuffle_window, seed, key)
            documents = read_documents(conversations, chat_encoder, seed, key)
            group = pack_separately if config.rows == "padded" else pack_conversations
            rows = pack_windows(documents, row_format, config.packing_window, group)
        return shuffle_windows(rows, window, seed, RngStream.SEQUENCE_ORDER, *key) if window > 1 else rows

    return _mix_components(components, read, repeat)


def build_preference_reader(
    components: Sequence[MixtureComponent],
    config: DataConfig,
    tokenizer: Tokenizer,
    row_length: int,
    seed: int,
    block_length: int | None = None,
    *,
    is_unpaired: bool = False,
) -> ResumableReader[Row]:
    """Read rows of one preference each: the chosen conversation, then the rejected one, each in half of the row.

    Args:
        is_unpaired: read rows of one labeled example each, in half of the row.

    Raises:
        ValueError: a component has no conversations, or the chat template does not allow to learn answers.
    """
    assert tokenizer.eos_token_id is not None, "prepare_tokenizer has checked it"
    row_format = RowFormat(row_length, tokenizer.eos_token_id, has_segments=True)

    def read(component: MixtureComponent, key: tuple[int, ...]) -> ResumableReader[Row]:
        if component.chat is None:
            raise ValueError(f"{component.name} has no conversations: preferences need a chosen and a rejected answer")
        encoder = ChatEncoder(component.chat, tokenizer, row_length // 2, block_length)
        conversations = _shuffle_documents(component, config.document_shuffle_window, seed, key)
        encode = partial(encoder.encode_preference, is_unpaired=is_unpaired)
        preferences = read_documents(conversations, encoder, seed, key, encode)
        return pack_windows(preferences, row_format, 1, lambda preferences, _: preferences)

    return _mix_components(components, read, repeat=True)


def _mix_components(
    components: Sequence[MixtureComponent],
    read: Callable[[MixtureComponent, tuple[int, ...]], ResumableReader[Row]],
    repeat: bool,
) -> ResumableReader[Row]:
    """Mix the rows that `read` reads of each component, with the RNG key of the component in a mixture."""
    if len(components) == 1:
        return read(components[0], ())
    readers = [read(component, (index,)) for index, component in enumerate(components)]
    weights, names = [component.weight for component in components], [component.name for component in components]
    return MixedRowReader(readers, weights, names, repeat)


def _shuffle_documents(
    component: MixtureComponent, window: int, seed: int, key: tuple[int, ...]
) -> ResumableReader[Any]:
    source = component.source
    assert not isinstance(source, ShardDocuments), "shards have tokens"
    return shuffle_windows(source, window, seed, RngStream.DOCUMENT_ORDER, *key) if window > 1 else source


@dataclass
class MixedRowReader:
    """Interleave readers deterministically: the next row comes from the component with the lowest tokens / weight.

    Ties go to the first component. So at every position the tokens of each component are its share, to within a row.
    """

    readers: list[ResumableReader[Row]]
    weights: list[float]
    names: list[str]
    repeat: bool
    """Components start again, in a new order, until each was read to its end once. False: each is read once."""

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Read rows; a position holds tokens, passes and position of each component."""
        states = (
            [_ComponentState(**state) for state in position] if position else [_ComponentState() for _ in self.readers]
        )
        rows: list[Row] = []
        while len(rows) < limit:
            candidates = [index for index, state in enumerate(states) if self.repeat or state.passes == 0]
            if all(state.passes for state in states) or not candidates:
                return rows, None
            index = min(candidates, key=lambda candidate: states[candidate].tokens / self.weights[candidate])
            rows += self._read_row(epoch, index, states[index])
        return rows, [vars(state) for state in states]

    def _read_row(self, epoch: int, index: int, state: _ComponentState) -> list[Row]:
        """Return the next row of a component, or none if its pass has ended."""
        is_start = state.position is None
        rows, state.position = self.readers[index].read(epoch * MAX_PASSES_PER_EPOCH + state.passes, state.position, 1)
        if is_start and not rows and self.repeat:
            raise ValueError(f"data.mixture: {self.names[index]} has no documents to train on; remove it")
        state.tokens += sum(int((row.document_ids_L >= 0).sum()) for row in rows)
        state.passes += state.position is None
        return rows


@dataclass
class _ComponentState:
    """Progress of one component within an epoch of the mixture. The field names are part of checkpoints."""

    tokens: int = 0
    passes: int = 0
    """Number of times the component was read to its end."""
    position: ReaderPosition = None


def read_training_tokens(
    components: Sequence[MixtureComponent], tokenizer: Tokenizer, limit: int, end_with_eos: bool = True
) -> Tokens:
    """Return the first tokens of the training documents, up to ``limit`` and the end of a document.

    The components of a mixture contribute by their weights.
    """
    end = np.array([tokenizer.eos_token_id] if end_with_eos else [], dtype=np.int32)
    total_weight = sum(component.weight for component in components)
    pieces: list[Tokens] = []
    for component in components:
        reader = build_token_reader(component, tokenizer, shuffle_window=0, seed=0)
        num_left, position = limit * component.weight / total_weight, None
        while num_left > 0:
            documents, position = reader.read(0, position, DOCUMENTS_PER_READ)
            pieces += [piece for tokens in documents for piece in (tokens, end)]
            num_left -= sum(len(tokens) + len(end) for tokens in documents)
            if position is None:
                break
    return np.concatenate(pieces)
