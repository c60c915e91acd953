"""Log-likelihoods of continuations after their contexts, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.model import ModelConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.likelihood.answers import AnswerEstimate, BlockedAnswer, Key, SamplingPlan
from diffusionlm.evaluation.likelihood.copies import CopyTable
from diffusionlm.inference.settings import check_token_ids
from diffusionlm.models.transformer import Transformer

Item = TypeVar("Item")

OnProgress = Callable[[int, int], None]
"""Called with the number of scored requests, and of all requests."""


@dataclass(frozen=True)
class ScoringRequest:
    """A continuation to be scored after its context."""

    context: tuple[int, ...]
    """Token ids, read but not scored; may be empty unless the model's outputs are shifted."""
    continuation: tuple[int, ...]
    """Token ids, at least one."""
    key: int | tuple[int, ...] = 0
    """Non-negative numbers from which the masks are drawn, besides the seed: the same for requests that are to be
    compared, such as the options of a document."""


@dataclass(frozen=True)
class ContinuationScore:
    """The log-likelihood of a continuation: of masked diffusion a bound, which is at most it."""

    log_likelihood: float
    """In nats, over all tokens."""
    standard_error: float
    """Sampling error of `log_likelihood`; 0 if it is exact, infinite with a single draw."""
    num_tokens: int
    """Tokens of the continuation."""
    num_forwards: int
    """Forwards of a single row that compute it. A row in block-causal attention holds a masked copy of each block."""
    is_exact: bool
    """The value has no sampling error: all masks were enumerated, or there is just one."""


@dataclass(frozen=True)
class AnswerBuilder:
    """Builds the answers of a model and of settings."""

    model: ModelConfig
    layout: InputLayout
    scored_suffix: tuple[int, ...]
    """Tokens after each continuation that belong to it."""
    suffix: tuple[int, ...]
    """Tokens after each continuation that are not scored."""

    @classmethod
    def from_model(cls, model: ModelConfig, config: AnswerLikelihoodConfig) -> AnswerBuilder:
        """Resolve the block length, and the end-of-text token.

        Raises:
            ValueError: the model has no mask token, and is not autoregressive; or it has no end-of-text token, and the
                settings need one.
        """
        block_length = None if config.bidirectional else config.block_length or model.block_length
        layout = InputLayout.from_config(model, block_length)
        if config.end_of_text == "none":
            return cls(model, layout, (), ())
        if model.eos_token_id is None:
            raise ValueError(
                f'end_of_text = "{config.end_of_text}" needs a token, and the model\'s config.json names no '
                'eos_token_id: set end_of_text = "none"'
            )
        eos = (model.eos_token_id,)
        return cls(model, layout, eos, ()) if config.end_of_text == "scored" else cls(model, layout, (), eos)

    def build(self, context: Sequence[int], continuation: Sequence[int], name: str) -> BlockedAnswer:
        """Build an answer; an error calls it ``name``.

        Raises:
            ValueError: it is empty, too long for the model's context, or has a token that the model cannot predict.
        """
        check_token_ids((*context, *continuation), self.model, name)
        suffix = self.scored_suffix if len(continuation) else ()
        answer = BlockedAnswer(self.layout, context, (*continuation, *suffix), name, suffix=self.suffix)
        limit = self.model.max_position_embeddings
        if len(answer.tokens_T) > limit:
            raise ValueError(
                f"{name} has {len(answer.tokens_T)} tokens with its context, more than max_position_embeddings = "
                f"{limit} of the model: remove the first tokens of the context"
            )
        return answer


def normalize_key(key: int | tuple[int, ...]) -> Key:
    """The key as a tuple.

    Raises:
        ValueError: it has a negative number.
    """
    numbers = key if isinstance(key, tuple) else (key,)
    if any(number < 0 for number in numbers):
        raise ValueError(f"key = {key} of a request must have no negative number")
    return numbers


def score_continuations(
    model: Transformer,
    requests: Sequence[ScoringRequest],
    config: AnswerLikelihoodConfig | None = None,
    on_progress: OnProgress | None = None,
) -> list[ContinuationScore]:
    """Score continuations, each by itself: the value of a request does not depend on the others, or on their order.

    Texts of any lengths share a forward without padding, and attend to themselves only; matrix products over more rows
    may round differently in the last bits (1e-5 nats in fp32).

    Raises:
        ValueError: a continuation is empty, too long for the model's context, or has a token that the model cannot
            predict; or the model's probabilities are not finite.
    """
    config = AnswerLikelihoodConfig() if config is None else config
    builder = AnswerBuilder.from_model(model.config, config)
    scores: list[ContinuationScore] = []
    for group in split_into_groups(requests, lambda item: len(item.context) + len(item.continuation), config):
        table = CopyTable(builder.layout, cfg_scale=config.cfg_scale)
        readers, estimates = [], []
        for index, request in enumerate(group, start=len(scores)):
            answer = builder.build(request.context, request.continuation, f"continuation {index}")
            plan = SamplingPlan.from_answers([answer], config)
            estimate = AnswerEstimate(answer, plan, config.seed, normalize_key(request.key))
            readers.append(estimate.add_copies(table, plan.num_draws(plan.num_stages)))
            estimates.append(estimate)
        table.compute(model, config.batch_tokens)
        for reader, estimate in zip(readers, estimates, strict=True):
            reader()
            scores.append(
                ContinuationScore(
                    estimate.log_likelihood,
                    estimate.standard_error,
                    estimate.answer.num_tokens,
                    estimate.num_forwards,
                    estimate.plan.is_exact,
                )
            )
        if on_progress is not None:
            on_progress(len(scores), len(requests))
    return scores


def split_into_groups(
    items: Sequence[Item], count_tokens: Callable[[Item], int], config: AnswerLikelihoodConfig
) -> Iterator[Sequence[Item]]:
    """Split items, in order, into groups whose copies fill some forwards; memory is for the copies of one group."""
    start = num_tokens = 0
    for index, item in enumerate(items):
        num_tokens += count_tokens(item)
        if index > start and num_tokens > config.batch_tokens:
            yield items[start:index]
            start, num_tokens = index, count_tokens(item)
    if items:
        yield items[start:]
