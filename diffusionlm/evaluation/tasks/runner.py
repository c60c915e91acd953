"""Run tasks with several variants, write each result at once, and continue an interrupted run."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from config.data import LocalFiles
from config.dump import to_toml_values
from config.evaluation.tasks import AnyTask
from config.infer import InferModelConfig
from diffusionlm.checkpoints.huggingface import load_configured_model
from diffusionlm.checkpoints.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    find_weights_directory,
    list_weight_files,
)
from diffusionlm.data.sources.local_files import find_files
from diffusionlm.evaluation.grading.code_execution import probe_isolation
from diffusionlm.evaluation.tasks.evaluation import AnswerKey, evaluate_task, list_answers
from diffusionlm.evaluation.tasks.humaneval import HumanEvalTask
from diffusionlm.evaluation.tasks.item_task import GenerationTask
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.evaluation.tasks.preparation import PreparedTask, PreparedText, Variant
from diffusionlm.evaluation.tasks.results import EvaluationResults, RunFolder, write_results
from diffusionlm.evaluation.tasks.summary import TaskSummary, compare_variants
from diffusionlm.models.transformer import Transformer
from files.lock import lock_directory
from files.paths import hash_file
from profiling.torch_setup import select_device, select_dtype

KEYS_WITHOUT_EFFECT = ("name", "data", "limit", "item_ids", "repeats", "batch_size")
"""Keys of a task that change no result of an item: which items there are, where they are, what is computed together."""
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)


class RunProgress(Protocol):
    """Callback for the progress of a run."""

    def __call__(self, phase: str, unit: str, done: int, total: int | None) -> None:
        """``phase``: such as variant and task. ``done`` of ``total`` units (None: unknown) are finished."""


@dataclass
class TaskRun:
    """A run in a folder.

    Args:
        fingerprints: variant -> task -> hashes.
    """

    variants: Sequence[Variant]
    folder: RunFolder
    fingerprints: Mapping[str, Mapping[str, Mapping[str, str]]]
    _loaded: tuple[InferModelConfig, Transformer] | None = field(default=None, init=False)

    @classmethod
    def open(cls, path: Path, variants: Sequence[Variant]) -> TaskRun:
        """Create the folder of a run, or continue the run in it.

        Raises:
            ValueError: it holds another run, or a file cannot be read.
            OSError: it cannot be written.
        """
        models = {(variant.model, variant.directory) for variant in variants}
        hashes = {key: fingerprint_model(*key) for key in models}  # variants of one model read its weights once
        fingerprints = {
            variant.name: {
                task.name: {
                    "model": hashes[variant.model, variant.directory],
                    "data": fingerprint_data(task.config),
                    "prompt": fingerprint_prompt(task),
                }
                for task in variant.prepared
            }
            for variant in variants
        }
        decisive = {
            variant.name: {
                task.name: fingerprint_task(task, fingerprints[variant.name][task.name]) for task in variant.prepared
            }
            for variant in variants
        }
        return cls(variants, RunFolder(path, decisive), fingerprints)

    def run(self, on_progress: RunProgress | None = None, command: str = "") -> EvaluationResults:
        """Evaluate what is missing, and write results.json.

        Raises:
            ValueError: the weights do not fit, the model's probabilities are not finite, or a line of an earlier run is
                damaged.
            OSError: a file cannot be written, or another process works in the folder.
        """
        with lock_directory(self.folder.path):
            for variant in self.variants:
                self._evaluate(variant, on_progress)
            self._loaded = None
            results = self._summarize(command)
            write_results(self.folder.path, results)
        return results

    def _evaluate(self, variant: Variant, on_progress: RunProgress | None) -> None:
        done: dict[str, set[AnswerKey]] = defaultdict(set)
        for result in self.folder.read_items(variant.name):
            done[result.task].add((result.id, result.repeat))
        with self.folder.open_writer(variant.name) as write:
            for task in variant.prepared:
                answers = list_answers(task)
                num_done, phase = len(done[task.name].intersection(answers)), f"{variant.name}: {task.name}"
                if num_done == len(answers):
                    continue

                def show_phase(name: str, count: int, total: int | None, phase: str = phase) -> None:
                    if on_progress is not None:
                        on_progress(f"{phase}, {name}", "steps", count, total)

                model = self._load(variant.model)
                for result in evaluate_task(model, task, variant.name, done[task.name], show_phase):
                    write(result)
                    num_done += 1
                    if on_progress is not None:
                        on_progress(phase, "answers", num_done, len(answers))

    def _load(self, config: InferModelConfig) -> Transformer:
        """Load a model, unless it is the one that is loaded."""
        if self._loaded is None or self._loaded[0] != config:
            self._loaded = None  # frees the memory before the next one is loaded
            self._loaded = (config, load_configured_model(config))
        return self._loaded[1]

    def _summarize(self, command: str) -> EvaluationResults:
        summaries: list[TaskSummary] = []
        results = []
        for variant in self.variants:
            own = {task.name: TaskSummary(task, variant.name, str(variant.model.path)) for task in variant.prepared}
            selected = {task.name: set(list_answers(task)) for task in variant.prepared}
            for item in self.folder.read_items(variant.name):
                if (item.id, item.repeat) in selected.get(item.task, ()):
                    selected[item.task].remove((item.id, item.repeat))
                    own[item.task].results.append(item)
            for task in variant.prepared:
                fingerprints = self.fingerprints[variant.name][task.name]
                results.append(own[task.name].build(describe_protocol(task), fingerprints))
            summaries += own.values()
        runs_code = any(
            isinstance(task.config, HumanEvalTask) for variant in self.variants for task in variant.prepared
        )
        notes = [f"Executed code: {probe_isolation().describe()}"] if runs_code else []
        return EvaluationResults(
            results=tuple(results),
            comparisons=compare_variants(summaries),
            item_ids={
                task.name: tuple(item.id for item in task.items)
                for task in self.variants[0].prepared
                if not isinstance(task, PreparedText)
            },
            command=command,
            software={name: version(name) for name in ("diffusionlm", "torch")} | {"python": platform.python_version()},
            notes=tuple(notes),
        )


# ----------------------------------------------------------------------------------------------------------------------
# Fingerprints: what decides the results of a task with a model


def fingerprint_model(model: InferModelConfig, directory: Path) -> str:
    """Hash a model: names and whole contents of its configs, tokenizer, weight files and adapter, and its dtype.

    A checkpoint's weight files have the same size as those before, and mostly the same ends: only the whole content
    tells them apart.

    Args:
        directory: of the model, resolved.

    Raises:
        ValueError: a file cannot be read, or there is no CUDA device where one is required.
    """
    folders = [directory, find_weights_directory(directory)]
    paths = [folder / name for folder in folders for name in CONFIG_FILES]
    paths += list_weight_files(folders[1])
    for folder in (directory, model.adapter):
        paths += [] if folder is None else [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    lines = [f"{path.name} {hash_file(path)}" for path in dict.fromkeys(paths) if path.is_file()]
    return _hash([*lines, select_dtype(model.dtype, select_device(model.device, "model.device"))])


def fingerprint_data(task: AnyTask) -> str:
    """Hash the files of a task's items or text, and of its examples; a source that is no files by its settings.

    Raises:
        ValueError: a file cannot be read.
    """
    source = task.text_config.source if isinstance(task, PerplexityTask) else getattr(task, "source", None)
    patterns = source.paths if isinstance(source, LocalFiles) else ()
    files = [Path(path) for path in find_files(patterns, "data")] if patterns else []
    if not isinstance(task, PerplexityTask):
        files += [path for path in (task.data, task.prompt_config.shots_data) if path is not None]
    return _hash([hash_file(path) for path in files])


def fingerprint_prompt(task: PreparedTask) -> str:
    """Hash the templates of a task's prompts; empty for a text."""
    if isinstance(task, PreparedText):
        return ""
    template = task.builder.chat_template
    chat = "" if template is None else template.source
    return _hash([task.builder.template, task.builder.answer_template, task.builder.delimiter, chat])


def describe_protocol(task: PreparedTask) -> dict[str, Any]:
    """All settings of a task, decoding with the defaults of the model's family, and what differs from its preset."""
    values: dict[str, Any] = to_toml_values(task.config, "task")
    if isinstance(task, PreparedText):
        return values
    if task.config.preset is not None:
        values["deviations"] = task.config.deviations
    if isinstance(task.config, GenerationTask):
        generation = task.settings.config.model_copy(
            update={"suppress_token_ids": task.config.resolve_length().suppress_token_ids}
        )
        values["generation"] = to_toml_values(generation, "generation")
    if "prompt" in values:
        values["prompt"] |= {
            "template": task.builder.template,
            "answer_template": task.builder.answer_template,
            "delimiter": task.builder.delimiter,
        }
    return values


def fingerprint_task(task: PreparedTask, fingerprints: dict[str, str]) -> dict[str, Any]:
    """What decides the results of a task's items: all its settings but `KEYS_WITHOUT_EFFECT`, and hashes of files."""
    values = {key: value for key, value in describe_protocol(task).items() if key not in KEYS_WITHOUT_EFFECT}
    for section, key in (("prompt", "shots_data"), ("likelihood", "batch_tokens")):
        if isinstance(values.get(section), dict):
            values[section] = {name: value for name, value in values[section].items() if name != key}
    return {**json.loads(json.dumps(values)), "fingerprints": fingerprints}


def _hash(lines: list[str]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
