"""What a run of tasks writes: a line of JSON for each answer, and results.json at the end. Without torch and numpy.

A result is one line of ``items/VARIANT.jsonl``, flushed at once. A last line without a line break was torn when the
process ended, and is dropped when the run goes on. ``fingerprint.json`` holds what decides results; a run with other
values is refused.

A run evaluates *tasks* (items of a data file, and how they are asked and graded) with *variants* (a model and its
settings). Each item is answered `num_repeats` times by each variant.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from config.dump import list_differences
from files.atomic import write_bytes_atomic, write_text_atomic
from files.json_files import read_json_object, read_text

ITEMS_FOLDER = "items"
RESULTS_FILE = "results.json"
FINGERPRINT_FILE = "fingerprint.json"
CONFIG_FILE = "config.toml"
"""Names within the folder of a run."""

MAX_SHOWN_DIFFERENCES = 8
LIKELIHOOD_METRICS = ("nats_per_token", "perplexity", "bits_per_byte")
"""Metrics that are no shares in [0, 1]."""


@dataclass(frozen=True)
class MetricValue:
    """A mean over items, or an estimate over tokens."""

    value: float
    standard_error: float | None = None
    """Over items, whose repeats are averaged first. None: unknown, as of a single item."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")
    """JSON has no infinity, which a perplexity may be: it is the text "Infinity" there."""

    @classmethod
    def from_floats(cls, value: float, standard_error: float) -> MetricValue:
        """An error that is not finite is unknown."""
        return cls(value, standard_error if math.isfinite(standard_error) else None)


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """One answer of a variant to an item, or its choice among the options of an item."""

    task: str
    id: str
    """Of the item, stable between runs."""
    repeat: int
    """0, 1, ...: number of this answer to the item."""
    prompt_sha256: str
    """Of the text that the model has read, in UTF-8."""
    gold: str
    """The right answer: a number, a text, or an option."""
    is_correct: dict[str, float]
    """By metric: 1 for a right answer and 0 for a wrong one, or another number; all 0 if grading has failed."""
    variant: str = ""
    output: str = ""
    """Text of the answer, up to the first stop string. Empty for tasks of likelihoods."""
    extracted: dict[str, str | None] = field(default_factory=dict)
    """By rule: what was graded; None: the rule finds nothing in the output."""
    finish_reason: Literal["stop", "length"] | None = None
    """stop: a stop token or a stop string ended the answer. length: it filled its canvas. None: not generated."""
    num_tokens: int = 0
    """Tokens of the answer up to the stop, or tokens of the options that were scored."""
    num_forwards: int = 0
    """Forwards that this answer or these options took part in."""
    seconds: float = 0.0
    """Time since the result before it, or its share of a group's; they sum to the time of the run."""
    error: str | None = None
    """Why grading has failed; such an answer counts as wrong and invalid."""
    detail: str | None = None
    """What grading says beside the verdict, such as the outcome of executed code."""
    option_log_likelihoods: tuple[float, ...] | None = None
    """Of each option, in nats."""
    option_standard_errors: tuple[float | None, ...] | None = None
    """Of the log-likelihoods; 0 for exact ones. None: unknown, with fewer than two draws."""
    chosen: dict[str, int] | None = None
    """By rule: index of the chosen option."""
    metrics: dict[str, MetricValue] | None = None
    """Of a perplexity task, whose only item is the whole text."""

    @property
    def is_empty(self) -> bool:
        """The model was to generate an answer, and it is blank."""
        return self.finish_reason is not None and not self.output.strip()

    @property
    def is_invalid(self) -> bool:
        """Grading has failed, or no rule finds an answer in the output."""
        has_nothing = bool(self.extracted) and all(value is None for value in self.extracted.values())
        return self.error is not None or has_nothing


@dataclass(frozen=True)
class OutcomeShares:
    """Shares of all answers of a variant to a task."""

    stopped: float
    """Ended by a stop token or a stop string."""
    length: float
    """Not ended when their canvas was full."""
    empty: float
    """Answers that are nothing but white space."""
    invalid: float
    """No rule finds an answer in them, or their grading has failed."""


@dataclass(frozen=True, kw_only=True)
class VariantResult:
    """All answers of one variant to one task, together."""

    task: str
    kind: str
    variant: str
    model: str
    """Directory or name of the model."""
    num_items: int
    num_repeats: int
    metrics: dict[str, MetricValue]
    """Accuracy in [0, 1] by rule, the task's main rule first; of a perplexity task nats_per_token, perplexity and
    bits_per_byte."""
    number_metrics: tuple[str, ...] = LIKELIHOOD_METRICS
    """Those that are no shares in [0, 1]."""
    pass_at_k: dict[str, dict[int, MetricValue]] = field(default_factory=dict)
    """By rule and k; only with repeats."""
    shares: OutcomeShares | None = None
    """None: nothing was generated."""
    num_grading_errors: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    seconds: float = 0.0
    protocol: dict[str, Any] = field(default_factory=dict)
    """All settings of the task with this variant, and how they were resolved for its model."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Hashes of the model, the data and the template."""

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens up to the stop per forward; None: nothing was generated."""
        return self.num_tokens / self.num_forwards if self.shares is not None and self.num_forwards else None


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of the mean scores of two variants over the same items."""

    num_items: int
    difference: float
    """Mean of the second minus that of the first."""
    standard_error: float | None
    """Over the items' differences; None: a single item."""
    p_value: float
    """Exact two-sided sign test on the items that differ (of right and wrong answers: McNemar's exact test)."""
    num_only_first: int
    """Items that only the first variant answers right; with repeats: more often."""
    num_only_second: int


@dataclass(frozen=True, kw_only=True)
class VariantComparison(PairedDifference):
    """The paired difference of two variants in a task by one rule."""

    task: str
    rule: str
    first: str
    second: str
    """Names of the variants."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """The contents of results.json."""

    results: tuple[VariantResult, ...]
    """Of each task and variant, in the order of the config."""
    comparisons: tuple[VariantComparison, ...] = ()
    """Of each pair of variants, for each task and rule."""
    item_ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By task: ids of the items that the results are of; the folder may hold answers of a larger run. A task without
    items, such as a text, has none."""
    command: str = ""
    """The command that made the results, as it was typed."""
    software: dict[str, str] = field(default_factory=dict)
    """Versions of diffusionlm, Python and torch, and the device."""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers has to know, such as how executed code was isolated."""


def mean_by_item(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean over the repeats of an item, by item id in order of appearance."""
    repeats: dict[str, list[float]] = {}
    for name, value in values:
        repeats.setdefault(name, []).append(value)
    return {name: sum(own) / len(own) for name, own in repeats.items()}


def accuracy_by_item(items: Iterable[ItemResult], rule: str) -> dict[str, float]:
    """Share of an item's repeats that are right, by item id in order of appearance."""
    return mean_by_item((item.id, item.is_correct.get(rule, 0.0)) for item in items)


_ITEM = TypeAdapter(ItemResult)
_RESULTS = TypeAdapter(EvaluationResults)


def format_item_line(item: ItemResult) -> str:
    """Format as one line of JSON, without the line break; empty fields that the item does not use are left out."""
    return json.dumps(_ITEM.dump_python(item, mode="json", exclude_defaults=True), ensure_ascii=False)


def parse_item_line(line: str, location: str) -> ItemResult:
    """Parse a line of `format_item_line`.

    Raises:
        ValueError: it is none; begins with ``location``.
    """
    try:
        return _ITEM.validate_json(line)
    except ValidationError as error:
        raise ValueError(f"{location}: is no result of an item ({_first_problem(error)})") from None


def write_results(folder: Path, results: EvaluationResults) -> None:
    """Write results.json, replacing an earlier one."""
    write_bytes_atomic(folder / RESULTS_FILE, _RESULTS.dump_json(results, indent=1) + b"\n")


def read_results(folder: Path) -> EvaluationResults:
    """Read results.json of a run.

    Raises:
        ValueError: it is missing, or has other contents.
    """
    path = folder / RESULTS_FILE
    try:
        return _RESULTS.validate_json(read_text(path))
    except ValidationError as error:
        raise ValueError(
            f"{path}: does not hold the results of an evaluation ({_first_problem(error)}): name the folder of a "
            "finished run"
        ) from None


def read_items(path: Path) -> Iterator[ItemResult]:
    """Iterate over the answers of a variant, without a torn last line.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no result.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parse_item_line(line.decode("utf-8", "replace"), f"{path}: line {number}")


def _first_problem(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}" if details["loc"] else details["msg"]


class RunFolder:
    """Reads and writes a folder.

    Args:
        fingerprint: variant -> task -> what decides its results.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the folder, or continue the run in it.

        Raises:
            ValueError: it holds another run; names what differs.
            OSError: it cannot be written.
        """
        self.path = path
        file = path / FINGERPRINT_FILE
        if file.is_file():
            check_fingerprint(path, read_json_object(file), fingerprint)
        elif path.is_dir() and any(path.iterdir()):
            raise ValueError(f"{path} is not empty, and holds no evaluation: name another folder as output")
        (path / ITEMS_FOLDER).mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(fingerprint, indent=1, ensure_ascii=False) + "\n")

    def items_path(self, variant: str) -> Path:
        """File of a variant's results."""
        return self.path / ITEMS_FOLDER / f"{to_file_name(variant)}.jsonl"

    @contextmanager
    def open_writer(self, variant: str) -> Iterator[Callable[[ItemResult], None]]:
        """Drop a torn last line of a variant's results, and yield a function that appends a result, flushed at once."""
        with self.items_path(variant).open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

            def write(result: ItemResult) -> None:
                file.write(format_item_line(result).encode() + b"\n")
                file.flush()

            try:
                yield write
            finally:
                os.fsync(file.fileno())

    def read_items(self, variant: str) -> Iterator[ItemResult]:
        """Iterate over the results of a variant; none if it has no file yet.

        Raises:
            ValueError: a line is no result.
        """
        path = self.items_path(variant)
        return read_items(path) if path.is_file() else iter(())


def to_file_name(variant: str) -> str:
    """A file name for a variant: its own, if that is plain, else a shortened one with a hash."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,99}", variant):
        return variant
    digest = hashlib.sha256(variant.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', variant).strip('-.')[:80]}-{digest}"


def check_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a run continues an earlier one; it may have more variants and tasks.

    Raises:
        ValueError: a variant or task is missing, or differs.
    """
    missing = [name for name in old if name not in new]
    differences = [f"variant {name!r} is missing" for name in missing]
    for name in old:
        if name in missing:
            continue
        for task, values in old[name].items():
            if task not in new[name]:
                differences.append(f"task {task!r} is missing")
            else:
                lines = list_differences(values, dict(new[name][task]))
                differences += [f"{name}, {task}: {line}" for line in lines]
    if differences:
        shown = differences[:MAX_SHOWN_DIFFERENCES]
        more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
        raise ValueError(
            f"{path} holds the results of another evaluation: {'; '.join([*shown, *more])}. Name another folder as "
            "output, or remove this one"
        )
