"""What a run of tasks writes: a line of JSON for each answer, and results.json, its summary. Without torch and numpy.

A run evaluates *tasks* (items of a data file, and how they are asked and graded) with *variants* (a model and its
settings). Each item is answered `num_repeats` times by each variant.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from files.atomic import write_bytes_atomic
from files.json_files import read_text

ITEMS_FOLDER = "items"
RESULTS_FILE = "results.json"
CONFIG_FILE = "config.toml"
"""Names within the folder of a run."""

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


@dataclass(frozen=True)
class Verdict:
    """How good an answer is."""

    is_correct: dict[str, float]
    """By metric: 1 for a right answer and 0 for a wrong one, or another number, whose mean over items is reported; all
    0 if grading has failed."""
    extracted: dict[str, str | None] = field(default_factory=dict)
    """By rule: what was graded; None: the rule finds nothing in the output."""
    chosen: dict[str, int] | None = None
    """By rule: index of the chosen option."""
    detail: str | None = None
    """What grading says beside the verdict, such as the outcome of executed code."""
    error: str | None = None
    """Why grading has failed; such an answer counts as wrong and invalid."""


@dataclass(frozen=True, kw_only=True)
class ItemResult(Verdict):
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
    variant: str = ""
    output: str = ""
    """Text of the answer, up to the first stop string. Empty for tasks of likelihoods."""
    finish_reason: Literal["stop", "length"] | None = None
    """stop: a stop token or a stop string ended the answer. length: it filled its canvas. None: not generated."""
    num_tokens: int = 0
    """Tokens of the answer up to the stop, or tokens of the options that were scored."""
    num_forwards: int = 0
    """Forwards that this answer or these options took part in."""
    seconds: float = 0.0
    """Time since the result before it, or its share of a group's; they sum to the time of the run."""
    option_log_likelihoods: tuple[float, ...] | None = None
    """Of each option, in nats."""
    option_standard_errors: tuple[float | None, ...] | None = None
    """Of the log-likelihoods; 0 for exact ones. None: unknown, with fewer than two draws."""
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
    variant: str = ""
    model: str = ""
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

    def list_logged_values(self) -> dict[str, float]:
        """Values to log: the metrics with their standard errors, and the share of stopped answers."""
        values = {f"tasks/{self.task}/{rule}": metric.value for rule, metric in self.metrics.items()}
        for rule, metric in self.metrics.items():
            if metric.standard_error is not None:
                values[f"tasks_standard_error/{self.task}/{rule}"] = metric.standard_error
        return values if self.shares is None else {**values, f"tasks_stopped/{self.task}": self.shares.stopped}

    def describe(self) -> str:
        values = []
        for rule, metric in self.metrics.items():
            error = "" if metric.standard_error is None else f" +- {metric.standard_error:.3f}"
            values.append(f"{rule} {metric.value:.3f}{error}")
        return f"{self.task}: {', '.join(values)} of {self.num_items:,} items"


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """The contents of results.json."""

    results: tuple[VariantResult, ...]
    """Of each task and variant, in the order of the config."""
    item_ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By task: ids of the items that the results are of; the folder may hold answers of a larger run."""
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


_ITEM = TypeAdapter(ItemResult)
_RESULTS = TypeAdapter(EvaluationResults)


def format_item_line(item: ItemResult) -> str:
    """Format as one line of JSON, without the line break; empty fields that the item does not use are left out."""
    return json.dumps(_ITEM.dump_python(item, mode="json", exclude_defaults=True), ensure_ascii=False)


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
            if not line.endswith(b"\n"):
                return
            try:
                yield _ITEM.validate_json(line)
            except ValidationError as error:
                problem = _first_problem(error)
                raise ValueError(f"{path}: line {number}: is no result of an item ({problem})") from None


def _first_problem(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}" if details["loc"] else details["msg"]


def to_file_name(variant: str) -> str:
    """A file name for a variant: its own, if that is plain, else a shortened one with a hash."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,99}", variant):
        return variant
    digest = hashlib.sha256(variant.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', variant).strip('-.')[:80]}-{digest}"
