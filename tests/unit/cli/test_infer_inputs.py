"""What is asked of a model, and how it becomes tokens."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest

from cli.infer.inputs import EncodedInput, Input, encode_inputs, read_inputs
from config.generation import GenerationConfig
from config.infer import InferInputConfig
from config.model import ModelConfig
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, train_bpe
from tokenizer.special_tokens import TokenOptions


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_bpe(["the cat sat"] * 2, vocab_size=262, special_tokens=["<bos>", "<|endoftext|>", "<|mask|>"])


def model_config(words: Tokenizer, *, begin_with_eos: bool = False) -> ModelConfig:
    return ModelConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        intermediate_size=8, max_position_embeddings=48, vocab_size=words.vocab_size,
        mask_token_id=words.mask_token_id, eos_token_id=words.eos_token_id, begin_with_eos=begin_with_eos,
    )  # fmt: skip


def settings_of(model: ModelConfig, **keys: Any) -> DecodingSettings:
    return resolve_settings(GenerationConfig(**{"max_new_tokens": 2, **keys}), model)


def written(path: Path, data: bytes) -> InferInputConfig:
    path.write_bytes(data)
    return InferInputConfig(prompts_file=path)


def test_the_order_is_prompts_file_chats_infills(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbf two \r\n\n  \n\xe2\x80\xa8three\\n")
    config = InferInputConfig(prompts=("one", ""), prompts_file=path, chats=("hi",), system="be", infills=("[MASK:1]",))
    assert read_inputs(config) == [
        Input("prompt", "one"),
        Input("prompt", ""),
        Input("prompt", " two ", location=f"{path}:1", folder=tmp_path),
        Input("prompt", "\u2028three\\n", location=f"{path}:4", folder=tmp_path),
        Input("chat", messages=({"role": "system", "content": "be"}, {"role": "user", "content": "hi"})),
        Input("infill", "[MASK:1]"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    data = b'"a\\nb"\n{"prompt": "", "id": 3}\n\n{"messages": [{"role": "user", "content": "x"}]}\n{"infill": "y"}'
    assert read_inputs(written(path, data)) == [
        Input("prompt", "a\nb", location=f"{path}:1", folder=tmp_path),
        Input("prompt", "", location=f"{path}:2", folder=tmp_path, extra={"id": 3}),
        Input("chat", messages=({"role": "user", "content": "x"},), location=f"{path}:4", folder=tmp_path),
        Input("infill", "y", location=f"{path}:5", folder=tmp_path),
    ]


def test_standard_input_and_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'"a"\n')))
    standard = InferInputConfig(prompts_file=Path("-"), prompts_format="jsonl")
    assert read_inputs(standard) == [Input("prompt", "a", location="standard input:1")]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'"a"\n')))
    assert read_inputs(InferInputConfig(prompts_file=Path("-"))) == [
        Input("prompt", '"a"', location="standard input:1")
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("{}")
    [only] = read_inputs(InferInputConfig(prompts_file=path, prompts_format="text"))
    assert (only.kind, only.text) == ("prompt", "{}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "is not JSON"),
        (b'{"prompt": "a", "score": NaN}', "is not JSON"),
        (b"\xff", "is not UTF-8 (byte 1 of the line)"),
        (b'{"prompt": "a", "messages": []}', 'is {"prompt": "a", "messages": []}: expected a string, or'),
        (b'{"infill": null}', '"infill" is null: expected a string'),
        (b'{"messages": [{"content": "a"}]}', '"messages" is [{"content": "a"}]: expected a list of objects'),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(ValueError) as caught:
        read_inputs(written(path, b'"good"\n' + line + b"\n"))
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no input: add --prompt "TEXT", --chat "TEXT", --infill'):
        read_inputs(InferInputConfig())
    with pytest.raises(ValueError, match=r"p.txt: has no prompts: write one per line"):
        read_inputs(written(tmp_path / "p.txt", b"\n \n"))


def test_plain_texts_begin_as_the_model_has_it_else_the_tokenizer(words: Tokenizer) -> None:
    eos, bos = words.special_tokens["<|endoftext|>"], words.special_tokens["<bos>"]
    mask = words.special_tokens["<|mask|>"]
    begins = words.with_options(TokenOptions(bos_token="<bos>", adds_bos=True))
    inputs = [Input("prompt", "the <bos>"), Input("infill", "t[MASK:2]"), Input("prompt", "")]
    the, t = words.encode("the <bos>"), words.encode("t")

    def ids(tokenizer: Tokenizer, model: ModelConfig) -> list[EncodedInput]:
        return encode_inputs(inputs, RequestBuilder(tokenizer, settings_of(model)), 4)

    plain = ids(words, model_config(words))
    assert [list(request.token_ids) for request in plain] == [the, [*t, mask, mask], []]
    assert [(request.name, request.seed, request.num_hidden) for request in plain] == [
        ("prompt 1", 4, 0),
        ("infill 1", 5, 0),
        ("prompt 2", 6, 0),
    ]
    begun = ids(begins, model_config(words))
    assert [list(request.token_ids) for request in begun] == [[bos, *the], [bos, *t, mask, mask], [bos]]
    assert begun[1].is_new(4) == [False, False, True, True]
    assert (begun[2].num_hidden, begun[2].is_new(3)) == (1, [False, True, True])
    trained = ids(begins, model_config(words, begin_with_eos=True))
    assert list(trained[2].token_ids) == [eos]


def test_chat_requests_match_the_template(words: Tokenizer) -> None:
    bos = words.special_tokens["<bos>"]
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}")
    template = ChatTemplate(template.source, {"bos_token": "<bos>"})
    model = model_config(words, begin_with_eos=True)
    chat = Input("chat", messages=({"role": "user", "content": "a<bos>"},), location="f:3")
    [request] = encode_inputs([chat], RequestBuilder(words, settings_of(model), template), 0)
    assert request.text == "<bos>a<bos>:"
    assert list(request.token_ids) == [bos, *words.encode("a<bos>:")], "what a user writes stays text"
    assert request.num_hidden == len(request.token_ids)
    with pytest.raises(ValueError, match="f:3: the model has no chat template: set one with --set input"):
        encode_inputs([chat], RequestBuilder(words, settings_of(model)), 0)
    broken = ChatTemplate("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"^f:3: .*no"):
        encode_inputs([chat], RequestBuilder(words, settings_of(model), broken), 0)


def test_blocks_of_a_chat_are_counted_as_the_model_was_trained(words: Tokenizer) -> None:
    """Every message is ended by a stop token; the template of the last chat leaves earlier answers out."""
    text = "{{ ':' if message.role == 'assistant' else '' }}{{ message.content }}<|endoftext|>"
    source = f"{{% for message in messages %}}{text}{{% endfor %}}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}:{% endif %}")
    forgetful = ChatTemplate(source.replace("message.content", "message.content if loop.last else ''"))
    messages = tuple({"role": role, "content": "abc"} for role in ("user", "assistant", "user", "assistant", "user"))
    chat = Input("chat", messages=messages)

    def starts(template: ChatTemplate, trained: Literal["text", "turn"], **keys: Any) -> tuple[int, ...]:
        model = model_config(words).model_copy(update={"block_length": 4, "block_origin": trained})
        [request] = encode_inputs([chat], RequestBuilder(words, settings_of(model, **keys), template), 0)
        return tuple(request.prepared.options.segment_starts)

    assert starts(template, "turn") == starts(template, "text", block_origin="turn") == (9, 18)
    assert starts(template, "text") == starts(template, "turn", block_origin="text") == ()
    assert starts(template, "turn", attention="bidirectional") == starts(forgetful, "turn") == ()


def test_the_config_names_the_templates_that_there_are() -> None:
    literal = InferInputConfig.model_fields["chat_template"].annotation
    assert set(get_args(get_args(literal)[0])) == set(CHAT_TEMPLATES)
