"""Errors in a step end the requests that cause them; the others get their answers, and no page is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from config.generation import GenerationConfig
from diffusionlm.inference import scheduler as scheduler_module
from diffusionlm.inference.cuda_graphs import InputText
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.generate import Generation, decode, generate, to_generation
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.sampling.token_sampler import BatchSampler
from diffusionlm.models.transformer import Transformer
from tests.decoding_jobs import BLOCKS, LIMITS, Job, assert_same, check_pages, limit_decoder, make_jobs

NUM_JOBS, VICTIM = 8, 3
Fault = Callable[[pytest.MonkeyPatch, Decoder, ActiveRequest], None]
Jobs = tuple[list[Job], list[Generation]]


class InjectedError(RuntimeError):
    """A fault that a test has caused."""


def fail(*arguments: Any, **options: Any) -> Any:
    raise InjectedError("a defect")


def in_forwards_that(is_faulty: Callable[[ActiveRequest], bool]) -> Fault:
    """A fault in each forward of the victim while it is in a state."""

    def inject(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
        compute = decoder.runner.compute_logits

        def compute_or_fail(texts: Sequence[InputText]) -> torch.Tensor:
            if is_faulty(victim) and any(text.tokens_L is victim.tokens_L for text in texts):
                fail()
            return compute(texts)

        patch.setattr(decoder.runner, "compute_logits", compute_or_fail)

    return inject


def in_its(method: str) -> Fault:
    return lambda patch, decoder, victim: patch.setattr(victim, method, fail)


def in_the_scheduler(function: str, num_forwards: int) -> Fault:
    """A fault in a function of the victim's pages or inputs, from its forward of this number on."""

    def inject(patch: pytest.MonkeyPatch, decoder: Decoder, victim: ActiveRequest) -> None:
        owner: Any = scheduler_module if function == "schedule_step" else decoder.scheduler.pages
        call = getattr(owner, function)

        def call_or_fail(request: ActiveRequest, *arguments: Any) -> Any:
            is_faulty = request is victim and request.num_forwards >= num_forwards
            return fail() if is_faulty else call(request, *arguments)

        patch.setattr(owner, function, call_or_fail)

    return inject


IN_THE_FORWARD = in_forwards_that(lambda victim: victim.num_forwards == 2)
FAULTS: dict[str, Fault] = {
    "forward": IN_THE_FORWARD,
    "sampling": in_its("draw_uniforms"),
    "commit": in_its("commit"),
    "preparation": in_its("prepare_step"),
    "inputs": in_the_scheduler("schedule_step", 2),
    "admission": in_the_scheduler("allocate_prompt_pages", 0),
    "prefix cache": in_the_scheduler("publish", 1),
    "reading": in_forwards_that(lambda victim: victim.cached_length > 0 and victim.num_forwards == 0),
}


@pytest.fixture(scope="module")
def jobs(blocks: Transformer) -> Jobs:
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
        else:
            assert_same(to_generation(request), answer)


@pytest.mark.parametrize("limits", ["plenty", "everything"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_request_ends_it_alone(
    blocks: Transformer, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, fault: str, limits: str
) -> None:
    own_jobs, answers = jobs
    if fault == "reading":  # in parts, which few inputs of a step ask for
        limits = "small steps" if limits == "plenty" else limits
    decoder = Decoder(blocks, *LIMITS[limits])
    requests = run(decoder, own_jobs, lambda requests: FAULTS[fault](monkeypatch, decoder, requests[VICTIM]))
    check_answers(requests, answers, VICTIM)


def test_memory_for_a_part_of_a_step(blocks: Transformer, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of all requests does not fit, one of some of them does: nobody notices."""
    own_jobs, answers = jobs
    decoder, sizes = Decoder(blocks, *LIMITS["plenty"]), []
    compute = decoder.runner.compute_logits

    def compute_small(texts: Sequence[InputText]) -> torch.Tensor:
        num_rows = sum(text.sequence.num_inputs for text in texts)
        if num_rows > 30 and len(texts) > 2:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(num_rows)
        return compute(texts)

    monkeypatch.setattr(decoder.runner, "compute_logits", compute_small)
    check_answers(run(decoder, own_jobs), answers)
    assert len(sizes) > decoder.counts.num_steps, "some steps took several forwards"


@pytest.mark.parametrize(
    ("owner", "is_collective"), [(Transformer, False), (Transformer, True), (BatchSampler, True)], ids=str
)
def test_what_is_no_fault_of_a_request_ends_the_decoder(
    owner: type, is_collective: bool, blocks: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be computed at all; and a forward of several ranks, which is not repeated: the others would
    wait for ever for a rank that computes one alone, or that goes on with fewer requests."""
    calls = []

    def fail_to_compute(*args: Any, **options: Any) -> Any:
        calls.append(args)
        fail()

    model = Transformer(blocks.config)
    monkeypatch.setattr(owner, "forward" if owner is Transformer else "sample_predictions", fail_to_compute)
    model.has_collective_forwards = is_collective
    with pytest.raises(InjectedError):
        generate(model, [[1, 2], [3], [4]], GenerationConfig(max_new_tokens=4))
    assert (len(calls) == 1) == is_collective


def test_a_request_that_fails_alone_is_no_fault_of_the_model(
    blocks: Transformer, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is there whose success would show it."""
    decoder = Decoder(blocks, *limit_decoder(num_pages=50, page_size=4))
    [request] = run(decoder, [jobs[0][VICTIM]], lambda requests: IN_THE_FORWARD(monkeypatch, decoder, requests[0]))
    assert isinstance(request.error, InjectedError) and request.num_forwards == 2
