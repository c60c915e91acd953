"""What decides the results of a task with a model, for resuming and for reports."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from config.data import LocalFiles
from config.dump import to_toml_values
from config.evaluation.tasks import AnyTask, ExactMatchTask, PerplexityTask
from config.infer import InferModelConfig
from diffusionlm.checkpoints.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    find_weights_directory,
    list_weight_files,
)
from diffusionlm.data.sources.local_files import find_files
from diffusionlm.evaluation.tasks.preparation import PreparedGeneration, PreparedOptions, PreparedTask, resolve_length
from files.hashing import hash_file
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
    if isinstance(task, PerplexityTask):
        source = task.text.source
        patterns = source.paths if isinstance(source, LocalFiles) else (str(task.data),) if task.data else ()
        files = find_files(patterns, "data")
    else:
        files = [task.data]
        if not isinstance(task, ExactMatchTask) and task.prompt.shots_data is not None:
            files.append(task.prompt.shots_data)
    return _hash([hash_file(path) for path in files])


def fingerprint_prompt(task: PreparedTask) -> str:
    """Hash the templates of a task's prompts; empty for a text."""
    if not isinstance(task, PreparedGeneration | PreparedOptions):
        return ""
    chat = "" if task.template is None else task.template.source
    return _hash([task.builder.template, task.builder.answer_template, task.builder.delimiter, chat])


def describe_protocol(task: PreparedTask) -> dict[str, Any]:
    """All settings of a task, decoding with the defaults of the model's family, and what differs from its preset."""
    values: dict[str, Any] = to_toml_values(task.config, "task")
    if not isinstance(task.config, PerplexityTask) and task.config.preset is not None:
        values["deviations"] = task.config.deviations
    if isinstance(task, PreparedGeneration):
        generation = task.settings.config.model_copy(
            update={"suppress_token_ids": resolve_length(task.config).suppress_token_ids}
        )
        values["generation"] = to_toml_values(generation, "generation")
    if isinstance(task, PreparedGeneration | PreparedOptions) and "prompt" in values:
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
