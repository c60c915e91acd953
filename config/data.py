"""Where text comes from and how it becomes rows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

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


Source = Annotated[PythonStdlib | LocalFiles | HubDataset, Field(discriminator="kind")]


class DataConfig(Section):
    """``[data]``: source, rows, order."""

    source: Source
    """`"python-stdlib"`, or a table `[data.source]` with its `kind`."""
    rows: Literal["packed", "padded"] = "packed"
    """packed: documents end in end-of-text and follow each other without gaps, and see only themselves. padded: one
    document a row, cut at the row's length."""
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
