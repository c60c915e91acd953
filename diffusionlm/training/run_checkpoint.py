"""What a checkpoint keeps of a run, and how a run goes on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config.dump import to_toml
from diffusionlm.checkpoints.huggingface import save_model
from diffusionlm.checkpoints.model_card import Bound, write_card
from diffusionlm.data.pipeline import identity_of
from diffusionlm.training.card import describe_training
from diffusionlm.training.checkpointing.staging import Snapshot, take_snapshot
from diffusionlm.training.checkpointing.store import Saved
from diffusionlm.training.run import Progress, Run, say
from diffusionlm.training.spreading import on_first
from logger import RunLogger
from tokenizer import save_tokenizer


def save(run: Run, logger: RunLogger, *, must_succeed: bool) -> None:
    """Copy what a checkpoint keeps, and write it while training goes on, unless there will be no later one.

    Raises:
        ValueError: it could not be written and there will be no later one; older ones stand.
    """
    run.saves.start(snapshot_of(run))
    if must_succeed:
        run.saves.wait()
        tell_failures(run, logger)  # of those before


def tell_failures(run: Run, logger: RunLogger) -> None:
    """Say which checkpoints could not be written; the run goes on, and the older ones stand."""
    for failure in run.saves.poll():
        logger.event(run.progress.step, "checkpoint", f"{failure}; going on without it")


def snapshot_of(run: Run) -> Snapshot:
    """Everything that a checkpoint keeps; all ranks call this."""
    progress = run.progress
    state = {
        "step": progress.step,
        "progress": vars(progress),
        "loader": run.loader.state_dict(),
        "max_steps": run.max_steps,
        "data_identity": identity_of(run.parts),
        "tokenizer_fingerprint": run.tokenizer.fingerprint,
        "average_updates": run.average.updates if run.average else 0,
        "guard": run.guard.state_dict(),
        "validated": run.validated and vars(run.validated),
        "world_size": run.ranks.world_size,
        "torch": torch.__version__,
    }
    model, tokenizer, config = run.model, run.tokenizer, run.config
    training = describe_training(run, run.validated)

    def write_model(folder: Path, weights: dict[str, Tensor]) -> None:
        save_model(model, folder, weights)
        save_tokenizer(tokenizer, folder)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        write_card(folder, model.config, weights, training)

    validated = run.validated
    bound = validated.nats_per_token if validated and validated.step == progress.step else None
    run.parallel.check_replicas()
    with run.master.full():
        average = run.average.average if run.average else None
        weights = dict(run.parallel.whole_parameters(average))
        live = dict(model.named_parameters()) if average else None
        optimizer = run.parallel.state_for_saving(run.optimizers.state_dict())
        return take_snapshot(progress.step, write_model, state, weights, optimizer, live, bound)


def resume(run: Run) -> None:
    """Take up the newest checkpoint of the run directory that verifies, if there is one, whatever ranks made it.

    Raises:
        ValueError: it was made from other data or with another tokenizer.
    """
    saved = run.directory.store.load_newest(on_first(run.ranks, say), run.ranks)
    if saved is None:
        return
    made = {"data_identity": identity_of(run.parts), "tokenizer_fingerprint": run.tokenizer.fingerprint}
    for key, now in made.items():
        if saved.state[key] != now and run.config.checkpoint.config_change == "refuse":
            raise ValueError(
                f"{saved.path} was made with {key} {saved.state[key]}, now it is {now}: going on would mix them. "
                'Name another run.directory, or set checkpoint.config_change = "accept"'
            )
    if run.average is not None and saved.has_live_weights:
        run.average.restore(run.parallel.own_rows(saved.weights()), saved.state["average_updates"])
    with run.master.full():
        run.parallel.set_weights(saved.live_weights())
    run.optimizers.load_state_dict(_optimizer_state(run, saved))
    run.loader.load_state_dict(saved.state["loader"])
    run.batches.start_at(saved.state["loader"])
    run.guard.load_state_dict(saved.state["guard"])
    run.progress = Progress(**saved.state["progress"])
    validated = saved.state.get("validated")  # Older checkpoints do not say.
    run.validated = validated and Bound(**validated)
    run.flops.start_at(run.progress.step, run.progress.seconds)
    run.say(f"going on from {saved.path}")


def _optimizer_state(run: Run, saved: Saved) -> dict[str, Tensor]:
    """``parameter.key`` -> what this rank has of it: the rows of its part of the parameter, or all."""
    trained, own = run.parallel.trained(), {}
    for key, shape in saved.tensors.shapes.items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or name not in trained:
            continue
        if shape and not run.parallel.has_whole(name):
            start, end = run.parallel.row_range(name)
            shape = torch.Size((end - start, *shape[1:]))
        own[f"{name}.{kind}"] = torch.empty(shape, dtype=saved.tensors.dtypes[key])
    targets: dict[str, Any] = run.parallel.state_for_saving(own)
    saved.read_into({f"optimizer.{key}": target for key, target in targets.items()}, "optimizer.")
    return own
