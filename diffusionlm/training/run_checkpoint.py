"""What a checkpoint keeps of a run, and how a run goes on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.dump import to_toml
from diffusionlm.checkpoints.huggingface import save_model
from diffusionlm.checkpoints.model_card import ValidationBound, write_model_card
from diffusionlm.data.pipeline import compute_data_identity
from diffusionlm.training.card import describe_training
from diffusionlm.training.checkpointing.staging import StagedCheckpoint, stage_checkpoint
from diffusionlm.training.checkpointing.store import LoadedCheckpoint
from diffusionlm.training.run import Run, TrainingProgress, log
from diffusionlm.training.spreading import only_on_first_rank
from logger import RunLogger
from tokenizer import save_tokenizer


def save_checkpoint(run: Run, logger: RunLogger, *, must_succeed: bool) -> None:
    """Copy what a checkpoint keeps, and write it while training goes on, unless there will be no later one.

    Raises:
        ValueError: it could not be written and there will be no later one; older ones stand.
    """
    run.checkpointer.start(capture_checkpoint(run))
    if must_succeed:
        run.checkpointer.wait()
        log_failed_saves(run, logger)  # of those before


def log_failed_saves(run: Run, logger: RunLogger) -> None:
    """Say which checkpoints could not be written; the run goes on, and the older ones stand."""
    for failure in run.checkpointer.pop_failures():
        logger.event(run.progress.step, "checkpoint", f"{failure}; going on without it")


def capture_checkpoint(run: Run) -> StagedCheckpoint:
    """Everything that a checkpoint keeps; all ranks call this."""
    progress = run.progress
    state = {
        "step": progress.step,
        "progress": vars(progress),
        "loader": run.loader.state_dict(),
        "max_steps": run.max_steps,
        "data_identity": compute_data_identity(run.parts),
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "average_updates": run.average.num_updates if run.average else 0,
        "guard": run.guard.state_dict(),
        "validated": run.last_validation and vars(run.last_validation),
        "world_size": run.world.size,
        "torch": torch.__version__,
    }
    model, tokenizer, config = run.model, run.tokenizer, run.config
    training = describe_training(run, run.last_validation)

    def write_model(folder: Path, weights: dict[str, Tensor]) -> None:
        save_model(model, folder, weights)
        save_tokenizer(tokenizer, folder)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        write_model_card(folder, model.config, weights, training)

    last_validation = run.last_validation
    bound = last_validation.nats_per_token if last_validation and last_validation.step == progress.step else None
    run.parallel.check_replicas_equal()
    with run.master_weights.as_float32():
        average = run.average.averages if run.average else None
        weights = dict(run.parallel.iterate_whole_parameters(average))
        live = dict(model.named_parameters()) if average else None
        optimizer = run.parallel.to_checkpoint_state(run.optimizers.state_dict())
        return stage_checkpoint(progress.step, write_model, state, weights, optimizer, live, bound)


def resume_run(run: Run) -> None:
    """Take up the newest checkpoint of the run directory that verifies, if there is one, whatever ranks made it.

    Raises:
        ValueError: it was made from other data or with another tokenizer.
    """
    saved = run.directory.store.load_newest(only_on_first_rank(run.world, log), run.world)
    if saved is None:
        return
    made = {"data_identity": compute_data_identity(run.parts), "tokenizer_fingerprint": run.tokenizer.fingerprint}
    for key, now in made.items():
        if saved.state[key] != now and run.config.checkpoint.config_change == "refuse":
            raise ValueError(
                f"{saved.path} was made with {key} {saved.state[key]}, now it is {now}: going on would mix them. "
                'Name another run.directory, or set checkpoint.config_change = "accept"'
            )
    if run.average is not None and saved.has_live_weights:
        run.average.restore(run.parallel.slice_own_rows(saved.weights()), saved.state["average_updates"])
    with run.master_weights.as_float32():
        run.parallel.set_weights(saved.live_weights())
    run.optimizers.load_state_dict(_read_optimizer_state(run, saved))
    run.loader.load_state_dict(saved.state["loader"])
    run.skipped_batches.resume_from(saved.state["loader"])
    run.guard.load_state_dict(saved.state["guard"])
    run.progress = TrainingProgress(**saved.state["progress"])
    last_validation = saved.state.get("validated")  # Older checkpoints do not say.
    run.last_validation = last_validation and ValidationBound(**last_validation)
    run.flops.resume_from(run.progress.step, run.progress.seconds)
    run.log(f"going on from {saved.path}")


def _read_optimizer_state(run: Run, saved: LoadedCheckpoint) -> dict[str, Tensor]:
    """``parameter.key`` -> what this rank has of it: the rows of its part of the parameter, or all."""
    trainable_parameters, own = run.parallel.trainable_parameters(), {}
    for key, shape in saved.tensors.shapes.items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or name not in trainable_parameters:
            continue
        if shape and not run.parallel.has_whole_parameter(name):
            start, end = run.parallel.row_range(name)
            shape = torch.Size((end - start, *shape[1:]))
        own[f"{name}.{kind}"] = torch.empty(shape, dtype=saved.tensors.dtypes[key])
    targets: dict[str, Any] = run.parallel.to_checkpoint_state(own)
    saved.read_into({f"optimizer.{key}": target for key, target in targets.items()}, "optimizer.")
    return own
