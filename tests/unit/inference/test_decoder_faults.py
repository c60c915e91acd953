"""Errors in a step end the requests that cause them; the others get their answers, and no page is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, generate, to_generation
from diffusionlm.inference.model_runner import InputText, find_input_slice
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.sampling import BatchSampler
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import BLOCKS, LIMITS, Job, check_pages, limit_decoder, make_jobs

NUM_JOBS, VICTIM = 8, 3
Fault = Callable[[pytest.MonkeyPatch, Decoder, ActiveRequest], None]


class InjectedError(RuntimeError):
    """A fault that a test has caused."""


def fail(*arguments: Any, **options: Any) -> Any:
    raise InjectedError("a defect")


def in_the_forward(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    compute = decoder._runner._compute_logits

    def compute_or_fail(texts: Sequence[InputText]) -> torch.Tensor:
        if victim.num_forwards == 2 and any(text.tokens_L is victim.tokens_L for text in texts):
            fail()
        return compute(texts)

    patch.setattr(decoder._runner, "_compute_logits", compute_or_fail)


def while_it_is_read(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    compute = decoder._runner._compute_logits

    def compute_or_fail(texts: Sequence[InputText]) -> torch.Tensor:
        is_read = victim.cached_length > 0 and victim.num_forwards == 0
        if is_read and any(text.tokens_L is victim.tokens_L for text in texts):
            fail()
        return compute(texts)

    patch.setattr(decoder._runner, "_compute_logits", compute_or_fail)


def in_sampling(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    patch.setattr(victim, "draw_uniforms", fail)


def in_its_commit(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    patch.setattr(victim, "commit", fail)


def in_preparing_a_step(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    patch.setattr(victim, "prepare_step", fail)


def _fail_for(victim: ActiveRequest, function: Callable[..., Any], num_forwards: int) -> Callable[..., Any]:
    def call(request: ActiveRequest, *arguments: Any) -> Any:
        if request is victim and request.num_forwards >= num_forwards:
            fail()
        return function(request, *arguments)

    return call


def in_its_inputs(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    patch.setattr("diffusionlm.inference.scheduler.find_input_slice", _fail_for(victim, find_input_slice, 2))


def in_its_admission(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    pages = decoder.scheduler.pages
    patch.setattr(pages, "allocate_prompt_pages", _fail_for(victim, pages.allocate_prompt_pages, 0))


def in_publishing_its_pages(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
    pages = decoder.scheduler.pages
    patch.setattr(pages, "publish", _fail_for(victim, pages.publish, 1))


FAULTS: tuple[Fault, ...] = (
    in_the_forward, in_sampling, in_its_commit, in_preparing_a_step, in_its_inputs, in_its_admission,
    in_publishing_its_pages,
)  # fmt: skip


@pytest.fixture(scope="module")
def jobs(blocks: Transformer) -> tuple[list[Job], list[Generation]]:
    """Jobs, and the answer of each alone; the victim samples, so that it draws numbers."""
    options = [*BLOCKS]
    options[VICTIM] = {"temperature": 0.9, "stop_token_ids": ()}
    jobs = make_jobs(blocks, options, NUM_JOBS)
    return jobs, [decode(blocks, [prepared])[0] for prepared in jobs]


def run(
    decoder: Decoder, jobs: list[Job], prepare: Callable[[list[ActiveRequest]], None] = lambda requests: None
) -> list[ActiveRequest]:
    """Decode jobs together; each one ends once, and pages are those of the requests in every round."""
    requests = [ActiveRequest(prepared) for prepared in jobs]
    prepare(requests)
    for request in requests:
        decoder.add(request)
    finished: list[ActiveRequest] = []
    while decoder.has_work:
        finished += decoder.step().finished
        check_pages(decoder, requests)
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    assert decoder.pool.num_owned == 0
    return requests


def check_answers(requests: list[ActiveRequest], answers: list[Generation], *failed: int) -> None:
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if index in failed:
            assert isinstance(request.error, InjectedError)
            continue
        ours = to_generation(request)
        assert (ours.token_ids, ours.step_map, ours.num_forwards) == (
            answer.token_ids,
            answer.step_map,
            answer.num_forwards,
        )
        assert ours.logprobs == pytest.approx(answer.logprobs, abs=1e-9)


@pytest.mark.parametrize(
    ("fault", "limits"),
    [*((fault, limits) for fault in FAULTS for limits in ("plenty", "everything")), (while_it_is_read, "everything")],
)
def test_a_fault_of_one_request_ends_it_alone(
    blocks: Transformer,
    jobs: tuple[list[Job], list[Generation]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    limits: str,
) -> None:
    own_jobs, answers = jobs
    decoder = Decoder(blocks, *LIMITS[limits])
    requests = run(decoder, own_jobs, lambda requests: fault(monkeypatch, decoder, requests[VICTIM]))
    check_answers(requests, answers, VICTIM)


def test_two_requests_that_cannot_be_computed(
    blocks: Transformer, jobs: tuple[list[Job], list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_jobs, answers = jobs
    decoder = Decoder(blocks, *LIMITS["plenty"])

    def prepare(requests: list[ActiveRequest]) -> None:
        in_the_forward(monkeypatch, decoder, requests[VICTIM])
        in_the_forward(monkeypatch, decoder, requests[VICTIM + 1])

    check_answers(run(decoder, own_jobs, prepare), answers, VICTIM, VICTIM + 1)


def test_memory_for_a_part_of_a_step(
    blocks: Transformer, jobs: tuple[list[Job], list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of all requests does not fit, one of some of them does: nobody notices."""
    own_jobs, answers = jobs
    decoder, sizes = Decoder(blocks, *LIMITS["plenty"]), []
    compute = decoder._runner._compute_logits

    def compute_small(texts: Sequence[InputText]) -> torch.Tensor:
        num_rows = sum(text.sequence.num_inputs for text in texts)
        if num_rows > 30 and len(texts) > 2:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(num_rows)
        return compute(texts)

    monkeypatch.setattr(decoder._runner, "_compute_logits", compute_small)
    check_answers(run(decoder, own_jobs), answers)
    assert len(sizes) > decoder.counts.num_steps, "some steps took several forwards"


def test_a_model_that_cannot_be_computed_is_no_fault_of_a_request(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Transformer(model.config)
    monkeypatch.setattr(broken, "forward", fail)
    with pytest.raises(InjectedError):
        generate(broken, [[1, 2], [3]], GenerationConfig(max_new_tokens=4))


@pytest.mark.parametrize("owner", [Transformer, BatchSampler])
def test_a_forward_of_several_ranks_is_not_repeated(
    owner: type, blocks: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would wait for ever for a rank that computes one alone, or that goes on with fewer requests."""
    calls = []

    def fail_to_compute(*args: Any, **options: Any) -> Any:
        calls.append(args)
        raise InjectedError("rank 0 alone")

    model = Transformer(blocks.config)
    monkeypatch.setattr(owner, "forward" if owner is Transformer else "sample_predictions", fail_to_compute)
    model.has_collective_forwards = True
    with pytest.raises(InjectedError):
        generate(model, [[1, 2], [3], [4]], GenerationConfig(max_new_tokens=4))
    assert len(calls) == 1


def test_a_request_that_fails_alone_is_no_fault_of_the_model(
    blocks: Transformer, jobs: tuple[list[Job], list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is there whose success would show it."""
    decoder = Decoder(blocks, *limit_decoder(num_pages=50, page_size=4))
    [request] = run(decoder, [jobs[0][VICTIM]], lambda requests: in_the_forward(monkeypatch, decoder, requests[0]))
    assert isinstance(request.error, InjectedError) and request.num_forwards == 2
