"""``[data]``: the sources of text and how documents become rows."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from config.base import (
    ConfigPath,
    Fraction,
    HalfOpenFraction,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    TupleOf,
    expand_kind,
)
from config.finetune.chat import ChatRowsConfig

SampleBy = Literal["document", "paragraph", "line"]

ChatTask = Literal["copy", "reverse", "sort", "add", "count"]

OnBadRow = Literal["raise", "skip", "replace"]


class PythonStdlib(Section):
    """The source code of the running Python's standard library: real text that every machine has."""

    opener: ClassVar[str] = "local_files:StdlibSource"

    kind: Literal["python-stdlib"] = "python-stdlib"
    validation_share: Annotated[int, Field(gt=1)] = 12
    """One file in this many, selected by a hash of its path, is held out for validation."""


class RecordSourceOptions(Section):
    """Options of sources that read records from files or datasets."""

    max_documents: PositiveInt | None = None
    """Use only the first training documents, up to this number. None: all."""
    on_bad_row: OnBadRow = "raise"
    """Reaction to a record without text: malformed JSON; bytes that are not UTF-8; a lone surrogate; a number or
    nothing instead of text; the rest of a damaged file. raise: stop, and name the file and line. skip: leave the record
    out and count it. replace: repair the record if possible (U+FFFD for invalid bytes and surrogates, the digits of a
    number) and count it; skip others. Empty text is always left out."""
    chat: ChatRowsConfig | None = None
    """Read conversations in place of text; an empty table, `chat = {}`, has all defaults. None: text."""


class LocalFiles(RecordSourceOptions):
    """Local files: JSON, plain text or Parquet, optionally compressed, read as a stream."""

    opener: ClassVar[str] = "local_files:open_local_files"

    kind: Literal["files"] = "files"
    paths: Annotated[TupleOf[NonEmptyStr], Field(min_length=1)]
    """Files, directories or glob patterns; files are read in sorted order."""
    format: Literal["auto", "json", "text", "parquet"] = "auto"
    """auto: by the extension of each file (.jsonl, .json, .txt, .md, .py, ..., also followed by .gz, .zst, .bz2 or .xz;
    .parquet). JSON and Parquet files may be mixed, plain text not with them. A .json file has one object per line, or
    is an array of objects, or one object."""
    text_field: NonEmptyStr = "text"
    """The field or column that holds the text; plain-text files do not use it."""
    max_record_bytes: PositiveInt = 1 << 28
    """Largest record in bytes: a line, a paragraph, an archive that is one document or one JSON array, a value of
    Parquet. It bounds memory, some ten times as much."""
    sample_by: SampleBy = "document"
    """A document of a plain-text file is the whole file, a paragraph (between blank lines) or a line. Windows line
    breaks become plain ones."""
    validation_paths: TupleOf[NonEmptyStr] = ()
    """Files for validation. Empty: `validation_fraction` of the text in `paths` is held out."""
    validation_fraction: Fraction = 0.05
    """Share of the documents that is held out, selected by a hash of their text, if there are no `validation_paths`. If
    they are too few for that (fewer than 100 at 0.05), the end of each text is held out."""


def _check_split_name(split: str) -> str:
    if re.search(r"[:\[\]]", split):
        raise ValueError(f"{split!r} is not the name of a split; a slice or a number of documents is not allowed here")
    return split


def _check_split_and_count(split: str) -> str:
    if re.fullmatch(r"[^:\[\]]+(:[1-9][0-9]*)?", split) is None:
        raise ValueError(
            f'{split!r} is neither the name of a split, nor a name with a number of documents ("train:1000")'
        )
    return split


class HubDataset(RecordSourceOptions):
    """A dataset of the Hugging Face Hub, or a local directory with a dataset, read as a stream."""

    opener: ClassVar[str] = "hub:open_hub"

    kind: Literal["hub"] = "hub"
    dataset: NonEmptyStr
    """Name, such as `roneneldan/TinyStories`, or directory, such as `./stories`."""
    config: NonEmptyStr | None = None
    """Configuration of the dataset, if it has several."""
    revision: NonEmptyStr | None = None
    """Commit or tag. Set it for a reproducible run."""
    train_split: Annotated[NonEmptyStr, AfterValidator(_check_split_and_count)] = "train"
    """Training split; "train:1000" is short for "train" with max_documents = 1000."""
    validation_split: Annotated[NonEmptyStr, AfterValidator(_check_split_name)] | None = None
    """Validation split. None: `validation_fraction` of the training split is held out."""
    validation_fraction: Fraction = 0.005
    """Share of the documents that is held out, selected by a hash of their text, if there is no `validation_split`. If
    they are too few for that (fewer than 1,000 at 0.005), the end of each text is held out."""
    text_field: NonEmptyStr = "text"
    """The column that holds the text."""

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        if ":" in self.train_split and self.max_documents is not None:
            raise ValueError(
                f'train_split = "{self.train_split}" and max_documents = {self.max_documents} both limit the number '
                "of documents; remove one of them"
            )
        return self

    @property
    def train_split_and_limit(self) -> tuple[str, int | None]:
        """Name of the training split, and the number of training documents; None: all."""
        name, _, count = self.train_split.partition(":")
        return name, int(count) if count else self.max_documents


class Shards(Section):
    """A directory of `diffusionlm-make-data`: tokens of both splits and their tokenizer, memory-mapped."""

    kind: Literal["shards"] = "shards"
    path: ConfigPath
    """The directory."""
    max_documents: PositiveInt | None = None
    """Use only the first training documents, up to this number. None: all."""


class Synthetic(Section):
    """Options of synthetic sources. Their entropy is known exactly: it is the lowest possible loss."""

    seed: NonNegativeInt = 0
    """RNG seed. Documents are new in each epoch; two runs with the same seed read the same documents."""
    documents_per_epoch: PositiveInt = 100_000
    """Documents per training epoch."""
    validation_documents: PositiveInt = 4_096
    """Validation documents: independent samples from the same distribution."""


def _check_distinct_symbols(symbols: str) -> str:
    invalid = next((symbol for symbol in symbols if not "!" <= symbol <= "~"), None)
    if invalid is not None:
        raise ValueError(f"{invalid!r} is not a printable ASCII character; each symbol is one byte, and so one token")
    repeated = next((symbol for symbol in symbols if symbols.count(symbol) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} appears twice; name each symbol once")
    if len(symbols) < 2:
        raise ValueError("give at least 2 symbols")
    return symbols


Symbols = Annotated[str, AfterValidator(_check_distinct_symbols)]
"""Two or more printable ASCII characters, each once."""


class MarkovChain(Synthetic):
    """A sticky Markov chain: each symbol repeats the previous one or is any other one."""

    opener: ClassVar[str] = "synthetic:MarkovSource"

    kind: Literal["markov"] = "markov"
    symbols: Symbols = "abcdefgh"
    """The alphabet; all symbols are equally likely at the start of a document."""
    length: PositiveInt = 32
    """Symbols per document."""
    stay: Probability = 0.8
    """Probability that a symbol repeats; the other symbols share the rest equally."""


class ShidokuGrids(Synthetic):
    """4x4 Sudoku grids, 16 digits row by row; all 288 grids are equally likely."""

    opener: ClassVar[str] = "synthetic:ShidokuSource"

    kind: Literal["shidoku"] = "shidoku"
    noise: HalfOpenFraction = 0.0
    """Probability with which each digit of a training document is drawn anew, so that a model of them has something
    left to learn."""
    validation_fraction: HalfOpenFraction = 0.0
    """Share of the grids, selected by a hash, that are in no training document and in all validation documents. 0: both
    have all grids."""


class ChatTasks(Section):
    """Conversations of one question with an answer that can be checked, such as `reverse: abc` and `cba`."""

    opener: ClassVar[str] = "synthetic:ChatTaskSource"

    kind: Literal["chat_tasks"] = "chat_tasks"
    tasks: Annotated[TupleOf[ChatTask], Field(min_length=1)] = ("copy", "reverse", "sort", "add", "count")
    """Tasks, equally often: copy, reverse or sort a word, add two numbers, count a symbol in a word."""
    symbols: Symbols = "abcdefgh"
    """The alphabet of words."""
    max_length: PositiveInt = 6
    """Symbols of the longest word; all lengths are equally likely."""
    digits: PositiveInt = 2
    """Digits of the largest summand."""
    seed: NonNegativeInt = 0
    """RNG seed. Conversations are new in each epoch; two runs with the same seed read the same ones."""
    documents_per_epoch: PositiveInt = 20_000
    """Conversations per training epoch."""
    validation_documents: PositiveInt = 1_024
    """Validation conversations."""
    validation_fraction: Fraction = 0.1
    """Share of all prompts that is held out, selected by a hash of the prompt: no prompt is in both splits."""
    chat: ChatRowsConfig = ChatRowsConfig()
    """Template, EOS padding and other options of conversations."""


SyntheticText = MarkovChain | ShidokuGrids

TextSource = PythonStdlib | LocalFiles | HubDataset | SyntheticText | ChatTasks
"""Sources of text or conversations. The other source, `Shards`, has tokens. `opener` names a module of
`diffusionlm.data.sources`, and what in it opens a split when it is called with section, split and config key."""

Source = Annotated[TextSource | Shards, Field(discriminator="kind")]


def check_text_source(value: object) -> object:
    """Expand a `kind` alone, and reject `shards` where text is needed."""
    section = expand_kind(value)
    if isinstance(section, dict) and section.get("kind") == "shards":
        raise ValueError(
            'kind = "shards" has tokens, not text: name the source that they were made from; '
            "their tokenizer is in their directory tokenizer"
        )
    return section


TextSourceOrName = Annotated[TextSource, Field(discriminator="kind"), BeforeValidator(check_text_source)]

SourceOrName = Annotated[Source, BeforeValidator(expand_kind)]


class MixtureEntry(Section):
    """``[[data.mixture]]``: one component of the mixture."""

    source: SourceOrName
    """A `kind` alone, or a table with a `kind`."""
    weight: PositiveFloat = 1.0
    """Share of the tokens, relative to the other weights."""
    name: NonEmptyStr | None = None
    """Name in logs. None: its kind and index."""


class ImagesConfig(Section):
    """``[data.images]``: sizes of the images of conversations. A larger image is scaled down, a smaller one up."""

    min_pixels: PositiveInt | None = None
    """Pixels of the smallest image. None: as in the preprocessor_config.json of model.init_from; for random weights
    those of one position of the text."""
    max_pixels: PositiveInt | None = None
    """Pixels of the largest image; Qwen3-VL has a position for each 1,024. None: as in the preprocessor_config.json of
    model.init_from; for random weights those of 256 positions."""

    cache_features: ConfigPath | None = None
    """Directory where the features of images are stored, so that later epochs and runs neither read the images nor
    compute the vision tower. It must be frozen, by training.freeze = ["vision", "merger"] or [lora]; features of other
    weights have folders of their own. None: features are not stored."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels = {self.min_pixels} is more than max_pixels = {self.max_pixels}: lower it")
        return self

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by their keys."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {key: value for key, value in limits.items() if value is not None}


class DataConfig(Section):
    """``[data]``: source or mixture, rows, order, workers."""

    source: SourceOrName | None = None
    """A `kind` such as `"python-stdlib"` or `"markov"` alone, or a table `[data.source]` with a `kind`."""
    mixture: TupleOf[MixtureEntry] = ()
    """Several sources instead of one: `[[data.mixture]]` for each. A component that ends starts again in a new order;
    an epoch ends when each component was read to its end at least once."""
    rows: Literal["packed", "best_fit", "padded"] = "packed"
    """packed: documents follow each other without gaps and attend only to themselves; a document that is cut at the end
    of a row continues in the next row without its context. best_fit: documents are combined so that few are cut, and
    the rest of a row is padding. padded: one document per row, truncated to the row's length. Conversations are never
    cut: packed combines them as best_fit does."""
    packing_window: PositiveInt = 1_000
    """Number of documents that best_fit packs together."""
    begin_with_eos: bool = False
    """Each document, and each row that continues one, also begins with the end-of-text token: context that is never
    noised and has no loss. An autoregressive model predicts the first token of a text from it, so that its likelihood
    covers the same tokens as a diffusion model's. Conversations begin as their template says."""
    end_with_eos: bool = True
    """Each document ends with the end-of-text token, which is learned like any other. Documents of one fixed length do
    not need it. Conversations end with a stop token and `chat.eos_padding`."""
    row_length: PositiveInt | None = None
    """Tokens per row. None: model.max_position_embeddings."""
    random_length_probability: Probability = 0.0
    """Probability that the rows of a training step are split at random positions into separate documents, so that the
    model also sees short texts; LLaDA uses 0.01."""
    document_shuffle_window: NonNegativeInt = 10_000
    """Documents are shuffled within windows of this size; 0 keeps their order. Documents of shards are shuffled as a
    whole."""
    row_shuffle_window: NonNegativeInt = 8_192
    """Rows are shuffled within windows of this size, so that a batch holds many documents; 0 keeps their order. Of
    conversations at most 256."""
    images: ImagesConfig = ImagesConfig()
    workers: NonNegativeInt = 0
    """Processes that tokenize, pack and draw noise while the model trains: the first one packs and draws, further ones
    tokenize for it. 0: this happens between the steps. Rows and noise do not depend on it."""
    prefetch_steps: PositiveInt = 4
    """Maximum number of steps that the workers are ahead."""

    @model_validator(mode="after")
    def _check_source_or_mixture(self) -> Self:
        if (self.source is None) == (not self.mixture):
            problem = "no source" if self.source is None else "both source and mixture"
            raise ValueError(
                f'{problem} given: set source (a kind such as "python-stdlib", or a table [data.source] with a kind), '
                "or several of [[data.mixture]], each with its source"
            )
        return self

    @model_validator(mode="after")
    def _check_chats(self) -> Self:
        if not self.chats:
            return self
        if self.random_length_probability:
            raise ValueError(
                f"random_length_probability = {self.random_length_probability} cuts rows, and conversations must not "
                "be cut: set it to 0"
            )
        templates = [(section.template, dict(section.template_variables)) for section in self.chats]
        other = next((template for template in templates if template != templates[0]), None)
        if other is not None:
            raise ValueError(
                f"chat.template and template_variables differ between the sources, {templates[0]} and {other}: a model "
                "answers with one template, which its checkpoints keep; set the same ones in every source"
            )
        if self.pads_to_longest and (self.rows != "padded" or self.mixture):
            raise ValueError(
                'chat.eos_padding = "batch_max" depends on the other conversations of a step, so it needs one source '
                'and rows of one conversation each: set data.rows = "padded", or chat.eos_padding = "length:N"'
            )
        return self

    @property
    def chats(self) -> list[ChatRowsConfig]:
        """The sections ``chat`` of all sources that have one."""
        sections = [getattr(entry.source, "chat", None) for entry in self.components]
        return [section for section in sections if section is not None]

    @property
    def has_only_chats(self) -> bool:
        """All sources are conversations."""
        return len(self.chats) == len(self.components)

    @property
    def pads_to_longest(self) -> bool:
        """Each conversation is padded to the longest of its step."""
        return any(section.eos_padding == "batch_max" for section in self.chats)

    @property
    def components(self) -> tuple[MixtureEntry, ...]:
        """The mixture; a single source is a mixture of one component."""
        return self.mixture if self.source is None else (MixtureEntry(source=self.source),)
