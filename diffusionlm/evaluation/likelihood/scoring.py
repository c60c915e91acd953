"""Log-likelihoods of options after their contexts, of one answer and of whole texts; and greedy matches.

Options of a document have common random numbers, and are drawn until the best one leads. Texts of any lengths share a
forward without padding, and attend to themselves only; matrix products over more rows may round differently in the last
bits (1e-5 nats in fp32).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from config.evaluation.likelihood import AnswerLikelihoodConfig
from config.model import ModelConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.evaluation.likelihood.answers import AnswerEstimate, BlockedAnswer, SamplingPlan
from diffusionlm.evaluation.likelihood.copies import (
    MaskedCopy,
    compute_log_probabilities,
    count_forwards,
    split_by_size,
)
from diffusionlm.evaluation.statistics import check_positive
from diffusionlm.inference.settings import check_token_ids
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class OptionsRequest:
    """A context and the options that may follow it, or the only continuation that is scored."""

    context: tuple[int, ...]
    """Token ids, read but not scored; may be empty unless the model's outputs are shifted."""
    options: tuple[tuple[int, ...], ...]
    """Token ids of each option, at least one token; one option may be the beginning of another."""
    key: int = 0
    """Non-negative number from which the masks of all options are drawn, besides the seed."""
    window: int | None = None
    """Number of a window of a text, which has masks of its own."""
    divisors: tuple[tuple[float, ...], ...] = ()
    """By rule: what the log-likelihood of each option is divided by before options are compared, such as its length.
    Racing ends once all rules are decided. Empty: one rule, without division."""


@dataclass(frozen=True)
class OptionScores:
    """Log-likelihoods of the options of a document, all exact or all sampled with the same masks. Of masked diffusion
    they are bounds, which are at most the log-likelihoods."""

    log_likelihoods: tuple[float, ...]
    """Of each option, in nats, over all its tokens."""
    standard_errors: tuple[float, ...]
    """Sampling error of each; 0 if exact, infinite with a single draw."""
    num_tokens: tuple[int, ...]
    """Tokens of each option."""
    num_forwards: int
    """Forwards of a single row that computed all options; equal inputs are computed once. A row in block-causal
    attention holds a masked copy of each block."""
    is_exact: bool
    """The values have no sampling error: all masks were enumerated, or there is just one."""

    @property
    def log_likelihood(self) -> float:
        """That of the only option."""
        [value] = self.log_likelihoods
        return value

    @property
    def standard_error(self) -> float:
        """That of the only option."""
        [value] = self.standard_errors
        return value


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
    7. Others are estimated from about ``num_mc_samples`` masked copies. Answers of one token and blocks of one token
    take a single forward.

    Args:
        block_length: tokens per block, counted from the start of the prompt. None: bidirectional.
        seed: of the masks.
        batch_size: masked copies per forward.

    Raises:
        ValueError: the answer is empty or has a token that the model cannot predict, an argument is below 1, or the
            model's probabilities are not finite.
    """
    check_positive(num_mc_samples=num_mc_samples, block_length=block_length, batch_size=batch_size)
    config = AnswerLikelihoodConfig(
        num_mc_samples=num_mc_samples,
        block_length=block_length,
        bidirectional=block_length is None,
        seed=seed,
        batch_tokens=batch_size * max(1, len(prompt) + len(answer)),
    )
    [score] = score_documents(model, [OptionsRequest(tuple(prompt), (tuple(answer),))], config)
    return LikelihoodEstimate(score.log_likelihood, score.standard_error, score.num_tokens[0])


def score_documents(
    model: Transformer, requests: Sequence[OptionsRequest], config: AnswerLikelihoodConfig | None = None
) -> list[OptionScores]:
    """Score the options of many documents, each document by itself: a value does not depend on the other documents.

    All options of a document are exact, if each can be enumerated, or are sampled with common random numbers: the same
    shares of masked tokens, and the same order of the tokens by their index in the option. With `racing` the draws of a
    document are doubled until, by each rule of `OptionsRequest.divisors`, the best option leads every other by
    ``racing_standard_errors`` of their difference.

    Raises:
        ValueError: a document has no option, an option is empty, too long for the model's context, or has a token that
            the model cannot predict; or the model's probabilities are not finite.
    """
    config = AnswerLikelihoodConfig() if config is None else config
    builder = AnswerBuilder.from_model(model.config, config)
    scores: list[OptionScores] = []
    sizes = [(sum(len(request.context) + len(option) for option in request.options),) for request in requests]
    for group in split_by_size(requests, sizes, (config.batch_tokens,)):  # memory is for the copies of one group
        samplers = [
            AdaptiveSampler(builder, request, config, f"document {len(scores) + i}") for i, request in enumerate(group)
        ]
        unfinished = samplers
        while unfinished:
            copies = [copy for sampler in unfinished for copy in sampler.add_stage()]
            values = compute_log_probabilities(model, builder.layout, copies, config.batch_tokens, config.cfg_scale)
            remaining = iter(values)
            for sampler in unfinished:
                sampler.read(remaining)
            unfinished = [sampler for sampler in unfinished if not sampler.is_decided()]
        scores += [sampler.build_scores() for sampler in samplers]
    return scores


def score_texts(
    model: Transformer,
    requests: Sequence[OptionsRequest],
    window: int | None = None,
    config: AnswerLikelihoodConfig | None = None,
) -> list[float]:
    """Sum log-likelihoods over windows, which together hold each token of a text once and are texts by themselves.

    A window has one token that it does not score, the last one of the window before it, or the context of the first.
    The sum is a bound: minus what `nelbo` estimates for the same windows as rows. With blocks of one token it is the
    exact log-likelihood of the windows. Longer windows give the model more context, so a value belongs to its window.

    Args:
        requests: texts as the only option, after a context of at most one token, which a model with shifted outputs
            needs.
        window: tokens of a window, with the one that is not scored. None: the model's context.

    Raises:
        ValueError: the window is below 2 or longer than the model's context, the settings have guidance or an
            end-of-text token, or `score_documents` raises.
    """
    if config is not None and (config.cfg_scale > 0.0 or config.end_of_text != "none"):
        raise ValueError(
            f'cfg_scale = {config.cfg_scale} and end_of_text = "{config.end_of_text}": windows of a text have neither '
            'guidance nor an end; set 0 and "none"'
        )
    window = model.config.max_position_embeddings if window is None else window
    if not 2 <= window <= model.config.max_position_embeddings:
        raise ValueError(
            f"window = {window} must be between 2 and the model's context, {model.config.max_position_embeddings}"
        )
    windows = [_split_into_windows(request, window) for request in requests]
    scores = iter(score_documents(model, list(chain.from_iterable(windows)), config))
    return [sum(score.log_likelihood for score in islice(scores, len(own))) for own in windows]


def _split_into_windows(request: OptionsRequest, window: int) -> list[OptionsRequest]:
    prefix, [text] = request.context, request.options
    tokens = prefix + text
    first = OptionsRequest(prefix, (tokens[len(prefix) : window],), request.key, window=0)
    starts = range(window - 1, len(tokens) - 1, window - 1)
    return [
        first,
        *(
            OptionsRequest(tokens[start : start + 1], (tokens[start + 1 : start + window],), request.key, number)
            for number, start in enumerate(starts, start=1)
        ),
    ]


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
        if not len(continuation):
            raise ValueError(f"{name} is empty, and has no likelihood: give at least one token")
        if self.layout.alignment == "shifted" and not len(context):
            raise ValueError(
                f"{name} has no context, and with shifted outputs the model cannot predict the first token of a text: "
                "put a token before it, such as the end-of-text token"
            )
        mask_token, limit = self.layout.mask_token, self.model.max_position_embeddings
        if mask_token is not None and mask_token in continuation:
            raise ValueError(
                f"{name} has the mask token {mask_token} at index {list(continuation).index(mask_token)}, which has "
                "probability zero: remove it"
            )
        scored = (*continuation, *self.scored_suffix)
        tokens = (*context, *scored, *self.suffix)
        if len(tokens) > limit:
            raise ValueError(
                f"{name} has {len(tokens)} tokens with its context, more than max_position_embeddings = {limit} of the "
                "model: remove the first tokens of the context"
            )
        return BlockedAnswer(self.layout, tokens, len(context), len(scored))


class AdaptiveSampler:
    """The options of one document, of which draws are added until the best one leads."""

    def __init__(
        self, builder: AnswerBuilder, request: OptionsRequest, config: AnswerLikelihoodConfig, name: str
    ) -> None:
        if not request.options:
            raise ValueError(f"{name} has no options: give at least one")
        names = [f"option {index} of {name}" for index in range(len(request.options))]
        answers = [builder.build(request.context, *option) for option in zip(request.options, names, strict=True)]
        self._config = config
        self._plan = SamplingPlan.from_answers(answers, config)
        self._divisors = request.divisors or ((1.0,) * len(answers),)
        key = (request.key,) if request.window is None else (request.key, request.window)
        self._estimates = [AnswerEstimate(answer, self._plan, config.seed, key) for answer in answers]
        self._num_stages = 0

    def add_stage(self) -> list[MaskedCopy]:
        """The copies of the next stage, or of all stages without racing."""
        is_race = self._config.racing and len(self._estimates) > 1
        self._num_stages = self._num_stages + 1 if is_race else self._plan.num_stages
        num_draws = self._plan.num_draws(self._num_stages)
        return [copy for estimate in self._estimates for copy in estimate.add_draws(num_draws)]

    def read(self, log_probabilities: Iterator[NDArray[np.float64]]) -> None:
        """Read the log-probabilities of the copies of the stage."""
        for estimate in self._estimates:
            estimate.read(log_probabilities)

    def is_decided(self) -> bool:
        """By each rule the best option leads every other by enough, or all draws are made."""
        return self._num_stages == self._plan.num_stages or all(map(self._leads, self._divisors))

    def _leads(self, divisors: Sequence[float]) -> bool:
        """Whether one option leads every other by enough, if log-likelihoods are divided by these numbers."""
        values = self._log_likelihoods() / divisors
        best = int(values.argmax())
        leads = values[best] - values > self._config.racing_standard_errors * self.difference_errors(best, divisors)
        return bool(np.delete(leads, best).all())

    def _log_likelihoods(self) -> NDArray[np.float64]:
        return np.array([estimate.log_likelihood for estimate in self._estimates])

    def difference_errors(self, chosen: int, divisors: Sequence[float]) -> NDArray[np.float64]:
        """Standard error of the difference between each option and the chosen one, divided first."""
        reference, own = self._estimates[chosen], divisors[chosen]
        pairs = zip(self._estimates, divisors, strict=True)
        return np.array([estimate.difference_error(reference, (divisor, own)) for estimate, divisor in pairs])

    def build_scores(self) -> OptionScores:
        """The scores of all draws so far."""
        return OptionScores(
            tuple(self._log_likelihoods().tolist()),
            tuple(estimate.standard_error for estimate in self._estimates),
            tuple(estimate.answer.num_tokens for estimate in self._estimates),
            count_forwards([copy for estimate in self._estimates for copy in estimate.copies]),
            self._plan.is_exact,
        )
