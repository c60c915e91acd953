"""Drawn pictures of colored shapes, and questions about them whose answers can be checked."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import NamedTuple

import numpy as np

from config.data import Pictures
from diffusionlm.data.chat.conversation import Message, identify_images
from diffusionlm.data.sources.synthetic import SyntheticChat, SyntheticChatSource

COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40),
    "purple": (150, 60, 180),
}  # fmt: skip
FORMS = ("circle", "square", "triangle")
PLACES = tuple(f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "center", "right"))
MAX_SHAPES = 4


class Shape(NamedTuple):
    """A shape of a picture."""

    place: int
    """Index of `PLACES`."""
    color: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.color} {self.form}"


class PictureSource(SyntheticChatSource):
    """Questions about pictures. The arrangement of shapes decides whether a picture is for validation."""

    config: Pictures

    def sample_chat(self, task: str, rng: np.random.Generator) -> SyntheticChat:
        count = int(rng.integers(1, MAX_SHAPES + 1))
        places = sorted(rng.choice(len(PLACES), count, replace=False).tolist())
        kinds = [
            divmod(kind, len(FORMS)) for kind in rng.choice(len(COLORS) * len(FORMS), count, replace=False).tolist()
        ]
        shapes = [
            Shape(place, list(COLORS)[color], FORMS[form]) for place, (color, form) in zip(places, kinds, strict=True)
        ]
        question, answer = ask(task, shapes, rng)
        key = ", ".join(f"{shape.name} {PLACES[shape.place]}" for shape in shapes)
        drawing_seed = int(rng.integers(1 << 32))
        return SyntheticChat(key, partial(self._build_question, shapes, question, drawing_seed), answer)

    def _build_question(self, shapes: list[Shape], question: str, seed: int) -> list[Message]:
        picture = draw([] if self.config.blank else shapes, self.config.size, np.random.default_rng(seed))
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        [message] = identify_images([{"role": "user", "content": parts}])
        content: list[Message] = message["content"]
        return content


def ask(task: str, shapes: list[Shape], rng: np.random.Generator) -> tuple[str, str]:
    """Ask a question of a task about a picture of different shapes, and answer it."""
    shape = shapes[int(rng.integers(len(shapes)))]
    if task == "describe":
        return "Describe the picture.", ", ".join(f"{PLACES[shape.place]}: {shape.name}" for shape in shapes)
    if task == "locate":
        return f"Where is the {shape.name}?", PLACES[shape.place]
    if task == "count":
        return "How many shapes are there?", str(len(shapes))
    return f"What is at the {PLACES[shape.place]}?", shape.name


def draw(shapes: list[Shape], size: int, rng: np.random.Generator) -> bytes:
    """Draw a square picture on a light background, as PNG. Size and place of each shape vary a little."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (size, size), tuple(rng.integers(225, 256, 3).tolist()))
    canvas, cell = ImageDraw.Draw(picture), size / 3
    for shape in shapes:
        radius = cell * float(rng.uniform(0.28, 0.42))
        row, column = divmod(shape.place, 3)
        x, y = ((index + 0.5 + float(rng.uniform(-0.06, 0.06))) * cell for index in (column, row))
        left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
        if shape.form == "circle":
            canvas.ellipse((left, top, right, bottom), fill=COLORS[shape.color])
        elif shape.form == "square":
            canvas.rectangle((left, top, right, bottom), fill=COLORS[shape.color])
        else:
            canvas.polygon(((x, top), (left, bottom), (right, bottom)), fill=COLORS[shape.color])
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
