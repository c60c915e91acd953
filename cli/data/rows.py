"""Read rows as a training run does, count their tokens, and format them for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from config.train import TrainConfig
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.packing import Row, pad_to_longest
from diffusionlm.data.pipeline import (
    MixtureComponent,
    build_preference_reader,
    build_row_reader,
    count_skipped,
    describe_skipped,
    open_components,
)
from diffusionlm.data.reader import ResumableReader, Split, iterate
from diffusionlm.vision.processor import PROCESSOR_FILE, ImageProcessor, load_processor
from files.terminal_text import escape_control_characters, print_message
from logger.pages import Part, Table
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

ROWS_PER_READ = 64
MAX_COUNTED_ROWS = 10_000
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)

STYLES = {
    "context": "dim", "answer": "green", "stop": "bold reverse green", "eos_padding": "magenta", "block": "cyan",
    "image": "yellow",
}  # fmt: skip
OPENING = {"context": "", "answer": "[[", "eos_padding": "{"}
CLOSING = {"context": "", "answer": "]]", "eos_padding": "}"}
LEGEND = "prompts as they are, [[learned tokens]], {EOS padding}, | begins a block"

MAX_SEGMENTS = 3
"""Segments of a shortened row."""
NUM_END_TOKENS = 20
"""Tokens at each end of a shortened run of one kind."""


@dataclass(frozen=True)
class RowSource:
    """What a training run reads rows from."""

    config: TrainConfig
    split: Split
    components: list[MixtureComponent]
    tokenizer: Tokenizer
    processor: ImageProcessor | None = None
    """Reads images. None: they are refused."""

    @classmethod
    def open(cls, config: TrainConfig, split: Split) -> RowSource:
        """Open the sources, and the tokenizer of the run directory, or the one that it would get.

        Raises:
            ValueError: the sources, the tokenizer or the chat template cannot be read.
        """
        from diffusionlm.training.setup import find_tokenizer, open_processor

        processor, directory = open_processor(config), config.run.directory / "tokenizer"
        path = None if config.tokenizer.path is None else Path(config.tokenizer.path)
        if processor is None and path is not None and (path / PROCESSOR_FILE).is_file():
            processor = load_processor(path)  # of files, whose config has no model
        components = open_components(config.data, split, processor=processor)
        if directory.is_dir():
            return cls(config, split, components, load_tokenizer(directory), processor)
        texts = components if split == "train" else open_components(config.data, "train")
        tokenizer = find_tokenizer(config.tokenizer, config.model, texts, print_message)
        return cls(config, split, components, tokenizer, processor)


def read_rows(source: RowSource) -> Iterator[Row]:
    """Iterate over the rows of an epoch in the order of training, or over those of a run's validations.

    Raises:
        ValueError: there are none.
    """
    config, components, tokenizer = source.config, source.components, source.tokenizer
    if source.split == "validation":
        from diffusionlm.evaluation.validation import read_validation_rows

        yield from read_validation_rows(config, tokenizer, components)
        return
    build_reader: Callable[..., ResumableReader[Row]] = build_row_reader
    if config.objective.kind == "preference":
        build_reader = partial(build_preference_reader, is_unpaired=config.objective.loss.is_unpaired)
    block_length, seed = config.objective.longest_block_length, config.run.seed
    reader = build_reader(components, config.data, tokenizer, config.row_length, seed, block_length=block_length)
    rows, is_empty = iterate(reader, ROWS_PER_READ), True
    while batch := list(islice(rows, config.training.batch_size)):
        yield from pad_to_longest(batch) if config.data.pads_to_longest else batch
        is_empty = False
    if is_empty:
        raise ValueError(f"[data]: the sources have no documents{describe_skipped(components)}")


def count_rows(rows: Iterator[Row], source: RowSource, num_kept: int) -> tuple[list[Row], dict[str, Any]]:
    """Count the first `MAX_COUNTED_ROWS` rows, and keep the first ones of them.

    Returns:
        The rows, and their numbers, as a JSON value. ``answers`` are segments (of text, the documents), ``targets``
        have the EOS padding, ``skipped`` are records left out or repaired, by reason; lengths are quantiles by percent.
    """
    kept, is_complete = list[Row](), True
    counts = dict.fromkeys(("rows", "positions", "tokens", "targets", "eos_padding"), 0)
    documents, answers = list[int](), list[int]()
    for row in rows:
        if counts["rows"] == MAX_COUNTED_ROWS:
            is_complete = False
            break
        if len(kept) < num_kept:
            kept.append(row)
        segment_ids_L, is_eos_padding_L = _segments_and_eos_padding(row)
        is_token_L = row.document_ids_L >= 0
        numbers = (1, len(is_token_L), is_token_L.sum(), row.loss_mask_L.sum(), is_eos_padding_L.sum())
        counts = {name: count + int(number) for (name, count), number in zip(counts.items(), numbers, strict=True)}
        documents += np.bincount(row.document_ids_L[is_token_L]).tolist()
        answer_ids = segment_ids_L[row.loss_mask_L & ~is_eos_padding_L]
        answers += np.bincount(answer_ids, minlength=int(segment_ids_L.max()) + 1).tolist()
    return kept, {
        "is_complete": is_complete,
        **counts,
        "documents": len(documents),
        "answers": len(answers),
        "skipped": count_skipped(source.components),
        "padding_share": 1.0 - counts["tokens"] / max(1, counts["positions"]),
        "document_length": _quantiles(documents),
        "answer_length": _quantiles(answers),
    }


def _segments_and_eos_padding(row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Segment of each position, a document of text being one, and whether it is EOS padding."""
    segment_ids_L = row.document_ids_L if row.segment_ids_L is None else row.segment_ids_L
    is_eos_padding_L = (
        np.zeros(len(row.tokens_L), dtype=np.bool_) if row.is_eos_padding_L is None else row.is_eos_padding_L
    )
    return segment_ids_L, is_eos_padding_L


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Shortest, longest and other quantiles, by percent; empty without lengths."""
    if not lengths:
        return {}
    values = np.quantile(lengths, QUANTILES, method="nearest")
    return {f"{share:.0%}": int(value) for share, value in zip(QUANTILES, values, strict=True)}


@dataclass(frozen=True)
class _Segment:
    """A segment of a document in a row; a document of text is one segment."""

    document: int
    number: int
    """Index within its document."""
    token_ids: list[int]
    kinds: list[str]
    """Of each token: context, answer (which is learned), eos_padding, or the description of an image."""


def _split_row(row: Row, processor: ImageProcessor | None) -> Iterator[_Segment]:
    segment_ids_L, is_eos_padding_L = _segments_and_eos_padding(row)
    kinds_L = np.where(is_eos_padding_L, "eos_padding", np.where(row.loss_mask_L, "answer", "context")).astype(object)
    for number, placed in enumerate(row.images, 1):
        assert processor is not None, "it has read the image"
        height, width = (side * processor.config.pixels_per_token for side in placed.image.grid)
        kinds_L[placed.start : placed.end] = f"[image {number}: {height}x{width}, {placed.image.num_tokens:,} tokens]"
    for document in range(int(row.document_ids_L.max()) + 1):
        for index, number in enumerate(np.unique(segment_ids_L[row.document_ids_L == document])):
            part_L = (row.document_ids_L == document) & (segment_ids_L == number)
            yield _Segment(document, index, row.tokens_L[part_L].tolist(), kinds_L[part_L].tolist())


def format_row(row: Row, number: int, source: RowSource, *, is_full: bool) -> list[Part | Text]:
    """Format the segments of a row, each below a line with its numbers; without ``is_full`` in some 20 lines."""
    from rich.text import Text

    num_tokens = int((row.document_ids_L >= 0).sum())
    parts: list[Part | Text] = []
    if number == 1:
        parts.append(f"{LEGEND}{'' if is_full else '; --full shows rows in full'}\n")
    numbers = f"{num_tokens:,} of {len(row.tokens_L):,} positions, {row.loss_mask_L.sum():,} learned"
    if row.is_desirable_1 is not None:
        numbers += ", desirable" if row.is_desirable_1.all() else ", undesirable"
    parts.append(Text(f"row {number}: {numbers}", "bold"))
    segments = list(_split_row(row, source.processor))
    first_segments = segments if is_full else segments[:MAX_SEGMENTS]
    for segment in first_segments:
        count = segment.kinds.count
        numbers = f"{count('context'):,} context, {count('answer'):,} learned, {count('eos_padding'):,} EOS padding"
        num_image_tokens = sum(kind not in OPENING for kind in segment.kinds)
        numbers += f", {num_image_tokens:,} of images" if num_image_tokens else ""
        parts.append(Text(f"- document {segment.document + 1}, segment {segment.number + 1}: {numbers}", "bold"))
        parts.append(_format_segment(segment, source, is_full=is_full))
    if len(first_segments) < len(segments):
        parts.append(Text(f"- {len(segments) - len(first_segments):,} more segments", "bold"))
    return [*parts, ""]


def _format_segment(segment: _Segment, source: RowSource, *, is_full: bool) -> Text:
    """Format the tokens of a segment; without ``is_full`` only the ends of long contexts and answers."""
    from rich.text import Text

    text, kinds = Text(), segment.kinds
    block_length = source.config.objective.longest_block_length
    length = len(kinds) if block_length in (None, 1) else block_length
    for kind, group in groupby(range(len(kinds)), key=kinds.__getitem__):
        run = list(group)
        if kind not in OPENING:
            text.append(kind, STYLES["image"])
            continue
        is_short = is_full or kind == "eos_padding" or len(run) <= 3 * NUM_END_TOKENS
        hidden = range(0) if is_short else range(run[NUM_END_TOKENS], run[-NUM_END_TOKENS])
        text.append(OPENING[kind], STYLES[kind])
        for block, part in groupby(run, key=lambda index: -1 if index in hidden else index // length):
            indices = list(part)
            text.append("|" if indices[0] and indices[0] % length == 0 else "", STYLES["block"])
            if block < 0:
                text.append(f" <... {len(indices):,} tokens ...> ", STYLES["block"])
            else:
                _append_tokens(text, [segment.token_ids[index] for index in indices], kind, source.tokenizer)
        text.append(CLOSING[kind], STYLES[kind])
    return text


def _append_tokens(text: Text, token_ids: Sequence[int], kind: str, tokenizer: Tokenizer) -> None:
    """Append the text of tokens; EOS padding as a number, and special tokens of an answer in their own style."""
    if kind == "eos_padding":
        text.append(f"{len(token_ids)} x {_decode(token_ids[:1], tokenizer)}", STYLES[kind])
        return
    for is_special, group in groupby(token_ids, key=lambda token: token in tokenizer.hidden_ids):
        style = STYLES["stop" if is_special and kind == "answer" else kind]
        text.append(_decode(list(group), tokenizer), style)


def _decode(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return escape_control_characters(tokenizer.decode(token_ids))


def row_to_json(row: Row, tokenizer: Tokenizer, processor: ImageProcessor | None = None) -> dict[str, Any]:
    """The arrays of a row, and its segments as text; of images the first position and the size in positions."""
    segments = []
    for segment in _split_row(row, processor):
        texts = {
            kind: tokenizer.decode(list(compress(segment.token_ids, (kind == other for other in segment.kinds))))
            for kind in OPENING
        }
        segments.append({"document": segment.document, "segment": segment.number, **texts})
    images = [{"start": placed.start, "grid": placed.image.grid} for placed in row.images]
    arrays = {
        name[:-2]: None if value is None else value.tolist() for name, value in vars(row).items() if name != "images"
    }
    return {"segments": segments, "images": images, **arrays}


def format_counts(counts: dict[str, Any], source: RowSource) -> list[Part]:
    """Format the table of numbers."""
    num_answer_tokens = counts["targets"] - counts["eos_padding"]
    whole = "of an epoch" if source.split == "train" else "of the run's validations"
    scope = whole if counts["is_complete"] else "the first ones; others were not counted"
    tokens, targets = max(1, counts["tokens"]), max(1, counts["targets"])
    block_length = source.config.objective.longest_block_length
    blocks = "none, both directions" if block_length is None else f"{block_length:,} tokens"
    lines = [
        ("rows", f"{counts['rows']:,} of {source.config.row_length:,} positions ({scope})"),
        ("documents", f"{counts['documents']:,}, with {counts['answers']:,} segments"),
        ("tokens", f"{counts['tokens']:,}, and {counts['padding_share']:.1%} of the positions are padding"),
        ("learned", f"{num_answer_tokens:,} tokens, {num_answer_tokens / tokens:.1%} of all"),
        ("EOS padding", f"{counts['eos_padding']:,} tokens, {counts['eos_padding'] / targets:.1%} of the targets"),
        ("document length", _format_quantiles(counts["document_length"])),
        ("learned per segment", _format_quantiles(counts["answer_length"])),
        ("blocks", blocks),
        ("left out or mended", "" if counts["skipped"] else "nothing"),
    ]
    logs = [log for component in source.components for log in component.skip_logs]
    examples = {reason: f"; the first: {text}" for log in logs for reason, text in log.examples.items()}
    skipped = sorted(counts["skipped"].items())
    return [Table((), [*lines, *((f"  {count:,}", reason + examples.get(reason, "")) for reason, count in skipped)])]


def _format_quantiles(lengths: dict[str, int]) -> str:
    return ", ".join(f"{share} {value:,}" for share, value in lengths.items()) or "none"
