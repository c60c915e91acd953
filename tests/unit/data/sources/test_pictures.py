"""Questions about drawn pictures: their answers are those that the pixels give."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from config.data import Pictures
from diffusionlm.data.chat.conversation import Conversation
from diffusionlm.data.sources import open_source, read_reference_answers
from diffusionlm.data.sources.pictures import COLORS, PLACES


def read(split: Any = "train", epoch: int = 0, **options: Any) -> list[Conversation]:
    documents, _ = open_source(Pictures(**options), split, "data.source").read(epoch, None, 400)
    assert all(isinstance(document, Conversation) for document in documents)
    return documents


def look(conversation: Conversation) -> dict[str, str]:
    """Colors in the middle of the nine places, by name of the place, as the picture's pixels have them."""
    image, _ = conversation.messages[0]["content"]
    pixels = np.asarray(Image.open(BytesIO(image["image"])))
    cell = len(pixels) // 3
    names = {values: name for name, values in COLORS.items()}
    seen = {}
    for index, place in enumerate(PLACES):
        row, column = divmod(index, 3)
        # Below the middle, where a triangle is wide.
        values = tuple(pixels[row * cell + cell // 2 + 2, column * cell + cell // 2].tolist())
        if values in names:
            seen[place] = names[values]
    return seen


@pytest.mark.parametrize("size", [96, 150])
def test_answers_agree_with_the_pixels(size: int) -> None:
    tasks = set()
    for conversation in read(size=size):
        (_, question), answer = conversation.messages[0]["content"], conversation.messages[1]["content"]
        seen, text = look(conversation), question["text"]
        tasks.add(conversation.task)
        if conversation.task == "count":
            assert answer == str(len(seen))
        elif conversation.task == "name":
            place = text.removeprefix("What is at the ").removesuffix("?")
            assert answer.split()[0] == seen[place]
        elif conversation.task == "locate":
            assert seen[answer] == text.split()[3]
        else:
            described = dict(part.split(": ") for part in answer.split(", "))
            assert {place: name.split()[0] for place, name in described.items()} == seen
            assert list(described) == [place for place in PLACES if place in seen]
    assert tasks == {"describe", "count", "name", "locate"}


def test_pictures_tell_equal_questions_apart() -> None:
    answers = read_reference_answers(Pictures(tasks=("count",)), "validation", "data.source", 300)
    assert len(answers) == 300
    assert len({item.messages[0]["content"][1]["text"] for item in answers}) == 1


def test_forms_differ_in_the_pixels() -> None:
    """Filled shares of the square around a shape: 1 of a square, pi / 4 of a circle, a half of a triangle."""
    for conversation in read(tasks=("describe",)):
        answer = conversation.messages[1]["content"]
        if ", " in answer:
            continue
        pixels = np.asarray(Image.open(BytesIO(conversation.messages[0]["content"][0]["image"]))).astype(int)
        is_shape = np.abs(pixels - pixels[0, 0]).sum(-1) > 60
        rows, columns = np.flatnonzero(is_shape.any(1)), np.flatnonzero(is_shape.any(0))
        share = is_shape.sum() / (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
        expected = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}[answer.split()[-1]]
        assert share == pytest.approx(expected, abs=0.08)


def test_no_arrangement_is_in_both_splits() -> None:
    options: dict[str, Any] = {"tasks": ("describe",), "validation_fraction": 0.3}
    answers = [{item.messages[1]["content"] for item in read(split, **options)} for split in ("train", "validation")]
    assert all(answers) and not answers[0] & answers[1]


def test_pictures_are_keyed_by_seed_and_epoch() -> None:
    assert read() == read()
    assert read() != read(seed=1)
    assert read() != read(epoch=1)


def test_blank_pictures_have_the_same_questions() -> None:
    for blank, conversation in zip(read(blank=True), read(), strict=True):
        assert blank.messages[0]["content"][1] == conversation.messages[0]["content"][1]
        assert blank.messages[1] == conversation.messages[1]
        assert not look(blank)
