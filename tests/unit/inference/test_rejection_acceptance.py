"""Rejection sampling of drafts: the law of the text by enumeration and by frequencies, acceptance, and reproducible
texts among other requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from config.generation import GenerationConfig
from diffusionlm.diffusion.rng import RngStream
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, generate, stream
from diffusionlm.inference.request_builder import prepare_prompt_scoring, prepare_request
from diffusionlm.inference.requests import ActiveRequest, PreparedRequest, RequestOptions
from diffusionlm.inference.sampling import distributions
from diffusionlm.inference.sampling.rejection import verify_drafts
from diffusionlm.inference.sampling.token_sampler import BatchSampler, LogitRows
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.speculation.state import SpeculationState
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import LIMITS, assert_same, limit_decoder, run_all
from tests.reference.enumeration import table_config
from tests.unit.inference.test_speculation import KINDS, MODELS, PROMPTS, config_of, prepare, with_laws

Text = tuple[int, ...]
Law = NDArray[np.float64]
Like = Callable[..., Transformer]
NUM_TOKENS, NUM_NEW = 3, 5
EDGE = 1e-13
"""Distance from the ends of an interval of draws, within which all draws have to give one token."""


# ----------------------------------------------------------------------------------------------------------------------
# The law of the text by enumeration


class RandomTables:
    """Logits that depend on the whole text before a position, and those of drafts that have nothing to do with them.
    The mask token, which may never be chosen, is the most probable one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logits(self, text: Text, drafted_position: int = 0) -> Law:
        """Of the next token; with a position those of a mask there, behind this text."""
        rng = np.random.default_rng([self._seed, drafted_position, 1, *text])
        return np.append(1.5 * rng.standard_normal(NUM_TOKENS), 5.0)


def filter_plainly(logits: Law, text: Text, config: GenerationConfig, bias: Mapping[int, float]) -> Law:
    """The distribution after a text that a request asks for, of the tokens without the mask."""
    logits = np.array([logit + bias.get(token, 0.0) for token, logit in enumerate(logits[:NUM_TOKENS])])
    penalties = np.where(np.isin(range(NUM_TOKENS), text), config.repetition_penalty, 1.0)
    logits = np.where(logits > 0.0, logits / penalties, logits * penalties)
    probs = np.exp(logits / (config.temperature or 1.0))
    order = np.argsort(-probs)
    probs[order[config.top_k or NUM_TOKENS :]] = 0.0
    probs /= probs.sum()
    num_inside = 1 + int((probs[order].cumsum() < config.top_p).sum())
    probs[order[num_inside:]] = 0.0
    probs[probs < config.min_p * probs.max()] = 0.0
    return np.asarray(probs / probs.sum())


def next_token_law(tables: RandomTables, config: GenerationConfig, bias: Mapping[int, float]) -> dict[Text, float]:
    law: dict[Text, float] = {(): 1.0}
    for _ in range(NUM_NEW):
        law = {
            (*text, token): own * prob
            for text, own in law.items()
            for token, prob in enumerate(filter_plainly(tables.logits((0, *text)), (0, *text), config, bias))
        }
    return {text: prob for text, prob in law.items() if prob}


class ChosenDraws(ActiveRequest):
    """A request whose random numbers are chosen, each by its position."""

    draws: Mapping[RngStream, Law]

    def draw_uniforms(self, stream: RngStream, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.draws[stream][positions]


STREAMS = (RngStream.TOKEN_SAMPLING, RngStream.DRAFT_ACCEPTANCE, RngStream.DRAFT_RESIDUAL)
Interval = tuple[float, float]
Cell = tuple[Interval, ...]
"""Intervals of the numbers of `STREAMS` at a position, in which the position has one token."""
MIDDLE = (0.5, 0.5)


def split_interval(weights: Sequence[float]) -> list[Interval]:
    """Parts of [0, 1) in proportion to weights, without empty ones."""
    ends = np.cumsum(weights) / np.sum(weights)
    return [(end - weight / np.sum(weights), end) for end, weight in zip(ends, weights, strict=True) if weight > 0.0]


def find_cells(law: Law, draft: tuple[int, Law] | None) -> list[tuple[Cell, float]]:
    """Cells of a position, and the probability of each. A verified draft has the number that it was sampled with."""
    if draft is None:
        return [((part, MIDDLE, MIDDLE), part[1] - part[0]) for part in split_interval([*law])]
    token, draft_law = draft
    start = draft_law[:token].sum()
    own = (start + draft_law[token] / 2,) * 2
    accepted = min(1.0, law[token] / draft_law[token])
    residual = np.maximum(law - draft_law, 0.0)
    sampled = split_interval([*residual]) if residual.any() else [(0.0, 1.0)]
    parts = split_interval([accepted, 1.0 - accepted])
    return [((own, part, other), np.diff(part)[0] * np.diff(other)[0]) for part in parts for other in sampled]


def corners(cell: Cell) -> list[tuple[float, ...]]:
    return list(product(*((low,) if low == high else (low + EDGE, high - EDGE) for low, high in cell)))


class TextEnumerator:
    """The law of the text that speculation emits, by the project's sampler and state: each forward is sampled with all
    numbers at which a token may change."""

    def __init__(self, tables: RandomTables, config: GenerationConfig, bias: Mapping[int, float]) -> None:
        model = table_config(NUM_TOKENS, 8, block_length=4, clean_alignment="shifted")
        self._settings = resolve_settings(config, model)
        self._tables, self._config, self._bias = tables, config, bias
        self._sampler = BatchSampler(torch.device("cpu"))

    def compute_law(self) -> dict[Text, float]:
        """Probability of each text."""
        law: defaultdict[Text, float] = defaultdict(float)
        pending: dict[tuple[Text, Text], tuple[float, SpeculationState, list[Law]]] = {}
        pending[(), ()] = 1.0, SpeculationState(self._settings), []
        while pending:
            # Forwards make a text longer, or draft behind it.
            key = min(pending, key=lambda own: (len(own[0]), len(own[1])))
            prob, state, draft_laws = pending.pop(key)
            for own, text, next_state, next_laws in self._step(key[0], state, draft_laws):
                if len(text) == NUM_NEW:
                    law[text] += prob * own
                else:
                    next_key = text, tuple(next_state.tokens.tolist())
                    before = pending.get(next_key, (0.0,))[0]
                    pending[next_key] = before + prob * own, next_state, next_laws
        return dict(law)

    def _step(
        self, text: Text, state: SpeculationState, draft_laws: list[Law]
    ) -> list[tuple[float, Text, SpeculationState, list[Law]]]:
        """Outcomes of a forward: probability, text, state, and the laws of its drafts."""
        options = RequestOptions(logit_bias=self._bias)
        request = ChosenDraws(prepare_request(self._settings, [0, *text], options=options))
        request.speculation = state = copy(state)
        request.prepare_step()
        placed = tuple(request.input_tokens_L.tolist())
        num_drafts, num_verified = len(state.tokens), state.num_verified
        rows, laws = [], []
        for index, position in enumerate(request.output_positions.tolist()):
            before = placed[: position if index < num_verified else state.start + num_drafts]
            rows.append(self._tables.logits(before, position if index >= num_verified else 0))
            laws.append(filter_plainly(rows[-1], before, self._config, self._bias))
        drafts = [*zip(state.tokens.tolist(), draft_laws, strict=True), *[None] * (len(rows) - num_drafts)]
        cells = [find_cells(law, draft) for law, draft in zip(laws, drafts, strict=True)]
        tokens, draft_probs = self._sample(request, np.stack(rows), [[cell for cell, _ in own] for own in cells])
        outcomes = []
        for chosen in product(*(range(len(own)) for own in cells)):
            next_state = copy(state)
            tokens_N = np.array([own[index] for own, index in zip(tokens, chosen, strict=True)])
            count = next_state.accept(tokens_N, (), draft_probs)
            prob = np.prod([own[index][1] for own, index in zip(cells, chosen, strict=True)])
            next_laws = laws[num_verified:] if len(next_state.tokens) else []
            outcomes.append((float(prob), (*text, *tokens_N[:count].tolist()), next_state, next_laws))
        return outcomes

    def _sample(
        self, request: ChosenDraws, logits: Law, cells: Sequence[Sequence[Cell]]
    ) -> tuple[list[list[int]], tuple[torch.Tensor, ...]]:
        """The token of each cell of each position, and what the forward drafts from."""
        numbers = [[corner for cell in own for corner in corners(cell)] for own in cells]
        requests = []
        for index in range(max(map(len, numbers))):
            requests.append(copy(request))
            draws = np.zeros((len(STREAMS), len(request.tokens_L)))
            draws[:, request.output_positions] = np.transpose([own[index % len(own)] for own in numbers])
            requests[-1].draws = dict(zip(STREAMS, draws, strict=True))
        logits_NV = torch.from_numpy(np.concatenate([logits] * len(requests)))
        results = []
        for result in self._sampler.sample_predictions(LogitRows(logits_NV, requests)):
            assert not isinstance(result, ValueError)
            results.append(result)
        tokens: list[list[int]] = []
        for row, own in enumerate(cells):
            sampled = iter(int(result.tokens_N[row]) for result in results)
            tokens.append([])
            for cell in own:
                [token] = {next(sampled) for _ in corners(cell)}
                tokens[-1].append(token)
        return tokens, results[0].draft_probs


FILTERS: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({"temperature": 1.0}, {}),
    ({"temperature": 0.6}, {0: 0.8, 2: -0.5, NUM_TOKENS: 9.0}),
    ({"temperature": 1.0, "top_k": 2}, {}),
    ({"temperature": 1.3, "top_p": 0.75}, {1: 0.5}),
    ({"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.6}, {}),
]


@pytest.mark.parametrize(("kind", "draft_length"), [("two_forwards", 2), ("one_forward", 1), ("one_forward", 2)])
@pytest.mark.parametrize(("values", "bias"), FILTERS, ids=["plain", "tempered", "top-k", "top-p", "min-p"])
def test_the_law_is_that_of_next_tokens(
    kind: str, draft_length: int, values: dict[str, Any], bias: dict[int, float]
) -> None:
    tables = RandomTables(seed=draft_length)
    config = config_of(kind, draft_length, acceptance="rejection", max_new_tokens=None, total_length=6, **values)
    law = TextEnumerator(tables, config, bias).compute_law()
    expected = next_token_law(tables, config, bias)
    assert law.keys() == expected.keys()
    assert sum(abs(law[text] - expected[text]) for text in expected) / 2 <= 1e-12


# ----------------------------------------------------------------------------------------------------------------------
# The whole way


def rejection_config(kind: str, draft_length: int, **values: Any) -> GenerationConfig:
    return config_of(kind, draft_length, **{"acceptance": "rejection", "temperature": 1.0, **values})


COMMITTED, DRAFTED = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
SAMPLING = {"temperature": 0.8, "top_k": 3}


def temper(probs: Sequence[float]) -> Law:
    """What `SAMPLING` makes of a law: four tokens, the least probable of which is left out."""
    tempered = np.where(np.array(probs) > min(probs), np.array(probs) ** (1.0 / 0.8), 0.0)
    return np.asarray(tempered / tempered.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_of_texts_are_their_probabilities(like: Like, kind: str) -> None:
    model, num_texts = with_laws(like, COMMITTED, DRAFTED), 400
    config = rejection_config(kind, 2, max_new_tokens=3, **SAMPLING)
    counts = Counter(answer.token_ids for answer in generate(model, [[0]] * num_texts, config))
    own = temper(COMMITTED)
    expected = {text: num_texts * own[[*text]].prod() for text in product(range(3), repeat=3)}
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[text] - count) ** 2 / count for text, count in expected.items())
    # Of 26 degrees of freedom: the mean and six standard deviations.
    assert chi_square < 26 + 6 * 52**0.5


def test_acceptance_is_the_overlap_of_the_distributions(like: Like) -> None:
    model, draft_length = with_laws(like, COMMITTED, DRAFTED), 3
    powers = np.minimum(temper(COMMITTED), temper(DRAFTED)).sum() ** np.arange(draft_length + 1)
    formulas = {"two_forwards": powers.sum() / 2, "one_forward": (1 + powers[:-1].sum()) / (2 - powers[-1])}
    for kind, expected in formulas.items():
        config = rejection_config(kind, draft_length, max_new_tokens=100, **SAMPLING)
        answers = generate(model, [[0]] * 4, config)
        num_forwards = sum(answer.num_forwards for answer in answers)
        assert 4 * 100 / num_forwards == pytest.approx(expected, rel=0.08)


def test_greedy_texts_are_those_of_next_tokens(like: Like) -> None:
    model = like(**MODELS["token, shifted"])
    for kind in KINDS:
        config = rejection_config(kind, 3, temperature=0.0)
        assert generate(model, PROMPTS, config) == generate(model, PROMPTS, config_of(kind, 3, temperature=0.0))


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_exact_ones_of_the_text(like: Like, kind: str) -> None:
    model = like(**MODELS["block"])
    [answer] = generate(model, [PROMPTS[0]], rejection_config(kind, 3, top_p=0.9))
    settings = resolve_settings(config_of(), model.config)
    [scored] = decode(model, [prepare_prompt_scoring(settings, [*PROMPTS[0], *answer.token_ids])])
    assert answer.logprobs == pytest.approx(scored.logprobs[len(PROMPTS[0]) - 1 :], abs=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Among other requests


def make_jobs(model: Transformer) -> list[PreparedRequest]:
    """Requests of both acceptances and kinds, some of which differ in nothing else, and one without speculation."""
    prompts = [*PROMPTS, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [4, 3, 2, 1, 0, 5, 6, 7], [11] * 19, [1, 2, 3]]
    configs = [
        rejection_config(KINDS[index // 2 % 2], 2 + index // 3, acceptance=("rejection", "keyed")[index % 2], top_p=0.9)
        for index in range(7)
    ]
    configs.append(config_of(temperature=1.0, top_p=0.9))
    return [
        prepare(model, config, prompt, seed) for seed, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]


def decode_alone(model: Transformer, jobs: Sequence[PreparedRequest]) -> list[Generation]:
    return [decode(model, [job])[0] for job in jobs]


@pytest.mark.parametrize("name", ["plenty", "everything"])
def test_texts_do_not_depend_on_the_batch(like: Like, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = like(**MODELS["block"])
    jobs = make_jobs(model)
    decoder = Decoder(model, *LIMITS[name])
    num_drafts, remove = [], decoder.scheduler.remove

    def record_removal(request: ActiveRequest) -> None:
        if not request.is_done and request.speculation is not None:
            num_drafts.append(len(request.speculation.probs))
        remove(request)

    monkeypatch.setattr(decoder.scheduler, "remove", record_removal)
    answers = run_all(decoder, jobs, [0, 0, 1, 3, 5, 6, 8, 12])
    for answer, expected in zip(answers, decode_alone(model, jobs), strict=True):
        assert_same(answer, expected)
    assert any(num_drafts) == (name == "everything"), "preempted between a draft and its verification"


def test_chunks_of_positions_have_the_same_texts(like: Like, monkeypatch: pytest.MonkeyPatch) -> None:
    model = like(**MODELS["block"])
    jobs = make_jobs(model)
    expected = decode_alone(model, jobs)
    for num_positions in (1, 3):
        monkeypatch.setattr(distributions, "CPU_CHUNK_BYTES", 8 * 23 * num_positions)
        for answer, other in zip(decode(model, jobs), expected, strict=True):
            assert_same(answer, other)


def test_deterministic_decoders_give_the_same_bits(like: Like) -> None:
    model, num_threads = like(**MODELS["token, shifted"]).float(), torch.get_num_threads()
    jobs = make_jobs(model)
    torch.set_num_threads(1)
    try:
        limits = limit_decoder(num_pages=60, page_size=4, deterministic=True, max_num_batched_tokens=7)
        alone = [run_all(Decoder(model, *limits), [job], [0])[0] for job in jobs]
        together = run_all(Decoder(model, *limits), jobs, [0, 0, 0, 2, 4, 4, 5, 9])
    finally:
        torch.set_num_threads(num_threads)
    assert together == alone


def test_streams_are_the_text(like: Like, tokenizer: Any) -> None:
    model = like(**MODELS["block"], vocab_size=len(tokenizer.vocab) + 2, mask_token_id=len(tokenizer.vocab) + 1)
    prompt, config = tokenizer.encode("the cat"), rejection_config("one_forward", 3, suppress_token_ids=(21,))
    [answer] = generate(model, [prompt], config, seeds=[0])
    assert "".join(stream(model, tokenizer, prompt, config)) == tokenizer.decode(answer.token_ids)


# ----------------------------------------------------------------------------------------------------------------------
# Edges


def test_a_draft_is_accepted_where_only_rounding_rejects_it() -> None:
    """Without a residual there is no other token."""
    law_1V = torch.tensor([[0.0, 0.25, 0.75]], dtype=torch.float64)
    lower_1V = law_1V * (1.0 - 2.0**-52)
    [token] = verify_drafts(torch.tensor([2]), lower_1V, law_1V, torch.tensor([[1.0 - 2.0**-53], [0.5]])).tolist()
    assert token == 2


def test_constraints_are_refused(like: Like) -> None:
    model = like(**MODELS["block"])
    with pytest.raises(ValueError, match=r"rejection. has no constraints"):
        prepare(model, rejection_config("two_forwards", 2), [1], constraints=(object(),))
