"""Numbers of drafts that are chosen by measurements: against enumeration, and without an effect on texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import decode, generate
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.speculation.adaptive import MEMORY, NUM_SKIPPED_STEPS, DraftPolicy, find_best_lengths
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import LIMITS, add_requests, limit_decoder, run_all
from tests.unit.inference.constraints.test_constrained_decoding import make_constraint
from tests.unit.inference.test_speculation import MODELS, PROMPTS, assert_same_text, config_of, prepare, with_laws

Like = Callable[..., Transformer]


def compute_rate(
    are_right_D: NDArray[np.float64], fixed: float, per_input: float, num_extra: int, lengths: tuple[int, int]
) -> float:
    """Tokens per second from the stationary distribution of the number of drafts that a forward verifies."""
    num_states = len(are_right_D)
    transitions, tokens, seconds = np.zeros((num_states, num_states)), np.zeros(num_states), np.zeros(num_states)
    for verified in range(num_states):
        drafted = lengths[verified > 0]
        for right in range(verified + 1):
            probability = are_right_D[right] - (are_right_D[right + 1] if right < verified else 0.0)
            transitions[verified, drafted if right == verified else 0] += probability
            tokens[verified] += probability * (right + 1)
        seconds[verified] = fixed + per_input * (1 + verified + drafted + (num_extra if drafted else 0))
    distribution = np.eye(num_states)[0]
    for _ in range(20):
        transitions = transitions @ (transitions + np.eye(num_states)) / 2  # to the limit of averages over steps
    distribution = distribution @ transitions
    return float(distribution @ tokens / (distribution @ seconds))


def test_lengths_are_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(150):
        size, num_extra = int(rng.integers(2, 7)), int(rng.integers(2))
        are_right_D: NDArray[np.float64] = np.cumprod([1.0, *rng.uniform(0.05, 0.99, size - 1)])
        laws = are_right_D, 1.0, float(10 ** rng.uniform(-3, 0.5)), num_extra
        best = find_best_lengths(*laws)
        rates = {lengths: compute_rate(*laws, lengths) for lengths in product(range(size), range(size))}
        assert rates[best] == pytest.approx(max(rates.values()), rel=1e-9)
        chosen.add(best)
    assert len(chosen) > 12
    assert find_best_lengths(np.array([1.0, 0.5, 0.25]), 1.0, 0.0, 1) == (2, 2), "inputs are free"


def measure(
    policy: DraftPolicy, fixed: float, per_input: float, num_requests: int = 1, num_steps: int = 200
) -> DraftPolicy:
    """Record steps whose times follow a line."""
    for number in range(num_steps):
        num_inputs = num_requests * (2 + 2 * (number % 7))
        policy.record_step(num_requests, num_inputs, fixed + per_input * num_inputs)
    return policy


def choose(policy: DraftPolicy, max_length: int = 6) -> tuple[int, int]:
    return policy.choose_length(max_length, 1, verifies=False), policy.choose_length(max_length, 1, verifies=True)


@pytest.mark.parametrize("per_input", [0.0, 0.003, 0.05, 0.2, 0.5, 3.0])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_times_and_acceptance_are_measured(per_input: float, num_requests: int) -> None:
    rng, acceptance = np.random.default_rng(1), [0.95, 0.9, 0.8, 0.6, 0.5, 0.4]
    policy = measure(DraftPolicy(), 1.0, per_input, num_requests)
    for _ in range(2000):
        policy.record_drafts(6, int((rng.random(6) < acceptance).cumprod().sum()))
    are_right_D: NDArray[np.float64] = np.cumprod([1.0, *acceptance], dtype=np.float64)
    laws = are_right_D, 1.0, num_requests * per_input, 1
    assert compute_rate(*laws, choose(policy)) == pytest.approx(compute_rate(*laws, find_best_lengths(*laws)), rel=0.03)


def test_first_averages_are_exact() -> None:
    """The prior counts as one draft, and a wrong draft says nothing of those after it."""
    policy = DraftPolicy()
    policy.record_drafts(3, 1)
    policy.record_drafts(3, 3)
    policy.record_drafts(2, 0)
    assert policy._acceptance == pytest.approx([(0.9 + 1 + 1 + 0) / 4, (0.9 + 0 + 1) / 3, (0.9 + 1) / 2])
    inputs, seconds = np.array([4.0, 9.0, 5.0, 7.0]), np.array([3.0, 4.0, 5.0, 3.0])
    lengths = []
    for num_inputs, own in [(1, 1e3)] * NUM_SKIPPED_STEPS + [*zip(inputs.tolist(), seconds.tolist(), strict=True)]:
        policy.record_step(1, num_inputs, own)
        lengths.append(choose(policy))
    assert lengths[:-1] == [(6, 6), (0, 0)] * 3 + [(6, 6)], "nothing is known"
    assert policy._covariance / policy._variance == pytest.approx(np.polyfit(inputs, seconds, 1)[0])
    assert (policy._mean_inputs, policy._mean_seconds) == pytest.approx((inputs.mean(), seconds.mean()))


def test_dear_inputs_and_more_requests_shorten_drafts() -> None:
    by_cost = [choose(measure(DraftPolicy(), 1.0, cost)) for cost in (0.0, 0.02, 0.1, 0.3, 1.0, 3.0)]
    by_load = [choose(measure(DraftPolicy(), 1.0, 0.02, count)) for count in (1, 4, 16, 64)]
    for lengths in (by_cost, by_load):
        assert lengths == sorted(lengths, reverse=True) and lengths[0] == (6, 6) and lengths[-1] == (0, 0)
        assert len(set(lengths)) > 2


def test_new_measurements_replace_old_ones() -> None:
    policy = measure(DraftPolicy(), 1.0, 3.0)
    assert choose(policy) == (0, 0)
    assert choose(measure(policy, 1.0, 0.0, num_steps=8 * MEMORY)) == (6, 6)
    for number in range(24 * MEMORY):
        policy.record_drafts(6, 6 if number < 20 * MEMORY else 0)
    measure(policy, 1.0, 0.05)
    assert choose(policy) == (0, 0)


def test_a_slow_step_is_no_load() -> None:
    policy = measure(DraftPolicy(), 1.0, 0.02)
    expected = choose(policy)
    policy.record_step(1, 14, 1e3)
    assert choose(policy) == expected


def test_rounding_makes_no_number_negative() -> None:
    assert choose(measure(DraftPolicy(), 20.0, -1.0), 12) == (12, 12), "as if inputs were free"
    assert choose(measure(DraftPolicy(), -1.9, 1.0)) == (0, 0), "as if forwards were free"
    policy = measure(DraftPolicy(), 1.0, 0.05)
    for _ in range(5000):
        policy.record_drafts(6, 6)
    assert choose(policy) == (6, 6)


def test_inputs_whose_time_is_not_known_anymore_are_tried() -> None:
    """Next-token decoding with as many requests in each step does not tell what another input takes."""
    policy = measure(DraftPolicy(), 1.0, 3.0)
    lengths = []
    for _ in range(20 * MEMORY):
        policy.record_step(1, 1, 4.0)
        lengths.append(choose(policy))
    assert 2 * MEMORY < lengths.index((6, 6)) < 19 * MEMORY


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Policies that choose at random; the lengths that were chosen."""
    rng, lengths = np.random.default_rng(0), list[int]()

    def choose_any(self: DraftPolicy, max_length: int, num_extra: int, *, verifies: bool) -> int:
        lengths.append(int(rng.integers(max_length + 1)))
        return lengths[-1]

    monkeypatch.setattr(DraftPolicy, "choose_length", choose_any)
    return lengths


@pytest.mark.parametrize("name", ["plenty", "everything"])
@pytest.mark.parametrize("model_name", ["block", "token, shifted", "next tokens"])
def test_texts_are_those_of_next_tokens(like: Like, model_name: str, name: str, any_length: list[int]) -> None:
    model = like(**MODELS[model_name])
    constraint = make_constraint("[abd]{5,}(ab|c)*")
    jobs, plain = (
        [
            prepare(
                model,
                config_of(*kind, temperature=seed % 3 / 2, max_new_tokens=10 + seed),
                PROMPTS[seed % 4],
                seed,
                constraints=[constraint] if seed % 4 == 1 else (),
            )
            for seed in range(8)
        ]
        for kind in (("auto", 5), ())
    )
    decoder = Decoder(model, *LIMITS[name])
    for ours, expected in zip(run_all(decoder, jobs, [0, 0, 1, 3, 5, 6, 8, 12]), decode(model, plain), strict=True):
        assert_same_text(ours, expected)
    assert {*any_length} == {*range(6)}


def test_deterministic_decoders_give_the_bits_of_next_tokens(like: Like, any_length: list[int]) -> None:
    model, num_threads = like(**MODELS["block"]).float(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limits = limit_decoder(num_pages=60, page_size=4, deterministic=True)
        ours, expected = (
            run_all(Decoder(model, *limits), [prepare(model, config_of(*kind, temperature=0.8), [3, 4], 7)], [0])[0]
            for kind in (("auto", 4), ())
        )
    finally:
        torch.set_num_threads(num_threads)
    assert_same_text(ours, expected, tolerance=0.0)
    assert len(set(any_length)) > 2


def test_what_a_decoder_measures(like: Like, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with a long prompt are left out, and the first forward of a request drafts as much as possible."""
    model, steps, rounds = with_laws(like, [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]), list[Any](), list[Any]()
    monkeypatch.setattr(DraftPolicy, "record_step", lambda self, *step: steps.append(step))
    monkeypatch.setattr(DraftPolicy, "record_drafts", lambda self, *own: rounds.append(own))
    monkeypatch.setattr(DraftPolicy, "choose_length", lambda self, *own, verifies: 1 + verifies)
    decoder = Decoder(model, *limit_decoder(200, 8, max_num_batched_tokens=20))
    config = config_of("auto", 3, temperature=1.0, max_new_tokens=30)
    requests = add_requests(decoder, prepare(model, config, [0] * 30), prepare(model, config, [0], 1))
    expected, lengths = [], {id(request): list[int]() for request in requests}
    while decoder.has_work:
        num_inputs, num_active = decoder.counts.num_batched_tokens, decoder.counts.num_request_steps
        for active in decoder.step().decoded:
            assert active.speculation is not None
            lengths[id(active)].append(active.speculation.num_drafted)
        num_inputs = decoder.counts.num_batched_tokens - num_inputs
        expected.append((decoder.counts.num_request_steps - num_active, num_inputs))
    num_prompt_steps = len(expected) - len(steps)
    assert num_prompt_steps >= 2 and [step[:2] for step in steps] == expected[num_prompt_steps:]
    assert all(seconds > 0.0 for *_, seconds in steps)
    for own in lengths.values():
        assert own[0] == 3 and {*own[1:-3]} <= {1, 2} and own[1] == 2
    assert {num_drafts for num_drafts, _ in rounds} == {0, 1, 2, 3}
    assert sum(right + 1 for _, right in rounds) == 60 and all(right <= count for count, right in rounds)


@pytest.mark.parametrize("model_name", ["block", "token, shifted"])
def test_inputs_of_a_forward(like: Like, model_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the choice counts with."""
    extra = list[int]()

    def choose_two(self: DraftPolicy, max_length: int, num_extra: int, *, verifies: bool) -> int:
        extra.append(num_extra)
        return 2

    monkeypatch.setattr(DraftPolicy, "choose_length", choose_two)
    model = like(**MODELS[model_name])
    decoder = Decoder(model, *LIMITS["plenty"])
    [active] = add_requests(decoder, prepare(model, config_of("auto", 3), [1]))
    while decoder.has_work:
        num_inputs, state = decoder.counts.num_batched_tokens, active.speculation
        decoder.step()
        assert state is not None
        num_inputs = decoder.counts.num_batched_tokens - num_inputs
        if extra:  # not the first forward
            assert num_inputs == state.num_verified + state.num_drafted + extra[-1] * (state.num_drafted > 0)
    assert len(extra) > 4


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], list[float]]]:
    """Sets the seconds of a step and of an input; returns the seconds of the steps that follow."""

    def set_costs(fixed: float, per_input: float) -> list[float]:
        steps, count = list[float](), Decoder._count

        def count_costs(self: Decoder, scheduled: Any, seconds: float) -> None:
            steps.append(fixed + per_input * sum(item.num_tokens for item in scheduled))
            count(self, scheduled, steps[-1])

        monkeypatch.setattr(Decoder, "_count", count_costs)
        return steps

    with monkeypatch.context():
        yield set_costs


@pytest.mark.parametrize(("per_input", "num_requests"), [(0.0, 1), (0.1, 4), (2.0, 2)])
def test_decoding_is_as_fast_as_with_the_best_lengths(
    like: Like, costs: Callable[[float, float], list[float]], per_input: float, num_requests: int
) -> None:
    model = with_laws(like, [0.5, 0.5 - 1e-9, 5e-10, 5e-10], [0.75, 0.25 - 2e-12, 1e-12, 1e-12])
    steps, num_tokens = costs(1.0, per_input), 400
    generate(model, [[0]] * num_requests, config_of("auto", 4, temperature=1.0, max_new_tokens=num_tokens))
    are_right_D = 0.75 ** np.arange(5.0)
    rates = [
        compute_rate(are_right_D, 1.0, num_requests * per_input, 1, lengths) for lengths in product(range(5), range(5))
    ]
    assert num_tokens / sum(steps) == pytest.approx(max(rates), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "is_collective", "announces", "has_policy"),
    [
        ("auto", False, False, True),
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("one_forward", False, False, False),
    ],
)
def test_who_goes_by_the_clock(like: Like, kind: str, is_collective: bool, announces: bool, has_policy: bool) -> None:
    """Not ranks that decode the same requests, each by itself."""
    model = like(**MODELS["block"])
    model.has_collective_forwards = is_collective
    request = ActiveRequest(prepare(model, config_of(kind, 4), [1]))
    decoder = Decoder(model, *LIMITS["plenty"])
    if announces:
        decoder.runner.announce = lambda texts, sampling: None
    decoder.add(request)
    assert request.speculation is not None and (request.speculation.policy is not None) == has_policy
