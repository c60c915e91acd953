"""Requests answered by a tiny model: values against brute force; order, neighbors and batches change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from config.evaluation.lm_eval import LmEvalConfig
from diffusionlm.evaluation.likelihood.scoring import OptionsRequest, score_documents
from diffusionlm.evaluation.lm_eval.runner import RequestRunner
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.lm_eval.fake_instance import FakeInstance
from tokenizer import Tokenizer

CONTEXT = "Question: is it blue?\nAnswer:"


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tiny_model: Callable[..., Transformer]) -> Transformer:
    token_ids = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    return tiny_model(
        dtype=torch.float64,
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.eos_token_id,
        max_position_embeddings=96,
        **token_ids,
    )


@pytest.fixture
def build(model: Transformer, tokenizer: Tokenizer) -> Callable[..., RequestRunner]:
    def build(**options: Any) -> RequestRunner:
        return RequestRunner(model, tokenizer, LmEvalConfig.model_validate(options))

    return build


def options_of(document: str, texts: Sequence[str], context: str = CONTEXT) -> list[FakeInstance]:
    return [FakeInstance((context, text), {"document": document}, index) for index, text in enumerate(texts)]


def test_short_options_are_those_of_documents(model: Transformer, build: Callable[..., RequestRunner]) -> None:
    runner = build()
    instances = options_of("a", [" yes", " is?", " q"]) + options_of("b", [" it"])
    for instance, (log_likelihood, is_greedy) in zip(instances, runner.score(instances), strict=True):
        pair = runner.encoder.encode_pair(*instance.args)
        [score] = score_documents(model, [OptionsRequest(pair.context_ids, (pair.continuation_ids,))])
        assert score.is_exact and log_likelihood == pytest.approx(score.log_likelihood, abs=1e-9) and not is_greedy


def test_order_and_neighbors_change_nothing(build: Callable[..., RequestRunner]) -> None:
    """Long options, which are sampled: their masks depend on their document alone."""
    texts = [" is it blue? yes", " no no no maybe, xyz", "", " is it"]
    instances = options_of("a", texts) + options_of("b", texts[:2], CONTEXT * 2) + options_of("c", texts[1:2])
    settings: dict[str, Any] = {"likelihood": {"num_mc_samples": 16}}
    expected = build(**settings).score(instances)
    assert len({value for value, _ in expected}) == 7 and expected[2] == (0.0, False)
    shuffled = [5, 0, 3, 6, 1, 4, 2]
    others = build(likelihood={"num_mc_samples": 16, "batch_tokens": 40}).score([instances[i] for i in shuffled])
    for index, value in zip(shuffled, others, strict=True):
        assert value == pytest.approx(expected[index], abs=1e-9)
    alone = build(**settings).score([instances[3], instances[0], instances[1]])
    assert alone[0] == pytest.approx(expected[3], abs=1e-9)
    seeded = build(likelihood={"num_mc_samples": 16, "seed": 1}).score(instances)
    assert seeded[0] != expected[0] and seeded[6] != expected[6]


def test_repeats_have_draws_of_their_own(build: Callable[..., RequestRunner]) -> None:
    instance = FakeInstance((CONTEXT, " is it blue? yes, maybe xyz"), {"q": 1}, repeats=3)
    runs = [build(likelihood={"num_mc_samples": 16}).score([instance] * 4) for _ in range(2)]
    assert runs[0] == runs[1]
    values = [value for value, _ in runs[0]]
    assert len(set(values)) == 3 and values[3] == values[0]  # the fourth one fills up a rank


def test_a_single_continuation_is_compared_with_greedy_decoding(build: Callable[..., RequestRunner]) -> None:
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


def test_documents_with_the_same_content_are_no_options_of_each_other(build: Callable[..., RequestRunner]) -> None:
    """The same document twice, and a document whose only continuation is asked for twice."""
    score = build().score
    [(value, expected)] = score([FakeInstance((CONTEXT, ""), {"q": 1})])
    assert expected
    twice = [FakeInstance((CONTEXT, ""), {"q": 1}, doc_id=number) for number in (3, 8)]
    assert score(twice) == [(value, True)] * 2
    same = [FakeInstance((CONTEXT, ""), {"q": 1}, index, doc_id=3) for index in range(2)]
    assert score(same) == [(value, True)] * 2
    long = " is it blue? yes, maybe xyz"
    sampled = build(likelihood={"num_mc_samples": 16}).score
    [(value, _)] = sampled([FakeInstance((CONTEXT, long), {"q": 1})])
    both = sampled([FakeInstance((CONTEXT, long), {"q": 1}, doc_id=number) for number in (3, 8)])
    assert [other for other, _ in both] == pytest.approx([value] * 2, abs=1e-9)


def test_rolling_windows_of_a_uniform_model(
    tokenizer: Tokenizer, tiny_model: Callable[..., Transformer], model: Transformer
) -> None:
    uniform = Transformer(model.config)
    uniform.load_state_dict(model.state_dict())
    with torch.no_grad():
        uniform.lm_head.weight.zero_()
    runner = RequestRunner(uniform, tokenizer, LmEvalConfig.model_validate({"window": 5}))
    texts = ["is it blue?" * 3, "", "no"]
    values = runner.roll([FakeInstance((text,), {"text": text}) for text in texts])
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert lengths[0] > 10 and values[1] == 0.0
    assert values == pytest.approx([-length * math.log(tokenizer.vocab_size - 1) for length in lengths])


def test_answers_with_unequal_settings_keep_their_order(build: Callable[..., RequestRunner]) -> None:
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


def test_repeats_are_different_answers_and_the_same_in_a_second_run(build: Callable[..., RequestRunner]) -> None:
    arguments = {"max_gen_toks": 8, "temperature": 1.0, "do_sample": True}
    instance = FakeInstance((CONTEXT, arguments), {"q": 1}, repeats=4)
    first, second = (build().generate([instance] * 5) for _ in range(2))
    assert first == second and len(set(first[:4])) == 4 and first[4] == first[0]
    assert build(seed=1).generate([instance]) != first[:1]


def test_results_are_passed_on(build: Callable[..., RequestRunner]) -> None:
    seen: list[Any] = []
    instances = options_of("a", [" yes", " no"])
    scores = build().score(instances, lambda instance, result: seen.append((instance.args[1], result)))
    assert seen == [(" yes", scores[0]), (" no", scores[1])]
    seen.clear()
    build().roll([FakeInstance(("is it",))], lambda instance, result: seen.append(instance.args))
    build().generate([FakeInstance((CONTEXT, {"max_gen_toks": 2}))], lambda instance, text: seen.append(text))
    assert seen[0] == ("is it",) and isinstance(seen[1], str)


def test_contexts_that_do_not_fit(build: Callable[..., RequestRunner]) -> None:
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
