"""Log-likelihood of one answer given its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.evaluation.likelihood.scoring import ScoringRequest, score_continuations
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class LikelihoodEstimate:
    """Log-likelihood of an answer given its prompt."""

    log_likelihood: float
    """Sum over the answer's tokens in nats, at most 0: minus the NELBO, or exact."""
    standard_error: float
    """Standard error of `log_likelihood` over masks; 0 if all of them are enumerated, infinite for a single draw."""
    num_tokens: int
    """Number of tokens in the answer."""


def conditional_likelihood(
    model: Transformer,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    block_length: int | None = None,
    num_mc_samples: int = 128,
    seed: int = 0,
    batch_size: int = 32,
) -> LikelihoodEstimate:
    """Compute the log-likelihood of an answer given a clean prompt: LLaDA's quantity (Nie et al. 2025, appendix B.5).

    Answers with at most ``num_mc_samples`` masks are enumerated: up to 7 tokens for 128, any number in blocks of up to
    7. Others are estimated from about ``num_mc_samples`` masked copies (`score_continuations`). Answers of one token
    and blocks of one token take a single forward.

    Args:
        block_length: tokens per block, counted from the start of the prompt. None: bidirectional.
        seed: of the masks.
        batch_size: masked copies per forward.

    Raises:
        ValueError: the answer is empty or has a token that the model cannot predict, an argument is below 1, or the
            model's probabilities are not finite.
    """
    for name, value in {
        "num_mc_samples": num_mc_samples,
        "block_length": block_length,
        "batch_size": batch_size,
    }.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
    config = AnswerLikelihoodConfig(
        num_mc_samples=num_mc_samples,
        block_length=block_length,
        bidirectional=block_length is None,
        seed=seed,
        batch_tokens=batch_size * max(1, len(prompt) + len(answer)),
    )
    [score] = score_continuations(model, [ScoringRequest(tuple(prompt), tuple(answer))], config)
    return LikelihoodEstimate(score.log_likelihood, score.standard_error, score.num_tokens)
