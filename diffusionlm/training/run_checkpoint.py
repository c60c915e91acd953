"""Save a run to a checkpoint, resume it from one, and describe it in the model card."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from config.data import HubDataset, Source
from config.dump import to_toml
from config.training.parallel import SingleProcess
from ddp.parallelism import local_values
from diffusionlm.checkpoints.base_fingerprint import BaseFingerprint
from diffusionlm.checkpoints.model_card import (
    CardTraining,
    ValidationBound,
    update_training_section,
    write_model_card,
)
from diffusionlm.data.pipeline import MixtureComponent, compute_data_identity, hash_templates
from diffusionlm.data.sources.hub import is_directory
from diffusionlm.families.hub import describe_origin
from diffusionlm.training.checkpointing.staging import (
    TASK_METRICS_KEY,
    VALIDATION_BOUND_KEY,
    StagedCheckpoint,
    TensorShard,
    divide_over_ranks,
    stage_checkpoint,
    to_shards,
)
from diffusionlm.training.checkpointing.store import LoadedCheckpoint
from diffusionlm.training.metrics import TrainingProgress
from diffusionlm.training.run import Run
from diffusionlm.training.setup import only_on_first_rank
from diffusionlm.training.step import TrainState
from diffusionlm.vision.processor import load_processor
from files.paths import portable_path
from files.terminal_text import print_message
from logger import RunLogger
from tokenizer import save_tokenizer


def save_checkpoint(run: Run, logger: RunLogger, *, must_succeed: bool) -> None:
    """Stage a checkpoint and start to write it in the background. If it must succeed, wait until it is written.

    Raises:
        ValueError: ``must_succeed`` and it could not be written. Older checkpoints are intact.
    """
    run.checkpointer.start(stage_run(run))
    if must_succeed:
        run.checkpointer.wait()
        log_failed_saves(run, logger)


def log_failed_saves(run: Run, logger: RunLogger) -> None:
    """Log checkpoints that could not be written. The run continues, and older checkpoints are intact."""
    for failure in run.checkpointer.pop_failures():
        logger.event(run.progress.step, "checkpoint", f"{failure}; going on without it")


def stage_run(run: Run) -> StagedCheckpoint:
    """Copy the state of the run to CPU memory. All ranks call this."""
    state, progress, last_validation = run.state, run.progress, run.last_validation
    is_validated = last_validation is not None and last_validation.step == progress.step
    bound = last_validation.nats_per_token if last_validation and is_validated else None
    json_state = {
        "step": progress.step,
        "progress": vars(progress),
        "loader": run.loader_state,
        "max_steps": run.settings.max_steps,
        "data_identity": compute_data_identity(run.components),
        "chat_templates": hash_templates(run.components),
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "reference": run.reference_fingerprint and run.reference_fingerprint.to_metadata(),
        "average_updates": state.ema.num_updates if state.ema else 0,
        "guard": state.spike_guard.state_dict(),
        "validated": last_validation and vars(last_validation),
        VALIDATION_BOUND_KEY: bound,
        TASK_METRICS_KEY: run.last_tasks[1] if run.last_tasks and run.last_tasks[0] == progress.step else {},
        **({"early_stopping": run.early_stopping.state_dict()} if run.early_stopping.config is not None else {}),
        "world_size": run.world.size,
        "torch": torch.__version__,
    }
    # `write_model` runs in another thread, later: it uses only what training does not change.
    model, model_files, tokenizer, config = state.model, run.model_files, run.tokenizer, run.config
    card_section = describe_training(run, last_validation)

    def write_model(folder: Path, weights: dict[str, Tensor]) -> None:
        model_files.write(folder, weights)
        save_tokenizer(tokenizer, folder)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        write_model_card(folder, model.config, weights, card_section)

    state.parallel.check_replicas_equal()
    with state.master_weights.as_float32():
        average = state.ema.averages if state.ema else None
        values = model_files.saved_values(average)
        if state.parallel.has_all_weights:
            weights = dict(state.parallel.iterate_whole_parameters(values))
        else:  # gathered below, straight to where the others are copied
            shapes = state.parallel.whole_shapes
            names = set(shapes) if values is None else set().union(*run.world.all_gather_objects([*values]))
            weights = {
                name: torch.empty(shapes[name], device="meta")
                for name in shapes
                if name in names and run.world.is_first
            }
        live_weights = _shard_live_weights(state) if average else {}
        optimizer = to_shards(state.optimizers.state_dict(), state.parallel)
        if state.parallel.has_all_updates:
            live_weights, optimizer = (divide_over_ranks(shards, run.world) for shards in (live_weights, optimizer))
        memory = run.checkpointer.reserve_memory()
        staged = stage_checkpoint(progress.step, write_model, json_state, weights, optimizer, live_weights, memory)
        if not state.parallel.has_all_weights:
            for _ in state.parallel.iterate_whole_parameters(values, staged.weights):
                pass
        return staged


def resume_run(run: Run) -> None:
    """Load the newest valid checkpoint of the run directory, if there is one. The number of ranks may have changed.

    Raises:
        ValueError: the checkpoint is from other data, another tokenizer or another reference of preferences.
    """
    checkpoint = run.directory.store.load_newest(only_on_first_rank(run.world, print_message), run.world)
    if checkpoint is None:
        return
    _check_same_inputs(run, checkpoint)
    state = run.state
    weights = run.model_files.read(checkpoint)
    frozen_names = run.model_files.frozen_names & weights.keys()
    _check_frozen_weights(run, checkpoint, {name: weights.pop(name) for name in frozen_names})
    if state.ema is not None and checkpoint.has_live_weights:
        state.ema.restore(state.parallel.slice_own_rows(weights), checkpoint.state["average_updates"])
    with state.master_weights.as_float32():
        state.parallel.set_weights(checkpoint.live_weights() if checkpoint.has_live_weights else weights)
    state.optimizers.load_state_dict(_read_optimizer_state(run, checkpoint))
    state.spike_guard.load_state_dict(checkpoint.state["guard"])
    former_names = {"places": "num_positions"}  # of older checkpoints
    run.loader_state = {former_names.get(key, key): value for key, value in checkpoint.state["loader"].items()}
    run.loader.load_state_dict(run.loader_state)
    run.progress = TrainingProgress(**checkpoint.state["progress"])
    run.early_stopping.load_state_dict(checkpoint.state.get("early_stopping", {}))
    last_validation = checkpoint.state.get("validated")  # absent in older checkpoints
    run.last_validation = last_validation and ValidationBound(**last_validation)
    run.log(f"going on from {checkpoint.path}")


def _check_same_inputs(run: Run, checkpoint: LoadedCheckpoint) -> None:
    """Check that data, tokenizer, images and reference are those of the checkpoint, unless they may differ."""
    config, stored, reference = run.config, checkpoint.state, run.reference_fingerprint
    if config.checkpoint.config_change == "accept":
        return
    current = {
        "data_identity": compute_data_identity(run.components),
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
    }
    differences = [f"{key}: {stored[key]} -> {value}" for key, value in current.items() if stored[key] != value]
    old_templates = stored.get("chat_templates", {})  # absent in older checkpoints
    differences += [
        f"the content of {name}"
        for name, digest in hash_templates(run.components).items()
        if old_templates.get(name, digest) != digest
    ]
    processor = run.model_files.processor
    if processor is not None and load_processor(checkpoint.path) != processor:
        differences.append(f"preprocessor_config.json of model.init_from = {config.model.init_from}")
    old_reference = BaseFingerprint.from_metadata(stored.get("reference") or {})
    if reference is not None and old_reference != reference:
        key, path = ("model", config.model.init_from) if config.lora is None else ("lora", config.lora.init_from)
        detail = (old_reference and old_reference.find_difference(reference)) or "it was another one"
        differences.append(f"the reference of preferences, {key}.init_from = {path}: {detail}")
    if differences:
        raise ValueError(
            f"{checkpoint.path} was made with other inputs: {'; '.join(differences)}. Restore them, name another "
            'run.directory, or set checkpoint.config_change = "accept"'
        )


def _check_frozen_weights(run: Run, checkpoint: LoadedCheckpoint, frozen: dict[str, Tensor]) -> None:
    """Check that parameters that are not trained, which `model.init_from` has, are those of the checkpoint."""
    parameters = dict(run.state.model.named_parameters())
    for name, value in run.state.parallel.slice_own_rows(frozen).items():
        if not torch.equal(local_values(parameters[name]).cpu(), value):
            raise ValueError(
                f"{name}, which is not trained, differs between model.init_from = {run.config.model.init_from} and "
                f"{checkpoint.path}: restore the model, or name another run.directory"
            )


def _read_optimizer_state(run: Run, checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    """Read this rank's part of the optimizer state: ``parameter.key`` -> its rows, or the whole tensor."""
    parallel, tensors = run.state.parallel, checkpoint.tensors
    parameters = parallel.trainable_parameters()
    own: dict[str, Tensor] = {}
    for key, shape in tensors.shapes.items():
        name, _, state_key = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or name not in parameters:
            continue
        if shape and not parallel.shard_of(name).is_whole:
            shape = parameters[name].shape
        own[f"{name}.{state_key}"] = torch.zeros(shape, dtype=tensors.dtypes[key])
    shards = to_shards(own, parallel)
    checkpoint.tensors.read_into({f"optimizer.{key}": shard for key, shard in shards.items()}, "optimizer.")
    return own


def _shard_live_weights(state: TrainState) -> dict[str, TensorShard]:
    """The weights being trained, as this rank updates them. Frozen ones are left out."""
    parameters = state.parallel.trainable_parameters()
    return {name: TensorShard.of(value, state.parallel.shard_of(name)) for name, value in parameters.items()}


def describe_training(run: Run, bound: ValidationBound | None) -> CardTraining:
    """The training section of the model card, as of now; later steps do not change it."""
    config, training, init_from = run.config, run.config.training, run.config.model.init_from
    total_weight = sum(component.weight for component in run.components)
    command = "diffusionlm-train" if config.rl is None else "diffusionlm-rl"
    command = command if isinstance(config.parallel, SingleProcess) else "diffusionlm-train-ddp"
    sections, base, commit = {"Objective": to_toml(config.objective)}, None, ""
    if config.lora is not None and init_from is not None:
        sections["Adapter"] = to_toml(config.lora.model_copy(update={"init_from": None}))
        base, _, commit = describe_origin(init_from).partition(", commit ")
    sources = [component.source for component in config.data.components]
    size = f"{training.batch_size:,} sequences of up to {config.row_length:,} tokens"
    facts = {
        "steps": f"{run.progress.step:,} of {run.settings.max_steps:,}, with {size}",
        "tokens seen": f"{run.progress.tokens_seen:,}",
        "optimizer": config.optimizer.kind,
        "weights": f"moving average, decay {training.ema_decay:g}" if training.ema_decay else "of the last step",
        "started from": "random weights" if init_from is None else describe_origin(init_from),
        "tokenizer": run.tokenizer.fingerprint,
        "validation": "unknown" if bound is None else str(bound),
    }
    return CardTraining(
        name=config.run.directory.resolve().name,
        facts=facts,
        sources=tuple(
            _describe_data_source(component, source, component.weight / total_weight)
            for component, source in zip(run.components, sources, strict=True)
        ),
        sections=sections,
        command=f"{command} --config DIR/config.toml --set run.directory=runs/again",
        datasets=tuple(
            source.dataset for source in sources if isinstance(source, HubDataset) and not is_directory(source)
        ),
        adapter_base=base,
        is_base_on_hub=bool(commit),
    )


def _describe_data_source(component: MixtureComponent, source: Source, share: float) -> tuple[str, str, str, str]:
    """Describe a source without the folders of this machine: the identity of a dataset in a directory names it."""
    identity = component.source.identity
    if isinstance(source, HubDataset) and is_directory(source):
        identity = identity.replace(source.dataset, portable_path(source.dataset), 1)
    return component.name, component.source.provenance, identity, f"{share:.1%}"


def add_final_bound_to_card(run: Run, bound: ValidationBound) -> None:
    """Write the bound of the final evaluation into the card of the last checkpoint. A failure is printed, not
    raised."""
    folder = run.directory.store.path(run.progress.step)
    try:
        update_training_section(folder, describe_training(run, bound))
    except (OSError, ValueError) as error:
        run.log(f"the model card of {folder} lacks the final bound: {error}")
