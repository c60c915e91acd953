"""Compare the likelihoods of the options of a document: common random numbers, and draws until the best one leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.evaluation.likelihood.answers import AnswerEstimate, SamplingPlan
from diffusionlm.evaluation.likelihood.copies import CopyTable, count_forwards
from diffusionlm.evaluation.likelihood.scoring import AnswerBuilder, OnProgress, normalize_key, split_into_groups
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class OptionsRequest:
    """A context and the options that may follow it."""

    context: tuple[int, ...]
    """Token ids; may be empty unless the model's outputs are shifted."""
    options: tuple[tuple[int, ...], ...]
    """Token ids of each option, at least one token; one option may be the beginning of another."""
    key: int | tuple[int, ...] = 0
    """Non-negative numbers from which the masks of all options are drawn, besides the seed."""
    divisors: tuple[tuple[float, ...], ...] = ()
    """By rule: what the log-likelihood of each option is divided by before options are compared, such as its length.
    Racing ends once all rules are decided. Empty: one rule, without division."""


@dataclass(frozen=True)
class OptionScores:
    """Log-likelihoods of the options of a document, all exact or all sampled with the same masks."""

    log_likelihoods: tuple[float, ...]
    """Of each option, in nats, over all its tokens."""
    standard_errors: tuple[float, ...]
    """Sampling error of each; 0 if exact."""
    difference_standard_errors: tuple[float, ...]
    """Sampling error of the difference between each option and the chosen one, from their common draws; 0 for the
    chosen one."""
    chosen: int
    """Index of the option with the highest log-likelihood, the first of equals."""
    num_tokens: tuple[int, ...]
    """Tokens of each option."""
    num_forwards: int
    """Forwards of a single row that computed all options; equal inputs are computed once."""
    is_exact: bool


def score_options(
    model: Transformer,
    context: Sequence[int],
    options: Sequence[Sequence[int]],
    key: int | tuple[int, ...] = 0,
    config: AnswerLikelihoodConfig | None = None,
) -> OptionScores:
    """Score the options of one document; see `score_documents`."""
    request = OptionsRequest(tuple(context), tuple(map(tuple, options)), key)
    return score_documents(model, [request], config)[0]


def score_documents(
    model: Transformer,
    requests: Sequence[OptionsRequest],
    config: AnswerLikelihoodConfig | None = None,
    on_progress: OnProgress | None = None,
) -> list[OptionScores]:
    """Score the options of many documents, each document by itself.

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
    for group in split_into_groups(requests, _count_tokens, config):
        races = [_Race(builder, request, config, f"document {len(scores) + i}") for i, request in enumerate(group)]
        table, unfinished = CopyTable(builder.layout, cfg_scale=config.cfg_scale), races
        while unfinished:
            readers = [reader for race in unfinished for reader in race.add_stage(table)]
            table.compute(model, config.batch_tokens)
            for reader in readers:
                reader()
            unfinished = [race for race in unfinished if not race.is_decided()]
        scores += [race.build_scores() for race in races]
        if on_progress is not None:
            on_progress(len(scores), len(requests))
    return scores


def _count_tokens(request: OptionsRequest) -> int:
    return sum(len(request.context) + len(option) for option in request.options)


class _Race:
    """The options of one document."""

    def __init__(
        self, builder: AnswerBuilder, request: OptionsRequest, config: AnswerLikelihoodConfig, name: str
    ) -> None:
        if not request.options:
            raise ValueError(f"{name} has no options: give at least one")
        answers = [
            builder.build(request.context, option, f"option {index} of {name}")
            for index, option in enumerate(request.options)
        ]
        self._config = config
        self._plan = SamplingPlan.from_answers(answers, config)
        self._divisors = request.divisors or ((1.0,) * len(answers),)
        key = normalize_key(request.key)
        self._estimates = [AnswerEstimate(answer, self._plan, config.seed, key) for answer in answers]
        self._num_stages = 0

    def add_stage(self, table: CopyTable) -> list[Callable[[], None]]:
        """Add the copies of the next stage, or of all stages without racing. Returns what reads their values."""
        is_race = self._config.racing and len(self._estimates) > 1
        self._num_stages = self._num_stages + 1 if is_race else self._plan.num_stages
        num_draws = self._plan.num_draws(self._num_stages)
        return [estimate.add_copies(table, num_draws) for estimate in self._estimates]

    def is_decided(self) -> bool:
        """By each rule the best option leads every other by enough, or all draws are made."""
        return self._num_stages == self._plan.num_stages or all(map(self._leads, self._divisors))

    def _leads(self, divisors: Sequence[float]) -> bool:
        """Whether one option leads every other by enough, if log-likelihoods are divided by these numbers."""
        values = np.array(self._log_likelihoods()) / divisors
        best = int(values.argmax())
        errors = self._difference_errors(best, divisors)
        return all(
            values[best] - value > self._config.racing_standard_errors * error
            for index, (value, error) in enumerate(zip(values, errors, strict=True))
            if index != best
        )

    def _log_likelihoods(self) -> list[float]:
        return [estimate.log_likelihood for estimate in self._estimates]

    def _chosen(self) -> int:
        return int(np.argmax(self._log_likelihoods()))

    def _difference_errors(self, chosen: int, divisors: Sequence[float]) -> list[float]:
        reference = self._estimates[chosen]
        return [
            0.0 if index == chosen else estimate.difference_error(reference, (divisors[index], divisors[chosen]))
            for index, estimate in enumerate(self._estimates)
        ]

    def build_scores(self) -> OptionScores:
        chosen = self._chosen()
        return OptionScores(
            tuple(self._log_likelihoods()),
            tuple(estimate.standard_error for estimate in self._estimates),
            tuple(self._difference_errors(chosen, (1.0,) * len(self._estimates))),
            chosen,
            tuple(estimate.answer.num_tokens for estimate in self._estimates),
            count_forwards([handle for estimate in self._estimates for handle in estimate.handles]),
            self._plan.is_exact,
        )
