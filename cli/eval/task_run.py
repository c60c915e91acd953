"""Run the tasks of a config with their variants: check, evaluate, write and print the results."""

from __future__ import annotations

import copy
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from cli.entry import usage_errors
from cli.eval.report import build_page, read_evaluations, summarize
from config.dump import format_value, to_toml, to_toml_values
from config.eval import EvalConfig, VariantConfig
from config.evaluation.presets import get_preset
from config.evaluation.tasks import AnyTask
from config.infer import InferModelConfig
from config.load import validate_config
from diffusionlm.evaluation.tasks.perplexity import PerplexityTask
from diffusionlm.evaluation.tasks.preparation import Variant, prepare_variants
from diffusionlm.evaluation.tasks.results import CONFIG_FILE, RESULTS_FILE
from files.atomic import write_text_atomic
from files.json_files import read_text
from files.paths import check_can_write
from files.terminal_text import print_message
from files.usage_error import UsageError
from logger.console import ProgressMeter
from logger.pages.html import write_page
from logger.pages.terminal import print_parts

REPORT_FILE = "report.html"


SECTIONS = ("prompt", "generation", "likelihood")
"""Sections of a task that variants may change."""
MAX_VARIANTS = 200


def run_tasks(name: str, config: EvalConfig, argv: Sequence[str] | None) -> None:
    """Evaluate the tasks, write the report, and print the results, for a command and its arguments."""
    directory = config.results_directory
    if directory is None:
        raise UsageError("no folder for the results: add --output DIR, or directory to [output]")
    # Imported here, so that --help and config errors do not wait for torch.
    with usage_errors():
        existing = directory if directory.exists() else directory.parent
        check_can_write(existing, f"output.directory (--output) = {directory}")
        variants = prepare_variants(resolve_variants(config))
        from diffusionlm.evaluation.tasks.runner import TaskRun

        run = TaskRun(directory, variants)
        write_text_atomic(directory / CONFIG_FILE, to_toml(config))
    command = shlex.join([name, *(sys.argv[1:] if argv is None else argv)])
    with closing(ProgressMeter(sys.stderr, is_transient=True)) as meter:
        run.run(meter.advance, command)
    page = directory / REPORT_FILE
    report = read_evaluations([directory])
    write_page(build_page(report), page)
    values = json.loads(read_text(directory / RESULTS_FILE))
    del values["item_ids"]  # as long as the data; the folder has them
    text = json.dumps(values, ensure_ascii=False)
    if config.output.file is not None:
        write_text_atomic(config.output.file, text + "\n")
    if config.output.format == "json":
        print(text)
    else:
        print_parts(summarize(report))
    print_message(f"report: {page}")


def resolve_variants(config: EvalConfig) -> list[Variant]:
    """Combine variants and varied keys.

    Raises:
        ValueError: a variant has no model, two have the same name, there are too many, a key is of no task, or settings
            are invalid; names the variant.
    """
    variants = config.variants or (VariantConfig(),)
    points = list(product(*[[(key, value) for value in values] for key, values in config.vary.items()]))
    if len(variants) * len(points) > MAX_VARIANTS:
        raise ValueError(f"{len(variants) * len(points)} variants, and at most {MAX_VARIANTS} are compared: vary less")
    paths = [str(variant.model or config.model.path or "") for variant in variants]
    short = [Path(path).name or path for path in paths]
    labels = short if len(set(short)) == len(set(paths)) else paths
    resolved: dict[str, Variant] = {}
    for variant, label in zip(variants, labels, strict=True):
        for point in points:
            parts = [variant.name or label] if len(variants) > 1 or variant.name is not None else []
            for key, value in point:
                text = value if isinstance(value, str) else format_value(value)
                parts.append(f"{key.rpartition('.')[2]}={text}")
            name = " ".join(parts) or label
            if name in resolved:
                raise ValueError(f"two variants are named {name!r}: remove one, or set variants.N.name in a config")
            settings = {section: dict(getattr(variant, section)) for section in SECTIONS}
            for key, value in point:
                section, _, own_key = key.partition(".")
                if section not in SECTIONS or not own_key or "." in own_key:
                    sections = ", ".join(SECTIONS)
                    raise ValueError(f"vary: {key!r} is no key of tasks that can vary: name one of {sections}.KEY")
                settings[section][own_key] = value
            tasks = _apply_settings(config, settings, name)
            resolved[name] = Variant(name, _resolve_model(variant, config.model, name), tasks)
    return list(resolved.values())


def _resolve_model(variant: VariantConfig, model: InferModelConfig, name: str) -> InferModelConfig:
    path = variant.model or model.path
    if path is None:
        raise ValueError(f"variant {name!r} has no model: set its model, or model.path")
    adapter = variant.adapter or (model.adapter if variant.model is None else None)
    return model.model_copy(update={"path": path, "adapter": adapter})


def _own_settings(task: AnyTask, section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a section that do not come from the task's preset, which is applied anew: of keys that exclude
    each other, those of the preset give way to the variant's."""
    own: dict[str, Any] = dict(table.get(section, {}))
    if isinstance(task, PerplexityTask) or task.preset is None:
        return own
    published = get_preset(task.preset).values.get(section, {})
    return {
        key: value
        for key, value in own.items()
        if key not in published or (list(value) if isinstance(value, tuple) else value) != published[key]
    }


def _apply_settings(config: EvalConfig, settings: Mapping[str, Mapping[str, Any]], name: str) -> tuple[AnyTask, ...]:
    """The tasks with the settings of a variant, where they have such a section."""
    if not any(settings.values()):
        return config.tasks
    tables = []
    is_used = dict.fromkeys((section for section in SECTIONS if settings[section]), False)
    for task in config.tasks:
        table = copy.deepcopy(task.model_dump(exclude_unset=True))
        for section in is_used:
            if section in type(task).model_fields:
                table[section] = {**_own_settings(task, section, table), **settings[section]}
                is_used[section] = True
        tables.append(table)
    unused = next((section for section, used in is_used.items() if not used), None)
    if unused is not None:
        keys = ", ".join(f"{unused}.{key}" for key in settings[unused])
        raise ValueError(f"variant {name!r}: {keys} has no effect: no task has a section {unused}")
    values = {"tasks": tables, "model": to_toml_values(config.model)}
    return validate_config(EvalConfig, values, f"variant {name!r}").tasks
