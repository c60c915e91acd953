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
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.likelihood.answers import AnswerBuilder, BlockedAnswer
from diffusionlm.evaluation.likelihood.copies import (
    MaskedCopy,
    compute_log_probabilities,
    count_forwards,
    split_by_size,
)
from diffusionlm.evaluation.likelihood.masks import (
    WeightedMasks,
    count_order_pair_masks,
    enumerate_masks,
    independent_standard_error,
    mean_cover_sets,
    sample_levels,
    sample_masks,
    stratified_standard_error,
)
from diffusionlm.evaluation.statistics import check_positive
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.images import FeatureReader
from diffusionlm.inference.requests import DEFAULT_OPTIONS, RequestOptions
from diffusionlm.models.transformer import Transformer

MIN_ORDER_PAIRS = 2
"""Answers of which fewer orders fit into the samples are estimated from covers."""


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
    context_options: RequestOptions = DEFAULT_OPTIONS
    """Images in the context, and their processor."""


@dataclass(frozen=True)
class OptionScores:
    """Log-likelihoods of the options of a document, all exact or all sampled with the same masks. Of masked diffusion
    they are bounds, which are at most the log-likelihoods."""

    log_likelihoods: tuple[float, ...]
    """Of each option, in nats, over all its tokens."""
    standard_errors: tuple[float, ...]
    """Sampling error of each; 0 if exact, infinite with a single draw."""
    num_tokens: tuple[int, ...]
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


def conditional_likelihood(
    model: Transformer,
    prompt: Sequence[int] | HealedText,
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
        prompt: with images what `expand_images` returns.
        block_length: tokens per block, counted from the start of the prompt. None: bidirectional.
        seed: of the masks.
        batch_size: masked copies per forward.

    Raises:
        ValueError: the answer is empty or has a token that the model cannot predict, an argument is below 1, or the
            model's probabilities are not finite.
    """
    text = prompt if isinstance(prompt, HealedText) else HealedText(tuple(prompt))
    check_positive(num_mc_samples=num_mc_samples, block_length=block_length, batch_size=batch_size)
    config = AnswerLikelihoodConfig(
        num_mc_samples=num_mc_samples,
        block_length=block_length,
        bidirectional=block_length is None,
        seed=seed,
        batch_tokens=batch_size * max(1, len(text.token_ids) + len(answer)),
    )
    request = OptionsRequest(text.token_ids, (tuple(answer),), context_options=text.options)
    [score] = score_documents(model, [request], config)
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
    builder = AnswerBuilder(model.config, config, FeatureReader(model))
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


class AdaptiveSampler:
    """The log-likelihoods of the options of one document, of which draws are added until the best one leads.

    Draws are orders with their reverses, or else covers, with common random numbers for all options.
    Shapes: G blocks of an answer, C masks of a block, D draws.
    """

    def __init__(
        self, builder: AnswerBuilder, request: OptionsRequest, config: AnswerLikelihoodConfig, name: str
    ) -> None:
        if not request.options:
            raise ValueError(f"{name} has no options: give at least one")
        self._answers = [
            builder.build(request.context, option, f"option {index} of {name}", request.context_options)
            for index, option in enumerate(request.options)
        ]
        self._config = config
        self._divisors = request.divisors or ((1.0,) * len(self._answers),)
        self._key = (request.key,) if request.window is None else (request.key, request.window)
        limit = config.max_enumerated_forwards or config.num_mc_samples
        self.is_exact = max(answer.num_masks for answer in self._answers) <= limit
        self._plan_draws()
        self._values = [np.zeros((len(answer.blocks), 0)) for answer in self._answers]
        """Of each answer the estimates of its blocks' log-likelihoods in each draw, [G, D]; one draw if exact."""
        self._copies: list[MaskedCopy] = []
        self._new_masks: list[list[WeightedMasks]] = []
        """Masks of each block of each answer whose copies are computed next."""

    def _plan_draws(self) -> None:
        """Choose between orders and covers, and the draws after each stage: one stage, or doublings in a race."""
        longest = max(len(block.positions) for answer in self._answers for block in answer.blocks)
        num_draws = self._config.num_mc_samples // count_order_pair_masks(longest)
        self._draws_orders = num_draws >= MIN_ORDER_PAIRS
        if not self._draws_orders:
            num_draws = max(1, int(self._config.num_mc_samples / mean_cover_sets(longest)))
        num_stages = 1
        while not self.is_exact and num_draws >> num_stages >= self._config.racing_first_draws:
            num_stages += 1
        num_first = 1 if self.is_exact else num_draws >> (num_stages - 1)
        self._stages = [num_first << stage for stage in range(num_stages)]
        num_blocks = max(len(answer.blocks) for answer in self._answers)
        rngs = [keyed_rng(self._config.seed, RngStream.ANSWER_LEVELS, *self._key, block) for block in range(num_blocks)]
        self._levels_GD = [sample_levels(num_first, self._stages[-1], rng) for rng in rngs]
        if not self._config.racing or len(self._answers) == 1:
            self._stages = self._stages[-1:]

    def add_stage(self) -> list[MaskedCopy]:
        """The masked copies of the draws of the next stage, whose log-probabilities `read` takes."""
        num_draws = self._stages.pop(0)
        self._new_masks = [
            [self._choose_masks(answer, number, num_draws) for number in range(len(answer.blocks))]
            for answer in self._answers
        ]
        copies = [
            answer.mask_block(block, is_masked_n)
            for answer, own in zip(self._answers, self._new_masks, strict=True)
            for block, masks in zip(answer.blocks, own, strict=True)
            for is_masked_n in masks.is_masked_Cn
        ]
        self._copies += copies
        return copies

    def _choose_masks(self, answer: BlockedAnswer, number: int, num_draws: int) -> WeightedMasks:
        """Masks of a block for the draws up to ``num_draws``."""
        size, first = len(answer.blocks[number].positions), self._values[0].shape[1]
        if answer.layout.is_autoregressive:
            return WeightedMasks(np.ones((1, size), dtype=np.bool_), np.ones((1, size)), np.zeros(1, dtype=np.int64))
        if self.is_exact:
            return enumerate_masks(size)
        levels_D, key = self._levels_GD[number][:num_draws], (*self._key, number)
        return sample_masks(size, levels_D, first, self._config.seed, key, draws_orders=self._draws_orders)

    def read(self, log_probabilities: Iterator[NDArray[np.float64]]) -> None:
        first = self._values[0].shape[1]
        for index, own in enumerate(self._new_masks):
            values_GD = np.zeros((len(own), 1 + int(own[0].draws_C[-1]) - first))
            for values_D, masks in zip(values_GD, own, strict=True):
                values_C = [
                    float(weights_n[is_masked_n] @ next(log_probabilities))
                    for is_masked_n, weights_n in zip(masks.is_masked_Cn, masks.weights_Cn, strict=True)
                ]
                np.add.at(values_D, masks.draws_C - first, values_C)
            self._values[index] = np.concatenate([self._values[index], values_GD], axis=1)

    def is_decided(self) -> bool:
        """By each rule the best option leads every other by enough, or all draws are made."""
        return not self._stages or all(map(self._leads, self._divisors))

    def _leads(self, divisors: Sequence[float]) -> bool:
        """Whether one option leads every other by enough, if log-likelihoods are divided by these numbers."""
        values = self._log_likelihoods() / divisors
        best = int(values.argmax())
        leads = values[best] - values > self._config.racing_standard_errors * self.difference_errors(best, divisors)
        return bool(np.delete(leads, best).all())

    def _log_likelihoods(self) -> NDArray[np.float64]:
        """Sums over the blocks of the means of their draws."""
        return np.array([float(values_GD.mean(axis=1).sum()) for values_GD in self._values])

    def _standard_error(self, values_GD: NDArray[np.float64]) -> float:
        """Standard error of the sum over blocks of the means over draws; the draws of blocks are independent."""
        if self.is_exact:
            return 0.0
        errors = [
            independent_standard_error(values_D)
            if self._draws_orders
            else stratified_standard_error(levels_D[: len(values_D)], values_D)
            for levels_D, values_D in zip(self._levels_GD, values_GD, strict=False)
        ]
        return float(np.sqrt(np.sum(np.square(errors))))

    def difference_errors(self, chosen: int, divisors: Sequence[float]) -> NDArray[np.float64]:
        """Standard error of the difference between each option and the chosen one, divided first."""
        quotients = [values_GD / divisor for values_GD, divisor in zip(self._values, divisors, strict=True)]
        num_blocks = max(map(len, quotients))
        padded = [np.pad(values_GD, ((0, num_blocks - len(values_GD)), (0, 0))) for values_GD in quotients]
        return np.array([self._standard_error(values_GD - padded[chosen]) for values_GD in padded])

    def build_scores(self) -> OptionScores:
        return OptionScores(
            tuple(self._log_likelihoods().tolist()),
            tuple(map(self._standard_error, self._values)),
            tuple(answer.num_tokens for answer in self._answers),
            count_forwards(self._copies),
            self.is_exact,
        )
