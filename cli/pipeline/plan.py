"""Check a whole pipeline before its first stage runs: its graph, the config of each stage, and that they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.pipeline.settings import merge_settings, read_stage_settings, with_value
from config.base import Section
from config.convert import ConvertConfig
from config.data import DataConfig
from config.dump import to_toml_values
from config.eval import EvalConfig
from config.finetune.pipeline import CheckpointChoice, PipelineConfig, StageConfig
from config.generation import GenerationConfig
from config.infer import InferConfig
from config.load import validate_config
from config.model import Architecture, ModelConfig
from config.train import TrainConfig
from config.training.objective import NextTokenConfig
from config.training.parallel import SingleProcess
from diffusionlm.families.model_directory import read_model_config, resolve_model_directory

RUN, MODEL, RESULT, ANSWERS, REPLAY = "run", "model", "result.json", "answers.jsonl", "answers.html"
"""What a stage writes into its directory: of training, conversion, evaluation and sampling."""


@dataclass(frozen=True)
class StageModel:
    """A model that a stage reads or writes, as far as it is known before it exists."""

    path: Path
    """Directory, or name on the Hub."""
    config: ModelConfig
    is_adapter: bool = False
    """The directory has an adapter in place of weights."""
    tokenizer: Path | None = None
    """Directory of its tokenizer. None: a stage of the pipeline makes the tokenizer, so sizes and ids of ``config`` are
    placeholders."""

    @property
    def is_tokenizer_known(self) -> bool:
        return self.tokenizer is not None


@dataclass(frozen=True)
class StagePlan:
    """A stage whose config is valid and fits the stage that it starts from."""

    stage: StageConfig
    directory: Path
    command: str
    """Name of the command, as in ``diffusionlm NAME``."""
    config: Section
    """The command's config."""
    parent: StagePlan | None
    """The stage in ``from``. None: there is none, or it is a model."""
    model: StageModel | None
    """The model that the stage starts from or reads. None: random weights."""
    output: StageModel | None
    """The model that it writes. None: it writes none."""

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def is_training(self) -> bool:
        return isinstance(self.config, TrainConfig)


@dataclass(frozen=True)
class StageKindOptions:
    """How stages of a kind run."""

    config: type[Section]
    managed_keys: tuple[str, ...]
    """Keys of the command's config that the pipeline sets."""
    model_key: str
    """That of the model."""
    outputs: Mapping[str, str]
    """Key of the config -> name in the directory of the stage."""
    command: str = ""


_TRAINING = StageKindOptions(
    TrainConfig,
    ("run.directory", "model.init_from"),
    "model.init_from",
    {"run.directory": RUN},
)
_CONVERSION = StageKindOptions(ConvertConfig, ("source", "target"), "source", {"target": MODEL}, "convert")
STAGE_KINDS: dict[str, StageKindOptions] = {
    "train": _TRAINING,
    "sft": _TRAINING,
    "merge": _CONVERSION,
    "export": _CONVERSION,
    "evaluate": StageKindOptions(
        EvalConfig,
        ("model.path", "output.file"),
        "model.path",
        {"output.file": RESULT},
        "eval",
    ),
    "sample": StageKindOptions(
        InferConfig,
        ("model.path", "output.file", "output.html"),
        "model.path",
        {"output.file": ANSWERS, "output.html": REPLAY},
        "infer",
    ),
}


def plan_pipeline(config: PipelineConfig) -> list[StagePlan]:
    """Check all stages, in the order of their execution.

    Raises:
        ValueError: a stage is invalid; names it and the key.
    """
    plans: dict[str, StagePlan] = {}
    for stage in config.ordered_stages:
        try:
            plans[stage.name] = _plan_stage(stage, config, plans)
        except ValueError as error:
            text = str(error)
            label = f'stage "{stage.name}"'
            raise ValueError(text if text.startswith(label) else f"{label}: {text}") from error
    return list(plans.values())


def _plan_stage(stage: StageConfig, config: PipelineConfig, plans: Mapping[str, StagePlan]) -> StagePlan:
    kind, directory = STAGE_KINDS[stage.kind], config.directory / stage.name
    parent = plans.get(stage.input or "")
    model = _find_model(stage, parent, [other.name for other in config.stages])
    values = read_stage_settings(stage, config.common, kind.managed_keys)
    values = _add_model(stage, kind, values, model)
    for key, name in kind.outputs.items():
        values = with_value(values, key, str(directory / name))
    resolved = validate_config(kind.config, values, f'stage "{stage.name}"')
    output = _check_stage(stage, resolved, model)
    command = kind.command
    if isinstance(resolved, TrainConfig):
        command = "train" if isinstance(resolved.parallel, SingleProcess) else "train-ddp"
    return StagePlan(stage, directory, command, resolved, parent, model, output)


def _find_model(stage: StageConfig, parent: StagePlan | None, names: Sequence[str]) -> StageModel | None:
    """The model in ``from``, without reading its weights."""
    if stage.input is None:
        if stage.kind in ("train", "sft"):
            return None
        raise ValueError(f'from is missing: the stage or the model that kind = "{stage.kind}" reads')
    if parent is None:
        if stage.checkpoint != "last":
            raise ValueError(f'checkpoint = "{stage.checkpoint}" needs a training stage in from: remove it')
        try:
            from diffusionlm.checkpoints.model_files import ADAPTER_CONFIG

            directory = resolve_model_directory(stage.input, needs_weights=False)
            model_config = read_model_config(directory)
        except ValueError as error:
            raise ValueError(
                f'from = "{stage.input}" is neither a stage ({", ".join(names)}) nor a model: {error}'
            ) from error
        path = Path(stage.input)
        return StageModel(path, model_config, (directory / ADAPTER_CONFIG).is_file(), tokenizer=path)
    if parent.output is None:
        raise ValueError(f'from = "{parent.name}": a stage of kind "{parent.stage.kind}" has no model')
    if not isinstance(parent.config, TrainConfig):
        if stage.checkpoint != "last":
            raise ValueError(f'checkpoint = "{stage.checkpoint}": only training stages have several checkpoints')
        return parent.output
    return _choose_checkpoint(parent, parent.config, stage.checkpoint, parent.output)


def _choose_checkpoint(
    parent: StagePlan, config: TrainConfig, choice: CheckpointChoice, output: StageModel
) -> StageModel:
    if choice == "ema" and not config.training.ema_decay:
        raise ValueError(f'checkpoint = "ema", but stage "{parent.name}" has no average: set its training.ema_decay')
    if choice == "best":
        every_steps, saved_every = config.validation.every_steps, config.checkpoint.every_steps
        if not config.checkpoint.keep_best or not every_steps:
            raise ValueError(
                f'checkpoint = "best", but stage "{parent.name}" keeps no best checkpoint: set its '
                "checkpoint.keep_best = true and validation.every_steps > 0"
            )
        if every_steps >= (config.training.max_steps or every_steps + 1):
            raise ValueError(
                f'checkpoint = "best": stage "{parent.name}" never validates during its run, because '
                f"validation.every_steps = {every_steps} and training.max_steps = {config.training.max_steps}"
            )
        if every_steps % saved_every and saved_every % every_steps:
            raise ValueError(
                f'checkpoint = "best": stage "{parent.name}" validates every {every_steps} and saves every '
                f"{saved_every} steps: make one a multiple of the other, so that validated steps are saved"
            )
    folder = parent.directory / RUN / "checkpoints" / ("best" if choice == "best" else "latest")
    return replace(output, path=folder)


def _add_model(
    stage: StageConfig, kind: StageKindOptions, values: dict[str, Any], model: StageModel | None
) -> dict[str, Any]:
    """Add the path of the model; of training also its architecture, because the directory may not exist yet."""
    if model is None:
        return values
    values = with_value(values, kind.model_key, str(model.path))
    if model.is_adapter and stage.kind in ("train", "sft", "export"):
        raise ValueError(
            f'from = "{stage.input}" is an adapter: merge it first, in a stage of kind "merge" that this one starts '
            "from"
        )
    if stage.kind == "merge" and not model.is_adapter and "adapter" not in values:
        raise ValueError(
            f'from = "{stage.input}" has no adapter to merge: set [settings.lora] there, settings.adapter here, or '
            'kind = "export"'
        )
    if kind.config is TrainConfig:
        names = Architecture.model_fields
        architecture = {name: getattr(model.config, name) for name in names}
        known = {name: to_toml_values(value, name) for name, value in architecture.items() if value is not None}
        values = {**values, "model": merge_settings(known, values["model"])}
    return values


def _check_stage(stage: StageConfig, config: Section, model: StageModel | None) -> StageModel | None:
    """Check a config against the model that it reads, and return the model that its command writes, if any."""
    match config:
        case TrainConfig():
            if stage.kind == "sft" and not config.data.chats:
                raise ValueError(
                    'kind = "sft" learns answers, and data has no conversations: add chat = {} to a source'
                )
            return _check_training(config, model)
        case ConvertConfig():
            return _check_conversion(config, model)
        case EvalConfig():
            _check_evaluation(config, model)
        case InferConfig():
            _check_sampling(config, model)
    return None


def _check_training(config: TrainConfig, parent: StageModel | None) -> StageModel:
    """Check data and vocabulary as far as they exist, and return the model that training makes."""
    # Imported here, so that --help and config errors do not wait for numpy and regex.
    from cli.train import check_adapter, check_files

    if parent is None:
        check_files(config)
        return _predict_model(config, None)
    check_adapter(config)
    config.model.check_same_architecture(parent.config)
    has_mask_token = parent.config.mask_token_id is not None or not parent.is_tokenizer_known
    if not has_mask_token and not isinstance(config.objective, NextTokenConfig):
        raise ValueError(
            f'objective.kind = "{config.objective.kind}" needs a mask token, which the model in from has not: add a '
            'stage of kind "export" with [settings.diffusion]'
        )
    _check_tokenizer(config, parent)
    _check_data(config.data, parent)
    return _predict_model(config, parent)


def _check_tokenizer(config: TrainConfig, parent: StageModel) -> None:
    """Check that a tokenizer in the config is that of the model.

    Raises:
        ValueError: it is not, or that cannot be known.
    """
    from diffusionlm.checkpoints.model_files import load_tokenizer

    path = config.tokenizer.path
    if path is None:
        return
    if parent.tokenizer is None:
        raise ValueError(f'tokenizer.path = "{path}": the model in from brings its own tokenizer; remove it')
    own, other = load_tokenizer(parent.tokenizer), load_tokenizer(path)
    if own.fingerprint != other.fingerprint:
        raise ValueError(
            f'tokenizer.path = "{path}" is another tokenizer than that of the model in from, {parent.path}: remove it'
        )


def _check_data(config: DataConfig, parent: StageModel) -> None:
    """Open local data, and check chat templates as far as the tokenizer is known; a stage may add one to it."""
    from cli.train import LOCAL_SOURCES
    from diffusionlm.checkpoints.model_files import load_tokenizer
    from diffusionlm.data.chat.templates import check_template_name, resolve_chat_template
    from diffusionlm.data.pipeline import open_components

    components = open_components(config, "train", LOCAL_SOURCES)
    for chat in (component.chat for component in components if component.chat is not None):
        has_template = chat.config.template is not None
        if parent.tokenizer is not None and (has_template or parent.tokenizer == parent.path):
            resolve_chat_template(chat.config, load_tokenizer(parent.tokenizer), chat.key)
        elif has_template:
            check_template_name(chat.config, chat.key)


def _predict_model(config: TrainConfig, parent: StageModel | None) -> StageModel:
    """The model of the last checkpoint, with placeholders for what the tokenizer decides."""
    from diffusionlm.checkpoints.model_files import load_tokenizer

    path = config.run.directory / "checkpoints" / "latest"
    options: dict[str, Any] = {
        "block_length": config.objective.final_block_length,
        "block_origin": config.block_origin,
        "begin_with_eos": config.data.begin_with_eos,
    }
    if parent is not None:
        model = parent.config.model_copy(update=config.model.model_dump(exclude={"init_from"}) | options)
        return StageModel(path, model, config.lora is not None, parent.tokenizer)
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path)
        vocabulary: dict[str, int | None] = {
            "vocab_size": tokenizer.vocab_size,
            "mask_token_id": tokenizer.mask_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
    else:
        size = config.tokenizer.vocab_size
        vocabulary = {"vocab_size": size, "mask_token_id": size - 1, "eos_token_id": size - 2}
    model = config.model.to_model_config(**vocabulary, **options)
    tokenizer_path = config.tokenizer.path
    return StageModel(path, model, tokenizer=None if tokenizer_path is None else Path(tokenizer_path))


def _check_conversion(config: ConvertConfig, model: StageModel | None) -> StageModel:
    """Return the model that a conversion writes, with a mask token if it adds one."""
    assert model is not None and config.target is not None
    changes: dict[str, Any] = {}
    if config.diffusion is not None:
        section, mask = config.diffusion, model.config.mask_token_id
        changes = {
            "block_length": section.block_length,
            "mask_token_id": model.config.vocab_size - 1 if mask is None else mask,
            "tie_word_embeddings": model.config.tie_word_embeddings and not section.untie_head,
        }
        if section.logit_alignment != "keep":
            changes["logit_alignment"] = section.logit_alignment
    if config.model_type is not None:
        changes["model_type"] = config.model_type
    tokenizer = model.tokenizer if config.diffusion is None else None
    return StageModel(config.target, model.config.model_copy(update=changes), tokenizer=tokenizer)


def _check_evaluation(config: EvalConfig, model: StageModel | None) -> None:
    """Check the methods against the model, and open local data."""
    from cli.train import LOCAL_SOURCES
    from diffusionlm.data.pipeline import open_components
    from diffusionlm.evaluation.text_likelihood import build_data_config, resolve_method

    assert model is not None
    if config.tasks:
        _check_tasks(config, model)
        return
    if config.data.source is None:
        raise ValueError("no data: set settings.data.source or settings.tasks")
    resolve_method(config.likelihood, model.config)
    data = build_data_config(config.data, model.config)
    open_components(data, "validation" if config.data.split == "validation" else "train", LOCAL_SOURCES)


def _check_tasks(config: EvalConfig, model: StageModel) -> None:
    """Check the items of tasks, and their settings against the model; those of variants with a model of their own are
    checked by the command."""
    from cli.eval.variants import resolve_variants
    from diffusionlm.evaluation.tasks.item_task import GenerationTask
    from diffusionlm.evaluation.tasks.items import read_task_items
    from diffusionlm.evaluation.tasks.preparation import check_code_permission
    from diffusionlm.inference.settings import resolve_settings

    for variant in resolve_variants(config):
        for task in variant.tasks:
            if task.kind == "perplexity":
                continue
            if task.data is not None:
                read_task_items(task)
            check_code_permission(task)
            if isinstance(task, GenerationTask) and variant.model.path == config.model.path:
                resolve_settings(_without_token_ids(task.resolve_length(), model), model.config)


def _check_sampling(config: InferConfig, model: StageModel | None) -> None:
    """Check the inputs, and the settings against the model."""
    from cli.infer.inputs import read_inputs
    from diffusionlm.inference.settings import resolve_settings

    assert model is not None
    if config.input.interactive or str(config.input.prompts_file) == "-":
        raise ValueError("input: a stage has no terminal: write the inputs into a file, input.prompts_file")
    read_inputs(config.input)
    resolve_settings(_without_token_ids(config.generation, model), model.config)


def _without_token_ids(config: GenerationConfig, model: StageModel) -> GenerationConfig:
    """Leave out ids that cannot be checked, because the tokenizer does not exist yet."""
    if model.is_tokenizer_known:
        return config
    return config.model_copy(update={"stop_token_ids": None, "suppress_token_ids": (), "defer_token_ids": ()})
