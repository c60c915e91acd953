"""Policy gradients of models that are small enough to enumerate: all answers, exact values, and a table of estimators.

``python -m tests.reference.policy_estimates`` prints the table of docs/rl.md.

Shapes: Q answers, L positions of a canvas, J tokens of an answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.models.init import init_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.policy import combine
from tests.policy_answers import UNGROUPED, Answers, FixedAnswers, rl_config, trainable_settings, trajectories_of
from tests.reference.enumeration import PlainModel, log_probabilities

TOKENS = 3
"""The vocabulary; the mask token is the next one."""
PROMPT = (1, 2)
ONE_BY_ONE = {"remasking_strategy": "low_confidence", "confidence_of": "most_probable"}
"""One token in each step, in an order that depends on the tokens before."""


def small_model(block_length: int | None = None, scale: float = 0.5, seed: int = 0, **overrides: Any) -> Transformer:
    """Two layers in fp64, whose answers depend on the order in which they are decoded."""
    sizes = {"hidden_size": 8, "head_dim": 4, "intermediate_size": 12, "num_attention_heads": 2}
    values: dict[str, Any] = {
        **sizes,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": TOKENS + 1,
        "mask_token_id": TOKENS,
        "max_position_embeddings": 16,
        "block_length": block_length,
    }
    model = Transformer(ModelConfig(**(values | overrides)))
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.double()


def enumerate_answers(model: Transformer, prompt: Sequence[int] = PROMPT, seed: int = 0, **keys: Any) -> Answers:
    """All trajectories of a request, each once."""
    strategy = {} if "remasking_strategy" in keys else ONE_BY_ONE
    settings = trainable_settings(model, **({"stop_token_ids": ()} | strategy | keys))
    request = prepare_request(settings, prompt, seed)
    known = []
    for tokens in itertools.product(range(TOKENS), repeat=len(request.masked_positions)):
        canvas_L = request.canvas_L.copy()
        canvas_L[request.masked_positions] = tokens
        known.append(replace(request, known_tokens_L=canvas_L))
    unique = {(item.tokens_L.tobytes(), item.step_map_L.tobytes()): item for item in trajectories_of(model, known)}
    return Answers(settings, [request] * len(unique), list(unique.values()))


def compute_logprobs(model: Transformer, answers: Answers) -> Tensor:
    """Log-probability of each trajectory with gradient, [Q]: the model written again, one forward for each step."""
    plain, mask_token = PlainModel(model), TOKENS
    tokens_QL = torch.tensor(np.stack([item.tokens_L for item in answers.trajectories]))
    steps_QL = torch.tensor(np.stack([item.step_map_L for item in answers.trajectories]))
    is_open_QL = (steps_QL == 0) & ~torch.tensor(np.stack([item.is_given_L for item in answers.trajectories]))
    positions_L = torch.arange(tokens_QL.shape[1])
    blocks_L = positions_L // (answers.settings.block_causal_length or len(positions_L))
    shift = answers.settings.output_shift
    total_Q = torch.zeros(len(tokens_QL), dtype=torch.float64)
    for step in range(1, int(steps_QL.max()) + 1):
        inputs_QL = torch.where(is_open_QL | (steps_QL >= step), mask_token, tokens_QL)
        logits, _ = plain(inputs_QL, positions_L, blocks_L[:, None] >= blocks_L)
        log_p = log_probabilities(logits).roll(shift, dims=1)
        own_QL = log_p.gather(2, tokens_QL.clamp(max=TOKENS - 1)[..., None])[..., 0]
        total_Q = total_Q + (own_QL * (steps_QL == step)).sum(1)
    return total_Q


def draw_rewards(answers: Answers) -> np.ndarray:
    """A reward in [0, 1) of each answer's text."""
    return np.array(
        [
            keyed_rng(7, RngStream.MASKS, *item.tokens_L[: item.text_length].tolist()).random()
            for item in answers.trajectories
        ]
    )


def exact_gradient(model: Transformer, answers: Answers, rewards: np.ndarray) -> list[Tensor]:
    """Gradient of the expected reward by autograd."""
    expected = (compute_logprobs(model, answers).exp() * torch.tensor(rewards)).sum()
    return list(torch.autograd.grad(expected, list(model.parameters()), allow_unused=False))


def flatten(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def policy_gradient(
    model: Transformer, answers: Answers, advantages: np.ndarray, step: int = 0, **config: Any
) -> Tensor:
    """Sum over the answers of advantage times the gradient of log p, by the path of training."""
    loader = FixedAnswers(model, rl_config(**UNGROUPED, **config), answers, advantages.tolist())
    return -len(answers.requests) * flatten(loader.backward(step)[1])


# ----------------------------------------------------------------------------------------------------------------------
# The table of estimators

ESTIMATORS: dict[str, dict[str, Any]] = {
    "replay": {"kind": "replay"},
    "replay, shrink = 2": {"kind": "replay", "shrink": 2},
    "replay, sampled_steps = 1": {"kind": "replay", "sampled_steps": 1},
    "bound": {"kind": "bound"},
    "bound, num_draws = 4": {"kind": "bound", "num_draws": 4},
    "sandwich": {"kind": "sandwich"},
    "mean_field": {"kind": "mean_field"},
    "coupled": {"kind": "coupled"},
}


@dataclass(frozen=True)
class Quality:
    """What an estimator gives, over answers that the model writes."""

    bias: float
    """Mean of the estimates minus log p, in nats."""
    deviation: float
    """Standard deviation of an estimate over its own random numbers."""
    forwards: float
    """Rows of an answer."""
    cosine: float
    """Of its expected policy gradient and the exact one."""


def assess(model: Transformer, answers: Answers, logprobs: dict[str, Any], num_draws: int) -> Quality:
    """Bias and variance over ``num_draws`` draws of the masks of all answers."""
    rewards = draw_rewards(answers)
    exact_Q = compute_logprobs(model, answers).detach().numpy()
    probabilities_Q = np.exp(exact_Q)
    advantages = probabilities_Q * (rewards - (probabilities_Q * rewards).sum())
    config = rl_config(**UNGROUPED, logprobs=logprobs)
    loader = FixedAnswers(model, config, answers, advantages.tolist())
    estimates_DQ, gradients, rows = [], [], 0.0
    for step in range(num_draws):
        estimates_DQ.append(estimate_answers(loader, step))
        gradients.append(flatten(loader.backward(step)[1]))
        rows += loader.num_rows / len(answers.requests) / num_draws
    means_Q, variances_Q = np.mean(estimates_DQ, axis=0), np.var(estimates_DQ, axis=0)
    exact = -flatten(exact_gradient(model, answers, rewards))
    cosine = torch.nn.functional.cosine_similarity(torch.stack(gradients).mean(0), exact, dim=0)
    bias = float((probabilities_Q * (means_Q - exact_Q)).sum())
    return Quality(bias, math.sqrt((probabilities_Q * variances_Q).sum()), rows, float(cosine))


def estimate_answers(loader: FixedAnswers, step: int) -> np.ndarray:
    """The log-probability of each answer with the rows of a step, [Q]."""
    logprobs_N = loader.measure(step)
    scored = loader.loss.answers
    assert scored is not None
    estimates: np.ndarray = scored.sum_tokens(scored.weights_J * combine(loader.config, scored, logprobs_N)).numpy()
    return estimates


def fit(model: Transformer, answers: Answers, num_steps: int = 300) -> None:
    """Raise the bounds of answers by random weights, so that the model's predictions are about those of one
    distribution, as after training."""
    weights = np.exp(8.0 * keyed_rng(8, RngStream.MASKS).random(len(answers.requests)))
    loader = FixedAnswers(
        model, rl_config(**UNGROUPED, logprobs="bound"), answers, (weights / weights.sum()).tolist(), seed=1
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(num_steps):
        loader.backward(step)
        optimizer.step()


def format_table(num_draws: int = 400) -> str:
    """Markdown: a line for each estimator and attention."""
    lines = [
        "| attention | log p | estimate | bias | deviation | forwards | cosine |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, block_length in (("bidirectional", None), ("blocks of 2", 2)):
        model = small_model(block_length)
        fit(model, enumerate_answers(model, max_new_tokens=4))
        answers = enumerate_answers(model, max_new_tokens=4)
        logprobs_Q = compute_logprobs(model, answers).detach()
        mean = float((logprobs_Q.exp() * logprobs_Q).sum())
        for estimator, keys in ESTIMATORS.items():
            is_random = keys["kind"] not in ("replay", "mean_field") or "sampled_steps" in keys
            own = assess(model, answers, keys, num_draws if is_random else 1)
            bias = f"{own.bias:+.3f}" if abs(own.bias) > 1e-9 else "0"
            deviation = f"{own.deviation:.3f}" if own.deviation > 1e-9 else "0"
            lines.append(
                f"| {name} | {mean:.3f} | {estimator} | {bias} | {deviation} | {own.forwards:.1f} | {own.cosine:.3f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(format_table())
