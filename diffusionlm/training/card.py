"""What the card of a run's model says of the run."""

from __future__ import annotations

from config.data import HubDataset
from config.dump import to_toml
from config.parallel import SingleProcess
from diffusionlm.checkpoints.model_card import CardDataSource, CardTraining, ValidationBound, update_training_section
from diffusionlm.training.run import Run
from diffusionlm.training.summary import Summary


def describe_training(run: Run, bound: ValidationBound | None) -> CardTraining:
    """The run as it stands, in values that do not change any more."""
    config = run.config
    total = sum(part.weight for part in run.parts)
    command = "diffusionlm-train" if isinstance(config.parallel, SingleProcess) else "diffusionlm-train-ddp"
    init_from = config.model.init_from
    return CardTraining(
        name=config.run.directory.resolve().name,
        step=run.progress.step,
        max_steps=run.max_steps,
        batch_size=config.training.batch_size,
        row_length=config.row_length,
        tokens_seen=run.progress.tokens_seen,
        sources=tuple(
            CardDataSource(
                part.name,
                part.source.provenance,
                part.source.identity,
                part.weight / total,
                section.source.dataset if isinstance(section.source, HubDataset) else None,
            )
            for part, section in zip(run.parts, config.data.parts, strict=True)
        ),
        objective=to_toml(config.objective),
        optimizer=config.optimizer.kind,
        command=f"{command} --config DIR/config.toml --set run.directory=runs/again",
        tokenizer_fingerprint=run.tokenizer.fingerprint,
        init_from=None if init_from is None else str(init_from),
        ema_decay=config.training.ema_decay,
        bound=bound,
    )


def add_final_bound_to_card(run: Run, summary: Summary) -> None:
    """Put the final bound into the card of the last checkpoint; the first rank does. It is no reason to fail."""
    result = summary.evaluation
    bound = ValidationBound(result.nats_per_token, result.standard_error, summary.step, result.block_length == 1)
    folder = run.directory.store.path(run.progress.step)
    try:
        update_training_section(folder, describe_training(run, bound))
    except (OSError, ValueError) as error:
        run.log(f"the card of {folder} does not have the final bound: {error}")
