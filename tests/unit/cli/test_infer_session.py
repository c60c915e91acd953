"""A call of ``diffusionlm-infer`` from its inputs on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.infer import session
from cli.infer.answers import build_answers, build_page
from cli.infer.inputs import EncodedInput, Input, InputKind, encode_inputs
from cli.infer.session import answer
from config.generation import GenerationConfig
from config.infer import InferConfig, InferInputConfig, InferOutputConfig
from diffusionlm.inference.generate import Generation, decode
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import PreparedRequest
from diffusionlm.models.transformer import Transformer
from logger.pages import Examples, Token
from tests.decoding_jobs import make_request
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Transformer], tokenizer: Tokenizer) -> Transformer:
    return tiny_model(
        vocab_size=tokenizer.vocab_size, mask_token_id=tokenizer.mask_token_id, max_position_embeddings=40
    )


def settings(**output: Any) -> InferConfig:
    generation = GenerationConfig(max_new_tokens=3, denoising_steps=1)
    return InferConfig(generation=generation, input=InferInputConfig(batch_size=2), output=InferOutputConfig(**output))


def run(model: Transformer, tokenizer: Tokenizer, config: InferConfig, *inputs: Input) -> None:
    builder = RequestBuilder.from_config(tokenizer, model.config, config.generation)
    answer(model, builder, encode_inputs(inputs, builder, 0), config)


def test_complete_batches_are_written_if_decoding_fails(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[int]] = []

    def fail_at_second(model: Transformer, requests: Sequence[PreparedRequest], on_step: Any) -> list[Generation]:
        calls.append([request.seed for request in requests])
        if len(calls) == 2:
            raise ValueError("the model's probabilities are not finite")
        return decode(model, requests, on_step)

    monkeypatch.setattr(session, "decode", fail_at_second)
    config = settings(file=tmp_path / "a.jsonl", html=tmp_path / "a.html")
    with pytest.raises(ValueError, match="not finite"):
        run(model, tokenizer, config, *[Input("prompt")] * 5)
    assert calls == [[0, 1], [2, 3]]
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["params"]["seed"] for line in lines] == [0, 1]
    assert (tmp_path / "a.html").read_text(encoding="utf-8").count('<article class="sample card"') == 2


@pytest.mark.parametrize(
    ("kind", "given", "tokens"),
    [
        ("prompt", (Token("a"),), (Token("é", 3, 0.25), Token("\n", 2))),
        ("chat", (), (Token("é", 3, 0.25), Token("\n", 2))),
    ],
)
def test_the_page_says_when_each_token_was_committed(
    tokenizer: Tokenizer, kind: InputKind, given: tuple[Token, ...], tokens: tuple[Token, ...]
) -> None:
    """The first token is hidden, a character of two tokens has its later forward, and nan is no probability."""
    eos = tokenizer.eos_token_id or 0
    num_hidden = 1 if kind == "prompt" else 2
    request = EncodedInput(Input(kind, "a"), 2, "a", num_hidden, make_request([eos, *tokenizer.encode("a")], seed=5))
    ids = tuple(tokenizer.vocab[bytes([byte])] for byte in b"\xc3\xa9\n")
    result = Generation(ids, "stop", 3, (math.log(0.5), math.log(0.5), math.nan), (1, 3, 2))
    page = build_page(tokenizer, "model", {"top_k": None}, build_answers(tokenizer, [request], [result], 0.5))
    [examples] = page.sections["Answers"]
    assert isinstance(examples, Examples)
    [example] = examples.examples
    assert (example.title, example.prompt) == (f"{kind} 2", "a")
    assert example.outputs[0].text == (*given, *tokens)
    facts = dict(example.outputs[0].facts)
    assert (facts["finish reason"], facts["tokens per forward"], facts["seed"]) == ("stop", "1", "5")
    assert facts["mean logprob"] == "-0.6931"


def test_the_page_shows_masked_spans_in_their_text(model: Transformer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = settings(html=tmp_path / "a.html", file=tmp_path / "a.jsonl")
    run(model, tokenizer, config, Input("infill", "a[MASK:2]b"))
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'a<span class="hole">2</span>b' in page
    assert page.count("<mark data-forward=") == 2
