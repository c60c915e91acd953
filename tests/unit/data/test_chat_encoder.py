"""Documents of conversations: answers through their stop token are learned, prompts are those of the sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from config.finetune.chat import ChatRowsConfig
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.chat.encoder import (
    CUT,
    EXPANDED,
    NO_THOUGHTS,
    PROMPT_TOO_LONG,
    THOUGHTS,
    TOO_LONG,
    UNANSWERED,
    ChatEncoder,
    ChatRecords,
    read_documents,
)
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.chat.templates import resolve_chat_template
from diffusionlm.data.packing import Document
from diffusionlm.data.sources.record_source import BadRecord
from tests.unit.data.chat_cases import EOS, STOP, chat, chat_tokenizer, spell
from tokenizer import Tokenizer, encode_chat, encode_prompt

USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
LONG = 1_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return chat_tokenizer()


def make_encoder(
    tokenizer: Tokenizer, row_length: int = LONG, block_length: int | None = None, **options: Any
) -> ChatEncoder:
    config = ChatRowsConfig.model_validate(options)
    return ChatEncoder(ChatRecords(config, "data.source.chat", "skip"), tokenizer, row_length, block_length)


def parse(row: dict[str, Any], config: ChatRowsConfig) -> Conversation:
    conversation = ChatRowParser(config)(row)
    assert not isinstance(conversation, BadRecord), conversation
    return conversation


def encode(encoder: ChatEncoder, row: dict[str, Any], rng: np.random.Generator | None = None) -> list[Document]:
    conversation = parse(row, encoder.config)
    documents, reasons = encoder.encode(conversation, rng)
    encoder.count(conversation, reasons, len(documents))
    return documents


def test_decoding_begins_segments_where_training_does(tokenizer: Tokenizer) -> None:
    row = chat("q1", "a1", "question 2", "a", "q3", "answer 3")
    (document,) = encode(make_encoder(tokenizer, turns="all", eos_padding="block", block_length=4), row)
    token_ids, answer_ends = encode_prompt(tokenizer, "chatml", row["messages"][:-1])
    assert answer_ends == tuple(np.flatnonzero(np.diff(document.segment_ids)) + 1)
    assert document.tokens[: len(token_ids)].tolist() == list(token_ids)
    assert list(token_ids) == encode_chat(tokenizer, "chatml", row["messages"][:-1], add_generation_prompt=True)
    assert encode_prompt(tokenizer, "chatml", row["messages"][:1])[1] == ()


def test_expanded_turns_have_the_prompts_of_the_sampler(tokenizer: Tokenizer) -> None:
    row = chat("q1", "a1", "q2", "a2")
    documents = encode(make_encoder(tokenizer, eos_padding="none"), row)
    assert len(documents) == 2, "masked diffusion expands by default"
    for index, document in enumerate(documents):
        prompt = encode_chat(tokenizer, "chatml", row["messages"][: 2 * index + 1], add_generation_prompt=True)
        assert spell(document, tokenizer) == [(tokenizer.decode(prompt), f"a{index + 1}{STOP}", "")]


def test_one_turn_is_random_per_epoch_and_reproducible(tokenizer: Tokenizer, list_reader: Any) -> None:
    encoder = make_encoder(tokenizer, turns="one", eos_padding="none")
    conversation = parse(chat("q1", "a1", "q2", "a2", "q3", "a3"), encoder.config)
    reader = read_documents(list_reader([conversation] * 20), encoder, seed=3)

    def answers(epoch: int) -> list[str]:
        documents, _ = reader.read(epoch, None, 100)
        return [spell(document, tokenizer)[-1][1] for document in documents]

    assert set(answers(0)) == {f"a{index}{STOP}" for index in (1, 2, 3)}
    assert answers(0) == answers(0) != answers(1)
    last = make_encoder(tokenizer, turns="last", eos_padding="none")
    assert spell(encode(last, chat("q1", "a1", "q2", "a2"))[0], tokenizer)[0][1] == f"a2{STOP}"


@pytest.mark.parametrize("turns", ["all", "expand", "last", "one"])
def test_an_answer_with_weight_0_is_context(turns: str, tokenizer: Tokenizer) -> None:
    row = chat("q1", "a1", "q2", "wrong", "q3", "a3", "q4")
    row["messages"][3]["weight"] = 0
    encoder = make_encoder(tokenizer, turns=turns, eos_padding="none")
    learned: set[str] = set()
    for seed in range(20):
        for document in encode(encoder, row, np.random.default_rng(seed)):
            segments = spell(document, tokenizer)
            learned.update(answer.removesuffix(STOP) for _, answer, _ in segments)
            context = "".join(context for context, _, _ in segments)
            assert "wrong" in context or segments[-1][1] == f"a1{STOP}"
    assert learned == ({"a3"} if turns == "last" else {"a1", "a3"})
    assert set(encoder.records.skip_log.counts) == {UNANSWERED}


def test_eos_padding(tokenizer: Tokenizer) -> None:
    row = chat("q", "abc")  # an answer of 4 tokens
    (plain,) = encode(make_encoder(tokenizer, eos_padding="none"), row)
    num_prompt = int((~plain.loss_mask).sum())
    for eos_padding, expected in (("none", 0), ("length:3", 0), ("length:4", 0), ("length:9", 5)):
        (document,) = encode(make_encoder(tokenizer, eos_padding=eos_padding), row)
        assert spell(document, tokenizer)[0][1:] == (f"abc{STOP}", EOS * expected)
        assert document.loss_mask[num_prompt:].all()
    for block_length in (1, 2, 5, 16, 64):
        (document,) = encode(make_encoder(tokenizer, block_length=block_length, eos_padding="block"), row)
        assert int(document.is_eos_padding.sum()) == -(num_prompt + 4) % block_length
    (short,) = encode(make_encoder(tokenizer, row_length=num_prompt + 6, eos_padding="length:100"), row)
    assert int(short.is_eos_padding.sum()) == 2, "the padding ends with the row"
    two_turns = encode(make_encoder(tokenizer, block_length=8), chat("q1", "a1", "q2", "a2"))
    assert next(padding for _, _, padding in spell(two_turns[0], tokenizer)) == "", (
        "an inner answer ends in a short block"
    )


@pytest.mark.parametrize("row_length", [20, 30, 36, 45, 59])
def test_truncation(row_length: int, tokenizer: Tokenizer) -> None:
    row = chat("question", "answer of some length", "and", "another")
    stop = tokenizer.special_tokens[STOP]
    whole = encode(make_encoder(tokenizer, turns="all", eos_padding="none"), row)[0]
    drop = make_encoder(tokenizer, row_length, 4, turns="all")
    assert not encode(drop, row)
    assert drop.records.skip_log.counts == {TOO_LONG: 1}
    cut = make_encoder(tokenizer, row_length, 4, turns="all", truncate_mode="cut")
    documents = encode(cut, row)
    if not documents:
        assert cut.records.skip_log.counts == {PROMPT_TOO_LONG: 1}
        assert not whole.loss_mask[:row_length].any()
        return
    assert cut.records.skip_log.counts == {CUT: 1}
    (document,) = documents
    size = len(document)
    assert size <= row_length and not document.is_eos_padding.any() and document.loss_mask[-1]
    assert not whole.loss_mask[size:row_length].any(), "only a context without answer is left out"
    for name in ("tokens", "loss_mask", "segment_ids"):
        assert np.array_equal(getattr(document, name), getattr(whole, name)[:size])
    num_complete = int((whole.tokens[whole.loss_mask & (np.arange(len(whole)) < size)] == stop).sum())
    assert int((document.tokens[document.loss_mask] == stop).sum()) == num_complete


def test_a_conversation_that_the_template_rewrites_is_expanded() -> None:
    tokenizer = chat_tokenizer("qwen3")
    row = chat("q1", "a1", "q2", "a2")
    row["messages"][1]["reasoning_content"] = "r1"
    encoder = make_encoder(tokenizer, block_length=4, eos_padding="none")
    documents = encode(encoder, row)
    assert [spell(document, tokenizer)[0][1] for document in documents] == [
        f"<think>\nr1\n</think>\n\na1{STOP}",
        f"<think>\n\n</think>\n\na2{STOP}",
    ]
    assert encoder.records.skip_log.counts == {EXPANDED: 1}
    short = make_encoder(tokenizer, template="chatml", block_length=4)
    assert len(encode(short, row)) == 1 and short.records.skip_log.counts == {NO_THOUGHTS: 1}


REASONED = [{"content": "<think>\nwhy\n</think>\n\na"}, {"content": "a", "reasoning_content": "why"}]


@pytest.mark.parametrize("answer", REASONED, ids=["content", "reasoning_content"])
def test_thoughts_are_refused_where_prompts_end_them(answer: dict[str, str]) -> None:
    tokenizer = chat_tokenizer("qwen3")
    row = chat("q", "a")
    row["messages"][1] |= answer
    thinking = make_encoder(tokenizer, eos_padding="none")
    assert spell(encode(thinking, row)[0], tokenizer)[0][1] == f"<think>\nwhy\n</think>\n\na{STOP}"
    options: dict[str, Any] = {"template_variables": {"enable_thinking": False}, "eos_padding": "none"}
    skipping = make_encoder(tokenizer, **options)
    assert not encode(skipping, row)
    assert skipping.records.skip_log.counts == {THOUGHTS: 1}
    assert "enable_thinking = true" in skipping.records.skip_log.examples[THOUGHTS]
    records = ChatRecords(skipping.config, "data.source.chat", "raise")
    with pytest.raises(ValueError, match=r"data\.source\.chat: .*'why'.*enable_thinking = true.*reasoning_content"):
        encode(ChatEncoder(records, tokenizer, LONG), row)
    row["messages"][1] = {"role": "assistant", "content": "<think>\n\n</think>\n\na"}
    assert spell(encode(skipping, row)[0], tokenizer)[0][1] == f"a{STOP}", "no thoughts are no loss"


def test_what_the_template_refuses_names_its_place(tokenizer: Tokenizer) -> None:
    template = "{{ raise_exception('no tables, please') if 'table' in messages[0].content else '' }}"
    assert tokenizer.chat_template is not None
    tokenizer = tokenizer.with_chat_template(type(tokenizer.chat_template)(template + tokenizer.chat_template.source))
    skipping = make_encoder(tokenizer)
    assert not encode(skipping, chat("a table", "x"))
    assert skipping.records.skip_log.counts == {"refused by the chat template": 1}
    pair = parse({"prompt": "a table", "chosen": "x", "rejected": "y"}, ChatRowsConfig())
    pairs, reasons = skipping.encode_preference(pair)
    assert not pairs and [reason for reason, _ in reasons] == ["refused by the chat template"]
    strict = ChatEncoder(ChatRecords(ChatRowsConfig(), "data.source.chat", "raise"), tokenizer, LONG)
    conversation = replace(parse(chat("a table", "x"), ChatRowsConfig()), location="c.jsonl, line 7")
    with pytest.raises(ValueError, match=r"c.jsonl, line 7: .*no tables, please"):
        strict.encode(conversation)


NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "no chat template"),
        ("chatty", "no such built-in template"),
        (NO_PROMPT, "no generation prompt"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no generation prompt"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no special token"),
        ("{% for", "cannot be applied"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "changes the text of an answer"),
        ("{% for m in messages %}{{ m.content | lower }}<|im_end|>{% endfor %}", "changes the text of an answer"),
    ],
)
def test_unusable_templates_are_refused_before_work(template: str | None, problem: str, tmp_path: Any) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(template or "")
    name = template if template in (None, "chatty") else str(path)
    with pytest.raises(ValueError, match=f"data.source.chat.template.*{problem}"):
        make_encoder(chat_tokenizer(None), template=name)


def test_variables_of_the_template_are_kept_with_it() -> None:
    tokenizer = chat_tokenizer("qwen3")
    for name in ("messages", "a b"):
        with pytest.raises(ValueError, match=f"'{name}' is no variable of your own"):
            ChatRowsConfig.model_validate({"template_variables": {name: 1}})
    config = ChatRowsConfig.model_validate({"template_variables": {"enable_thinking": False}})
    template = resolve_chat_template(config, tokenizer, "chat")
    prompt = encode_chat(tokenizer, template, [{"role": "user", "content": "q"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    encoder = make_encoder(tokenizer, template_variables={"enable_thinking": False}, eos_padding="none")
    assert spell(encode(encoder, chat("q", "a"))[0], tokenizer)[0][1] == f"a{STOP}"


def test_preferences_are_pairs_with_the_same_prompt(tokenizer: Tokenizer) -> None:
    encoder = make_encoder(tokenizer, eos_padding="none", format="preference")
    conversation = parse({"prompt": "q", "chosen": "good", "rejected": "bad"}, encoder.config)
    (pair,), _ = encoder.encode_preference(conversation)
    assert [spell(document, tokenizer)[0][1] for document in pair] == [f"good{STOP}", f"bad{STOP}"]
    prompts = [document.tokens[~document.loss_mask].tolist() for document in pair]
    assert prompts[0] == prompts[1]
    (chosen,), _ = encoder.encode(conversation)
    assert np.array_equal(chosen.tokens, pair[0].tokens), "fine-tuning learns the chosen answer"
    short = make_encoder(tokenizer, row_length=len(pair[0]) - 1, eos_padding="none", format="preference")
    assert not short.encode_preference(conversation)[0]


def test_labeled_answers_are_examples(tokenizer: Tokenizer) -> None:
    """The label is that of the last answer; fine-tuning and validation leave undesirable answers out and count them."""
    encoder = make_encoder(tokenizer, eos_padding="none", format="unpaired")
    turns = chat("q", "first", "r", "bad") | {"label": False}
    bad = parse(turns, encoder.config)
    [(document,)], _ = encoder.encode_preference(bad, is_unpaired=True)
    assert spell(document, tokenizer)[0][1] == f"bad{STOP}" and document.is_desirable is False
    assert not encode(encoder, turns) and encoder.records.skip_log.counts == {"undesirable": 1}
    [document] = encode(encoder, turns | {"label": True})
    assert spell(document, tokenizer)[0][1] == f"bad{STOP}"
    pair = parse({"prompt": "q", "chosen": "good", "rejected": "bad", "label": True}, encoder.config)
    with pytest.raises(ValueError, match=r'has no label, .* set format = "unpaired"'):
        encoder.encode_preference(pair, is_unpaired=True)
    with pytest.raises(ValueError, match=r'has no rejected answer, .* set format = "preference" .* only "kto"'):
        encoder.encode_preference(bad)
