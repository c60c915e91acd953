"""What a person sees in a terminal, or in a file in its place."""

from __future__ import annotations

import io
import math

import pytest

from cli.infer.answers import build_answers
from cli.infer.inputs import EncodedInput, Input, InputKind
from cli.infer.terminal import MASK_GLYPH, LiveView, canvas_text_pieces, print_answer, render_canvas, wrap_pieces
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep, Generation
from diffusionlm.inference.text import parse_infill
from tokenizer import Tokenizer, train_bpe

ERASE = "\x1b[{}A\r\x1b[J"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_bpe(["the cat sat"] * 2, vocab_size=260)


@pytest.fixture(autouse=True)
def _without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def request_of(words: Tokenizer, text: str, kind: InputKind = "prompt", number: int = 1) -> EncodedInput:
    return EncodedInput(Input(kind, text), number, text, tuple(words.encode(text)), frozenset(), 0, 0)


def canvas(words: Tokenizer, text: str) -> CanvasSnapshot:
    """``_`` is a mask."""
    mask = words.mask_token_id or 0
    ids = [mask if char == "_" else words.vocab[char.encode()] for char in text]
    return CanvasSnapshot(tuple(ids), tuple(char == "_" for char in text), (math.nan,) * len(ids))


def test_one_line_per_changed_canvas(words: Tokenizer) -> None:
    stream = io.StringIO()
    view = LiveView(words, [request_of(words, "a"), request_of(words, "b", number=2)], stream)
    view(DecodingStep(1, (canvas(words, "a_x"), canvas(words, "b_"))))
    view(DecodingStep(2, (canvas(words, "ay_"), canvas(words, "b_"))))
    view(DecodingStep(3, (canvas(words, "ay_"), canvas(words, "bz"))))
    view.close()
    assert stream.getvalue().splitlines() == [
        'prompt 1, forward 1: "a░x"',
        'prompt 2, forward 1: "b░"',
        'prompt 1, forward 2: "ay░"',
        'prompt 2, forward 3: "bz"',
    ]


def test_a_drawing_takes_the_place_of_the_last(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "4")
    monkeypatch.setenv("LINES", "9")
    stream = Screen()
    view = LiveView(words, [request_of(words, "ab")], stream)
    view(DecodingStep(1, (canvas(words, "ab_xy_"),)))
    view(DecodingStep(2, (canvas(words, "ab__y"),)))
    view.close()
    assert stream.getvalue() == (f"forward 1\nab░x\ny░\n{ERASE.format(3)}forward 2\nab░░\ny\n{ERASE.format(3)}"), (
        "a token may be a mask again, and a canvas change its length"
    )


def test_several_requests_are_named_and_the_end_is_shown(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    requests = [request_of(words, "a"), request_of(words, "bc", "chat")]
    step = DecodingStep(7, (canvas(words, "a_"), canvas(words, "bcd_")))
    for height, lines in ((30, ["forward 7", "[prompt 1]", "a░", "[chat 1]", "d░"]), (3, ["[chat 1]", "d░"])):
        monkeypatch.setenv("LINES", str(height))
        stream = Screen()
        LiveView(words, requests, stream)(step)
        assert stream.getvalue().splitlines() == lines
    monkeypatch.setenv("LINES", "1")
    stream = Screen()
    LiveView(words, requests, stream)(step)
    assert stream.getvalue() == "d░\n"


def test_wrapped_lines_fit() -> None:
    assert wrap_pieces([("abcd", False), ("ef\ng", True)], 3) == ["abc", "def", "g"]
    assert wrap_pieces([("日本a\x1b\t", True)], 4) == ["日本", "a\\x1", "b   ", " "]
    assert wrap_pieces([], 4) == [""]
    assert wrap_pieces([("日本", True)], 1) == ["日", "本"]
    assert wrap_pieces([("e\u0301\u200du\u0308", True)], 2) == ["e\u0301\u200du\u0308"], "marks take no column"
    assert wrap_pieces([("a\u202eb", True)], 9) == ["a\\u202eb"], "nothing turns the line round"


@pytest.mark.parametrize(
    ("kind", "many", "expected"),
    [("prompt", False, "abc\n"), ("prompt", True, "[prompt 1]\nabc\n"), ("chat", False, "bc\n")],
)
def test_answers(
    words: Tokenizer, capsys: pytest.CaptureFixture[str], kind: InputKind, many: bool, expected: str
) -> None:
    new = tuple(words.vocab[char] for char in (b"b", b"c"))
    result = Generation(new, "length", 2, (-1.0, -1.0), (1, 2))
    [answer] = build_answers(words, [request_of(words, "a", kind)], [result], 1.0)
    print_answer(words, answer, shows_name=many)
    assert capsys.readouterr().out == expected


def test_rendering(words: Tokenizer) -> None:
    ids = parse_infill("the [MASK:2] sat", words)
    masked = [token == words.mask_token_id for token in ids]
    assert render_canvas(ids, masked, words) == f"the {MASK_GLYPH}{MASK_GLYPH} sat"
    first = masked.index(True)
    ids[first], still = words.encode("c")[0], list(masked)
    still[first] = False
    assert render_canvas(ids, still, words) == f"the c{MASK_GLYPH} sat"
    assert canvas_text_pieces(ids, still, masked, words) == [
        ("the ", False),
        ("c", True),
        (MASK_GLYPH, True),
        (" sat", False),
    ]


def test_final_mask_token_is_printed_as_text(words: Tokenizer) -> None:
    assert words.mask_token_id is not None
    assert render_canvas([words.mask_token_id] * 2, [False, True], words) == f"<|mask|>{MASK_GLYPH}"
