"""The report of evaluations of tasks: results, paired comparisons, the speed-quality curve and answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from diffusionlm.evaluation.grading.comparison import accuracy_under_parallelism, compare_paired
from diffusionlm.evaluation.tasks.results import (
    ITEMS_FOLDER,
    RESULTS_FILE,
    ItemResult,
    MetricValue,
    VariantResult,
    mean_by_item,
    read_items,
    read_results,
)
from files.json_files import flatten
from logger.console import format_duration
from logger.pages import (
    Cell,
    Chart,
    Code,
    Column,
    Curve,
    Example,
    Examples,
    Number,
    Output,
    Page,
    Part,
    Table,
    tabulate_settings,
)

MAX_VARIANTS_FOR_ALL_PAIRS = 5
"""Of more variants, each is compared with the first only, and by the main rule only."""
MAX_EXAMPLES = 10
"""Items that are shown of each group."""
MAX_ANSWERS = 4
"""Variants whose answers to an item are shown."""


@dataclass(frozen=True)
class ReportedVariant:
    """The result of a variant in one task, with its answers."""

    label: str
    """Name in the report: unlike that of every other variant."""
    result: VariantResult
    items: tuple[ItemResult, ...]
    """Empty if the task has no items, or their file is gone."""

    @property
    def settings(self) -> dict[str, Any]:
        """The protocol, the model and the fingerprints by dotted key."""
        result = self.result
        settings = {"model": result.model, **result.protocol, "fingerprints": result.fingerprints}
        return dict(flatten(settings, "."))


@dataclass(frozen=True)
class ReportedTask:
    """A task with all variants that were evaluated on it."""

    name: str
    variants: tuple[ReportedVariant, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the metrics that are accuracies in [0, 1], the main one first."""
        results = [variant.result for variant in self.variants]
        names = (name for result in results for name in result.metrics if name not in result.number_metrics)
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class TaskReport:
    """What the report shows."""

    title: str
    tasks: tuple[ReportedTask, ...]
    origins: tuple[tuple[str, str, dict[str, str]], ...]
    """Name of each folder, command and software."""
    notes: tuple[str, ...]


def is_evaluation(folder: Path) -> bool:
    """Return whether the folder holds the results of an evaluation of tasks."""
    return (folder / RESULTS_FILE).is_file() and (folder / ITEMS_FOLDER).is_dir()


def read_evaluations(folders: Sequence[Path]) -> TaskReport:
    """Read evaluations. A folder that is named twice counts once.

    Raises:
        ValueError: a folder holds no results of an evaluation, or a file of its answers is damaged.
    """
    paths = list({folder.resolve(): folder for folder in folders}.values())
    last = [path.resolve().name for path in paths]
    names = [name if last.count(name) == 1 else str(path) for name, path in zip(last, paths, strict=True)]
    variants: dict[str, list[ReportedVariant]] = {}
    origins, notes = [], []
    for path, name in zip(paths, names, strict=True):
        results = read_results(path)
        origins.append((name, results.command, results.software))
        prefix = f"{name}: " if len(paths) > 1 else ""
        notes += [prefix + note for note in results.notes]
        items = _read_all_items(path)
        for result in results.results:
            ids = frozenset(results.item_ids.get(result.task, ()))
            own = tuple(
                item
                for item in items
                if (item.task, item.variant) == (result.task, result.variant)
                and item.id in ids
                and item.repeat < result.num_repeats  # the folder keeps those of an earlier run with more of them
            )
            expected = result.num_items * result.num_repeats
            if result.kind != "perplexity" and len(own) != expected:
                notes.append(
                    f"{prefix}{result.variant}, {result.task}: {len(own):,} of {expected:,} answers are in "
                    f"{ITEMS_FOLDER}/; comparisons and examples use these"
                )
            label = f"{name}/" * (len(paths) > 1) + result.variant
            variants.setdefault(result.task, []).append(ReportedVariant(label, result, own))
    tasks = tuple(ReportedTask(name, tuple(own)) for name, own in variants.items())
    for task in tasks:
        data = {frozenset((item.id, item.gold) for item in variant.items) for variant in task.variants if variant.items}
        if len(data) > 1:
            notes.append(
                f"{task.name}: the variants have different items ({', '.join(f'{len(own):,}' for own in data)}). "
                "Accuracies are over each variant's own items, comparisons over those that both have"
            )
    title = names[0] if len(paths) == 1 else f"{len(paths)} evaluations: {', '.join(names)}"
    return TaskReport(title, tasks, tuple(origins), tuple(dict.fromkeys(notes)))


def _read_all_items(folder: Path) -> list[ItemResult]:
    """Read the answers of all variants; of an answer that is there twice, the last counts."""
    items: dict[tuple[str, str, str, int], ItemResult] = {}
    for path in sorted((folder / ITEMS_FOLDER).rglob("*.jsonl")):
        for item in read_items(path):
            items[item.task, item.variant, item.id, item.repeat] = item
    return list(items.values())


def build_page(report: TaskReport) -> Page:
    """Build the page of one evaluation, or of several compared."""
    sections: dict[str, list[Part]] = {}
    for task in report.tasks:
        parts: dict[str, Sequence[Part]] = {
            "Results": tabulate_results(task),
            "Comparisons": compare_pairs(task),
            "Speed and quality": draw_curves(task),
            "Answers": select_examples(task),
            "Protocol": tabulate_settings(
                [(variant.label, variant.settings) for variant in task.variants], "protocols"
            ),
        }
        for name, own in parts.items():
            title: list[Part] = [task.name] if len(report.tasks) > 1 and own else []
            sections.setdefault(name, []).extend([*title, *own])
    commands = [
        Code("\n".join([command, "", *(f"{key}: {value}" for key, value in software.items())]).rstrip(), name)
        for name, command, software in report.origins
    ]
    num_variants = len({variant.label for task in report.tasks for variant in task.variants})
    states = [_plural(len(report.tasks), "task"), _plural(num_variants, "variant")]
    return Page(report.title, {**sections, "Commands": [*commands]}, report.notes, states)


def summarize(report: TaskReport) -> list[Part]:
    """Return the results and comparisons of each task, and the notes, for a terminal."""
    parts: list[Part] = []
    for task in report.tasks:
        parts += [task.name, *tabulate_results(task), *compare_pairs(task), ""]
    return [*parts[:-1], *report.notes]


def tabulate_results(task: ReportedTask) -> list[Table]:
    """Tabulate accuracies with pass@k, and how answers ended and what they cost; a row for each variant."""
    note = "± is one standard error over items, whose repeats are averaged first." if task.rules else ""
    tables = []
    for list_cells, text in ((_list_accuracies, note), (_list_costs, "")):
        rows = [dict(list_cells(variant.result)) for variant in task.variants]
        names = dict.fromkeys(name for row in rows for name, cell in row.items() if cell is not None)
        cells = [[variant.label, *map(row.get, names)] for variant, row in zip(task.variants, rows, strict=True)]
        if names:
            tables.append(Table(["variant", *map(Column, names)], cells, note=text))
    return tables


def _list_accuracies(result: VariantResult) -> Iterator[tuple[str, Cell]]:
    for name, metric in result.metrics.items():
        yield name, _metric(metric, name not in result.number_metrics)
    for rule, samples in result.pass_at_k.items():
        for k, metric in samples.items():
            if k > 1:  # pass@1 is the accuracy
                yield f"pass@{k}" if len(result.pass_at_k) == 1 else f"pass@{k}, {rule}", _metric(metric, True)
    repeats = f" x {result.num_repeats}" if result.num_repeats > 1 else ""
    yield "items", f"{result.num_items:,}{repeats}" if result.num_items else None


def _list_costs(result: VariantResult) -> Iterator[tuple[str, Cell]]:
    if result.tokens_per_forward is not None:
        yield "tokens per forward", Number(result.tokens_per_forward, ".2f")
    if result.shares is not None:
        yield "stopped", Number(result.shares.stopped, ".1%")
        yield "cut by length", Number(result.shares.length, ".1%")
        yield "empty", Number(result.shares.empty, ".1%")
        yield "invalid", Number(result.shares.invalid, ".1%")
    yield "grading errors", result.num_grading_errors or None
    yield "tokens", result.num_tokens or None
    yield "forwards", result.num_forwards or None
    yield "time", format_duration(result.seconds) if result.seconds else None


def _metric(metric: MetricValue, is_accuracy: bool) -> Number:
    return Number(metric.value, ".1%" if is_accuracy else "", metric.standard_error)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def compare_pairs(task: ReportedTask) -> list[Table]:
    """Tabulate the paired differences by each rule; pairs without a common item are left out."""
    rows: list[list[Cell]] = []
    has_few = len(task.variants) <= MAX_VARIANTS_FOR_ALL_PAIRS
    for rule in task.rules if has_few else task.rules[:1]:
        for first, second in _pairs(task.variants):
            scores = [_scores(variant, rule) for variant in (first, second)]
            common = [key for key in scores[0] if key in scores[1]]
            if not common:
                continue
            first_N, second_N = (np.array([own[key] for key in common]) for own in scores)
            result = compare_paired(first_N, second_N)
            p_value = "< 0.0001" if result.p_value < 1e-4 else Number(result.p_value, ".2g")
            num_left_out = len(scores[0]) + len(scores[1]) - 2 * len(common)
            items = f"{result.num_items:,}" + (f" ({num_left_out:,} left out)" if num_left_out else "")
            difference = Number(result.difference, "+.1%", result.standard_error)
            pair = f"{second.label} - {first.label}"
            rows.append([pair, rule, difference, p_value, result.num_only_second, result.num_only_first, items])
    note = (
        "Difference of accuracies on the same items, ± one standard error; p: exact two-sided sign test on the items "
        f"that differ, not corrected for the number of comparisons ({len(rows)} here)."
    )
    names = ("difference", "p", "only B right", "only A right", "items in both")
    return [Table(["B - A", "rule", *(Column(name, ",") for name in names)], rows, note=note)] if rows else []


def _pairs(variants: Sequence[ReportedVariant]) -> Iterator[tuple[ReportedVariant, ReportedVariant]]:
    if len(variants) <= MAX_VARIANTS_FOR_ALL_PAIRS:
        return combinations(variants, 2)
    return ((variants[0], variant) for variant in variants[1:])


def _scores(variant: ReportedVariant, rule: str) -> dict[tuple[str, str], float]:
    """Accuracy by item and its right answer, of items that the rule grades."""
    items = [item for item in variant.items if rule in item.is_correct]
    golds = {item.id: item.gold for item in items}
    accuracies = mean_by_item((item.id, item.is_correct[rule]) for item in items)
    return {(name, golds[name]): accuracy for name, accuracy in accuracies.items()}


def select_examples(task: ReportedTask) -> list[Examples]:
    """Select items that only one of two variants answers right, and those that all answer wrong."""
    variants = [variant for variant in task.variants if variant.items]
    if not variants or not task.rules:
        return []
    rule = task.rules[0]
    scores = {variant.label: _scores(variant, rule) for variant in variants}
    groups = []
    for pair in list(_pairs(variants))[:MAX_ANSWERS]:
        for better, worse in (pair[::-1], pair):
            high, low = scores[better.label], scores[worse.label]
            gains = {key: high[key] - low[key] for key in low if high.get(key, 0.0) > low[key]}
            flipped = sorted(gains, key=gains.__getitem__, reverse=True)
            title = f"{better.label} right, {worse.label} wrong"
            groups.append(_build_examples(title, flipped, [(better, True), (worse, False)], rule))
    wrong = [key for key in scores[variants[0].label] if all(own.get(key) == 0.0 for own in scores.values())]
    title = "Wrong" if len(variants) == 1 else "Wrong with every variant"
    groups.append(_build_examples(title, wrong, [(variant, False) for variant in variants[:MAX_ANSWERS]], rule))
    return [group for group in groups if group.examples]


def _build_examples(
    title: str, keys: Sequence[tuple[str, str]], variants: Sequence[tuple[ReportedVariant, bool]], rule: str
) -> Examples:
    """Build the first examples of items with these right answers; of each variant the first answer that is right, or
    that is wrong."""
    examples = []
    for name, gold in keys[:MAX_EXAMPLES]:
        outputs = []
        for variant, is_right in variants:
            answers = [item for item in variant.items if item.id == name]
            answer = next((answer for answer in answers if answer.is_correct.get(rule) == is_right), answers[0])
            outputs.append(Output(variant.label, answer.output, list(_describe_answer(answer))))
        examples.append(Example(f"right answer: {gold}", outputs, title=name))
    note = f", {len(examples)} of them here" * (len(keys) > len(examples))
    return Examples(examples, f"{title}: {_plural(len(keys), 'item')}{note}", is_folded=True)


def _describe_answer(answer: ItemResult) -> Iterator[tuple[str, str]]:
    """Iterate over names and values: what each rule extracted and whether it is right, how the answer ended."""
    for rule, is_right in answer.is_correct.items():
        extracted: str | None = answer.extracted.get(rule, "")
        if answer.chosen and rule in answer.chosen:
            extracted = f"option {answer.chosen[rule]}"
        text = "nothing" if extracted is None else extracted[:80]
        yield rule, f"{'right' if is_right else 'wrong'}{': ' * bool(text)}{text}"
    if answer.option_log_likelihoods:
        yield "log-likelihoods", ", ".join(f"{value:.2f}" for value in answer.option_log_likelihoods)
    if answer.finish_reason is not None:
        ending = "stopped" if answer.finish_reason == "stop" else "cut by length"
        yield "ended", f"{ending}, {answer.num_tokens:,} tokens, {answer.num_forwards:,} forwards"
    if answer.detail:
        yield "detail", answer.detail[:300]
    if answer.error:
        yield "error", answer.error[:300]


def draw_curves(task: ReportedTask) -> list[Part]:
    """Build the chart and the table of the variants that generate; empty if fewer than two have accuracy and speed."""
    rule = task.rules[0] if task.rules else ""
    points: dict[str, tuple[float, MetricValue]] = {}
    for variant in task.variants:
        accuracy, speed = variant.result.metrics.get(rule), variant.result.tokens_per_forward
        if accuracy is not None and speed is not None and math.isfinite(accuracy.value):
            points[variant.label] = speed, accuracy
    if len(points) < 2:
        return []
    names = name_curves({variant.label: variant.settings for variant in task.variants if variant.label in points})
    best = max(accuracy.value for _, accuracy in points.values())
    curves: list[Curve] = []
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(names.values()):
        labels = sorted((label for label in points if names[label] == name), key=lambda label: points[label][0])
        speeds = [points[label][0] for label in labels]
        accuracies = [points[label][1] for label in labels]
        values = [100.0 * accuracy.value for accuracy in accuracies]
        errors_N = 100.0 * np.array([accuracy.standard_error for accuracy in accuracies], np.float64)  # None: nan
        curves.append(Curve(name, np.array(speeds), np.array(values), len(curves), error_N=errors_N, has_dots=True))
        area = accuracy_under_parallelism(list(zip(speeds, values, strict=True)), 100.0 * best) if best > 0.0 else None
        rows += [
            [label, name, speed, _metric(accuracy, True), None if number else area]
            for number, (label, speed, accuracy) in enumerate(zip(labels, speeds, accuracies, strict=True))
        ]
    chart = Chart(
        f"{task.name}: accuracy over speed",
        f"% right ({rule}) by tokens per forward",
        curves,
        note="Bars: one standard error over items. Tokens count up to the stop, forwards as the decoder counts them.",
        x_name="tokens per forward",
        y_least=0.0,
        x_end=1.05 * max(speed for speed, _ in points.values()),
    )
    note = (
        f"AUP: accuracy under parallelism with y_max = {best:.1%}, the best accuracy of this table. Compare it only "
        "with values of the same y_max."
    )
    heads: list[Column | str] = [
        "variant",
        "curve",
        Column("tokens per forward", ".2f"),
        Column(rule),
        Column("AUP", ".1f"),
    ]
    return [chart, Table(heads, rows, note=note if best > 0.0 else "No answer is right.")]


def name_curves(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name the curve of each variant, by its settings.

    The number with the most values runs along the curve; each combination of other settings has a curve of its own.
    """
    keys = dict.fromkeys(key for own in settings.values() for key in own)
    columns = {key: [own.get(key) for own in settings.values()] for key in keys}
    num_values = {key: len({repr(value) for value in column}) for key, column in columns.items()}
    numbers = [key for key, column in columns.items() if num_values[key] > 1 and all(map(_is_number, column))]
    main = max(numbers, key=lambda key: num_values[key], default="")
    names: dict[str, str] = {}
    for label, own in settings.items():
        varied = [key for key in own if num_values[key] > 1 and key != main and own[key] not in (None, "")]
        parts = (own[key] if isinstance(own[key], str) else f"{key.rpartition('.')[2]} {own[key]}" for key in varied)
        names[label] = ", ".join(parts) or "all variants"
    return names


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
