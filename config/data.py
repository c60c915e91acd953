"""Where text comes from and how it becomes rows."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from config.base import (
    ConfigPath,
    Fraction,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    StrTuple,
    TupleOf,
)


class PythonStdlib(Section):
    """The source of the Python standard library beside the running interpreter: real text that every machine has."""

    kind: Literal["python-stdlib"] = "python-stdlib"
    validation_share: Annotated[int, Field(gt=1)] = 12
    """One file in this many, chosen by a hash of its path, is kept for validation."""


class RecordSourceOptions(Section):
    """What sources of text that people wrote share."""

    max_documents: PositiveInt | None = None
    """Only the first so many training documents. None: all."""
    on_bad_row: Literal["raise", "skip", "replace"] = "raise"
    """A row that is no text: malformed JSON, bytes that are not UTF-8, a lone surrogate, a number or nothing where text
    should be; or a file that is damaged from some place on. raise: stop, and name the file and the line. skip: leave it
    out, and count it. replace: mend what can be mended (bytes and surrogates become U+FFFD, a number its digits), count
    it, and skip the rest. Empty text is always left out."""


class LocalFiles(RecordSourceOptions):
    """JSON lines, plain text or Parquet on this machine, plain or compressed, read as a stream."""

    kind: Literal["files"] = "files"
    paths: Annotated[StrTuple, Field(min_length=1)]
    """Files, directories or globs; read in sorted order."""
    format: Literal["auto", "json", "text", "parquet"] = "auto"
    """auto: by the ending of each file (.jsonl, .json, .txt, .md, .py; with .gz, .zst, .bz2 or .xz behind; .parquet).
    JSON and Parquet may be together, plain text not with them. A .json file has an object on each line, or is one array
    of them, or one object."""
    text_field: NonEmptyStr = "text"
    """The field or column that holds the text; for plain text files it is not used."""
    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What one document of a plain text file is: the file, or each of its paragraphs (between blank lines) or lines.
    Line breaks of Windows become plain ones."""
    validation_paths: StrTuple = ()
    """Files for validation. Empty: documents of `paths` are chosen by `validation_fraction`."""
    validation_fraction: Fraction = 0.05
    """Share of the documents, chosen by a hash of their text, when there are no `validation_paths`."""


def _check_split_name(split: str) -> str:
    if re.search(r"[:\[\]]", split):
        raise ValueError(f"{split!r} is not the name of a split; parts of it cannot be taken here")
    return split


def _check_split_and_count(split: str) -> str:
    if re.fullmatch(r"[^:\[\]]+(:[1-9][0-9]*)?", split) is None:
        raise ValueError(f'{split!r} is neither the name of a split, nor one with a number of documents ("train:1000")')
    return split


class HubDataset(RecordSourceOptions):
    """A dataset of the Hugging Face Hub, read as a stream."""

    kind: Literal["hub"] = "hub"
    dataset: NonEmptyStr
    """Name, as in `roneneldan/TinyStories`, or a directory with a dataset, as in `./stories`."""
    config: NonEmptyStr | None = None
    """Configuration of the dataset, where it has several."""
    revision: NonEmptyStr | None = None
    """Commit or tag: name one for a run that can be repeated."""
    train_split: Annotated[NonEmptyStr, AfterValidator(_check_split_and_count)] = "train"
    """Split to train on; "train:1000" is short for "train" with max_documents = 1000."""
    validation_split: Annotated[NonEmptyStr, AfterValidator(_check_split_name)] | None = None
    """Split to validate on. None: documents of the training split are chosen by `validation_fraction`."""
    validation_fraction: Fraction = 0.005
    """Share of the documents, chosen by a hash of their text, when there is no `validation_split`."""
    text_field: NonEmptyStr = "text"
    """The column that holds the text."""

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        if ":" in self.train_split and self.max_documents is not None:
            raise ValueError(
                f'train_split = "{self.train_split}" and max_documents = {self.max_documents} say how many documents '
                "to read; leave one of them out"
            )
        return self

    @property
    def train_split_and_limit(self) -> tuple[str, int | None]:
        """Name of the training split, and how many of its training documents are read; None: all."""
        name, _, count = self.train_split.partition(":")
        return name, int(count) if count else self.max_documents


class Shards(Section):
    """Tokens that `diffusionlm-make-data` wrote, with their tokenizer and both splits; read at the speed of memory."""

    kind: Literal["shards"] = "shards"
    path: ConfigPath
    """The directory that it wrote."""
    max_documents: PositiveInt | None = None
    """Only the first so many training documents. None: all."""


class Synthetic(Section):
    """What the sources of made-up text share. Their entropy is known exactly, so that what a model misses shows."""

    seed: NonNegativeInt = 0
    """Chance of the documents. They are new in each epoch; two runs with the same seed read the same ones."""
    documents_per_epoch: PositiveInt = 100_000
    """Documents of a training epoch."""
    validation_documents: PositiveInt = 4_096
    """Documents for validation: other draws from the same distribution."""


def _check_distinct_symbols(symbols: str) -> str:
    odd = next((symbol for symbol in symbols if not "!" <= symbol <= "~"), None)
    if odd is not None:
        raise ValueError(f"{odd!r} is not a printable ASCII character; each symbol is one byte, and so one token")
    repeated = next((symbol for symbol in symbols if symbols.count(symbol) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} is there twice; name each symbol once")
    if len(symbols) < 2:
        raise ValueError("give at least 2 symbols")
    return symbols


Symbols = Annotated[str, AfterValidator(_check_distinct_symbols)]
"""Two or more printable ASCII characters, each once."""


class MarkovChain(Synthetic):
    """A sticky Markov chain: each symbol is the one before it again, or any other one."""

    kind: Literal["markov"] = "markov"
    symbols: Symbols = "abcdefgh"
    """The alphabet; a document starts with any symbol, all equally likely."""
    length: PositiveInt = 32
    """Symbols of a document."""
    stay: Probability = 0.8
    """Probability of the same symbol again; the other symbols share the rest equally."""


class ShidokuGrids(Synthetic):
    """4x4 Sudoku grids, 16 digits row by row; all 288 are equally likely."""

    kind: Literal["shidoku"] = "shidoku"


class CopiedSymbols(Synthetic):
    """Random symbols, and the same once more."""

    kind: Literal["copy"] = "copy"
    symbols: Symbols = "abcdefgh"
    """The alphabet."""
    length: PositiveInt = 8
    """Symbols that are copied; a document has twice as many."""


class ReversedAddition(Synthetic):
    """Sums such as `321+654=9750`: 123 + 456 = 579, the least significant digit first."""

    kind: Literal["addition"] = "addition"
    digits: PositiveInt = 3
    """Digits of each number that is added, zeros included; the sum has one more."""


class NestedExpressions(Synthetic):
    """Expressions such as `(3+(1*2))` of a probabilistic context-free grammar; their lengths differ."""

    kind: Literal["grammar"] = "grammar"
    depth: Annotated[int, Field(ge=0, le=10)] = 3
    """Most parentheses around a digit. The longest document has 2 ** (depth + 2) - 3 characters."""


SyntheticText = MarkovChain | ShidokuGrids | CopiedSymbols | ReversedAddition | NestedExpressions

TextSource = PythonStdlib | LocalFiles | HubDataset | SyntheticText
"""Sources of text; the others have tokens already."""

Source = Annotated[TextSource | Shards, Field(discriminator="kind")]


def expand_source_kind(value: object) -> object:
    """A `kind` alone stands for its section."""
    return {"kind": value} if isinstance(value, str) else value


def check_text_source(value: object) -> object:
    """The same, where tokens will not do."""
    section = expand_source_kind(value)
    if isinstance(section, dict) and section.get("kind") == "shards":
        raise ValueError(
            'kind = "shards" has tokens already, and no text: name the source that they were made from; '
            "their tokenizer is in the directory tokenizer beside them"
        )
    return section


TextSourceOrName = Annotated[TextSource, Field(discriminator="kind"), BeforeValidator(check_text_source)]

SourceOrName = Annotated[Source, BeforeValidator(expand_source_kind)]


class MixtureEntry(Section):
    """One ``[[data.mixture]]``."""

    source: SourceOrName
    """A `kind` alone, or a table with its `kind`."""
    weight: PositiveFloat = 1.0
    """Share of the tokens that come from it, relative to the other weights."""
    name: NonEmptyStr | None = None
    """What logs call it. None: its kind and its place."""


class DataConfig(Section):
    """``[data]``: source or mixture, rows, order, workers."""

    source: SourceOrName | None = None
    """A `kind` such as `"python-stdlib"` or `"markov"` alone, or a table `[data.source]` with its `kind`."""
    mixture: TupleOf[MixtureEntry] = ()
    """Several sources in place of one: `[[data.mixture]]` for each. Each is read again from its start, in a new order,
    as soon as it ends; an epoch has ended when each was read to its end at least once."""
    rows: Literal["packed", "best_fit", "padded"] = "packed"
    """packed: documents follow each other without gaps, and see only themselves; one that is cut by the end of a row
    goes on in the next without what came before. best_fit: documents are put together so that as few as possible are
    cut, and the rest of a row is padding. padded: one document a row, cut at the row's length."""
    packing_window: PositiveInt = 1_000
    """best_fit chooses among this many documents."""
    begin_with_eos: bool = False
    """Each document, and each row that goes on with one, begins with the end-of-text token too: context that is never
    noised and never scored. An autoregressive model predicts the first token of a text from it, so that its likelihood
    covers the same tokens as a diffusion model's."""
    end_with_eos: bool = True
    """Each document ends in the end-of-text token, which is learnt and scored as any other. Documents of one known
    length do not need it."""
    row_length: PositiveInt | None = None
    """Tokens of a row. None: model.max_position_embeddings."""
    random_length_probability: Probability = 0.0
    """Probability that the rows of a training step are cut at random places into documents of their own, so that the
    model meets short texts too; LLaDA takes 0.01."""
    document_shuffle_window: NonNegativeInt = 10_000
    """Documents are shuffled within windows of this many; 0 keeps their order. Those of shards are
    shuffled altogether."""
    row_shuffle_window: NonNegativeInt = 8_192
    """Rows are shuffled within windows of this many, so that a batch holds many documents; 0 keeps their order."""
    workers: NonNegativeInt = 0
    """Processes that tokenise, pack and draw noise while the model trains: the first one packs and draws, further ones
    tokenise for it. 0: it is done between the steps. Rows and draws do not depend on it."""
    prefetch_steps: PositiveInt = 4
    """Steps that the workers are ahead at most."""

    @model_validator(mode="after")
    def _check_source_or_mixture(self) -> Self:
        if (self.source is None) == (not self.mixture):
            problem = "no source" if self.source is None else "both source and mixture"
            raise ValueError(
                f'{problem} given: set source (a kind such as "python-stdlib", or a table [data.source] with a kind), '
                "or several of [[data.mixture]], each with its source"
            )
        return self

    @property
    def parts(self) -> tuple[MixtureEntry, ...]:
        """The mixture; of one source, a mixture of it alone."""
        return self.mixture if self.source is None else (MixtureEntry(source=self.source),)
