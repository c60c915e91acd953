"""The stages of a pipeline: each is a command with a config, which is put together and validated here, without torch.

Whether models and data fit it is checked by the command itself when the stage runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from config.base import Section
from config.convert import ConvertConfig
from config.dump import to_toml_values
from config.eval import EvalConfig
from config.finetune.pipeline import PipelineConfig, StageConfig
from config.infer import InferConfig
from config.load import validate_config
from config.model import Architecture
from config.serving.server import ServeConfig
from config.spellings import read_key
from config.train import TrainConfig
from config.training.parallel import SingleProcess
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory
from files.toml_text import read_toml

TAGS = ("kind", "strategy", "rope_type")
"""Keys that select the other keys of their table."""


@dataclass(frozen=True)
class StageKindOptions:
    """How stages of a kind run."""

    config: type[Section]
    model_key: str
    """Key of the model that the stage reads."""
    outputs: Mapping[str, str]
    """Key of the config -> name in the directory of the stage; the first one is its result."""
    command: str
    common: str = ""
    """Name of its part of ``[common]``."""

    @property
    def managed_keys(self) -> tuple[str, ...]:
        """Keys of the config that the pipeline sets."""
        return (self.model_key, *self.outputs)


_TRAINING = StageKindOptions(TrainConfig, "model.init_from", {"run.directory": "run"}, "train", "train")
_CONVERSION = StageKindOptions(ConvertConfig, "source", {"target": "model"}, "convert")
STAGE_KINDS = {
    "train": _TRAINING,
    "sft": _TRAINING,
    "rl": replace(_TRAINING, command="rl"),
    "merge": _CONVERSION,
    "export": _CONVERSION,
    "evaluate": StageKindOptions(EvalConfig, "model.path", {"output.file": "result.json"}, "eval", "evaluate"),
    "sample": StageKindOptions(
        InferConfig, "model.path", {"output.file": "answers.jsonl", "output.html": "answers.html"}, "infer", "sample"
    ),
}


@dataclass(frozen=True)
class Stage:
    """A stage with a valid config."""

    settings: StageConfig
    directory: Path
    config: Section
    """The command's config."""
    parent: Stage | None
    """The stage in ``from``. None: there is none, or it is a model."""
    model: Path | None
    """The model that it reads: a directory, or a name on the Hub. None: random weights."""
    architecture: Mapping[str, Any]
    """The keys of `Architecture` that are set, of the model that it writes or reads."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def kind(self) -> StageKindOptions:
        return STAGE_KINDS[self.settings.kind]

    @property
    def is_training(self) -> bool:
        return isinstance(self.config, TrainConfig)

    @property
    def command(self) -> str:
        """Name of the command, as in ``diffusionlm NAME``."""
        has_ranks = isinstance(self.config, TrainConfig) and not isinstance(self.config.parallel, SingleProcess)
        return "train-ddp" if has_ranks else self.kind.command

    @property
    def output_paths(self) -> list[Path]:
        """Paths of the outputs: the run, the model, or the results."""
        return [self.directory / name for name in self.kind.outputs.values()]

    @property
    def result(self) -> Path:
        """What a stage that is done has: of training the last checkpoint."""
        path = self.output_paths[0]
        return path / "checkpoints" / "latest" if self.is_training else path

    def describe_input(self) -> str:
        checkpoint = self.settings.checkpoint
        return f"{self.settings.input or ''}{'' if checkpoint == 'last' else f' ({checkpoint})'}"


def build_stages(config: PipelineConfig) -> list[Stage]:
    """Build all stages and validate their configs, in the order of their execution.

    Raises:
        ValueError: a stage is invalid; names it and the key.
    """
    stages: dict[str, Stage] = {}
    for settings in config.ordered_stages:
        try:
            stages[settings.name] = _build_stage(settings, config, stages)
        except ValueError as error:
            label = f'stage "{settings.name}"'
            raise ValueError(str(error) if str(error).startswith(label) else f"{label}: {error}") from error
    return list(stages.values())


def build_server(config: PipelineConfig, stages: Sequence[Stage]) -> ServeConfig:
    """Build the config of a server for the last model that these stages write.

    Raises:
        ValueError: they write none, or ``[common.serve]`` is invalid.
    """
    models = [stage for stage in stages if isinstance(stage.config, TrainConfig | ConvertConfig)]
    if not models:
        raise ValueError("--serve: the stages to run write no model: select one of kind train, sft, merge or export")
    if read_key(config.common.serve, "model.path") is not None:
        raise ValueError("common.serve.model.path is set by the pipeline: remove it")
    values = with_value(config.common.serve, "model.path", str(models[-1].output_paths[0]))
    if read_key(values, "serve.model_name") is None:
        values = with_value(values, "serve.model_name", models[-1].name)
    return validate_config(ServeConfig, values, "common.serve")


def _build_stage(settings: StageConfig, config: PipelineConfig, stages: Mapping[str, Stage]) -> Stage:
    kind, directory = STAGE_KINDS[settings.kind], config.directory / settings.name
    parent = stages.get(settings.input or "")
    model, architecture = _find_model(settings, parent, [other.name for other in config.stages])
    values = _merge_stage_settings(settings, kind, getattr(config.common, kind.common) if kind.common else {})
    if model is not None:
        values = with_value(values, kind.model_key, str(model))
        if kind.config is TrainConfig:  # the directory, whose config.json has it, may not exist yet
            values = {**values, "model": merge_tables(architecture, values["model"])}
    for key, name in kind.outputs.items():
        values = with_value(values, key, str(directory / name))
    resolved = validate_config(kind.config, values, f'stage "{settings.name}"')
    if isinstance(resolved, TrainConfig):
        architecture = _architecture(resolved.model)
        if settings.kind == "sft" and not resolved.data.chats:
            raise ValueError('kind = "sft" learns answers, and data has no conversations: add chat = {} to a source')
        if settings.kind == "rl" and resolved.rl is None:
            raise ValueError('kind = "rl" answers prompts, and there are none: add [rl.prompts]')
    if isinstance(resolved, ConvertConfig) and resolved.diffusion is not None:
        if resolved.diffusion.untie_head:
            architecture = {**architecture, "tie_word_embeddings": False}
        if resolved.diffusion.logit_alignment != "keep":
            architecture = {**architecture, "logit_alignment": resolved.diffusion.logit_alignment}
        if resolved.diffusion.clean_alignment is not None:
            architecture = {**architecture, "clean_alignment": resolved.diffusion.clean_alignment}
    return Stage(settings, directory, resolved, parent, model, architecture)


def _find_model(
    settings: StageConfig, parent: Stage | None, names: Sequence[str]
) -> tuple[Path | None, Mapping[str, Any]]:
    """The model in ``from``, which need not exist yet, and its architecture."""
    name, checkpoint = settings.input, settings.checkpoint
    if name is None:
        if settings.kind in ("train", "sft"):
            return None, {}
        raise ValueError(f'from is missing: the stage or the model that kind = "{settings.kind}" reads')
    if checkpoint != "last" and (parent is None or not parent.is_training):
        raise ValueError(f'checkpoint = "{checkpoint}" needs a training stage in from: remove it')
    if parent is None:
        try:
            architecture = _architecture(read_model_config(resolve_model_directory(name, needs_weights=False)))
        except ValueError as error:
            raise ValueError(f'from = "{name}" is neither a stage ({", ".join(names)}) nor a model: {error}') from error
        return Path(name), architecture
    if not isinstance(parent.config, TrainConfig | ConvertConfig):
        raise ValueError(f'from = "{name}": a stage of kind "{parent.settings.kind}" has no model')
    if isinstance(parent.config, TrainConfig):
        training, validation = parent.config.training, parent.config.validation
        if checkpoint == "ema" and not training.ema_decay:
            raise ValueError(f'checkpoint = "ema", but stage "{name}" has no average: set its training.ema_decay')
        is_validated = 0 < validation.every_steps < (training.max_steps or 2**63)
        if checkpoint == "best" and not (parent.config.checkpoint.keep_best and is_validated):
            raise ValueError(
                f'checkpoint = "best", but stage "{name}" keeps no best checkpoint: set its checkpoint.keep_best = '
                "true, and validation.every_steps to less than its steps"
            )
    return parent.result.with_name("best") if checkpoint == "best" else parent.result, parent.architecture


def _architecture(config: Architecture) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in Architecture.model_fields}
    return {name: to_toml_values(value) for name, value in values.items() if value is not None}


def _merge_stage_settings(settings: StageConfig, kind: StageKindOptions, common: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the common part, the config file without managed keys, and the settings of a stage."""
    for values, place in ((settings.settings, "settings"), (common, f"common.{kind.common}")):
        for key in kind.managed_keys:
            if read_key(values, key) is not None:
                remedy = 'name the model in "from"' if key == kind.model_key else "remove it"
                raise ValueError(f"{place}.{key} is set by the pipeline: {remedy}")
    file_values = {} if settings.config is None else read_toml(settings.config)[1]
    for key in kind.managed_keys:
        file_values = with_value(file_values, key, None)
    return merge_tables(merge_tables(common, file_values), settings.settings)


def merge_tables(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of tables; values of ``high`` win. A table of another kind replaces the whole table."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            is_same_kind = all(old.get(tag) == value[tag] for tag in TAGS if tag in value)
            merged[key] = merge_tables(old, value) if is_same_kind else value
        else:
            merged[key] = value
    return merged


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value of a dotted key; None: without the key.

    Raises:
        ValueError: the value of a part of the key is no table; names it.
    """
    if value is None and read_key(values, key) is None:
        return dict(values)
    first, _, rest = key.partition(".")
    inner = values.get(first, {})
    if rest and not isinstance(inner, Mapping):
        raise ValueError(f"{first} = {inner!r}: expected a table")
    changed = {**values, first: with_value(inner, rest, value) if rest else value}
    return {name: item for name, item in changed.items() if item is not None}
