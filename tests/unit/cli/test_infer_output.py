"""What ``diffusionlm-infer`` shows and writes: in a terminal, in files and on its page."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.infer import session
from cli.infer.answers import build_answers, build_page
from cli.infer.inputs import EncodedInput, Input, InputKind, encode_inputs
from cli.infer.session import answer
from cli.infer.terminal import (
    MASK_GLYPH,
    LiveView,
    canvas_text_pieces,
    print_answer,
)
from config.generation import GenerationConfig
from config.infer import InferConfig, InferInputConfig, InferOutputConfig
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep, Generation, decode
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.models.transformer import Transformer
from logger.pages import Examples, Token
from tests.conftest import MakeConfig
from tests.decoding_jobs import make_request
from tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "9")
    monkeypatch.delenv("NO_COLOR", raising=False)


class Screen(io.StringIO):
    """A terminal: `lines` are what it shows."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        rows, row = [""], 0
        for part in re.split(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)", self.getvalue()):
            if part == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif part.endswith("A"):
                row -= int(part[2:-1])
            elif part == "\x1b[2K":
                rows[row] = ""
            elif part != "\r" and not part.startswith("\x1b["):
                rows[row] += part
        return "\n".join(rows).rstrip("\n").split("\n")


def request_of(tokenizer: Tokenizer, text: str, kind: InputKind = "prompt", number: int = 1) -> EncodedInput:
    request = make_request(tokenizer.encode(text))
    return EncodedInput(Input(kind, text), number, text, len(text) if kind == "chat" else 0, request)


def canvas(tokenizer: Tokenizer, text: str) -> CanvasSnapshot:
    """``_`` is a mask."""
    mask = tokenizer.mask_token_id or 0
    ids = [mask if char == "_" else tokenizer.vocab[char.encode()] for char in text]
    return CanvasSnapshot(tuple(ids), tuple(char == "_" for char in text), (math.nan,) * len(ids))


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_one_line_per_changed_canvas(
    variables: dict[str, str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file, and in a terminal without escape sequences."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Screen() if variables else io.StringIO()
    view = LiveView(tokenizer, [request_of(tokenizer, "a"), request_of(tokenizer, "b", number=2)], stream)
    view(DecodingStep(1, (canvas(tokenizer, "a_x"), canvas(tokenizer, "b_"))))
    view(DecodingStep(2, (canvas(tokenizer, "ay_"), canvas(tokenizer, "b_"))))
    view(DecodingStep(3, (canvas(tokenizer, "ay_"), canvas(tokenizer, "bz"))))
    view.close()
    assert stream.getvalue().splitlines() == [
        'prompt 1, forward 1: "a░x"',
        'prompt 2, forward 1: "b░"',
        'prompt 1, forward 2: "ay░"',
        'prompt 2, forward 3: "bz"',
    ]


def test_a_drawing_takes_the_place_of_the_last(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4")
    screen = Screen()
    screen.write("before\n")
    view = LiveView(tokenizer, [request_of(tokenizer, "ab")], screen)
    view(DecodingStep(1, (canvas(tokenizer, "ab_xy_"),)))
    assert screen.lines == ["before", "forw", "ard ", "1", "ab░x", "y░"]
    view(DecodingStep(2, (canvas(tokenizer, "ab__y"),)))
    assert screen.lines == ["before", "forw", "ard ", "2", "ab░░", "y"], (
        "a token may be a mask again, and a canvas change its length"
    )
    view.close()
    assert screen.lines == ["before"]
    assert screen.getvalue().count("\x1b[?25l\x1b[?25h") == screen.getvalue().count("\x1b[?25l") == 1


def test_several_requests_are_named_and_the_end_is_shown(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request_of(tokenizer, "a"), request_of(tokenizer, "bc", "chat")]
    step = DecodingStep(7, (canvas(tokenizer, "a_"), canvas(tokenizer, "bcd_")))
    expected = ["forward 7", "[prompt 1]", "a░", "[chat 1]", "d░"]
    for height, num_lines in ((30, 5), (3, 2), (1, 1)):
        monkeypatch.setenv("LINES", str(height))
        screen = Screen()
        LiveView(tokenizer, requests, screen)(step)
        assert screen.lines == expected[-num_lines:]


def test_answers_in_a_terminal_are_harmless(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tuple(tokenizer.encode("\x1b]0;x\x07[red]" + "b " * 30))
    result = Generation(new, "length", 2, (-1.0,) * len(new), (1,) * len(new))
    [answer] = build_answers(tokenizer, [request_of(tokenizer, "a\x1b[2J")], [result], 1.0)
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    print_answer(tokenizer, answer, shows_name=True)
    assert screen.lines == ["[prompt 1]", r"a\x1b[2J\x1b]0;x\x07[red]" + "b " * 30], (
        "the terminal wraps: nothing is cut"
    )
    assert "\x1b[2ma\\x1b[2J\x1b[0m" in screen.getvalue() and "\x07" not in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    print_answer(tokenizer, answer, shows_name=False)
    assert screen.getvalue() == r"a\x1b[2J\x1b]0;x\x07[red]" + "b " * 30 + "\n"
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    print_answer(tokenizer, answer, shows_name=False)
    assert pipe.getvalue() == "a\x1b[2J\x1b]0;x\x07[red]" + "b " * 30 + "\n", "a pipe gets the exact text"


def test_pieces_of_a_canvas(tokenizer: Tokenizer, make_config: MakeConfig) -> None:
    """What was given, what is new, and masks; a final mask token is text."""
    mask = tokenizer.mask_token_id or 0
    model = make_config(vocab_size=tokenizer.vocab_size, mask_token_id=mask)
    builder = RequestBuilder.from_config(tokenizer, model, GenerationConfig(max_new_tokens=1))
    [request] = encode_inputs([Input("infill", "the [MASK:2] sat")], builder, 0)
    ids = list(request.token_ids)
    first = ids.index(mask)
    for token, text in ((tokenizer.encode("c")[0], "c"), (mask, "<|mask|>")):
        ids[first] = token
        is_masked = [position == first + 1 for position in range(len(ids))]
        assert canvas_text_pieces(request, ids, is_masked, tokenizer) == [
            ("the ", False), (text, True), (MASK_GLYPH, True), (" sat", False)
        ]  # fmt: skip


def test_a_prompt_of_which_healing_leaves_nothing_is_not_repeated(tokenizer: Tokenizer) -> None:
    prepared = replace(make_request([tokenizer.eos_token_id or 0]), options=RequestOptions(repeated_bytes=(b"a",)))
    ids = tuple(tokenizer.encode("ab"))
    result = Generation(ids, "stop", 1, (-1.0,) * len(ids), (1,) * len(ids))
    request = EncodedInput(Input("prompt", "a"), 1, "a", num_hidden=1, prepared=prepared)
    [answer] = build_answers(tokenizer, [request], [result], 1.0)
    assert answer.output == "b"


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
