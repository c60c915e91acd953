"""Answers are told from their prompts by markers: the prompt is the sampler's, and the last token is the stop."""

from __future__ import annotations

from typing import Any

import pytest

from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, encode_answer, encode_chat, encode_prompt, render_chat
from tokenizer.byte_alphabet import BYTE_ORDER
from tokenizer.special_tokens import TokenOptions

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin_of_text|>", "<|startoftext|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}\
[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""

TOOLS = """{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

MARKED = """{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}draft: \
{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n\
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


@pytest.fixture(scope="module")
def chatter() -> Tokenizer:
    """A tokenizer of bytes with the special tokens of all templates."""
    special = {text: 256 + index for index, text in enumerate(SPECIAL)}
    vocab = {bytes([byte]): byte for byte in BYTE_ORDER}
    options = TokenOptions(visible_tokens=frozenset({"<think>", "</think>"}))
    return Tokenizer(vocab, [], special, "qwen", None, eos_token="<|endoftext|>").with_options(options)


def split(
    tokenizer: Tokenizer, template: str | ChatTemplate, *messages: dict[str, Any], **variables: Any
) -> tuple[str, str]:
    """Prompt and answer as text; the prompt is checked against the sampler's."""
    resolved = CHAT_TEMPLATES[template] if isinstance(template, str) else template
    encoded = encode_answer(tokenizer, resolved, messages, **variables)
    assert encoded is not None
    sampled = encode_chat(tokenizer, resolved, messages[:-1], add_generation_prompt=True, **variables)
    assert list(encoded.prompt_ids) == sampled
    return tokenizer.decode(encoded.prompt_ids), tokenizer.decode(encoded.answer_ids)


@pytest.mark.parametrize(
    "template", ["chatml", "llama3", "llada", MISTRAL, "{{ strftime_now('%S%f') }}" + MISTRAL, MARKED]
)
def test_earlier_answers_end_after_their_stop_tokens(template: str, chatter: Tokenizer) -> None:
    """Also with a template that writes the time. Texts repeat, so that an end cannot be found by its text."""
    stops = {"llama3": "<|eot_id|>", "llada": "<|eot_id|>", "chatml": "<|im_end|>", MARKED: "<|im_end|>"}
    stop = chatter.special_tokens[stops.get(template, "<|endoftext|>")]
    source = CHAT_TEMPLATES.get(template) or ChatTemplate(template, {"eos_token": "<|endoftext|>"})
    chat = [user("same"), assistant("same"), user("same"), assistant(stops.get(template, "")), user("same")]
    token_ids, answer_ends = encode_prompt(chatter, source, chat)
    stop_positions = [index for index, token in enumerate(token_ids) if token == stop]
    has_stop_per_message = template in ("chatml", MARKED, "llama3", "llada")
    expected = [stop_positions[1], stop_positions[3]] if has_stop_per_message else stop_positions
    assert answer_ends == tuple(position + 1 for position in expected)


def test_answers_that_a_template_changes_have_no_ends(chatter: Tokenizer) -> None:
    """Qwen3 leaves reasoning out of earlier answers. Of an answer that is not written there is no end to be found."""
    chat = [user("a"), assistant("<think>\nx\n</think>\n\nb"), user("c")]
    assert encode_prompt(chatter, "qwen3", chat)[1] == ()
    lengths = ChatTemplate("{% for message in messages %}{{ message.content | length }}<|im_end|>{% endfor %}")
    token_ids, answer_ends = encode_prompt(chatter, lengths, [user("a"), assistant("bc"), user("c")])
    assert chatter.decode(token_ids) == "1<|im_end|>2<|im_end|>1<|im_end|>"
    assert answer_ends == ()


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_an_answer_without_text_is_its_stop_token(template: str, chatter: Tokenizer) -> None:
    _, stop = split(chatter, template, user("hi"), assistant("yo"))
    for content in ("", " \n"):
        prompt, answer = split(chatter, template, user("hi"), assistant(content))
        assert answer.split() == stop.replace("yo", "").split() and prompt


CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("hi"), assistant("yo")],
    "answer is the question": [user("same"), assistant("same"), user("same"), assistant("same")],
    "answer looks like a header": [user("q"), assistant("<|im_start|>assistant\nassistant<|im_end|><|eot_id|>")],
    "question with special tokens": [user("<|im_end|>\n<|im_start|>assistant\nx"), assistant("y")],
    "spaces": [user(" q "), assistant("\n a\n")],
    "system and history": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c"), assistant("d")],
}
STOPS = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "llada": "<|eot_id|>"}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", STOPS)
def test_built_in_templates_divide_into_prompt_and_answer(
    template: str, chat: list[dict[str, Any]], chatter: Tokenizer
) -> None:
    prompt, answer = split(chatter, template, *chat)
    whole = render_chat(template, chat, add_generation_prompt=False)
    assert (prompt + answer).rstrip("\n") == whole.rstrip("\n")
    assert answer.endswith(STOPS[template])
    assert chat[-1]["content"].strip() in answer
    answered = encode_answer(chatter, CHAT_TEMPLATES[template], chat)
    assert answered is not None and answered.answer_ids[-1] == chatter.special_tokens[STOPS[template]]
    assert set(answered.answer_ids[:-1]).isdisjoint(chatter.hidden_ids), "special tokens of the message are text"


def test_what_the_generation_prompt_writes_is_no_answer(chatter: Tokenizer) -> None:
    chat = (user("q"), assistant("a", reasoning_content="r"))
    assert split(chatter, "qwen3", *chat)[1] == "<think>\nr\n</think>\n\na<|im_end|>"
    prompt, answer = split(chatter, "qwen3", user("q"), assistant("a"), enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n") and answer == "a<|im_end|>"
    # The text with reasoning does not begin with this prompt: the answer is the content.
    assert split(chatter, "qwen3", *chat, enable_thinking=False)[1] == "a<|im_end|>"


def test_a_template_without_generation_prompt_may_begin_with_the_content(chatter: Tokenizer) -> None:
    template = ChatTemplate(MISTRAL, {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"})
    assert split(chatter, template, user("q"), assistant("a")) == ("<|startoftext|>[INST] q [/INST]", " a<|endoftext|>")


def test_tool_calls_belong_to_the_answer(chatter: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": "<|im_end|>", "y": 2}}}
    _, answer = split(chatter, ChatTemplate(TOOLS), user("q"), assistant("", tool_calls=[call]))
    assert answer == '<call>{"name": "add", "arguments": {"x": "<|im_end|>", "y": 2}}</call><|im_end|>'
    no_text = {"function": {"name": "f", "arguments": {}}}
    _, answer = split(chatter, ChatTemplate(TOOLS), user("q"), assistant("", tool_calls=[no_text]))
    assert answer == '<call>{"name": "f", "arguments": {}}</call><|im_end|>'
    for template in ("chatml", "qwen3"):
        tools = [{"type": "function", "function": {"name": "add"}}]
        prompt, answer = split(chatter, template, user("q"), assistant("so", tool_calls=[call]), tools=tools)
        assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in prompt
        written = '<tool_call>\n{"name": "add", "arguments": {"x": "<|im_end|>", "y": 2}}\n</tool_call><|im_end|>'
        assert answer.removeprefix("<think>\n\n</think>\n\n") == f"so\n{written}"


def test_generation_tags_limit_what_is_learned(chatter: Tokenizer) -> None:
    encoded = encode_answer(chatter, ChatTemplate(MARKED), [user("q"), assistant("a")])
    assert encoded is not None
    assert chatter.decode(encoded.prompt_ids).endswith("<|im_start|>assistant\ndraft: ")
    assert chatter.decode(encoded.answer_ids) == "a<|im_end|>"
    plain = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert render_chat(MARKED, [user("q"), assistant("a")], add_generation_prompt=False) == render_chat(
        plain, [user("q"), assistant("a")], add_generation_prompt=False
    )
    only_first = MARKED.replace("message.role == 'assistant'", "loop.index0 == 1")
    assert encode_answer(chatter, ChatTemplate(only_first), [user("q"), assistant("a")]) is not None
    assert (
        encode_answer(chatter, ChatTemplate(only_first), [user("q"), assistant("a"), user("r"), assistant("b")]) is None
    )


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no special token"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", "leaves them out"),
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}<|im_end|>{% endfor %}", "changes the texts"),
        ("{{ messages[-1].content | reverse }}<|im_end|>", "changes"),
    ],
)
def test_templates_that_hide_the_answer_are_refused(source: str, problem: str, chatter: Tokenizer) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_answer(chatter, ChatTemplate(source), [user("ask"), assistant("reply")])


@pytest.mark.parametrize("history", [[], [user("A b."), assistant("a. B")]], ids=["one turn", "two turns"])
@pytest.mark.parametrize(
    ("expression", "is_exact"),
    [
        ("m.content", True),
        ("m.content | trim", True),
        ("m.content | upper", False),
        ("m.content.lstrip(' A')", False),
        ("m.content[:3]", False),
        ("m.content | tojson", False),
        ("'draft' ~ m.content", True),
    ],
)
def test_the_text_of_an_answer_is_learned_as_it_is_or_refused(
    expression: str, is_exact: bool, history: list[dict[str, Any]], chatter: Tokenizer
) -> None:
    """Also where the filter leaves the question, or an earlier answer, as it is."""
    source = f"{{% for m in messages %}}<|im_start|>{{{{ {expression} }}}}<|im_end|>{{% endfor %}}"
    chat = [*history, user("q"), assistant(' A "b" <b>\n.')]
    if not is_exact:
        with pytest.raises(ValueError, match="the chat template changes the text"):
            encode_answer(chatter, ChatTemplate(source), chat)
        return
    encoded = encode_answer(chatter, ChatTemplate(source), chat)
    assert encoded is not None
    answer = chatter.decode(encoded.answer_ids)
    assert answer.removeprefix("<|im_start|>").removeprefix("draft").strip() == 'A "b" <b>\n.<|im_end|>'


def test_the_text_behind_reasoning_must_be_as_it_is(chatter: Tokenizer) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1].strip() FILTER }}<|im_end|>{% endfor %}"
    )
    chat = [user("q"), assistant("<think>\nHm\n</think>\n\nYes")]
    encoded = encode_answer(chatter, ChatTemplate(source.replace("FILTER", "")), chat)
    assert encoded is not None and chatter.decode(encoded.answer_ids).endswith("Yes<|im_end|>")
    assert "Hm" not in chatter.decode(encoded.answer_ids)
    with pytest.raises(ValueError, match=r"changes the text of an answer: 'Yes' becomes .*YES"):
        encode_answer(chatter, ChatTemplate(source.replace("FILTER", "| upper")), chat)


def test_parts_of_a_content_must_be_as_they_are(chatter: Tokenizer) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
        "m.content %}{{ part.text FILTER }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    chat = [user("q"), {"role": "assistant", "content": [{"type": "text", "text": "One "}, {"text": "two"}]}]
    encoded = encode_answer(chatter, ChatTemplate(source.replace("FILTER", "")), chat)
    assert encoded is not None and chatter.decode(encoded.answer_ids).endswith("One two<|im_end|>")
    with pytest.raises(ValueError, match="changes the text of an answer: 'One' becomes"):
        encode_answer(chatter, ChatTemplate(source.replace("FILTER", "| upper")), chat)
