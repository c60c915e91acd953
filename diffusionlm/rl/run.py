"""A run with rollouts: a training run whose loader decodes answers, and whose loss is a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

from config.train import TrainConfig
from ddp.process_group import World
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.rl.policy import PolicyLoss, PolicyObjective
from diffusionlm.rl.rollouts import PromptSet
from diffusionlm.rl.value import ValueHead
from diffusionlm.training.checkpointing.run_directory import RunDirectory
from diffusionlm.training.loop import TrainResult, train
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.samples import Samples
from logger import RunLogger


@dataclass(frozen=True)
class RolloutSamples(Samples):
    """Answers of the last step with their rewards, in place of texts that are decoded for the log."""

    loader: RolloutLoader | None = None
    num_shown: int = 0

    def log_samples(self, model: Transformer, step: int, logger: RunLogger) -> None:
        """Log an event for some answers."""
        assert self.loader is not None
        for item in self.loader.rollouts[: self.num_shown]:
            trajectory = item.answer.trajectory
            given = self.tokenizer.decode(trajectory.tokens_L[trajectory.is_given_L].tolist())
            values = self.describe(given, trajectory, is_stopped=item.answer.finish_reason == "stop") | {
                "reward": item.reward
            }
            logger.event(
                step, "sample", f"step {step}: {given!r} -> {item.answer.text!r}, reward {item.reward:g}", values
            )


def build_policy_run(config: TrainConfig, directory: RunDirectory, world: World) -> Run:
    """Build the parts of a run with rollouts.

    Raises:
        ValueError: the prompts, the rewards or the decoding are wrong; names the key.
    """
    assert config.rl is not None
    run = build_run(config, directory, world)
    model = run.state.model
    prompts = PromptSet(config, run.tokenizer, model.config)
    if prompts.num_left_out:
        run.log(f"rl.prompts: {prompts.num_left_out} prompts are left out, the first: {prompts.problem}")
    value = None
    if config.rl.value is not None:
        value = ValueHead(config.rl.value, model.config.hidden_size, run.settings.device)
    loss = PolicyLoss(config.rl, run.state.reference, value)
    run.loader.close()
    run.loader = loader = RolloutLoader(run, prompts, loss)
    run.state.model_loss = loss
    run.settings = replace(run.settings, objective=PolicyObjective(model.config.mask_token_id))
    run.samples = RolloutSamples(run.tokenizer, (), 0, [], loader, config.rl.num_shown)
    return run


def reinforce_policy(config: TrainConfig) -> TrainResult:
    """Train a model by rewards of its answers, or resume the run in ``run.directory``.

    Raises:
        ValueError: the user can fix it; the text names the config key or the file.
    """
    return train(config, build_policy_run)
