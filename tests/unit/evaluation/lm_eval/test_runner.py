"""Requests of lm-evaluation-harness: their numbers, keys and arguments, and answers of a tiny model to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from config.evaluation.lm_eval import LmEvalConfig, nest_arguments
from config.generation import GenerationConfig
from diffusionlm.evaluation.lm_eval.runner import (
    LENGTH_KEYS,
    NumberedRequest,
    RequestRunner,
    number_repeats,
    parse_generation_arguments,
)
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.conftest import token_ids
from tokenizer import Tokenizer


@dataclass
class FakeInstance:
    """What the adapter reads of an Instance."""

    args: tuple[Any, ...]
    doc: Any = field(default_factory=dict)
    idx: int = 0
    task_name: str | None = "task"
    repeats: int | None = 1
    doc_id: int = 0


CONTEXT = "Question: is it blue?\nAnswer:"


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tiny_model: Callable[..., Transformer]) -> Transformer:
    return tiny_model(torch.float64, **token_ids(tokenizer), max_position_embeddings=96)


class OrderedRunner(RequestRunner):
    """With the results in the order of the requests."""

    def score(self, instances: Sequence[Any]) -> Any:
        return [result for _, result in sorted(super().score(instances))]

    def generate(self, instances: Sequence[Any]) -> Any:
        return [result for _, result in sorted(super().generate(instances))]


@pytest.fixture
def build(model: Transformer, tokenizer: Tokenizer) -> Callable[..., OrderedRunner]:
    def build(**options: Any) -> OrderedRunner:
        return OrderedRunner(model, tokenizer, LmEvalConfig.model_validate(options))

    return build


def options_of(document: str, texts: Sequence[str], context: str = CONTEXT) -> list[FakeInstance]:
    return [FakeInstance((context, text), {"document": document}, index) for index, text in enumerate(texts)]


def test_repeats_have_draws_of_their_own(build: Callable[..., OrderedRunner]) -> None:
    instance = FakeInstance((CONTEXT, " is it blue? yes, maybe xyz"), {"q": 1}, repeats=3)
    runs = [build(likelihood={"num_mc_samples": 16}).score([instance] * 4) for _ in range(2)]
    assert runs[0] == runs[1]
    values = [value for value, _ in runs[0]]
    assert len(set(values)) == 3 and values[3] == values[0]  # the fourth one fills up a rank


def test_a_single_continuation_is_compared_with_greedy_decoding(build: Callable[..., OrderedRunner]) -> None:
    runner = build(generation={"max_new_tokens": 2, "stop_token_ids": []})
    contexts = [f"{letter}: is it {letter}?" for letter in "abcdefghijklmnop"]
    answers = runner.generate([FakeInstance((context, {})) for context in contexts])
    # The bytes of a random model are rarely text.
    context, answer = next(pair for pair in zip(contexts, answers, strict=True) if "\ufffd" not in pair[1])
    assert len(runner.encoder.encode_pair(context, answer).continuation_ids) == 2
    right, wrong = FakeInstance((context, answer), {"q": 1}), FakeInstance((context, " blue"), {"q": 2})
    empty = FakeInstance((context, ""), {"q": 3})
    assert [is_greedy for _, is_greedy in runner.score([right, wrong, empty])] == [True, False, True]
    both = [FakeInstance((context, text), {"q": 1}, index) for index, text in enumerate((answer, " blue"))]
    assert [is_greedy for _, is_greedy in runner.score(both)] == [False, False]
    assert [is_greedy for _, is_greedy in build(is_greedy="always").score(both)] == [True, False]
    assert [is_greedy for _, is_greedy in build(is_greedy="never").score([right])] == [False]


def test_empty_texts_are_certain(build: Callable[..., OrderedRunner]) -> None:
    texts = [" yes", "", " no"]
    values = build().score(options_of("a", texts))
    assert values[1] == (0.0, True) and all(value < 0.0 for value, _ in (values[0], values[2]))
    rolled = dict(build(window=5).roll([FakeInstance((text,), {"text": text}) for text in ("is it blue?" * 3, "")]))
    assert rolled[1] == 0.0 > rolled[0]


def test_documents_with_the_same_content_are_no_options_of_each_other(build: Callable[..., OrderedRunner]) -> None:
    """The same document twice, and a document whose only continuation is asked for twice."""
    long = " is it blue? yes, maybe xyz"
    score = build(likelihood={"num_mc_samples": 16}).score
    [(value, _)] = score([FakeInstance((CONTEXT, long), {"q": 1})])
    for instances in (
        [FakeInstance((CONTEXT, long), {"q": 1}, doc_id=number) for number in (3, 8)],
        [FakeInstance((CONTEXT, long), {"q": 1}, index, doc_id=3) for index in range(2)],
    ):
        assert [other for other, _ in score(instances)] == pytest.approx([value] * 2, abs=1e-9)


def test_answers_with_unequal_settings_keep_their_order(build: Callable[..., OrderedRunner]) -> None:
    arguments: list[dict[str, Any]] = [
        {"max_gen_toks": 4},
        {"max_gen_toks": 7, "temperature": 1.0, "do_sample": True},
        {"max_gen_toks": 4, "until": ["e", "\n"]},
        {"max_new_tokens": 5, "block_length": 2},
        {"max_gen_toks": 7, "temperature": 1.0, "do_sample": True},
    ]
    instances = [FakeInstance((CONTEXT, values), {"n": index}) for index, values in enumerate(arguments)]
    together = build().generate(instances)
    alone = [build(batch_size=1).generate([instance])[0] for instance in instances]
    backwards = build(batch_size=2).generate(instances[::-1])
    assert together == alone == backwards[::-1]
    assert together[1] != together[4]  # another document, another answer
    assert together[2] == together[0].partition("e")[0].partition("\n")[0]


def test_contexts_that_do_not_fit(build: Callable[..., OrderedRunner]) -> None:
    long = CONTEXT * 20
    for call in (lambda runner: runner.score(options_of("a", [" yes"], long)),
                 lambda runner: runner.generate([FakeInstance((long, {"max_gen_toks": 4}))])):  # fmt: skip
        with pytest.raises(ValueError, match=r"task task, document 0: .*truncation"):
            call(build())
        runner = build(truncation="left")
        call(runner)
        assert runner.num_truncated == 1
    with pytest.raises(ValueError, match="max_gen_toks"):
        build(truncation="left").generate([FakeInstance((CONTEXT, {"max_gen_toks": 96}))])
    with pytest.raises(ValueError, match=r"task task, document 0: .*num_beams"):
        build().generate([FakeInstance((CONTEXT, {"num_beams": 2}))])


# ----------------------------------------------------------------------------------------------------------------------
# Numbers, keys and arguments of requests


def test_repeats_are_numbered_and_padding_begins_again() -> None:
    """The harness appends the last request of a rank, with its repeats, as often as another rank has more."""
    first, second = (FakeInstance((name, {}), {"q": name}, repeats=2) for name in "ab")
    requests = number_repeats([first, first, second, second, second, second])
    assert [(request.instance.args[0], request.repeat) for request in requests] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip


def test_keys_are_of_the_document_and_the_repeat() -> None:
    options = [NumberedRequest(FakeInstance(("q", text), {"q": 1}, idx), 0) for idx, text in enumerate(("a", "b"))]
    assert options[0].document_key == options[1].document_key
    assert options[0].answer_seed(0) != options[1].answer_seed(0) != options[1].answer_seed(1)
    others = [
        NumberedRequest(options[0].instance, 1),
        NumberedRequest(FakeInstance(("q", "a"), {"q": 2}), 0),
        NumberedRequest(FakeInstance(("q", "a"), {"q": 1}, task_name="other"), 0),
        NumberedRequest(FakeInstance(("q", "a")), 0),  # without a document
        NumberedRequest(FakeInstance(("q", "b")), 0),
    ]
    assert len({request.document_key for request in [options[0], *others]}) == 6
    # The position in the task is no part of it: a subset draws the same.
    moved = NumberedRequest(FakeInstance(("q", "a"), {"q": 1}, doc_id=7), 0)
    assert moved.document_key == options[0].document_key == 4373528749710171147


@pytest.mark.parametrize(
    ("arguments", "defaults", "expected"),
    [
        *(({key: 7}, {"max_new_tokens": 99}, {"max_new_tokens": 7}) for key in LENGTH_KEYS),
        ({}, {}, {"max_new_tokens": 256}),
        ({}, {"max_new_tokens": 99}, {"max_new_tokens": 99}),
        ({}, {"total_length": 99}, {"total_length": 99}),
        ({"max_tokens": 7}, {"total_length": 99}, {"max_new_tokens": 7}),
        ({"max_tokens": 7, "max_gen_toks": 7, "max_new_tokens": None}, {}, {"max_new_tokens": 7}),
        # Published settings of a model stay, unless sampling is asked for.
        ({"do_sample": False}, {}, {"max_new_tokens": 256, "temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.2, "max_new_tokens": 9, "top_p": 0.9},
         {"temperature": 0.2, "max_new_tokens": 9, "top_p": 0.9}),
        ({"do_sample": False, "repetition_penalty": 1.2, "min_p": 0.0}, {"min_p": 0.1},
         {"repetition_penalty": 1.2, "min_p": 0.1, "max_new_tokens": 256, "temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.8, "top_k": 5}, {"temperature": 0.2, "max_new_tokens": 9},
         {"temperature": 0.8, "max_new_tokens": 9, "top_k": 5}),
        ({"top_k": 0, "num_beams": 1, "block_length": 8}, {"block_length": 4, "steps": 64, "max_new_tokens": 9},
         {"block_length": 8, "steps": 64, "max_new_tokens": 9}),
    ],
)  # fmt: skip
def test_arguments_of_generation(arguments: dict[str, Any], defaults: Any, expected: dict[str, Any]) -> None:
    until, config = parse_generation_arguments(arguments, GenerationConfig(**defaults))
    assert (until, config) == ((), GenerationConfig(**expected))


@pytest.mark.parametrize(("until", "expected"), [("\n\n", ("\n\n",)), (["a", "b", "a", ""], ("a", "b")), (None, ())])
def test_until_is_a_text_or_a_list(until: Any, expected: tuple[str, ...]) -> None:
    assert parse_generation_arguments({"until": until}, GenerationConfig())[0] == expected


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_tokens": 7, "max_gen_toks": 8}, "max_gen_toks = 8 and max_tokens = 7 contradict"),
        *(({"max_tokens": wrong}, "max_new_tokens") for wrong in (0, -1, 1.5, True, "x")),
        ({"until": ["a", 1]}, "until has 1"),
        ({"num_beams": 4}, "num_beams = 4 has no meaning"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_length": 5}, "max_length = 5 is unknown"),
        ({"block_length": 0}, "block_length"),
    ],
)
def test_wrong_arguments_of_generation(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_generation_arguments(arguments, GenerationConfig())


def test_arguments_of_the_command_line() -> None:
    tree = nest_arguments({"pretrained": "DIR", "dtype": "bfloat16", "generation.steps": 8, "likelihood": {"seed": 1}})
    config = LmEvalConfig.model_validate(tree)
    assert (str(config.model.path), config.model.dtype) == ("DIR", "bfloat16")
    assert (config.generation.steps, config.likelihood.seed, config.likelihood.racing) == (8, 1, False)
    for arguments in ({"path": "a", "pretrained": "b"}, {"generation": 1, "generation.steps": 2}):
        with pytest.raises(ValueError, match="once"):
            nest_arguments(arguments)
