"""Run tasks with several variants, write each result at once, and continue an interrupted run.

A result is one line of ``items/VARIANT.jsonl``, flushed at once. A last line without a line break was torn when the
process ended, and is dropped when the run goes on. ``fingerprint.json`` holds what decides results; a run with other
values is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from config.data import LocalFiles
from config.dump import list_differences, to_toml_values
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
from diffusionlm.evaluation.tasks.evaluation import AnswerKey, evaluate_task, list_answers, summarize_task
from diffusionlm.evaluation.tasks.item_task import GenerationTask
from diffusionlm.evaluation.tasks.preparation import PreparedTask, PreparedText, Variant
from diffusionlm.evaluation.tasks.results import (
    ITEMS_FOLDER,
    EvaluationResults,
    ItemResult,
    format_item_line,
    read_items,
    to_file_name,
    write_results,
)
from diffusionlm.evaluation.text_likelihood import OnProgress, ignore_progress
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.processor import JOINT_PROCESSOR_FILE, PROCESSOR_FILE
from files.atomic import write_text_atomic
from files.json_files import read_json_object
from files.lock import lock_directory
from files.paths import hash_file
from profiling.torch_setup import select_device, select_dtype

FINGERPRINT_FILE = "fingerprint.json"
MAX_SHOWN_DIFFERENCES = 8
KEYS_WITHOUT_EFFECT = ("name", "data", "limit", "item_ids", "repeats", "batch_size")
"""Keys of a task that change no result of an item: which items there are, where they are, what is computed together."""
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    PROCESSOR_FILE,
    JOINT_PROCESSOR_FILE,
)


class TaskRun:
    """A run in a folder."""

    def __init__(self, path: Path, variants: Sequence[Variant]) -> None:
        """Create the folder of a run, or continue the run in it.

        Raises:
            ValueError: it holds another run (names what differs), or a file cannot be read.
            OSError: it cannot be written.
        """
        self.path, self.variants = path, variants
        self._loaded: tuple[InferModelConfig, Transformer] | None = None
        models = {(variant.model, variant.directory) for variant in variants}
        model_hashes = {key: fingerprint_model(*key) for key in models}  # variants of one model read its weights once
        self.fingerprints: dict[str, dict[str, Any]] = {}
        """Variant -> task -> what decides its results."""
        for variant in variants:
            model = model_hashes[variant.model, variant.directory]
            self.fingerprints[variant.name] = {task.name: fingerprint_task(task, model) for task in variant.prepared}
        file = path / FINGERPRINT_FILE
        if file.is_file():
            check_fingerprint(path, read_json_object(file), self.fingerprints)
        elif path.is_dir() and any(path.iterdir()):
            raise ValueError(f"{path} is not empty, and holds no evaluation: name another folder as output")
        (path / ITEMS_FOLDER).mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(self.fingerprints, indent=1, ensure_ascii=False) + "\n")

    def run(self, on_progress: OnProgress = ignore_progress, command: str = "") -> EvaluationResults:
        """Evaluate what is missing, and write results.json.

        Raises:
            ValueError: the weights do not fit, the model's probabilities are not finite, or a line of an earlier run is
                damaged.
            OSError: a file cannot be written, or another process works in the folder.
        """
        with lock_directory(self.path):
            for variant in self.variants:
                self._evaluate(variant, on_progress)
            self._loaded = None
            results = self._summarize(command)
            write_results(self.path, results)
        return results

    def _read_results(self, variant: Variant) -> dict[str, dict[AnswerKey, ItemResult]]:
        """Results of a variant that the folder has, by task."""
        path = self._items_path(variant)
        results: dict[str, dict[AnswerKey, ItemResult]] = {task.name: {} for task in variant.prepared}
        for item in read_items(path) if path.is_file() else ():
            results.setdefault(item.task, {}).setdefault((item.id, item.repeat), item)
        return results

    def _items_path(self, variant: Variant) -> Path:
        return self.path / ITEMS_FOLDER / f"{to_file_name(variant.name)}.jsonl"

    def _evaluate(self, variant: Variant, on_progress: OnProgress) -> None:
        done = self._read_results(variant)
        with self._items_path(variant).open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            for task in variant.prepared:
                answers = list_answers(task)
                num_done, phase = len(done[task.name].keys() & set(answers)), f"{variant.name}: {task.name}"
                if num_done == len(answers):
                    continue

                def show_phase(name: str, unit: str, count: int, total: int | None, phase: str = phase) -> None:
                    on_progress(f"{phase}, {name}", unit, count, total)

                model = self._load(variant.model)
                for result in evaluate_task(model, task, done[task.name], show_phase):
                    file.write(format_item_line(replace(result, variant=variant.name)).encode() + b"\n")
                    file.flush()
                    num_done += 1
                    on_progress(phase, "answers", num_done, len(answers))
            os.fsync(file.fileno())

    def _load(self, config: InferModelConfig) -> Transformer:
        """Load a model, unless it is the one that is loaded."""
        if self._loaded is None or self._loaded[0] != config:
            self._loaded = None  # frees the memory before the next one is loaded
            self._loaded = (config, load_configured_model(config))
        return self._loaded[1]

    def _summarize(self, command: str) -> EvaluationResults:
        results = []
        for variant in self.variants:
            found = self._read_results(variant)
            for task in variant.prepared:
                selected = set(list_answers(task))
                own = [item for key, item in found[task.name].items() if key in selected]
                hashes = self.fingerprints[variant.name][task.name]["fingerprints"]
                result = replace(
                    summarize_task(task, own),
                    variant=variant.name,
                    model=str(variant.model.path),
                    protocol=describe_protocol(task),
                    fingerprints=hashes,
                )
                results.append(result)
        tasks = [task for variant in self.variants for task in variant.prepared]
        runs_code = any(task.config.runs_code for task in tasks)
        return EvaluationResults(
            results=tuple(results),
            item_ids={task.name: tuple(item.id for item in task.items) for task in self.variants[0].prepared},
            command=command,
            software={name: version(name) for name in ("diffusionlm", "torch")} | {"python": platform.python_version()},
            notes=(f"Executed code: {probe_isolation().describe()}",) if runs_code else (),
        )


def check_fingerprint(path: Path, old: Mapping[str, Any], new: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a run continues an earlier one; it may have more variants and tasks."""
    differences = []
    for name, tasks in old.items():
        for task, values in tasks.items():
            own = new.get(name, {}).get(task)
            lines = ["is missing"] if own is None else list_differences(values, dict(own))
            differences += [f"{name}, {task}: {line}" for line in lines]
    if differences:
        raise ValueError(
            f"{path} holds the results of another evaluation: {'; '.join(differences[:MAX_SHOWN_DIFFERENCES])}. Name "
            "another folder as output, or remove this one"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Fingerprints: what decides the results of a task with a model


def fingerprint_model(model: InferModelConfig, directory: Path) -> str:
    """Hash a model: names and whole contents of its configs, tokenizer, weight files and adapter, and its dtype.

    A checkpoint's weight files have the same size as those before, and mostly the same ends: only the whole content
    tells them apart.
    """
    folders = [directory, find_weights_directory(directory)]
    paths = [folder / name for folder in folders for name in CONFIG_FILES]
    paths += list_weight_files(folders[1])
    for folder in (directory, model.adapter):
        paths += [] if folder is None else [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    lines = [f"{path.name} {hash_file(path)}" for path in dict.fromkeys(paths) if path.is_file()]
    return _hash([*lines, select_dtype(model.dtype, select_device(model.device, "model.device"))])


def _hash_inputs(task: PreparedTask) -> dict[str, str]:
    """Hashes of a task's data (items or text, and examples) and of the templates of its prompts (empty for a text)."""
    if isinstance(task, PreparedText):
        return {"data": _hash(_hash_source(task.config.text_config.source)), "prompt": ""}
    config = task.config
    chat = "" if task.chat_template is None else task.chat_template.source
    return {
        "data": _hash([*_hash_source(getattr(config, "source", None)), *map(hash_file, config.input_files)]),
        "prompt": _hash([task.template, task.answer_template, task.delimiter, chat]),
    }


def _hash_source(source: object) -> list[str]:
    """Hashes of the files of a source; a source that is no files is known by its settings."""
    paths = source.paths if isinstance(source, LocalFiles) else ()
    return [hash_file(Path(path)) for path in find_files(paths, "data")] if paths else []


def describe_protocol(task: PreparedTask) -> dict[str, Any]:
    """All settings of a task, decoding with the defaults of the model's family, and what differs from its preset."""
    values: dict[str, Any] = to_toml_values(task.config)
    if isinstance(task, PreparedText):
        return values
    if task.config.preset is not None:
        values["deviations"] = task.config.deviations
    if isinstance(task.config, GenerationTask):
        generation = task.requests.settings.config.model_copy(
            update={"suppress_token_ids": task.config.resolve_length().suppress_token_ids}
        )
        values["generation"] = to_toml_values(generation)
    if "prompt" in values:
        values["prompt"] |= {
            "template": task.template,
            "answer_template": task.answer_template,
            "delimiter": task.delimiter,
        }
    return values


def fingerprint_task(task: PreparedTask, model_hash: str) -> dict[str, Any]:
    """What decides the results of a task's items: all its settings but `KEYS_WITHOUT_EFFECT`, and hashes of files."""
    values = {key: value for key, value in describe_protocol(task).items() if key not in KEYS_WITHOUT_EFFECT}
    for section, key in (("prompt", "shots_data"), ("likelihood", "batch_tokens")):
        if isinstance(values.get(section), dict):
            values[section] = {name: value for name, value in values[section].items() if name != key}
    return {**json.loads(json.dumps(values)), "fingerprints": {"model": model_hash, **_hash_inputs(task)}}


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
