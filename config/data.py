"""Where text comes from and how it becomes rows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from config.base import Fraction, NonEmptyStr, NonNegativeInt, PositiveInt, Probability, Section, StrTuple


class PythonStdlib(Section):
    """The source of the Python standard library beside the running interpreter: real text that every machine has."""

    kind: Literal["python-stdlib"] = "python-stdlib"
    validation_share: Annotated[int, Field(gt=1)] = 12
    """One file in this many, chosen by a hash of its path, is kept for validation."""


class LocalFiles(Section):
    """JSON lines, plain text or Parquet on this machine, plain or compressed, read as a stream."""

    kind: Literal["files"] = "files"
    paths: Annotated[StrTuple, Field(min_length=1)]
    """Files, directories or globs; read in sorted order."""
    format: Literal["auto", "json", "text", "parquet"] = "auto"
    """auto: by the ending (.jsonl, .json, .txt, .md, .py, .parquet; with .gz, .zst, .bz2 or .xz behind)."""
    text_field: NonEmptyStr = "text"
    """The field or column that holds the text; for plain text files it is not used."""
    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What one document of a plain text file is: the file, or each of its paragraphs or lines."""
    validation_paths: StrTuple = ()
    """Files for validation. Empty: documents of `paths` are chosen by `validation_fraction`."""
    validation_fraction: Fraction = 0.05
    """Share of the documents, chosen by a hash of their text, when there are no `validation_paths`."""


class HubDataset(Section):
    """A dataset of the Hugging Face Hub, read as a stream."""

    kind: Literal["hub"] = "hub"
    dataset: NonEmptyStr
    """Name, as in `roneneldan/TinyStories`."""
    config: NonEmptyStr | None = None
    """Configuration of the dataset, where it has several."""
    revision: NonEmptyStr | None = None
    """Commit or tag: name one for a run that can be repeated."""
    train_split: NonEmptyStr = "train"
    """Split to train on."""
    validation_split: NonEmptyStr | None = None
    """Split to validate on. None: documents of the training split are chosen by `validation_fraction`."""
    validation_fraction: Fraction = 0.005
    """Share of the documents, chosen by a hash of their text, when there is no `validation_split`."""
    text_field: NonEmptyStr = "text"
    """The column that holds the text."""


class Synthetic(Section):
    """What the sources of made-up text share. Their entropy is known exactly, so that what a model misses shows."""

    seed: NonNegativeInt = 0
    """Chance of the documents. They are new in each epoch; two runs with the same seed read the same ones."""
    documents_per_epoch: PositiveInt = 100_000
    """Documents of a training epoch."""
    validation_documents: PositiveInt = 4_096
    """Documents for validation: other draws from the same distribution."""


def _distinct_symbols(symbols: str) -> str:
    odd = next((symbol for symbol in symbols if not "!" <= symbol <= "~"), None)
    if odd is not None:
        raise ValueError(f"{odd!r} is not a printable ASCII character; each symbol is one byte, and so one token")
    repeated = next((symbol for symbol in symbols if symbols.count(symbol) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} is there twice; name each symbol once")
    if len(symbols) < 2:
        raise ValueError("give at least 2 symbols")
    return symbols


Symbols = Annotated[str, AfterValidator(_distinct_symbols)]
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

Source = Annotated[PythonStdlib | LocalFiles | HubDataset | SyntheticText, Field(discriminator="kind")]


class DataConfig(Section):
    """``[data]``: source, rows, order."""

    source: Source
    """A `kind` such as `"python-stdlib"` or `"markov"` alone, or a table `[data.source]` with its `kind`."""
    rows: Literal["packed", "padded"] = "packed"
    """packed: documents follow each other without gaps, and see only themselves. padded: one document a row, cut at
    the row's length."""
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
    """Documents are shuffled within windows of this many; 0 keeps their order."""
    row_shuffle_window: NonNegativeInt = 8_192
    """Rows are shuffled within windows of this many, so that a batch holds many documents; 0 keeps their order."""

    @field_validator("source", mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value


class TokenizerConfig(Section):
    """``[tokenizer]``: trained on the training documents, unless one is given."""

    path: NonEmptyStr | None = None
    """A directory with a tokenizer. None: the one of the run directory, trained there first."""
    vocab_size: Annotated[int, Field(ge=258)] = 4_096
    """Tokens, end-of-text and mask included."""
    pattern: Literal["gpt2", "gpt4", "qwen", "llama3"] = "qwen"
    """How text is cut into words before the merges."""
    max_training_bytes: PositiveInt = 64_000_000
    """Merges are learnt on the first documents, up to this many bytes."""

    @model_validator(mode="after")
    def _given_or_trained(self) -> Self:
        trained = {"vocab_size", "pattern", "max_training_bytes"} & self.model_fields_set
        if self.path is not None and trained:
            raise ValueError(f"path names a finished tokenizer, so {', '.join(sorted(trained))} cannot be set as well")
        return self
