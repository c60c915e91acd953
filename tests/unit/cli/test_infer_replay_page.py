"""The page that replays a decoding."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli.infer.answers import Answer, build_answers
from cli.infer.inputs import EncodedInput, Input
from cli.infer.replay_page import ReplayFrame, ReplayRecorder, RequestReplay, render_replay
from diffusionlm.inference.generate import CanvasSnapshot, DecodingStep, Generation
from tests.decoding_jobs import make_request
from tokenizer import Tokenizer

NAN = math.nan


def request_of(ids: Sequence[int], *, text: str = "", number: int = 1, hidden: int = 0) -> EncodedInput:
    return EncodedInput(Input("prompt", text), number, text, hidden, make_request(ids, seed=5))


def recorded(
    tokenizer: Tokenizer, request: EncodedInput, canvases: Sequence[CanvasSnapshot], result: Generation
) -> Any:
    recorder = ReplayRecorder([request])
    for number, canvas in enumerate(canvases, 1):
        recorder(DecodingStep(number, (canvas,)))
    return recorder.replays[0], build_answers(tokenizer, [request], [result], 0.5)[0]


@pytest.fixture(scope="module")
def replay(tokenizer: Tokenizer) -> tuple[RequestReplay, Answer]:
    """``a`` was given. Forwards: é's first byte and a newline; the newline becomes a mask; é's other byte and <."""
    (a, first, second, line, end) = (tokenizer.vocab[bytes([byte])] for byte in b"a\xc3\xa9\n<")
    mask = tokenizer.mask_token_id or 0
    canvases = [
        CanvasSnapshot((a, first, mask, line), (False, False, True, False), (NAN, math.log(0.25), NAN, math.log(0.5))),
        CanvasSnapshot((a, first, mask, mask), (False, False, True, True), (NAN, math.log(0.25), NAN, NAN)),
        CanvasSnapshot((a, first, second, end), (False,) * 4, (NAN, math.log(0.25), math.log(0.95), 0.0)),
    ]
    result = Generation((first, second), "stop", 3, (math.log(0.25), math.log(0.95)), (1, 3))
    replay: tuple[RequestReplay, Answer] = recorded(tokenizer, request_of([a], text="a"), canvases, result)
    return replay


def test_frames_have_the_changes_of_each_forward(replay: tuple[RequestReplay, Answer], tokenizer: Tokenizer) -> None:
    recording, _ = replay
    first, second, line, end = (tokenizer.vocab[bytes([byte])] for byte in b"\xc3\xa9\n<")
    assert recording.frames == [
        ReplayFrame(4, ((1, first, math.log(0.25)), (3, line, math.log(0.5))), ()),
        ReplayFrame(4, (), (3,)),
        ReplayFrame(4, ((2, second, math.log(0.95)), (3, end, 0.0)), ()),
    ]


def test_a_growing_canvas_and_a_token_that_changes() -> None:
    recorder = ReplayRecorder([request_of([7])])
    recorder(DecodingStep(1, (CanvasSnapshot((7, 1, 9), (False, False, True), (NAN, -1.0, NAN)),)))
    recorder(DecodingStep(2, (CanvasSnapshot((7, 2, 3, 9), (False, False, False, True), (NAN, -2.0, -3.0, NAN)),)))
    recorder(DecodingStep(3, (CanvasSnapshot((7, 2, 3), (False, False, False), (NAN, -2.0, -3.0)),)))
    assert recorder.replays[0].frames == [
        ReplayFrame(3, ((1, 1, -1.0),), ()),
        ReplayFrame(4, ((1, 2, -2.0), (2, 3, -3.0)), ()),
        ReplayFrame(3, (), ()),
    ]


def test_only_the_forwards_of_the_request_are_frames() -> None:
    change, nothing = ReplayFrame(2, ((1, 3, -1.0),), ()), ReplayFrame(2, (), ())
    recording = RequestReplay(request_of([0]), frames=[nothing, change, nothing, change, nothing])
    assert recording.trim_frames(2) == [change, change], "the batch went on without it"
    assert recording.trim_frames(4) == [nothing, change, nothing, change], "a forward may commit nothing"


class Reader(HTMLParser):
    """The elements of a page, checked to be closed in order; and the text of some of them."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for tag, attributes in self.open:
            for name in (tag, attributes.get("class"), attributes.get("id")):
                if name:
                    self.texts.setdefault(name, []).append(data)

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, []))


def test_the_page_is_whole_without_a_script(tokenizer: Tokenizer, replay: tuple[RequestReplay, Answer]) -> None:
    settings = {"remasking_strategy": "p2", "temperature": 0.5, "top_k": None, "stop_token_ids": [1, 2]}
    other = recorded(tokenizer, request_of(tokenizer.encode("<b>&"), number=2), [], Generation((), "length", 0, (), ()))
    reader = Reader(render_replay(tokenizer, "<i>name</i>", settings, [replay, other]))
    assert reader.text("h1") == "<i>name</i>"
    assert reader.texts["title"][0] == "<i>name</i>: a replay"
    assert "strategyp2" in reader.text("header") and "top k" not in reader.text("header")
    assert "stop token ids1, 2" in reader.text("header")
    assert reader.texts["given"] == ["given", "a", "<b>&"], "the first one is in the legend"
    assert reader.texts["new"] == ["é"], "the answer ends before the stop token"
    assert "finished bya stop token" in reader.text("request0")
    assert "finished byits length" in reader.text("request1")
    assert [attributes["id"] for tag, attributes in reader.seen if tag == "section"] == ["request0", "request1"]
    assert reader.texts["button"] == ["prompt 1", "prompt 2"]
    assert "seconds0.50seed5" in reader.text("facts")
    assert "tokens per forward0.67" in reader.text("facts")
    assert f"probability (geometric mean){math.sqrt(0.25 * 0.95):.1%}" in reader.text("facts")
    titles = ["forward 1: 2 committed", "forward 2: 0 committed, 1 masked again", "forward 3: 2 committed"]
    assert reader.texts["title"][1:] == titles, "of the bars"


def test_page_is_self_contained(tokenizer: Tokenizer, replay: tuple[RequestReplay, Answer]) -> None:
    page = render_replay(tokenizer, "model", {}, [replay])
    reader = Reader(page)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert not [tag for tag, _ in reader.seen if tag in ("img", "iframe", "object", "base", "form")]
    assert [attributes for tag, attributes in reader.seen if tag == "link"] == [{"rel": "icon", "href": "data:,"}]
    assert all("src" not in attributes for _, attributes in reader.seen)
    [policy] = [a["content"] for tag, a in reader.seen if tag == "meta" and a.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none';")
    assert "slot:" not in page
    assert 'role="tablist"' not in page, "one request has no tabs"


def test_the_numbers_cannot_end_their_script(tokenizer: Tokenizer) -> None:
    text = "</script><!--<script>&amp;<!--slot:data-->\u2028"
    replay = recorded(tokenizer, request_of(tokenizer.encode(text), text=text), [], Generation((), "length", 0, (), ()))
    reader = Reader(render_replay(tokenizer, text, {"x": text}, [replay]))
    assert (reader.text("h1"), reader.texts["given"]) == (text, ["given", text])
    data = json.loads(reader.text("data"))
    start = data["requests"][0]["start"]
    assert tokenizer.decode(start) == text
    assert [data["tokens"][str(token)] for token in start[:3]] == ["<", "/", "s"]


def test_script_input(tokenizer: Tokenizer, replay: tuple[RequestReplay, Answer]) -> None:
    data = json.loads(Reader(render_replay(tokenizer, "m", {}, [replay])).text("data"))
    a, first, second, line, end = (tokenizer.vocab[bytes([byte])] for byte in b"a\xc3\xa9\n<")
    assert data["tokens"] == {
        str(a): "a",
        str(first): {"bytes": "c3"},
        str(second): {"bytes": "a9"},
        str(line): "\n",
        str(end): "<",
    }
    [request] = data["requests"]
    assert (request["start"], request["new"], request["end"]) == ([a, -1, -1, -1], [0, 1, 1, 1], 3)
    assert request["frames"] == [
        {"length": 4, "committed": [[1, first, 0.25], [3, line, 0.5]], "masked": []},
        {"length": 4, "committed": [], "masked": [3]},
        {"length": 4, "committed": [[2, second, 0.95], [3, end, 1.0]], "masked": []},
    ]


def test_hidden_tokens_and_special_ones(tokenizer: Tokenizer) -> None:
    eos, mask = tokenizer.eos_token_id or 0, tokenizer.mask_token_id or 0
    a = tokenizer.vocab[b"a"]
    canvases = [CanvasSnapshot((eos, mask, a, eos), (False,) * 4, (NAN, NAN, NAN, -1.0))]
    request = request_of([eos, mask, a], hidden=1)
    replay = recorded(tokenizer, request, canvases, Generation((eos,), "length", 1, (-1.0,), (1,)))
    [data] = json.loads(Reader(render_replay(tokenizer, "m", {}, [replay])).text("data"))["requests"]
    assert (data["start"], data["new"], data["end"]) == ([mask, a, -1], [0, 0, 1], 3), "a mask in a prompt is text"
    assert data["frames"][0]["committed"] == [[2, eos, 0.36788]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_replays(tokenizer: Tokenizer, replay: tuple[RequestReplay, Answer], tmp_path: Path) -> None:
    page, shim = tmp_path / "page.html", Path(__file__).with_name("infer_replay_page.js")
    other = recorded(tokenizer, request_of(tokenizer.encode("the"), number=2), [], Generation((), "length", 0, (), ()))
    page.write_text(render_replay(tokenizer, "m", {}, [replay, other]), encoding="utf-8")
    done = subprocess.run(["node", shim, page], capture_output=True, text=True, check=True, timeout=60)
    replayed = json.loads(done.stdout)
    prompt_token, half = ["token given", "a"], "\ufffd"
    assert replayed["frames"] == [
        [prompt_token, ["mask", ""], ["mask", ""], ["mask", ""]],
        [prompt_token, ["token p1 fresh", half], ["mask", ""], ["token p3 fresh lines", "\n"]],
        [prompt_token, ["token p1", half], ["mask", ""], ["mask fresh", ""]],
        [prompt_token, ["token p1 part", ""], ["token p5 fresh", "é"], ["token p5 fresh past", "<"]],
    ]
    assert replayed["back"] == replayed["frames"][2]
    assert (replayed["state"], replayed["now"]) == ("forward 2 of 3 · 1 of 3 tokens · 0 now · 1 masked again", 1)
    assert [part for part in replayed["mask"] if isinstance(part, str)] == ["mask", "not committed yet"]
    assert [part for part in replayed["token"] if isinstance(part, str)] == [
        '"<"',
        f"token {tokenizer.vocab[b'<']}",
        "forward 3",
        "probability over 99.9%",
        "after the end",
    ]
    assert [text for _, text in replayed["last"]] == [tokenizer.decode([token]) for token in tokenizer.encode("the")]
