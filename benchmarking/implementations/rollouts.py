"""An update with rollouts, part by part, and its answers decoded together and one by one.

Imported inside functions: it loads all of training.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarking.harness import Comparison, compare, make_table
from config.bench.training import BenchTrainSection
from config.load import load_config
from config.train import TrainConfig
from ddp.process_group import SINGLE_PROCESS
from diffusionlm.diffusion.preference import compute_nll
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.rollouts import PromptSet
from diffusionlm.rl.run import build_policy_run
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.run import Run
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import autocast, load_step_batch, train_step
from logger.pages import Table

TOGETHER, ONE_BY_ONE, SCORING, UPDATE = "answers together", "one by one", "log-probabilities", "update with rollout"

METHOD_OF_ROLLOUTS = """\
Parts of an update of the run's config, in turn, in one process. Answers: those of an update, decoded \
`rl.prompts.batch_size` at a time, and one at a time. Log-probabilities: a forward without gradient over the rows that \
score them. Update with rollout: decoding, grading, rows, forward, backward and optimizer. Share: of the update."""


def measure_rollouts(bench: BenchTrainSection, threads: int) -> Table:
    """Measure the run of ``bench.rollouts``, whose start it trains further in a temporary directory.

    Raises:
        ValueError: the config is wrong, or has no [rl]; names the key.
    """
    assert bench.rollouts is not None
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f'run.directory="{Path(folder) / "run"}"', f"run.threads={threads}"]
        config = load_config(TrainConfig, bench.rollouts, overrides)
        if config.rl is None:
            raise ValueError(f"bench.rollouts = {bench.rollouts}: it has no [rl]; name a config of diffusionlm-rl")
        with open_run_directory(config) as directory:
            run = build_policy_run(config, directory, SINGLE_PROCESS)
            calls = _build_calls(config, run)
            times = compare(calls, rounds=bench.rounds, warmup=bench.warmup, label=str(bench.rollouts))
            run.checkpointer.close()
    return _build_table(times)


def _build_calls(config: TrainConfig, run: Run) -> dict[str, Callable[[], object]]:
    assert config.rl is not None and isinstance(run.loader, RolloutLoader)
    loader, state, settings, stop, steps = run.loader, run.state, run.settings, StopRequest(), itertools.count()
    alone = config.rl.model_copy(update={"prompts": config.rl.prompts.model_copy(update={"batch_size": 1})})
    one_by_one = PromptSet(config.model_copy(update={"rl": alone}), run.tokenizer, state.model.config)

    def decode(prompts: PromptSet) -> object:
        with torch.no_grad(), autocast(settings):
            return prompts.decode(state.model, 0, range(config.training.batch_size))

    def update() -> None:
        batch = load_step_batch(loader, next(steps), run.world, stop)
        train_step(state, loader, batch, settings, run.monitor).wait()

    def score() -> None:
        with torch.no_grad(), autocast(settings):
            for batch in loader.noised_batches:
                moved = batch.to(settings.device)
                compute_nll(state.model, moved, settings.objective.build_loss_inputs(moved, 1.0)).sum().item()

    # The update comes first: its rows are what is scored.
    return {
        UPDATE: update,
        TOGETHER: lambda: decode(loader.prompts),
        ONE_BY_ONE: lambda: decode(one_by_one),
        SCORING: score,
    }


def _build_table(times: Comparison) -> Table:
    rows = []
    for name in times.seconds:
        share = f"{times.median(name) / times.median(UPDATE):.0%}"
        speedup = times.format_speedup(name, ONE_BY_ONE) if name == TOGETHER else "-"
        rows.append([name, times.format_ms(name), share, speedup])
    return make_table(["part", "ms", "share", "speedup over one by one"], rows)
