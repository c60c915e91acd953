"""Read the folders of finished evaluations, and arrange their variants by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusionlm.evaluation.tasks.results import (
    ITEMS_FOLDER,
    RESULTS_FILE,
    ItemResult,
    VariantResult,
    read_items,
    read_results,
)
from files.json_files import flatten


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
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of all variants, the main one first."""
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.result.metrics))

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the metrics that are accuracies in [0, 1], the main one first."""
        numbers = {name for variant in self.variants for name in variant.result.number_metrics}
        return tuple(name for name in self.metrics if name not in numbers)


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
    names = _distinct_names(paths)
    results = [read_results(path) for path in paths]
    variants: dict[str, list[ReportedVariant]] = {}
    notes: list[str] = []
    for path, name, result in zip(paths, names, results, strict=True):
        prefix = f"{name}: " if len(paths) > 1 else ""
        notes += [prefix + note for note in result.notes]
        items = _read_all_items(path)
        for variant in result.results:
            own = _select_items(items, variant, result.item_ids.get(variant.task))
            if variant.kind != "perplexity" and len(own) != variant.num_items * variant.num_repeats:
                expected = variant.num_items * variant.num_repeats
                notes.append(
                    f"{prefix}{variant.variant}, {variant.task}: {len(own):,} of {expected:,} answers are in "
                    f"{ITEMS_FOLDER}/; comparisons and examples use these"
                )
            label = f"{name}/" * (len(paths) > 1) + variant.variant
            variants.setdefault(variant.task, []).append(ReportedVariant(label, variant, own))
    tasks = tuple(ReportedTask(name, tuple(own)) for name, own in variants.items())
    notes += [note for task in tasks for note in _differences_of_data(task)]
    return TaskReport(
        title=names[0] if len(paths) == 1 else f"{len(paths)} evaluations: {', '.join(names)}",
        tasks=tasks,
        origins=tuple((name, result.command, result.software) for name, result in zip(names, results, strict=True)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the whole path of those whose last part is not the only one."""
    last = [path.resolve().name for path in paths]
    return [name if last.count(name) == 1 else str(path) for name, path in zip(last, paths, strict=True)]


def _select_items(
    items: Sequence[ItemResult], variant: VariantResult, ids: Sequence[str] | None
) -> tuple[ItemResult, ...]:
    """The answers that a result is of: the folder keeps those of an earlier run with more items or repeats.

    Args:
        ids: of the items. None: unknown, as of results without them; then all.
    """
    selected = None if ids is None else frozenset(ids)
    return tuple(
        item
        for item in items
        if (item.task, item.variant) == (variant.task, variant.variant)
        and (selected is None or (item.id in selected and item.repeat < variant.num_repeats))
    )


def _read_all_items(folder: Path) -> list[ItemResult]:
    """Read the answers of all variants; of an answer that is there twice, the last counts."""
    items: dict[tuple[str, str, str, int], ItemResult] = {}
    for path in sorted((folder / ITEMS_FOLDER).rglob("*.jsonl")):
        for item in read_items(path):
            items[item.task, item.variant, item.id, item.repeat] = item
    return list(items.values())


def _differences_of_data(task: ReportedTask) -> list[str]:
    """Return a note if the variants of a task were evaluated on different data."""
    if not any(variant.items for variant in task.variants):
        return []
    sets = {frozenset((item.id, item.gold) for item in variant.items) for variant in task.variants if variant.items}
    if len(sets) == 1:
        return []
    common = frozenset.intersection(*sets)
    sizes = ", ".join(f"{len(ids):,}" for ids in sorted(sets, key=len))
    return [
        f"{task.name}: the variants have different items ({sizes}; {len(common):,} in common). Accuracies are over "
        "each variant's own items; comparisons are over the items that both have"
    ]
